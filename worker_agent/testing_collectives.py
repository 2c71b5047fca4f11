"""Conformance suite for all-reduce schedules, ours and those of plug-ins.

A test file subclasses it, states what the algorithm promises, and adds what is its own:

    class TestRing(ScheduleConformance):
        name = "ring"

        def contributions(self, world_size, skip):
            return world_size - skip
        ...

pytest collects the inherited tests; this module does not need it to be installed. Everything runs
on virtual ranks in one process.

Letters: N world size, S skipped steps, r rank, c slice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import SCHEDULES, Algorithm, Schedule, slice_bounds
from gradpilot.worker_agent.collectives.reduction import MAX, SUM, Reduction
from gradpilot.worker_agent.collectives.skipping import min_skip_elements, omitted_parts
from gradpilot.worker_agent.testing import average, gradients, relative_error, same_bits
from gradpilot.worker_agent.virtual import run_schedules, virtual_step

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
LARGE_WORLD_SIZES = (2, 3, 7, 16, 33, 64, 100)
CAP = 100


def _saturating_(target: Tensor, incoming: Tensor) -> Tensor:
    return target.add_(incoming).clamp_(-CAP, CAP)


SATURATING = Reduction("saturating", _saturating_, native=False)
"""A sum that stays within +-CAP; its result depends on the order unless all signs are alike."""


class ScheduleConformance:
    """What every schedule must fulfil; subclass it as ``TestX`` and override the four statements.

    Attributes:
        name: Registered name.
        balanced: Whether all shifts together omit every (rank, slice) pair equally often. If not,
            say why.
    """

    name: ClassVar[str]
    balanced: ClassVar[bool] = True

    # --- what a subclass states ----------------------------------------------------------------

    def contributions(self, world_size: int, skip: int) -> int:
        """Return how many ranks are in the sum of every slice."""
        raise NotImplementedError

    def steps(self, world_size: int, skip: int) -> tuple[int, int]:
        """Return the number of steps in which ranks reduce, and in which they gather."""
        raise NotImplementedError

    def sent(self, rank: int, world_size: int, skip: int) -> Fraction:
        """Return how many payloads a rank sends in all, if no slice is shorter than the others."""
        raise NotImplementedError

    def textbook(self, payloads: Sequence[Tensor], reduction: Reduction) -> Tensor:
        """Return the result with nothing skipped, written independently; payloads may be changed.

        Where the order matters, the own part comes first: ``reduction.combine_(own, incoming)``.
        """
        raise NotImplementedError

    # --- tools ---------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Give the tests below their arguments."""
        if "skip" in metafunc.fixturenames:
            most = SCHEDULES.get(self.name).most_skipped
            cases = [(n, skip) for n in WORLD_SIZES for skip in range(most(n) + 1)]
            ids = [f"{n}-skip{skip}" for n, skip in cases]
            metafunc.parametrize(("world_size", "skip"), cases, ids=ids)
        elif "world_size" in metafunc.fixturenames:
            metafunc.parametrize("world_size", WORLD_SIZES)

    @property
    def algorithm(self) -> Algorithm:
        """Return what is tested."""
        return SCHEDULES.get(self.name)

    def made(self, world_size: int, skip: int = 0, shift: int = 0) -> list[Schedule]:
        """Return the schedule of every rank."""
        build = self.algorithm.build
        return [build(rank, world_size, skip=skip, shift=shift) for rank in range(world_size)]

    def reduced(
        self,
        payloads: Sequence[Tensor],
        skip: int = 0,
        shift: int = 0,
        reduction: Reduction = SUM,
    ) -> list[Tensor]:
        """Return what every rank ends with; payloads are left alone."""
        out = [payload.clone() for payload in payloads]
        run_schedules(out, self.made(len(out), skip, shift), reduction)
        return out

    def sizes(self, world_size: int) -> Iterator[int]:
        """Yield numbers of elements, some of which leave slices short or empty."""
        slices = self.made(world_size)[0].slices
        yield from sorted({1, 2, slices, slices + 1, 3 * slices - 1, 24 * slices - 5})

    # --- the declaration -----------------------------------------------------------------------

    def test_is_registered_with_its_source(self) -> None:
        """The registry knows it, where it comes from, and how much it can skip."""
        assert self.algorithm.source
        assert self.algorithm.most_skipped(1) == 0
        for world_size in range(1, 40):
            # What an option can ask for.
            assert 0 <= self.algorithm.most_skipped(world_size) <= world_size - 1

    def test_arguments_out_of_range_are_clamped(self, world_size: int) -> None:
        """Too large a skip is the largest, a negative one is none; shifts go round."""
        build, most = self.algorithm.build, self.algorithm.most_skipped(world_size)
        for rank in range(world_size):
            last, whole = build(rank, world_size, skip=most), build(rank, world_size)
            assert build(rank, world_size, skip=most + 1) == last
            assert build(rank, world_size, skip=99) == last
            assert build(rank, world_size, skip=-1) == whole
            assert build(rank, world_size, skip=most, shift=world_size) == last

    def test_one_rank_has_nothing_to_do(self) -> None:
        """A single rank keeps its payload."""
        expected = Schedule(slices=1, steps=(), omitted=(), contributions=1)
        assert self.algorithm.build(0, 1, skip=3, shift=2) == expected

    # --- the messages --------------------------------------------------------------------------

    def test_ranks_expect_what_their_peers_send(self, world_size: int, skip: int) -> None:
        """Every message has both ends in the same step, with the same slices in the same order."""
        for shift in range(world_size):
            made = self.made(world_size, skip, shift)
            assert len({(len(s.steps), s.slices) for s in made}) == 1
            for steps in zip(*(s.steps for s in made), strict=True):
                assert len({step.accumulate for step in steps}) == 1
                for rank, step in enumerate(steps):
                    assert len(set(step.send)) == len(step.send)
                    if step.send:
                        assert step.to != rank
                        assert steps[step.to].source == rank
                        assert steps[step.to].receive == step.send
                    if step.receive:
                        assert steps[step.source].to == rank
                        assert steps[step.source].send == step.receive

    def test_an_omitted_slice_waits_for_its_sum(self, world_size: int, skip: int) -> None:
        """A driver may let sums land in the payload early: nothing else may need the place then."""
        for shift in range(world_size):
            for schedule in self.made(world_size, skip, shift):
                waiting = set(schedule.omitted)
                for step in schedule.steps:
                    assert not waiting & set(step.send)
                    if step.accumulate:
                        assert not waiting & set(step.receive)
                    waiting -= set(step.receive)
                assert not waiting

    def test_steps_and_bytes(self, world_size: int, skip: int) -> None:
        """As many steps and elements as stated; short slices make it less."""
        for shift in range(world_size):
            for rank, schedule in enumerate(self.made(world_size, skip, shift)):
                steps = [step.accumulate for step in schedule.steps]
                assert (steps.count(True), steps.count(False)) == self.steps(world_size, skip)
                share = self.sent(rank, world_size, skip)
                even, short = 24 * schedule.slices, schedule.slices - 1
                assert elements_sent(schedule, even) == share * even
                times = sum(step.send.count(schedule.slices - 1) for step in schedule.steps)
                assert elements_sent(schedule, even - short) == share * even - short * times

    # --- the result ----------------------------------------------------------------------------

    def test_equals_the_all_reduce_of_masked_payloads(self, world_size: int, skip: int) -> None:
        """Under every shift, also with short and empty slices."""
        for shift in range(world_size):
            for numel in self.sizes(world_size):
                self._check_masked(world_size, skip, shift, numel)

    def test_equals_the_all_reduce_of_masked_payloads_anywhere(self) -> None:
        """The same for any world size, skip beyond its bounds, shift and size."""
        generator = random.Random(0)
        for _ in range(100):
            case = [generator.randint(*ends) for ends in ((1, 12), (0, 12), (0, 11), (1, 100))]
            self._check_masked(*case)

    def _check_masked(self, world_size: int, skip: int, shift: int, numel: int) -> None:
        payloads = whole_numbers(world_size, numel, -99, 99)
        expected = self._masked(payloads, skip, shift, 0.0).sum(0)
        for result in self.reduced(payloads, skip, shift):
            assert torch.equal(result, expected), (world_size, skip, shift, numel)

    def _masked(self, payloads: Sequence[Tensor], skip: int, shift: int, neutral: float) -> Tensor:
        """Return payloads, (N, numel), in which omitted slices hold ``neutral``."""
        masked = torch.stack(list(payloads))
        for rank, schedule in enumerate(self.made(len(payloads), skip, shift)):
            for part in omitted_parts(schedule, masked.shape[1]):
                masked[rank, part] = neutral
        return masked

    def test_all_ranks_end_with_the_same_bits(self, world_size: int, skip: int) -> None:
        """Also where rounding depends on the order."""
        for dtype in (torch.float32, torch.bfloat16):
            payloads = gradients(1001, world_size, dtype=dtype)
            for shift in range(world_size):
                out = self.reduced(payloads, skip, shift)
                assert all(same_bits(o, out[0]) for o in out)

    def test_without_skip_it_is_the_textbook(self, world_size: int) -> None:
        """Bit for bit, also for a reduction in which the order matters."""
        cases = (
            (gradients(1001, world_size), SUM),
            (gradients(7, world_size), SUM),
            (gradients(1001, world_size), MAX),
            (whole_numbers(world_size, 1001, -CAP, CAP), SATURATING),
        )
        for payloads, reduction in cases:
            expected = self.textbook([p.clone() for p in payloads], reduction)
            for out in self.reduced(payloads, reduction=reduction):
                assert same_bits(out, expected), reduction.name

    def test_reductions_see_contributions_only(self, world_size: int, skip: int) -> None:
        """The maximum, and a sum that saturates, of what is not omitted."""
        for shift in range(world_size):
            payloads = whole_numbers(world_size, 101, -99, 0)
            expected = self._masked(payloads, skip, shift, -torch.inf).amax(0)
            for out in self.reduced(payloads, skip, shift, MAX):
                assert torch.equal(out, expected)
            payloads = whole_numbers(world_size, 101, 0, 60)
            expected = self._masked(payloads, skip, shift, 0.0).sum(0).clamp(max=CAP)
            for out in self.reduced(payloads, skip, shift, SATURATING):
                assert torch.equal(out, expected)

    # --- what is skipped -----------------------------------------------------------------------

    def test_contributions_and_omissions(self, world_size: int, skip: int) -> None:
        """Every slice gets as many contributions as stated, from those who do not omit it."""
        heard = self.contributions(world_size, skip)
        for shift in range(world_size):
            made = self.made(world_size, skip, shift)
            slices = made[0].slices
            assert {s.contributions for s in made} == {heard}
            omitted = Counter(number for s in made for number in s.omitted)
            assert all(omitted[c] == world_size - heard for c in range(slices))
            for s in made:
                assert len(set(s.omitted)) == len(s.omitted)
                if self.balanced:
                    assert len(s.omitted) * world_size == slices * (world_size - heard)
            # Counted on the data itself: who is in the sum of each slice.
            who = self.reduced([torch.full((slices,), 2.0**r) for r in range(world_size)], skip,
                               shift)[0]  # fmt: skip
            for c in range(slices):
                expected = sum(2**r for r, s in enumerate(made) if c not in s.omitted)
                assert int(who[c]) == expected

    def test_more_skip_never_hears_more(self, world_size: int) -> None:
        """Contributions fall with every step left out; the last one leaves one."""
        most = self.algorithm.most_skipped(world_size)
        heard = [self.made(world_size, skip)[0].contributions for skip in range(most + 1)]
        assert heard[0] == world_size
        assert heard == sorted(set(heard), reverse=True)
        if most:
            assert heard[-1] == 1

    def test_all_shifts_together_omit_every_pair_equally(self, world_size: int, skip: int) -> None:
        """No part of a rank's gradient is heard less often than another, if so promised."""
        if not self.balanced:
            return
        pairs = Counter(
            (rank, number)
            for shift in range(world_size)
            for rank, s in enumerate(self.made(world_size, skip, shift))
            for number in s.omitted
        )
        missed = world_size - self.contributions(world_size, skip)
        slices = self.made(world_size)[0].slices
        assert all(pairs[r, c] == missed for r in range(world_size) for c in range(slices))

    def test_average_over_all_shifts_is_the_shrunken_mean(self, world_size: int, skip: int) -> None:
        """Dividing by N shrinks, and does nothing else on average."""
        if not self.balanced:
            return
        payloads = [p.double() / world_size for p in gradients(240, world_size)]
        means = [self.reduced(payloads, skip, shift)[0] for shift in range(world_size)]
        expected = average(payloads) * self.contributions(world_size, skip)
        assert relative_error(average(means), expected) < 1e-15

    def test_error_against_theory(self, skip: int, world_size: int) -> None:
        """With k of N heard: 1 - k/N and N/k - 1 of independent gradients, squared of equal ones.

        Dividing by N ("skip") loses what is missing, dividing by k ("drop") adds noise instead.
        """
        if skip == 0:
            return
        generator = torch.Generator().manual_seed(0)
        independent = [torch.randn(50_000, generator=generator) for _ in range(world_size)]
        left = self.contributions(world_size, skip) / world_size
        for grads, divisor, expected in (
            (independent, "skip", 1 - left),
            (independent, "drop", 1 / left - 1),
            (independent[:1] * world_size, "skip", (1 - left) ** 2),
            (independent[:1] * world_size, "drop", 0.0),
        ):
            option = Option(collective=self.name, skip=skip, divisor=divisor)
            error = relative_error(virtual_step(option, grads).mean, average(grads)) ** 2
            assert abs(error - expected) <= 0.02 * expected + 1e-12, (divisor, error, expected)

    def test_feedback_keeps_what_was_omitted(self, world_size: int, skip: int) -> None:
        """The mean is the average of what does not stay behind as residual."""
        grads = gradients(4097, world_size)
        option = Option(collective=self.name, skip=skip, skip_feedback=True)
        for number in range(4):
            step = virtual_step(option, grads, step=number)
            sent = average([g - r for g, r in zip(grads, step.residuals, strict=True)])
            assert relative_error(step.mean, sent) < 1e-6
            kept = sum(int(residual.count_nonzero()) for residual in step.residuals)
            missed = world_size - self.contributions(world_size, skip)
            assert abs(kept - missed * 4097) <= world_size

    # --- non-finite gradients ------------------------------------------------------------------

    def test_every_rank_is_heard_from_the_floor_on(self) -> None:
        """From ``min_skip_elements`` on everybody contributes an element, whatever is skipped."""
        for world_size in LARGE_WORLD_SIZES:
            most = self.algorithm.most_skipped(world_size)
            made = [s for shift in (0, 1, world_size - 1)
                    for s in self.made(world_size, most, shift)]  # fmt: skip
            slices = made[0].slices
            kept = {frozenset(range(slices)).difference(s.omitted) for s in made}
            floor = min_skip_elements(world_size)
            for numel in range(floor, floor + 2 * world_size):
                bounds = slice_bounds(numel, slices)
                real = {c for c in range(slices) if bounds[c].start < bounds[c].stop}
                assert not any(real.isdisjoint(numbers) for numbers in kept), numel

    def test_nan_of_one_rank_reaches_all(self, world_size: int, skip: int) -> None:
        """A payload that is NaN throughout shows up in everybody's result."""
        numel = min_skip_elements(world_size)
        for odd in range(world_size):
            payloads = [torch.full((numel,), torch.nan if r == odd else 1.0)
                        for r in range(world_size)]  # fmt: skip
            for shift in {0, world_size // 2}:
                assert all(bool(out.isnan().any()) for out in self.reduced(payloads, skip, shift))


def elements_sent(schedule: Schedule, numel: int) -> int:
    """Return how many elements of a payload a rank sends."""
    bounds = slice_bounds(numel, schedule.slices)
    numbers = (number for step in schedule.steps for number in step.send)
    return sum(bounds[number].stop - bounds[number].start for number in numbers)


def whole_numbers(world_size: int, numel: int, low: int, high: int) -> list[Tensor]:
    """Return payloads whose sums are exact in any order; ends included."""
    generator = torch.Generator().manual_seed(numel)
    return list(torch.randint(low, high + 1, (world_size, numel), generator=generator).float())
