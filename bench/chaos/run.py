"""Disturb a job at random: 0 hangs, 0 mixed steps, 0 divergence.

One job of real ranks over gloo trains all the time under a real controller. Between the two lies a
line (``line.py``) on which one rank's plans are delayed, dropped, doubled or put in another order;
in a quarter of the schedules the controller is killed, too, and started again. A schedule is over
when all ranks carry out what was ordered last. Then the steps of all ranks are compared:

- a *hang* is a schedule that is not over in ``HANG_SECONDS``;
- a *mixed* step is one in which ranks carried out different plans;
- a *diverged* step is one after which ranks have different parameters.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import results_file
from bench.chaos import job
from bench.chaos.line import Line
from bench.chaos.schedule import KINDS, Schedule, draw
from gradpilot.diagnose import DiagnoseError, lines, report
from gradpilot.operate import OperatorClient, OperatorError
from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent import embedded
from gradpilot.worker_agent.config import AgentConfig

RANKS = 3
HANG_SECONDS = 40.0
START_SECONDS = 60.0
STEPS_AFTER = 12
"""Steps under the last order until a schedule is over: more than one decision step."""

_SETTINGS = {
    "GRADPILOT_CTL_POLICY_SETTINGS__INTERVAL": "5",
    "GRADPILOT_CTL_MIN_DECISION_SECONDS": "3600",  # orders decide here, not the policy
    "GRADPILOT_CTL_REPORT_SECONDS": "0.5",
}


class HangError(Exception):
    """Something did not happen in time."""


@dataclass
class Findings:
    """What came of all schedules.

    Attributes:
        schedules: How many were over.
        kills: How often the controller was killed.
        faults: How many faults of each kind were carried out.
        hangs: Schedules that hung, in words.
        steps: Steps compared.
        mixed: Steps in which plans differed.
        diverged: Steps after which parameters differed.
        longest_seconds: The longest schedule.
        ranks: What the agents counted.
    """

    schedules: int = 0
    kills: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    hangs: list[str] = field(default_factory=list)
    steps: int = 0
    mixed: list[int] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)
    longest_seconds: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)


class Logs:
    """Reads what the ranks note, and compares it."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._paths = [job.log_path(folder, rank) for rank in range(world_size)]
        self._read = [0] * world_size
        self._waiting: list[collections.deque[job.Entry]] = [
            collections.deque() for _ in self._paths
        ]
        self.last: list[job.Entry | None] = [None] * world_size

    def compare(self, findings: Findings) -> None:
        """Take in what is new; steps that all ranks have noted are compared."""
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(job.size_of(self._read[rank]))
                new = job.entries(file.read())
            self._read[rank] += len(new)
            self._waiting[rank].extend(new)
            if new:
                self.last[rank] = new[-1]
        while all(self._waiting):
            same_step = [waiting.popleft() for waiting in self._waiting]
            step = same_step[0].step
            assert {entry.step for entry in same_step} == {step}
            findings.steps += 1
            if len({(e.term, e.plan, e.content) for e in same_step}) > 1:
                findings.mixed.append(step)
            if len({e.parameters for e in same_step}) > 1:
                findings.diverged.append(step)


class Keeper:
    """Starts the controller, kills it and starts it again, on one state file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = AgentConfig(state=str(folder / "controller"), policy="fixed")
        self._child = self._start()

    @property
    def address(self) -> str:
        """Return where the present one serves."""
        return self._child.grpc_address

    def kill(self, down_seconds: float) -> None:
        """Kill it, wait, and start another."""
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.stop()
        time.sleep(down_seconds)
        self._child = self._start()

    def stop(self) -> None:
        """End it in good order."""
        self._child.stop()

    def _start(self) -> embedded.EmbeddedController:
        with _temporary(self._folder):
            child = embedded.start(self._config, {**os.environ, **_SETTINGS})
        if child is None:
            raise RuntimeError("the controller did not start; why is in the log")
        return child


class Chaos:
    """One job with what disturbs it."""

    def __init__(self, folder: Path, keeper: Keeper, line: Line, processes: list[Any]) -> None:
        self.findings = Findings()
        self._folder, self._keeper, self._line = folder, keeper, line
        self._processes = processes
        self._logs = Logs(folder, len(processes))

    def play(self, schedule: Schedule) -> None:
        """Carry a schedule out and wait until it is over.

        Raises:
            HangError: It is not over in time.
        """
        begun = time.monotonic()
        self._line.begin(schedule.faults)
        for index, (gap, option) in enumerate(schedule.orders):
            self._maybe_kill(schedule, index)
            time.sleep(gap)
            self.order(option)
        self._maybe_kill(schedule, len(schedule.orders))
        self._line.release()
        self.settle(schedule.orders[-1][1])
        self.findings.schedules += 1
        self.findings.longest_seconds = max(self.findings.longest_seconds, time.monotonic() - begun)

    def order(self, option: Option) -> None:
        """Pin an option; a controller that has just been started must hear of the job first."""

        def accepted() -> bool:
            with contextlib.suppress(OperatorError), OperatorClient(self._keeper.address) as client:
                client.pin(job.RUN, "", option)
                return True
            return False

        self._until(f"{option.label} is ordered", accepted, HANG_SECONDS, 0.05)

    def settle(self, option: Option, seconds: float = HANG_SECONDS) -> None:
        """Wait until all ranks have done some steps under an option."""
        wanted = job.check_sum(option.label)
        since: list[int | None] = [None] * len(self._processes)

        def done() -> bool:
            self._logs.compare(self.findings)
            for rank, entry in enumerate(self._logs.last):
                if entry is None or entry.option != wanted:
                    since[rank] = None
                elif since[rank] is None:
                    since[rank] = entry.step
            return all(
                first is not None and entry is not None and entry.step - first >= STEPS_AFTER
                for first, entry in zip(since, self._logs.last, strict=True)
            )

        self._until(f"all ranks carry out {option.label}", done, seconds, 0.02)

    def _maybe_kill(self, schedule: Schedule, index: int) -> None:
        if schedule.kill_before != index:
            return
        time.sleep(schedule.kill_after_seconds)
        self.findings.kills += 1
        self._keeper.kill(schedule.down_seconds)
        self._line.upstream = self._keeper.address

    def _until(self, what: str, condition: Any, seconds: float, interval: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [rank for rank, p in enumerate(self._processes) if not p.is_alive()]
            if ended:
                raise HangError(f"ranks {ended} have ended while waiting until {what}")
            if time.monotonic() > deadline:
                raise HangError(f"not within {seconds:.0f} s: {what}\n{self._diagnosis()}")
            time.sleep(interval)

    def _diagnosis(self) -> str:
        try:
            return "\n".join("\n".join(lines(found)) for found in report(self._folder / "dumps")[0])
        except DiagnoseError as error:
            return str(error)


def disturb(schedules: int, seed: int, world_size: int = RANKS) -> Findings:
    """Run a job through so many schedules; it ends early when one hangs.

    Raises:
        HangError: The job did not start or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="gradpilot-chaos-") as name:
        folder = Path(name)
        keeper = Keeper(folder)
        with Line(keeper.address) as line:
            results, processes = _start_ranks(world_size, line.address, folder)
            chaos = Chaos(folder, keeper, line, processes)
            try:
                last = DENSE
                chaos.settle(last, START_SECONDS)
                try:
                    for number in range(schedules):
                        schedule = draw(seed, number, world_size, last)
                        last = schedule.orders[-1][1]
                        chaos.play(schedule)
                except HangError as error:
                    chaos.findings.hangs.append(f"schedule {number} of seed {seed}: {error}")
                else:
                    (folder / "stop").touch()
                    chaos.findings.ranks = _collect(results, world_size)
            finally:
                for process in processes:
                    process.join(10 if not chaos.findings.hangs else 0)
                    if process.is_alive():
                        process.kill()
                keeper.stop()
            chaos.findings.faults = {kind: line.done[kind] for kind in KINDS}
            return chaos.findings


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Let temporary files go to a folder: a controller that is killed leaves its log there."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def _start_ranks(world_size: int, address: str, folder: Path) -> tuple[Any, list[Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gradpilot.worker_agent.agent", "torch._dynamo"])
    results = context.Queue()
    processes = [
        context.Process(
            target=job.main,
            args=(rank, world_size, address, folder, {"TMPDIR": str(folder)}, results),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return results, processes


def _collect(results: Any, world_size: int) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for _ in range(world_size):
        try:
            rank, counted = results.get(timeout=HANG_SECONDS)
        except queue.Empty:
            raise HangError("the ranks do not end") from None
        found[rank] = counted
    return [found[rank] for rank in sorted(found)]


def verdicts(schedules: int, found: Findings) -> list[dict[str, Any]]:
    """Return what is claimed of ``schedules`` schedules, and whether it holds."""
    frozen = [counted["frozen"] for counted in found.ranks if counted["frozen"]]
    measured = (
        ("schedules that hang", len(found.hangs)),
        ("steps with different plans", len(found.mixed)),
        ("steps after which parameters differ", len(found.diverged)),
        ("ranks whose plans are frozen at the end", len(frozen)),
    )
    return [
        results_file.verdict("schedules that were over", f"{schedules}", found.schedules,
                             found.schedules == schedules),
        *(results_file.verdict(name, "0", value, value == 0) for name, value in measured),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb a job, print what came of it and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--quick", action="store_true", help="10 schedules, no result file")
    arguments = parser.parse_args(argv)
    schedules = 10 if arguments.quick else arguments.schedules
    begun = time.monotonic()
    found = disturb(schedules, arguments.seed)
    judged = verdicts(schedules, found)
    row = {
        "ranks": RANKS,
        "schedules": found.schedules,
        "seconds": round(time.monotonic() - begun, 1),
        "longest_schedule_s": round(found.longest_seconds, 2),
        "kills": found.kills,
        **{f"plans_{kind}": count for kind, count in found.faults.items()},
        "steps": found.steps,
        "switches": min((counted["switches"] for counted in found.ranks), default=0),
        "plans_rejected": sum(counted["plans_rejected"] for counted in found.ranks),
    }
    document: dict[str, Any] = {"rows": [row], "verdicts": judged}
    if not arguments.quick:
        command = f"python -m bench.chaos --schedules {schedules} --seed {arguments.seed}"
        path = results_file.write("chaos", command, [arguments.seed], [row], judged)
        document = json.loads(path.read_text())
    if arguments.output == "json":
        print(json.dumps(document, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
        for v in judged:
            print(f"{'holds' if v['holds'] else 'DOES NOT HOLD'}: {v['name']}: {v['measured']}")
    for line in found.hangs:
        print(line, file=sys.stderr)
    return 0 if all(v["holds"] for v in judged) else 1
