"""Several policies on one job and network, with what could have been reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradpilot.policies.base import POLICIES
from gradpilot.protos.messages import Option
from gradpilot.simulate.driver import Case, Driver, Result
from gradpilot.simulate.engine import Weather
from gradpilot.simulate.oracle import Clairvoyant


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy, and what it is given.

    Attributes:
        policy: Its registered name.
        fixed: The option of ``fixed``.
        collectives: Carriers that it may choose; empty for those of the case.
    """

    policy: str
    fixed: Option | None = None
    collectives: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name to show."""
        return f"{self.policy} {self.fixed.label}" if self.fixed is not None else self.policy


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of all of them.

    Attributes:
        case: What was simulated.
        results: By name of the contender.
        oracle_seconds: The least time that is known to be possible with the gain floor kept.
        oracle_steps: Steps that the oracle took.
        best_fixed: The best plan that never changes, one option for all buckets.
        best_fixed_seconds: Its time, in force from the first step on.
    """

    case: Case
    results: Mapping[str, Result]
    oracle_seconds: float
    oracle_steps: int
    best_fixed: Option
    best_fixed_seconds: float

    def regret(self, name: str) -> float:
        """Return total time / oracle time - 1; may be negative only below the gain floor."""
        return self.results[name].seconds / self.oracle_seconds - 1

    def versus_fixed(self, name: str) -> float:
        """Return total time / time of the best fixed plan."""
        return self.results[name].seconds / self.best_fixed_seconds


def compare(case: Case, contenders: Sequence[Contender]) -> Comparison:
    """Run all contenders through the same case, with the same noise.

    The oracle is greedy: in every step the best option. A step is not divided when the link changes
    in it, so by luck a policy could be faster by less than a step a change; who knows the future
    could have done the same, so the fastest of all that keep the gain floor bounds the oracle.

    Raises:
        ConfigError: No such policy, or it cannot be carried out.
    """
    weather = Weather(case.world, case.noise, case.seed)
    results = {}
    for contender in contenders:
        POLICIES.get(contender.policy)
        settings = case.settings
        if contender.fixed is not None:
            case.world.family(contender.fixed)
            settings = replace(settings, fixed=contender.fixed)
        if contender.collectives:
            settings = replace(settings, collectives=contender.collectives)
        driver = Driver(replace(case, settings=settings), weather)
        results[contender.name] = driver.run(contender.policy)
    extra = {option for r in results.values() for plan in r.plans for option in plan}
    clairvoyant = Clairvoyant(case, weather, sorted(extra, key=repr))
    bound = clairvoyant.oracle()
    plan, fixed = clairvoyant.best_fixed()
    tame = [result.seconds for result in results.values() if result.below_floor == 0]
    return Comparison(
        case,
        results,
        min(bound.seconds, fixed.seconds, *tame),
        bound.steps,
        plan[0],
        fixed.seconds,
    )
