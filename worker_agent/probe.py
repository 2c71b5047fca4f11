"""A probe of the link: collectives of two sizes, timed between two steps."""

from __future__ import annotations

import logging
import threading

import torch

from gradpilot.protos.messages import ProbeRequest, WireSample
from gradpilot.worker_agent.threads import OrderedThread
from gradpilot.worker_agent.wire import Wire

log = logging.getLogger("gradpilot.agent")

REPETITIONS = 3
"""How often each size is timed."""


def measure(
    probe: ProbeRequest, step: int, wire: Wire, thread: OrderedThread, device: torch.device
) -> list[WireSample]:
    """Return the times of the collectives that a probe asks for, in order.

    All ranks call it at the same step. It waits; the timeout of the wire's group bounds that.

    One that fails is logged and gives what was timed before.

    Args:
        probe: Sizes.
        step: Number of the step.
        wire: Carries them out.
        thread: Thread that the wire belongs to.
        device: Where payloads are.
    """
    done = threading.Event()
    samples: list[WireSample] = []

    def run() -> None:
        try:
            for size in (probe.small_bytes, probe.large_bytes):
                payload = torch.zeros(max(size // 4, 1), device=device)
                for _ in range(REPETITIONS):
                    seconds = wire.probe(payload, step)
                    samples.append(
                        WireSample(step, -1, len(samples), "all_reduce", payload.nbytes, 0, seconds)
                    )
        except Exception as error:
            # It must not end the thread, on which the step's buckets wait. If the group is broken,
            # their collectives say so.
            log.warning("probe of the link failed: %s", error)
        finally:
            done.set()

    thread.submit(run)
    done.wait()
    return samples
