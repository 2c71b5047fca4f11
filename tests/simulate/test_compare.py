from __future__ import annotations

import pytest

from gradpilot.errors import ConfigError
from gradpilot.policies.base import POLICIES, PolicySettings
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.simulate.compare import Contender, compare
from gradpilot.simulate.engine import Noise
from gradpilot.simulate.traces import constant, make_trace
from tests.simulate.cases import case

QUICK = PolicySettings(ratios=6, interval=10)


def test_every_policy_can_be_compared() -> None:
    of = case(make_trace("steps", 2, 120.0), noise=Noise(), steps=200, settings=QUICK)
    contenders = tuple(Contender(name) for name in POLICIES.names())
    found = compare(of, contenders)
    assert list(found.results) == list(POLICIES.names())
    for name, result in found.results.items():
        assert result.steps >= 200 * 0.99
        if result.below_floor == 0:
            assert found.regret(name) >= 0
        assert found.versus_fixed(name) > 0
    assert found.oracle_seconds <= found.best_fixed_seconds
    again = compare(of, contenders)
    assert again == found


def test_adaptive_on_a_constant_slow_link_comes_close_to_the_best_fixed_plan() -> None:
    of = case(
        constant(0.5, 0.5), noise=Noise(), steps=600, sequential=True,
        settings=PolicySettings(interval=10),  # of a coarse grid no ratio may be close
    )  # fmt: skip
    found = compare(of, (Contender("adaptive"), Contender("fixed", DENSE)))
    assert found.versus_fixed("adaptive") < 1.15  # the beginning included
    assert found.versus_fixed("fixed none native") > 3


def test_fixed_takes_an_option() -> None:
    found = compare(case(steps=60), (Contender("fixed", BF16), Contender("fixed", DENSE)))
    fast, slow = (found.results[f"fixed {o.label}"] for o in (BF16, DENSE))
    assert fast.seconds < slow.seconds


def test_a_thousand_ranks() -> None:
    found = compare(
        case(noise=Noise(), ranks=1024, steps=60, settings=QUICK), (Contender("fixed", BF16),)
    )
    assert found.regret(f"fixed {BF16.label}") >= 0


@pytest.mark.parametrize(
    "contender", [Contender("nothing"), Contender("fixed", Option("powersgd"))]
)
def test_who_cannot_compete_is_refused(contender: Contender) -> None:
    with pytest.raises(ConfigError):
        compare(case(steps=10), (contender,))
