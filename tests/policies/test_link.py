from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.base import Operation
from gradpilot.policies.cost import coefficients
from gradpilot.policies.link import changed_operations, fit_link, wide_enough
from gradpilot.protos.messages import COLLECTIVES, LinkEstimate
from tests.policies import scenario

N = 8


def noisy(
    rng: np.random.Generator,
    alpha: float,
    beta: float,
    count: int,
    *,
    noise: float = 0.1,
    outliers: float = 0.0,
    newest_age: float = 0.0,
    sizes: tuple[int, ...] = (),
    collectives: tuple[str, ...] = ("all_reduce", "all_gather", "broadcast"),
) -> list[Operation]:
    """Operations on a planted link, oldest first, a tenth of a second apart."""
    # Sizes around the one at which latency and bandwidth cost the same.
    middle = alpha / beta
    made = []
    for i in range(count):
        collective = str(rng.choice(collectives))
        size = int(rng.choice(sizes)) if sizes else int(middle * 10 ** rng.uniform(-1.5, 1.5)) + 1
        a, b = coefficients(collective, N)
        seconds = (a * alpha + b * size * beta) * math.exp(noise * rng.normal())
        if rng.random() < outliers:
            seconds *= rng.uniform(2, 20)
        made.append(
            Operation(i, collective, size, 0, seconds, 0.0, newest_age + (count - 1 - i) * 0.1)
        )
    return made


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.floats(-4, -1.7), st.floats(7, 10), st.integers(0, 2**32 - 1))
def test_recovers_a_planted_link_under_outliers(
    log_alpha: float, log_rate: float, seed: int
) -> None:
    alpha, beta = 10**log_alpha, 8 / 10**log_rate
    rng = np.random.default_rng(seed)
    link = fit_link(noisy(rng, alpha, beta, 300, noise=0.05, outliers=0.2), N)
    assert link is not None
    assert link.separable
    assert link.alpha_seconds == pytest.approx(alpha, rel=0.05)
    assert link.beta_seconds_per_byte == pytest.approx(beta, rel=0.05)


def test_standard_errors_are_honest() -> None:
    alpha, beta = 2e-3, 8e-8
    misses = []
    for seed in range(150):
        link = fit_link(noisy(np.random.default_rng(seed), alpha, beta, 80), N)
        assert link is not None
        misses.append(
            (
                (link.alpha_seconds - alpha) / link.alpha_error,
                (link.beta_seconds_per_byte - beta) / link.beta_error,
            )
        )
    spread = np.std(misses, axis=0)
    assert ((spread > 0.7) & (spread < 1.5)).all()


def test_exact_data() -> None:
    link = fit_link(noisy(np.random.default_rng(0), 1e-3, 1e-8, 20, noise=0.0), N)
    assert link is not None
    assert link.alpha_seconds == pytest.approx(1e-3, rel=1e-6)
    assert link.beta_seconds_per_byte == pytest.approx(1e-8, rel=1e-6)
    assert link.samples == 20
    assert link.age_seconds == 0


def test_two_sizes_of_a_probe_are_enough() -> None:
    rng = np.random.default_rng(0)
    probe = noisy(rng, 1e-3, 8e-8, 1, noise=0, sizes=(4096,), collectives=("all_reduce",))
    probe += noisy(rng, 1e-3, 8e-8, 1, noise=0, sizes=(1 << 20,), collectives=("all_reduce",))
    link = fit_link(probe, N)
    assert link is not None
    assert link.separable
    assert wide_enough(probe, N, "gloo", None)


def test_one_size_cannot_be_separated() -> None:
    rng = np.random.default_rng(0)
    same = noisy(rng, 1e-3, 8e-8, 50, sizes=(1 << 20,), collectives=("all_reduce",))
    link = fit_link(same, N)
    assert link is not None
    assert not link.separable
    assert not wide_enough(same, N, "gloo", None)
    # It explains the data nevertheless.
    a, b = coefficients("all_reduce", N)
    predicted = a * link.alpha_seconds + b * (1 << 20) * link.beta_seconds_per_byte
    assert predicted == pytest.approx(np.median([o.transfer_seconds for o in same]), rel=0.1)


def test_latency_hidden_behind_large_payloads_is_not_claimed() -> None:
    rng = np.random.default_rng(1)
    large = noisy(rng, 5e-4, 8e-7, 30, sizes=(9_000_000, 11_000_000), collectives=("all_reduce",))
    link = fit_link(large, N)
    assert link is not None
    assert not link.separable


def test_a_known_split_is_kept_while_it_agrees() -> None:
    rng = np.random.default_rng(2)
    known = LinkEstimate(1e-3, 8e-8, 1e-5, 1e-9, 50)
    same = noisy(rng, 1e-3, 8e-8, 50, sizes=(1 << 20,), collectives=("all_reduce",), newest_age=3)
    link = fit_link(same, N, previous=known)
    assert link is not None
    assert link.separable
    assert link.age_seconds == 3
    assert link.alpha_seconds / link.beta_seconds_per_byte == pytest.approx(1e-3 / 8e-8)
    slower = [replace(o, transfer_seconds=2 * o.transfer_seconds) for o in same]
    link = fit_link(slower, N, previous=known)
    assert link is not None
    assert not link.separable


SMALL = (768, 2896, 11296, 39048)
"""Payloads of PowerSGD in a small model, by a ring of four."""


def small_rings(alpha: float, beta: float = 0.0, repeats: int = 15) -> list[Operation]:
    return [
        Operation(step, "ring", size, 0, 7 * alpha + 1.5 * size * beta, 0.0, float(repeats - step))
        for step in range(repeats)
        for size in SMALL
    ]


@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 4.0])
def test_small_payloads_leave_the_bandwidth_as_it_was(factor: float) -> None:
    """Else every byte would be free, and a dense plan the best on any link."""
    known = LinkEstimate(2.4e-3, 8e-8, 1e-5, 1e-9, 60, 0.0, True)
    found = fit_link(small_rings(factor * 2.4e-3), 4, "gloo", known)
    assert found is not None
    assert found.beta_seconds_per_byte == pytest.approx(8e-8, rel=0.3)
    assert found.alpha_seconds == pytest.approx(factor * 2.4e-3, rel=0.15)
    if factor != 1.0:
        assert not found.separable
    again = fit_link(small_rings(factor * 2.4e-3), 4, "gloo", found)
    assert again is not None
    assert again.beta_seconds_per_byte == pytest.approx(8e-8, rel=0.3), "it does not wear off"


def test_what_was_never_known_does_not_stay() -> None:
    """The first collectives of a job may tell next to nothing, and that must not be kept."""
    guess = LinkEstimate(5.2e-4, 5.6e-9, 1e-6, 4e-9, 3, 0.0, False)
    found = fit_link(small_rings(5.2e-4, 4e-10), 4, "gloo", guess)
    fresh = fit_link(small_rings(5.2e-4, 4e-10), 4, "gloo")
    assert found is not None
    assert fresh is not None
    assert found.beta_seconds_per_byte == pytest.approx(fresh.beta_seconds_per_byte)
    assert found.beta_seconds_per_byte < 0.5 * guess.beta_seconds_per_byte


@pytest.mark.parametrize("known", [True, False])
def test_three_large_payloads_among_many_small_ones_are_no_outliers(known: bool) -> None:
    """As after a probe. Small ones may pass a shaper at once, so they seem to cost no bandwidth."""
    large = [Operation(20, "all_reduce", 1 << 20, 0, 12 * 2.4e-3 + 1.5 * 2**20 * 8e-8, 0.0, 0.0)]
    before = LinkEstimate(2.5e-3, 6e-10, 1e-5, 1e-8, 60, 0.0, False) if known else None
    found = fit_link([*small_rings(2.4e-3, repeats=20), *3 * large], 4, "gloo", before)
    assert found is not None
    assert found.separable
    assert found.alpha_seconds == pytest.approx(2.4e-3, rel=0.1)
    assert found.beta_seconds_per_byte == pytest.approx(8e-8, rel=0.25)


def test_impossible_operations_are_ignored() -> None:
    rng = np.random.default_rng(0)
    good = noisy(rng, 1e-3, 8e-8, 40)
    bad = [
        replace(good[0], transfer_seconds=seconds)
        for seconds in (math.nan, -1.0, 0.0, math.inf, -math.inf)
    ]
    bad += [
        replace(good[0], collective="reduce"),
        replace(good[0], bytes=-1),
        replace(good[0], age_seconds=math.nan),
    ]
    assert fit_link(good + bad, N) == fit_link(good, N)
    assert fit_link(bad, N) is None
    assert fit_link([], N) is None
    assert fit_link(good, 1) is None


def test_order_of_arrival_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    made = noisy(rng, 1e-3, 8e-8, 60, outliers=0.2)
    shuffled = [made[i] for i in rng.permutation(len(made))]
    assert fit_link(shuffled, N) == fit_link(made, N)


# Where only one of the two changes, operations that the other dominates say nothing.
@pytest.mark.parametrize(
    ("slower_alpha", "slower_beta", "within"),
    [(3, 3, 8), (0.3, 0.3, 8), (1, 10, 40), (10, 1, 40)],
)
def test_a_step_is_seen_within_few_operations(
    slower_alpha: float, slower_beta: float, within: int
) -> None:
    alpha, beta, seen = 2e-3, 8e-8, 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        before = noisy(rng, alpha, beta, 150, newest_age=5.0)
        known = fit_link(before, N)
        after = noisy(rng, slower_alpha * alpha, slower_beta * beta, within)
        seen += changed_operations(before + after, N, "gloo", known) > 0
    assert seen >= 38


def test_old_operations_are_dropped_after_a_step() -> None:
    rng = np.random.default_rng(5)
    before = noisy(rng, 1e-3, 8e-8, 200, newest_age=4.0)
    known = fit_link(before, N)
    after = noisy(rng, 3e-3, 8e-7, 40)
    assert changed_operations(before + after, N, "gloo", known) == pytest.approx(200, abs=3)
    link = fit_link(before + after, N, previous=known)
    assert link is not None
    assert link.alpha_seconds == pytest.approx(3e-3, rel=0.2)
    assert link.beta_seconds_per_byte == pytest.approx(8e-7, rel=0.2)
    # The next decision knows the new link; what is old stays out.
    assert changed_operations(before + after, N, "gloo", link) == pytest.approx(200, abs=3)


def test_a_change_is_not_forgotten_while_few_newest_operations_agree() -> None:
    # A decision soon after a change: its estimate fits the newest few, all others are older.
    rng = np.random.default_rng(0)
    sizes = (500, 4000)
    old = noisy(rng, 1e-3, 1.6e-7, 100, noise=0.03, sizes=sizes, newest_age=2.0)
    for newest in range(5, 14):
        now = noisy(rng, 20e-3, 8e-9, newest, noise=0.03, sizes=sizes)
        link = fit_link([*old, *now], N, previous=LinkEstimate(20e-3, 8e-9, separable=False))
        assert link is not None
        assert link.alpha_seconds == pytest.approx(20e-3, rel=0.1)


def test_noise_raises_no_alarm() -> None:
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        before = noisy(rng, 1e-3, 8e-8, 150, newest_age=10)
        known = fit_link(before, N)
        alarms += changed_operations(before + noisy(rng, 1e-3, 8e-8, 100), N, "gloo", known) > 0
    assert alarms == 0


def test_outliers_raise_hardly_any_alarm() -> None:
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        before = noisy(rng, 1e-3, 8e-8, 150, newest_age=10, outliers=0.2)
        known = fit_link(before, N)
        now = noisy(rng, 1e-3, 8e-8, 100, outliers=0.2)
        alarms += changed_operations(before + now, N, "gloo", known) > 0
    assert alarms <= 4


def test_recent_operations_count_more() -> None:
    rng = np.random.default_rng(0)
    old = noisy(rng, 1e-3, 8e-8, 60, newest_age=600.0)
    new = noisy(rng, 2e-3, 16e-8, 30)
    link = fit_link(old + new, N, half_life_seconds=30)
    assert link is not None
    assert link.alpha_seconds == pytest.approx(2e-3, rel=0.1)


anything = st.floats(allow_nan=True, allow_infinity=True)
wild_operation = st.builds(
    Operation,
    step=st.integers(0, 10**6),
    collective=st.sampled_from((*COLLECTIVES, "other")),
    bytes=st.integers(-1, 2**40),
    skip=st.integers(-2, 20),
    transfer_seconds=anything | st.floats(1e-6, 10),
    straggle_seconds=anything,
    age_seconds=anything | st.floats(0, 1000),
)
wild_link = st.none() | st.builds(
    LinkEstimate, anything, anything, anything, anything, st.integers(0, 100), anything
)


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    st.lists(wild_operation, max_size=30),
    st.integers(0, 64),
    st.sampled_from(("gloo", "nccl", "model", "")),
    wild_link,
)
def test_anything_is_survived(
    made: list[Operation], n: int, backend: str, previous: LinkEstimate | None
) -> None:
    link = fit_link(made, n, backend, previous)
    if link is not None:
        assert link.alpha_seconds >= 0
        assert link.beta_seconds_per_byte >= 0
        assert math.isfinite(link.alpha_seconds + link.beta_seconds_per_byte)


def test_what_a_rank_did_not_tell_counts_only_without_anything_newer() -> None:
    good = scenario.operations(1e-3, 8e-9, 8, age=100.0)
    late = tuple(
        replace(o, transfer_seconds=100 * o.transfer_seconds, complete=False, age_seconds=1.0)
        for o in good
    )
    near = tuple(replace(o, age_seconds=50.0) for o in late)
    fitted = fit_link((*good, *near), 8)
    assert fitted is not None
    assert fitted.beta_seconds_per_byte == pytest.approx(8e-9, rel=0.01)
    alone = fit_link(late, 8)
    assert alone is not None
    assert alone.beta_seconds_per_byte == pytest.approx(8e-7, rel=0.01)
    assert fit_link((*good, *late), 8) != fit_link(good, 8)  # the whole ones are old


# --- how well, with stragglers --------------------------------------------------------------------


def straggled(
    rng: np.random.Generator,
    alpha: float,
    beta: float,
    n_ranks: int,
    count: int,
    *,
    decades: float = 1.5,
    newest_age: float = 0.0,
) -> list[Operation]:
    """A fifth of the operations wait for a rank, on average as long as they take; 5 % of noise.

    Sizes lie within so many decades of the one at which latency and bandwidth cost the same.
    """
    made = []
    for i in range(count):
        collective = str(rng.choice(("all_reduce", "all_gather", "broadcast")))
        a, b = coefficients(collective, n_ranks)
        middle = a * alpha / (b * beta)
        size = int(middle * 10 ** rng.uniform(-decades, decades)) + 1
        free = a * alpha + b * size * beta
        late = rng.exponential() if rng.random() < 0.2 else 0.0
        seconds = free * (math.exp(0.05 * rng.normal()) + late)
        age = newest_age + (count - 1 - i) * 0.1
        made.append(Operation(i, collective, size, 0, seconds, 0.0, age))
    return made


GRID = [
    (n, alpha, 8 / rate)
    for n in (2, 4, 8, 64, 1024)
    for alpha in (50e-6, 1e-3, 20e-3)
    for rate in (1e8, 1e9, 25e9)
]


def test_alpha_and_beta_within_15_percent_and_the_errors_say_how_much() -> None:
    """48 operations, 450 links: measured were 6 and 7 % at most, and 97 and 96 % covered."""
    covered = np.zeros(2)
    runs = 10 * len(GRID)
    seeds = iter(np.random.SeedSequence(0).spawn(runs))
    for n, alpha, beta in GRID:
        for _ in range(10):
            rng = np.random.default_rng(next(seeds))
            link = fit_link(straggled(rng, alpha, beta, n, 48), n)
            assert link is not None
            assert link.separable
            assert link.alpha_seconds == pytest.approx(alpha, rel=0.15)
            assert link.beta_seconds_per_byte == pytest.approx(beta, rel=0.15)
            covered += (
                abs(link.alpha_seconds - alpha) <= 2 * link.alpha_error,
                abs(link.beta_seconds_per_byte - beta) <= 2 * link.beta_error,
            )
    assert (covered / runs >= 0.9).all()


@pytest.mark.parametrize(("decades", "told"), [(0.02, 0.0), (0.05, 0.1), (0.7, 1.0)])
def test_what_cannot_be_separated_is_flagged(decades: float, told: float) -> None:
    """Sizes within 5, 12 and 400 %: claimed are 0, 5 and 100 % of 100 fits from 24 operations."""
    claims = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        link = fit_link(straggled(rng, 1e-3, 8e-8, N, 24, decades=decades), N)
        assert link is not None
        claims += link.separable
    assert claims / 100 == pytest.approx(told, abs=0.1)


@pytest.mark.parametrize(
    ("factors", "seen"),
    [((2, 2), 95), ((0.5, 0.5), 95), ((1, 2), 95), ((2, 1), 95), ((1, 0.5), 80), ((0.5, 1), 80)],
)
def test_a_change_by_two_is_in_the_estimate_after_two_periods(
    factors: tuple[float, float], seen: int
) -> None:
    """Both numbers within 25 % after two decisions with 24 new operations each.

    Of 100 runs these were 98 to 100, and 87 and 89 where only one of the two became smaller.
    """
    alpha, beta, period = 1e-3, 8e-8, 24
    now = (factors[0] * alpha, factors[1] * beta)
    right = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        before = straggled(rng, alpha, beta, N, 150, newest_age=0.1 * 2 * period)
        link = fit_link(before, N)
        after = straggled(rng, *now, N, 2 * period)
        for upto in (period, 2 * period):
            link = fit_link([*before, *after[:upto]], N, previous=link)
        assert link is not None
        right += (
            abs(link.alpha_seconds / now[0] - 1) < 0.25
            and abs(link.beta_seconds_per_byte / now[1] - 1) < 0.25
        )
    assert right >= seen
