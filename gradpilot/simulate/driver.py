"""Drives a policy through a simulated job: reports, decisions, switches, until the job is done.

Reports go through the controller's own ``Run``, so that what a policy sees (joined collectives,
medians over windows, ages, its history) is made by the code that makes it in production.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gradpilot.controller.plans import decision_interval
from gradpilot.controller.probing import patience
from gradpilot.controller.run import Run
from gradpilot.controller.store import Memory
from gradpilot.errors import ConfigError
from gradpilot.policies.base import POLICIES, Inputs, Outcome, PolicySettings
from gradpilot.policies.guards import settle
from gradpilot.protos.messages import (
    DENSE,
    START_INTERVAL,
    START_PROBE,
    Assignment,
    Catalog,
    Decision,
    Hello,
    Option,
    Plan,
    check_option,
)
from gradpilot.simulate.engine import BLOCK, Noise, Weather, part, run_steps
from gradpilot.simulate.reporter import FRESH_STEPS, Reporter, Window
from gradpilot.simulate.traces import Trace
from gradpilot.simulate.world import World, safe

Floats = NDArray[np.float64]
Decide = Callable[[Inputs], Outcome]

_START_PROBE = (START_PROBE.small_bytes, START_PROBE.large_bytes)

ROUNDING = 1e-9
"""Share by which a gain may fall short of its floor: sums over buckets are rounded."""

MOST_STEPS = 100
"""A job that needs this many times its dense steps is given up: its plan makes no progress."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happen; the defaults are those of the controller.

    Attributes:
        report_seconds: Least time between two reports of a rank.
        decision_seconds: Least time between two decisions.
        thin_after: When both grow by ``thin``, to make long simulations cheaper.
        thin: By which factor.
        late: From when on they grow in proportion to the time, too: for jobs that do not end.
    """

    report_seconds: float = 2.0
    decision_seconds: float = 5.0
    thin_after: float = math.inf
    thin: float = 1.0
    late: float = math.inf

    def at(self, seconds: float) -> tuple[float, float]:
        """Return the least time between two reports, and between two decisions, at a time."""
        factor = self.thin if seconds >= self.thin_after else 1.0
        factor *= max(seconds / self.late, 1.0)
        return factor * self.report_seconds, factor * self.decision_seconds


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated.

    Attributes:
        world: Job and ranks.
        trace: The network.
        steps: Progress at which the job is done, in dense steps.
        seed: Seed of all noise.
        noise: How much of it.
        settings: Of the policy.
        timing: When ranks report and decisions are taken.
        start: Option of all buckets before the first plan.
    """

    world: World
    trace: Trace
    steps: int
    seed: int = 0
    noise: Noise = field(default_factory=Noise)
    settings: PolicySettings = field(default_factory=PolicySettings)
    timing: Timing = field(default_factory=Timing)
    start: Option = DENSE


@dataclass(frozen=True, slots=True)
class Switch:
    """A plan coming into force.

    Attributes:
        step: First step under it.
        seconds: When that was.
        decided: When it was decided.
        options: Its distinct options.
        reason: Why.
    """

    step: int
    seconds: float
    decided: float
    options: tuple[Option, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job.

    Attributes:
        seconds: Until its progress was reached.
        steps: Steps until then.
        switches: Plans that came into force.
        decisions: Decisions taken, by outcome.
        probe_seconds: Time that probes took.
        below_floor: Share of steps whose true gain was below the gain floor.
        plans: Every distinct plan that was in force, one option per bucket.
    """

    seconds: float
    steps: int
    switches: tuple[Switch, ...]
    decisions: dict[str, int]
    probe_seconds: float
    below_floor: float
    plans: tuple[tuple[Option, ...], ...]


class Driver:
    """One job under one policy.

    Args:
        case: What is simulated.
        weather: Its randomness, shared by everything that is compared; None for its own.
    """

    def __init__(self, case: Case, weather: Weather | None = None) -> None:
        self._case = case
        world = case.world
        self._weather = weather or Weather(world, case.noise, case.seed)
        self._reporter = Reporter(world, case.noise, case.seed)
        self._buckets = world.job.layout.buckets
        self._now = self._progress = self._probe_seconds = 0.0
        self._step = self._below = 0
        self._plan = Plan(
            0, 0, world.job.layout.digest, default=case.start, interval=START_INTERVAL
        )
        self._pending: tuple[Plan, float] | None = None
        self._asked: tuple[int, ...] = ()
        self._probed = False
        self._switches: list[Switch] = []
        self._decisions: dict[str, int] = {}
        self._plans: dict[tuple[Option, ...], None] = {}
        self._use((case.start,) * len(self._buckets))
        self._window = self._new_window()

    def fixed(self, options: Sequence[Option]) -> Result:
        """Carry out the job under one plan from its first step on, without reports."""
        self._plans.clear()
        # No decision steps in between, not even early ones: as often as the oracle looks.
        self._plan = replace(self._plan, id=1, interval=BLOCK)
        self._use(tuple(options))
        while self._progress < self._case.steps:
            self._advance(math.inf)
        return self._result()

    def run(self, policy: str | Decide) -> Result:
        """Carry out the job under a policy.

        Args:
            policy: A registered name, or what decides.

        Raises:
            ConfigError: The policy answered something that cannot be carried out.
        """
        decide = POLICIES.get(policy)().decide if isinstance(policy, str) else policy
        run = self._attach()
        self._asked = _START_PROBE
        timing = self._case.timing
        while self._progress < self._case.steps:
            report_seconds, decision_seconds = timing.at(self._now)
            # The step that begins with a probe that was asked for ends the window.
            full = self._advance(0.0 if self._probed else report_seconds)
            self._probed = False
            boundary = self._plan.steps_to_decision(self._step) == 0
            waited_for = self._pending or run.probes.pending(self._now)
            if full or (boundary and waited_for):
                self._report(run)
                waited = self._now - run.decided_at >= decision_seconds
                due = waited or run.probes.answered
                # Not ``run.news``: that waits for all N ranks, here only some of them speak.
                if due and all(member.fresh for member in run.members.values()):
                    self._decide(run, decide)
            if boundary:
                self._agree()
        return self._result()

    # --- training --------------------------------------------------------------------------------

    def _advance(self, window_seconds: float) -> bool:
        """Take steps until a window is full, a decision step comes or the link changes.

        Returns:
            Whether the window is full.
        """
        case = self._case
        number, offset = divmod(self._step, BLOCK)
        last = min(BLOCK, offset + 1 + self._plan.steps_to_decision(self._step + 1))
        block = self._weather.block(number)
        done = run_steps(
            self._costs, self._rows, case.trace.at(self._now), part(block, offset, last)
        )
        begins = self._now + np.concatenate([[0.0], np.cumsum(done.seconds)])
        worth = self._worth()
        taken = int(np.searchsorted(begins[:-1], case.trace.next_change(self._now) - 1e-9))
        started = self._now - self._window_seconds
        full_after = int(np.searchsorted(begins[1:] - started, window_seconds - 1e-12)) + 1
        left = case.steps - self._progress
        needed = math.ceil(left / worth - 1e-9)
        taken = max(min(taken, full_after, needed, len(done.seconds)), 1)
        done = done.cut(taken)
        if taken == needed:  # of the last step only what is needed
            spare = 1.0 - max(taken - left / worth, 0.0)
            end = float(begins[taken - 1] + spare * done.seconds[-1])
        else:
            end = float(begins[taken])
        self._window_seconds += end - self._now
        self._now = end
        self._step += taken
        self._below += taken if self._too_bold else 0
        self._progress = float(case.steps) if taken == needed else self._progress + worth * taken
        if self._step > MOST_STEPS * case.steps:
            raise ConfigError(f"no end after {self._step} steps: {self._options[0].label}")
        self._window.parts.append(done)
        self._window.compute = block.compute
        if not math.isfinite(window_seconds):
            self._window.parts.clear()
        return taken >= full_after

    def _worth(self) -> float:
        """Return the progress of a step in dense steps, and note whether its gain is too small."""
        case = self._case
        at = min(self._progress / case.steps, 1.0)
        gradients = case.world.job.gradients
        weights = gradients.weights(at)
        gain, worth = case.world.worth(self._distinct, at)
        column = np.arange(len(weights))
        total = float(gain[self._rows, column] @ weights)
        whole = all(map(safe, self._distinct))
        self._too_bold = not whole and total < case.settings.gain_floor * (1 - ROUNDING)
        return float(worth[self._rows, column] @ weights)

    def _new_window(self) -> Window:
        self._window_seconds = 0.0
        self._too_bold = False
        return Window(self._step, self._step + FRESH_STEPS, [])

    def _use(self, options: tuple[Option, ...]) -> None:
        self._options = options
        self._distinct = tuple(dict.fromkeys(options))
        self._rows = np.array([self._distinct.index(option) for option in options])
        self._costs = self._case.world.costs(self._distinct)
        self._plans[options] = None

    # --- control ---------------------------------------------------------------------------------

    def _attach(self) -> Run:
        world = self._case.world
        run = Run("simulated", world.job.name, Memory(), self._now)
        catalog = Catalog(world.job.layout, world.families, self._reporter.calibration())
        for rank in range(self._reporter.speakers):
            hello = Hello(
                run.run, run.model, "simulated", rank, world.ranks, backend=world.backend,
                emulated=world.sequential, plan=self._plan,
            )  # fmt: skip
            run.join(hello, self._now)
            run.set_catalog(rank, catalog)
        return run

    def _report(self, run: Run) -> None:
        """Close the window and tell the controller."""
        if not self._window.parts:
            return
        reports = self._reporter.reports(
            self._window,
            self._plan,
            self._options,
            self._compression(),
            self._progress / self._case.steps,
        )
        for rank, report in enumerate(reports):
            run.add_report(rank, report, self._now)
        fresh = self._window.fresh_until
        self._window = self._new_window()
        self._window.fresh_until = fresh

    def _compression(self) -> tuple[Floats, Floats]:
        """Return compress and decompress seconds of every bucket."""
        place = (self._rows, np.arange(len(self._rows)))
        return self._costs.compress[place], self._costs.decompress[place]

    def _decide(self, run: Run, decide: Decide) -> None:
        case = self._case
        inputs = run.inputs(case.settings, self._now, case.seed)
        run.decided_at, run.probes.answered = self._now, False
        outcome = settle(decide(inputs), inputs)
        self._decisions[outcome.outcome] = self._decisions.get(outcome.outcome, 0) + 1
        seconds = outcome.chosen.step_seconds if outcome.chosen else inputs.step_seconds
        plan = self._made(run, outcome, seconds) if outcome.outcome == "switch" else None
        run.record(
            Decision(
                run=run.run, model=run.model, term=1, id=run.plans.next_id, step=inputs.step,
                created=self._now, policy="", outcome=outcome.outcome, reason=outcome.reason,
                link=outcome.link, current=outcome.current, chosen=outcome.chosen, plan=plan,
            ),
            self._now,
        )  # fmt: skip
        if outcome.history is not None:
            run.history = outcome.history
        if plan is not None:
            self._pending = (plan, self._now)
        if outcome.outcome == "probe":
            self._asked = outcome.probe_bytes
            ranks = range(self._reporter.speakers)
            wait = patience(case.timing.report_seconds, self._plan.interval, inputs.step_seconds)
            run.probes.ask(run.plans.next_id - 1, self._step - 1, ranks, self._now + wait)

    def _made(self, run: Run, outcome: Outcome, step_seconds: float) -> Plan:
        layout, ranks = self._case.world.job.layout, self._case.world.ranks
        if len(outcome.options) != len(layout.buckets):
            raise ConfigError(
                f"policy gave {len(outcome.options)} options for {len(layout.buckets)} buckets"
            )
        for option in set(outcome.options):
            check_option(option, ranks)
            self._case.world.family(option)
        pairs = zip(layout.buckets, outcome.options, strict=True)
        return Plan(
            1, run.plans.next_id, layout.digest,
            tuple(Assignment(b.fingerprint, o) for b, o in pairs),
            interval=decision_interval(self._case.settings, step_seconds), reason=outcome.reason,
        )  # fmt: skip

    def _agree(self) -> None:
        """At a decision step: run the probe that was asked for, switch to the newest plan."""
        if self._asked:
            link = self._case.trace.at(self._now)
            took = self._reporter.probe(self._step, self._asked, link)
            self._now += took
            self._probe_seconds += took
            self._probed = self._asked != _START_PROBE
            self._asked = ()
        if self._pending is None:
            return
        self._plan, decided = self._pending
        self._pending = None
        self._use(tuple(self._plan.option(b.fingerprint) for b in self._buckets))
        distinct = tuple(dict.fromkeys(self._options))
        self._switches.append(Switch(self._step, self._now, decided, distinct, self._plan.reason))
        self._window = self._new_window()

    def _result(self) -> Result:
        return Result(
            self._now, self._step, tuple(self._switches), dict(self._decisions),
            self._probe_seconds, self._below / max(self._step, 1), tuple(self._plans),
        )  # fmt: skip
