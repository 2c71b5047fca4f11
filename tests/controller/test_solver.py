from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gradpilot.controller.solver import Solver, SolverError, decide
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import DENSE
from tests.controller import fakes
from tests.controller.fakes import layout


def inputs() -> Inputs:
    of = layout()
    return Inputs("r", "m", 4, 1, 0, of, fakes.families(of), (), (), (), 0.1)


def calls(policy: str, given: Inputs) -> Outcome:
    """One worker serves every case: the policy's name says what to do."""
    return {"hang": fakes.hang, "die": fakes.die, "fail": fakes.fail, "ok": fakes.to_bf16}[policy](
        policy, given
    )


@pytest.mark.asyncio(loop_scope="session")
async def test_a_policy_that_fails_hangs_or_dies_costs_one_decision() -> None:
    solver = Solver(20.0, calls)  # the first call in a process imports this file there
    try:
        outcome, text = await solver.decide("ok", inputs())
        assert outcome == fakes.to_bf16("", inputs())
        assert from_json(Inputs, text) == inputs()
        with pytest.raises(SolverError, match="'fail' failed: ValueError: planted failure"):
            await solver.decide("fail", inputs())
        first = solver._pid
        assert (await solver.decide("ok", inputs()))[0] == outcome
        assert solver._pid == first  # an exception does not cost the process
        solver._timeout = 1.0
        with pytest.raises(SolverError, match="longer than 1 s"):
            await solver.decide("hang", inputs())
        solver._timeout = 20.0
        assert gone(first)
        assert (await solver.decide("ok", inputs()))[0] == outcome
        with pytest.raises(SolverError, match="died"):
            await solver.decide("die", inputs())
        assert (await solver.decide("ok", inputs()))[0] == outcome
        assert solver.restarts == 2
    finally:
        solver.close()


def busy(policy: str, given: Inputs) -> Outcome:
    """Compute for half a second, holding what a policy holds, and say where."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    return Outcome("keep", str(os.getpid()))


@pytest.mark.asyncio(loop_scope="session")
async def test_the_loop_runs_on_while_another_process_decides() -> None:
    solver = Solver(20.0, busy)
    try:
        await solver.start()
        decision = asyncio.create_task(solver.decide("busy", inputs()))
        beats = 0
        while not decision.done():
            await asyncio.sleep(0.001)
            beats += 1
        outcome, _ = await decision
        assert int(outcome.reason) == solver._pid != os.getpid()
        # A decision inside the loop would leave one beat or two; a busy machine loses some.
        assert beats >= 10
    finally:
        solver.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_what_was_measured_is_told_whatever_policy_decides() -> None:
    told = decide("fixed", replace(inputs(), step_seconds=0.25)).explanation
    assert told is not None
    assert told.seen is not None
    assert (told.seen.step_seconds, told.best) == (0.25, ())


@pytest.mark.asyncio(loop_scope="session")
async def test_registered_policies_run_by_name_and_unknown_ones_are_named() -> None:
    solver = Solver(20.0)
    try:
        await solver.start()
        outcome, _ = await solver.decide("fixed", inputs())
        assert outcome.options == (DENSE,) * 4
        with pytest.raises(SolverError, match=r"unknown policy 'fxied'; known: .*fixed"):
            await solver.decide("fxied", inputs())
    finally:
        solver.close()


def test_the_worker_ends_when_the_controller_is_killed() -> None:
    program = (
        "import asyncio, os, signal\n"
        "from gradpilot.controller.solver import Solver\n"
        "async def main():\n"
        "    solver = Solver()\n"
        "    await solver.start()\n"
        "    print(solver._pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=40, check=False
    )
    assert done.returncode == -9
    assert gone(int(done.stdout))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
