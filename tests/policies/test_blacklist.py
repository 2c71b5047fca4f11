from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.policies.base import Inputs
from gradpilot.policies.blacklist import (
    CAUSES,
    MOST_BANS,
    MOST_TOLD,
    active,
    banned_again,
    covering,
    patience,
    remembered,
    tell,
)
from gradpilot.policies.watches import Ban
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option
from tests.policies import scenario

TOPK = Option("topk", 0.01, "allgather")
LINK = LinkEstimate(1e-3, 8e-9)


def after(*bans: Ban, step: int = 1000) -> Inputs:
    base = scenario.inputs(step=step)
    return replace(base, history=replace(base.history, bans=bans))


def banned(option: Option, cause: str = "cost", step: int = 1000) -> tuple[Ban, ...]:
    return banned_again(after(step=step), (option,), cause, LINK)


def test_an_entry_expires_and_doubles_with_every_time() -> None:
    bans: tuple[Ban, ...] = ()
    step, lasted = 0, []
    for _ in range(8):
        bans = banned_again(after(*bans, step=step), (TOPK,), "cost", LINK)
        (ban,) = bans
        assert active(after(ban, step=ban.until - 1), LINK) == bans
        assert active(after(ban, step=ban.until), LINK) == ()
        lasted.append(ban.until - step)
        step = ban.until
    assert lasted == [1000, 2000, 4000, 8000, 16_000, 32_000, 32_000, 32_000]
    # Long after it expired it is a first time again.
    late = 2 * bans[0].until
    (fresh,) = banned_again(after(*bans, step=late), (TOPK,), "cost", LINK)
    assert (fresh.times, fresh.until) == (1, late + 1000)


def test_slowness_is_of_one_option_and_harm_of_all_stronger_ones() -> None:
    slow, harmful = banned(TOPK), banned(TOPK, "residual")
    assert covering(slow, replace(TOPK, ratio=0.011)) is slow[0]
    assert covering(slow, replace(TOPK, ratio=0.002)) is None
    assert covering(harmful, replace(TOPK, ratio=0.002)) is harmful[0]
    for bans in (slow, harmful):
        assert covering(bans, replace(TOPK, ratio=0.1)) is None
        assert covering(bans, Option("artopk", 0.01, settings=scenario.STAR)) is None
    assert covering(slow, replace(TOPK, collective="alltoall")) is None
    assert covering(harmful, replace(TOPK, collective="alltoall")) is harmful[0]
    assert covering(banned(TOPK, "nonfinite"), replace(TOPK, ratio=0.1)) is not None
    skips = Option(collective="ring", skip=2)
    assert covering(banned(skips, "loss"), replace(skips, skip=3)) is not None
    assert covering(banned(skips, "loss"), replace(skips, skip=1)) is None


@pytest.mark.parametrize("cause", CAUSES)
def test_dense_is_never_banned_and_bf16_only_for_overflows(cause: str) -> None:
    assert banned(DENSE, cause) == ()
    assert len(banned(BF16, cause)) == (cause == "nonfinite")


@pytest.mark.parametrize("cause", CAUSES)
def test_another_link_forgives_slowness_only(cause: str) -> None:
    bans = banned(TOPK, cause)
    assert active(after(*bans), LINK) == bans
    slower = LinkEstimate(1e-3, 8e-8)
    assert active(after(*bans), slower) == (() if cause == "cost" else bans)


def test_entries_are_bounded() -> None:
    bans: tuple[Ban, ...] = ()
    for number in range(2 * MOST_BANS):
        bans = banned_again(after(*bans), (Option(f"c{number}", 0.1),), "cost", LINK)
    assert len(bans) == MOST_BANS
    assert bans[-1].compressor == f"c{2 * MOST_BANS - 1}"
    assert len(tell(bans, after(*bans))) == MOST_TOLD + 1


def test_what_is_over_is_dropped() -> None:
    (ban,) = banned(TOPK)
    assert remembered(after(ban, step=ban.until)) == (ban,)
    assert remembered(after(ban, step=ban.until + 1000)) == ()
    assert remembered(after(ban, step=ban.step - 1)) == ()  # of another start of the job


def test_a_family_with_several_slow_options_is_left_alone() -> None:
    bans = banned(TOPK)
    far = replace(TOPK, ratio=0.3)
    assert covering(bans, far) is None
    bans = banned_again(after(*bans), (replace(TOPK, ratio=0.1),), "cost", LINK)
    assert covering(bans, far) is bans[-1]
    assert covering(bans, Option("artopk", 0.3, settings=scenario.STAR)) is None
    skips = Option(collective="ring", skip=1)
    slow = banned(skips)
    slow = banned_again(after(*slow), (replace(skips, skip=2),), "cost", LINK)
    assert covering(slow, replace(skips, skip=3)) is not None
    assert covering(slow, DENSE) is None


def test_after_a_failure_compression_waits_longer_and_longer() -> None:
    bans: tuple[Ban, ...] = ()
    waits = []
    for ratio in (0.1, 0.03, 0.01, 0.003):
        waits.append(patience(bans, (TOPK, BF16), after()))
        bans = banned_again(after(*bans), (replace(TOPK, ratio=ratio),), "cost", LINK)
    assert waits == [0, 250, 500, 1000]
    assert patience(bans, (BF16, DENSE), after()) == 0
    assert patience(banned(TOPK, "residual"), (TOPK,), after()) == 0


def test_reasons_name_option_deed_and_end() -> None:
    bans = banned(TOPK, "residual")
    (text,) = tell(bans, after(*bans, step=1400))
    for word in ("topk 1% allgather", "600 more steps", "residual"):
        assert word in text
