from __future__ import annotations

import pytest

from gradpilot.controller.probing import ProbeWatch, patience
from gradpilot.protos.messages import WireSample


def sample(step: int, bucket: int = -1) -> WireSample:
    return WireSample(step, bucket, 0, "all_reduce", 4096, 0, 1e-3)


def asked(ranks: int = 2, deadline: float = 10.0) -> ProbeWatch:
    watch = ProbeWatch()
    watch.ask(7, 100, range(ranks), deadline)
    return watch


def test_it_is_over_when_all_ranks_have_told_of_a_later_probe() -> None:
    watch = asked()
    watch.take(0, [sample(150, bucket=0), sample(100)])  # no probe, and one from before
    watch.take(1, [sample(101)])
    watch.take(1, [sample(102)])
    assert watch.pending(0.0) == 7
    assert not watch.answered
    watch.take(0, [sample(120, bucket=3), sample(101)])
    assert watch.pending(0.0) == 0
    assert watch.answered


def test_it_counts_as_lost_in_the_end() -> None:
    watch = asked(deadline=10.0)
    assert watch.pending(9.9) == 7
    assert watch.pending(10.0) == 0
    assert watch.pending(0.0) == 0
    assert not watch.answered


def test_it_can_be_given_up_and_asked_anew() -> None:
    watch = asked()
    watch.clear()
    assert watch.pending(0.0) == 0
    watch.take(0, [sample(200)])
    watch.ask(9, 200, [0], 20.0)
    assert watch.pending(15.0) == 9


@pytest.mark.parametrize(
    ("report", "interval", "step", "seconds"),
    [(2.0, 50, 0.0, 10.0), (2.0, 50, 0.01, 10.0), (2.0, 50, 1.0, 150.0)],
)
def test_patience_is_a_few_windows_or_decision_steps(
    report: float, interval: int, step: float, seconds: float
) -> None:
    assert patience(report, interval, step) == pytest.approx(seconds)
