from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies.base import Inputs
from gradpilot.policies.compute import ComputeModel
from gradpilot.policies.cost import at_once, coefficients
from gradpilot.policies.gain import skip_efficiency
from gradpilot.policies.options import COSTED, bucket_groups, make_heads, ratio_grid
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import (
    BF16,
    DENSE,
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    LinkEstimate,
    Option,
    WireRound,
)
from tests.policies import scenario

LINK = LinkEstimate(1e-3, 8e-8)
OWN = ("ring", "halving_doubling", "tree")


def all_carriers(sizes: tuple[int, ...]) -> tuple[Family, ...]:
    """Return families that every carrier takes part in, with every kind of round."""
    reduced = ("native", *OWN, "pigeon")

    def family(name: str, by: tuple[str, ...], rounds: Callable[[int], list[WireRound]]) -> Family:
        ladder = tuple(
            LadderPoint(r, tuple(BucketRounds(tuple(rounds(max(1, int(n * r))))) for n in sizes))
            for r in (0.25, 1.0)
        )
        return Family(name, (), by, ladder, "energy", 1.0, 0.2)

    return (
        family("one", reduced, lambda k: [WireRound("all_reduce", 4 * k)]),
        family("scores", reduced, lambda k: [WireRound("all_reduce", 40, False)]),
        family(
            "gathers",
            ("allgather",),
            lambda k: [WireRound("all_reduce", 4, False), WireRound("all_gather", k)],
        ),
        family(
            "two_stages",
            ("alltoall",),
            lambda k: [WireRound("all_to_all", 8 * k), WireRound("all_gather", k)],
        ),
        family("scatters", reduced, lambda k: [WireRound("reduce_scatter", 4 * k)]),
    )


def brute_force(inputs: Inputs, option: Option, link: LinkEstimate) -> dict[str, float]:
    """One uniform candidate in plain loops, straight from the definitions."""
    family = next(f for f in inputs.families if (f.compressor, f.settings) == (option.family))
    points = [p.ratio for p in family.ladder]
    upper = min(i for i, r in enumerate(points) if r >= option.ratio - 1e-12)
    lower = max(i for i, r in enumerate(points) if r <= option.ratio + 1e-12)
    share = (
        0.0 if upper == lower else (option.ratio - points[lower]) / (points[upper] - points[lower])
    )
    n, model = inputs.world_size, ComputeModel(inputs.compute)
    total = {"compress": 0.0, "wire": 0.0, "bytes": 0.0, "gain": 0.0, "worth": 0.0}
    squares = sum(s.gradient_sq for s in inputs.buckets)
    end = 0.0
    bandwidth = last = 0.0
    ends = [0.0] * at_once(inputs.backend)
    kinds = {tuple(r.collective for r in b.rounds) for p in family.ladder for b in p.buckets}
    single = kinds == {("all_reduce",)}
    for b, bucket in enumerate(inputs.layout.buckets):
        low, high = family.ladder[lower].buckets[b].rounds, family.ladder[upper].buckets[b].rounds
        latency = transfer = 0.0
        for first, second in zip(low, high, strict=True):
            size = first.bytes + share * (second.bytes - first.bytes)
            carrier, skip = first.collective, 0
            if carrier == "all_reduce" and option.collective in OWN:
                carrier, skip = option.collective, option.skip if first.skippable else 0
            elif carrier == "broadcast" and option.collective in OWN:
                carrier = "scatter_broadcast"
            alphas, payloads = coefficients(carrier, n, skip, inputs.backend)
            latency += alphas * link.alpha_seconds
            transfer += payloads * size * link.beta_seconds_per_byte
            total["bytes"] += size
        before, after = (
            float(t[0, 0])
            for t in model.seconds(
                option.family, np.array([option.ratio]), np.array([float(bucket.elements)])
            )
        )
        state = inputs.buckets[b]
        gain = 1.0
        if family.gain_model == "energy":
            from gradpilot.protos.messages import ENERGY_RATIOS

            gain = family.gain_factor * math.exp(
                np.interp(math.log(option.ratio), np.log(ENERGY_RATIOS), np.log(state.energy))
            )
        left = 1 - option.skip / n if option.collective == "ring" else 0.5**option.skip
        weight = state.gradient_sq / squares
        total["gain"] += weight * gain * left
        total["worth"] += weight * gain**family.efficiency_exponent * skip_efficiency(left, "skip")
        total["compress"] += before + after
        total["wire"] += latency + transfer
        ready = state.ready_seconds
        end = max(end, ready) + before + latency + transfer + after
        bandwidth = max(bandwidth, ready + before, ends[b]) + transfer
        ends.append(max(ends[-1], bandwidth + latency))
        last = max(last, ends[-1] + after)
    if option.collective == "native" and single:
        end = last
    exposed = max(0.0, end - max(s.ready_seconds for s in inputs.buckets))
    return {
        "statistical_loss": 1 - total["worth"],
        "compression_seconds": total["compress"],
        "synchronisation_seconds": total["wire"],
        "gain": total["gain"],
        "efficiency": total["worth"],
        "step_seconds": inputs.compute_seconds + exposed,
        "wire_ratio": total["bytes"] / sum(b.dense_bytes for b in inputs.layout.buckets),
    }


@pytest.mark.parametrize("backend", ["gloo", "nccl", "model"])
def test_every_candidate_equals_brute_force(backend: str) -> None:
    inputs = scenario.inputs(
        ranks=4, settings=scenario.settings(ratios=7), backend=backend, sizes=(400_000, 90_000, 10)
    )
    space = Space(inputs, LINK)
    evaluation = space.uniform()
    assert len(space) == 7 * (1 + 4 + 1) + 2 * (1 + 4)
    for k in range(len(space)):
        candidate = space.candidate(evaluation, k)
        assert candidate.options == (space.option(k),)
        for name, value in brute_force(inputs, space.option(k), LINK).items():
            assert getattr(candidate, name) == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("backend", ["gloo", "nccl", "model"])
def test_every_carrier_equals_brute_force(backend: str) -> None:
    sizes = (400_000, 10)
    families = all_carriers(sizes)
    samples = tuple(
        ComputeSample(f.compressor, (), p.ratio, 1000, 1e-4, 1e-5)
        for f in families
        for p in f.ladder
    )
    inputs = scenario.inputs(
        ranks=4, sizes=sizes, families=families, compute=samples, backend=backend,
        settings=scenario.settings(ratios=3, collectives=COSTED),
    )  # fmt: skip
    space = Space(inputs, LINK)
    evaluation = space.uniform()
    # native, ring with 0 .. 3 skipped, the other two with 0 .. 2; without skip one each.
    assert len(space) == 3 * ((1 + 4 + 3 + 3) + 4 + 1 + 1 + 4)
    for k in range(len(space)):
        for name, value in brute_force(inputs, space.option(k), LINK).items():
            found = getattr(space.candidate(evaluation, k), name)
            assert found == pytest.approx(value, rel=1e-9, abs=1e-12), (space.option(k), name)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (8, {"native": [0], "ring": [*range(8)], "halving_doubling": [*range(4)],
             "tree": [*range(4)]}),
        (6, {"native": [0], "ring": [*range(6)], "halving_doubling": [0], "tree": [*range(4)]}),
        (2, {"native": [0], "ring": [0, 1], "halving_doubling": [0, 1], "tree": [0, 1]}),
        (1, {"native": [0], "ring": [0], "halving_doubling": [0], "tree": [0]}),
    ],
)  # fmt: skip
def test_skips_are_what_the_schedules_can_do(ranks: int, expected: dict[str, list[int]]) -> None:
    one, scores, *_ = all_carriers((1000,))
    found: dict[str, list[int]] = {}
    for head in make_heads([one], ranks, ratios=3, skips=True):
        found.setdefault(head.collective, []).append(head.skip)
    assert found == expected
    assert {h.skip for h in make_heads([scores], ranks, ratios=3, skips=True)} == {0}


def test_sequential_wires_overlap_nothing() -> None:
    inputs = scenario.inputs(ranks=4, sizes=(400_000, 90_000, 10), overlap=0.0)
    steps = []
    for sequential in (False, True):
        space = Space(replace(inputs, sequential=sequential), LINK)
        k = space.add(DENSE)
        assert k is not None
        steps.append(float(space.uniform().step_seconds[k]))
    a, _ = coefficients("all_reduce", 4)
    # Two of three latencies hide behind the bytes of another bucket; the last one's does not.
    assert steps[1] - steps[0] == pytest.approx(2 * a * LINK.alpha_seconds, rel=0.01)


def test_waiting_for_slower_ranks_is_in_the_step_time_of_every_option() -> None:
    inputs = scenario.inputs(ranks=4, current=DENSE)
    plain = Space(inputs, LINK)
    dense = plain.present()
    assert dense is not None
    measured = float(dense.step_seconds[0]) + 0.02
    late = replace(inputs, straggle_seconds=0.025, step_seconds=measured)
    space = Space(late, LINK)
    present = space.present()
    assert present is not None
    assert present.step_seconds[0] == pytest.approx(measured)
    assert space.uniform().step_seconds == pytest.approx(plain.uniform().step_seconds + 0.02)
    # Of what is in use nothing is known: no more than what is not compute time.
    blind = Space(replace(late, current=None, step_seconds=inputs.compute_seconds + 0.01), LINK)
    assert blind.uniform().step_seconds == pytest.approx(plain.uniform().step_seconds + 0.01)


def test_before_the_first_plan_the_start_option_is_what_is_in_use() -> None:
    inputs = scenario.inputs()
    assert Space(inputs, LINK).present() is None
    space = Space(replace(inputs, start=BF16), LINK)
    assert (space.current_options, space.present_options) == ((), (BF16,) * 3)
    present = space.present()
    assert present is not None
    assert space.candidate(present, 0).options == (BF16,)


def test_mixed_candidates_equal_their_parts() -> None:
    inputs = scenario.inputs(ranks=4, settings=scenario.settings(ratios=3))
    space = Space(inputs, LINK)
    uniform = space.uniform()
    rows = np.array(list(itertools.product((0, 5, 11), repeat=3)), dtype=np.intp)
    mixed = space.evaluate(rows)
    assert space.table is not None
    for p, row in enumerate(rows):
        parts = space.table.latency[row, range(3)] + space.table.transfer[row, range(3)]
        assert mixed.synchronisation_seconds[p] == pytest.approx(parts.sum())
        if len(set(row)) == 1:
            assert mixed.step_seconds[p] == pytest.approx(uniform.step_seconds[row[0]])
            assert mixed.efficiency[p] == pytest.approx(uniform.efficiency[row[0]])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(scenario.inputs(), LINK)
    whole = space.uniform()
    monkeypatch.setattr("gradpilot.policies.problem.CHUNK", 30)
    parts = space.uniform()
    for name in ("step_seconds", "efficiency", "gain", "wire_ratio"):
        assert (getattr(whole, name) == getattr(parts, name)).all()


def test_dense_and_bf16_are_always_there_and_safe() -> None:
    inputs = scenario.inputs(compute=())  # nothing was ever measured
    space = Space(inputs, LINK)
    evaluation = space.uniform()
    for option in (DENSE, BF16):
        k = space.add(option)
        assert k is not None
        assert space.option(k) == option
        assert evaluation.safe[k]
        assert evaluation.valid[k]
    unmeasured = space.add(Option("topk", 0.01, "allgather"))
    assert unmeasured is not None
    assert not space.uniform().valid[unmeasured]


def test_options_off_the_grid() -> None:
    space = Space(scenario.inputs(), LINK)
    size = len(space)
    odd = Option("topk", 0.0123456, "allgather")
    k = space.add(odd)
    assert k == size
    assert space.add(odd) == k
    assert space.option(k) == odd
    assert len(space.uniform().gain) == size + 1
    assert space.add(Option("unheard")) is None
    assert space.add(Option("topk", 0.01, "native")) is None
    assert space.add(Option("topk", math.nan, "allgather")) is None


def test_skip_only_where_a_round_may_skip() -> None:
    sizes = (1000,)
    fixed = Family(
        "scores",
        (),
        ("native", "ring"),
        (LadderPoint(1.0, (BucketRounds((WireRound("all_reduce", 40, False),)),)),),
    )
    space = Space(scenario.inputs(sizes=sizes, families=(fixed,)), LINK)
    assert [(h.collective, h.skip) for h in space.heads] == [("native", 0), ("ring", 0)]


def test_unusable_families_are_left_out() -> None:
    good = scenario.families((1000,))
    odd = (
        Family("empty", (), ("native",), ()),
        Family("short", (), ("native",), (LadderPoint(1.0, ()),)),
        replace(good[0], compressor="nowhere", collectives=("pigeon",)),
    )
    space = Space(scenario.inputs(sizes=(1000,), families=odd), LINK)
    assert len(space) == 0
    assert space.table is None


def test_grid() -> None:
    assert ratio_grid(np.array([0.01]), 24).tolist() == [0.01]
    grid = ratio_grid(np.array([0.001, 0.1]), 5)
    assert grid.tolist() == [0.001, 0.00316, 0.01, 0.0316, 0.1]
    assert ratio_grid(np.array([0.001, 0.1]), 0).tolist() == [0.001, 0.1]


def test_large_worlds_are_thinned() -> None:
    inputs = scenario.inputs(ranks=4096, sizes=(1000,), settings=scenario.settings(ratios=500))
    space = Space(inputs, LINK)
    assert len(space) <= 100_000
    assert {0, 4095} <= {h.skip for h in space.heads}


def test_groups_follow_the_widest_gaps() -> None:
    sizes = np.array([10.0, 1e6, 1.1e6, 12.0, 3e4, 1e6])
    assert bucket_groups(sizes, 4).tolist() == [0, 1, 1, 0, 2, 1]
    assert bucket_groups(sizes, 2).tolist() == [0, 1, 1, 0, 1, 1]
    assert bucket_groups(np.array([5.0, 5.0]), 4).tolist() == [0, 0]


def test_coding_round_trip() -> None:
    space = Space(scenario.inputs(settings=scenario.settings(ratios=9)), LINK)
    numbers = np.arange(len(space), dtype=np.intp)
    heads, levels = space.encode(numbers)
    assert (levels < space.levels).all()
    assert (space.decode(heads, levels) == numbers).all()
    off = space.add(Option("topk", 0.0123456, "allgather"))
    assert off is not None
    near = space.option(int(space.decode(*space.encode(np.array([off], dtype=np.intp)))[0]))
    assert near.ratio == pytest.approx(0.0123456, rel=0.3)
