from __future__ import annotations

import threading
import time

from gradpilot.worker_agent import threads
from gradpilot.worker_agent.threads import OrderedThread


def test_jobs_run_in_order_in_one_thread_after_the_set_up() -> None:
    seen: list[object] = []
    thread = OrderedThread("test", lambda: seen.append("set up"))
    for number in range(50):
        thread.submit(lambda n=number: seen.append(n))  # type: ignore[misc]
    assert thread.stop()
    assert seen == ["set up", *range(50)]


def test_a_stuck_job_does_not_hold_up_the_caller() -> None:
    release = threading.Event()
    thread = OrderedThread("test")

    def stuck() -> None:
        release.wait(20)

    thread.submit(stuck)
    begun = time.monotonic()
    assert not thread.stop()
    assert time.monotonic() - begun < threads.STOP_SECONDS + 1.0
    release.set()


def test_tensors_of_a_finished_job_are_not_kept() -> None:
    class Held:
        pass

    import weakref

    held = Held()
    reference = weakref.ref(held)
    done = threading.Event()
    thread = OrderedThread("test")

    def job(_: object = held) -> None:
        done.set()

    thread.submit(job)
    del job, held
    assert done.wait(5)
    deadline = time.monotonic() + 5
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None
    assert thread.stop()
