"""Conformance suite for compressors, ours and those of plug-ins.

A test file subclasses it, names the instances to try, and adds what is its algorithm's own:

    class TestTopK(CompressorConformance):
        compressors = (TopK(ratio=0.01), TopK(ratio=0.5))
        dense = (TopK(ratio=1.0),)

pytest collects the inherited tests; this module does not need it to be installed. Everything runs
on virtual ranks in one process.

Letters: N world size, n elements of the bucket.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast
from unittest import SkipTest

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.collectives.skipping import (
    backend_carries,
    min_skip_elements,
    omitted_parts,
    schedule_for,
    settle,
)
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    ESTIMATORS,
    At,
    Compressor,
    Estimate,
    Rounds,
    create,
    leave_residual_,
    option_of,
)
from gradpilot.worker_agent.compressors.sent import Sparse, dense_sent
from gradpilot.worker_agent.compressors.settings import bounds_of
from gradpilot.worker_agent.memory import MemoryStore, owner_of
from gradpilot.worker_agent.testing_tools import (
    average,
    gradients,
    refusal,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, run_lockstep, virtual_step

__all__ = [
    "SIZES",
    "WORLD_SIZES",
    "Case",
    "CompressorConformance",
    "average",
    "gradients",
    "relative_error",
    "same_bits",
    "dense_sent",
]

WORLD_SIZES = (1, 2, 3, 4, 8)
CARRIERS = ("native", "ring", "allgather", "alltoall")
"""Carriers that every compressor is tried under; the suite of collectives tries the others."""

SIZES = (1, 3, 64, 4097)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Case:
    """A compressor under one of the collectives that can carry it."""

    compressor: Compressor
    option: Option


class CompressorConformance:
    """What every compressor must fulfil; subclass it as ``TestX``.

    Attributes:
        compressors: Instances to try.
        dense: Instances that must give the dense mean.
        tolerance: Relative error allowed to the mean in fp32: of ``dense`` to the dense mean, and
            of every instance to the average over ranks of what was sent.
        exact: Whether ``sent + residual == corrected + carried`` holds bit for bit in fp32.
        conserving: Whether the mean is the average over ranks of what was sent. If not, say why.
        seeds: Steps over which an unbiased compressor is averaged.
    """

    compressors: ClassVar[Sequence[Compressor]] = ()
    dense: ClassVar[Sequence[Compressor]] = ()
    tolerance: ClassVar[float] = 1e-6
    exact: ClassVar[bool] = True
    conserving: ClassVar[bool] = True
    seeds: ClassVar[int] = 400

    def shapes(self, n: int) -> tuple[torch.Size, ...]:
        """Return shapes of parameters that fill a bucket: a matrix, a vector and a 0-d tensor."""
        if n < 4:
            return (torch.Size([]),) * n
        rows = max(2, int((n / 4) ** 0.5))
        columns = (n - 1) // rows
        rest = n - 1 - rows * columns
        vector = (torch.Size([rest]),) if rest else ()
        return (torch.Size([rows, columns]), *vector, torch.Size([]))

    def skip_gradients(self, world_size: int) -> list[Tensor]:
        """Return the gradients on which skipping is compared with masking.

        Both add up in orders of their own. Override it where rounding could then change a choice.
        """
        return gradients(4097, world_size)

    def cases(self, compressors: Sequence[Compressor]) -> list[Case]:
        """Return every compressor under the carriers that it is tried with."""
        return [
            Case(c, option_of(c, how))
            for c in compressors
            for how in c.collectives
            if how in CARRIERS
        ]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Give the tests below their arguments."""
        cases = self.cases(self.compressors)
        for name, chosen in (
            ("case", cases),
            ("ring_case", [c for c in cases if c.option.collective == "ring"]),
            ("dense_case", self.cases(self.dense)),
        ):
            if name not in metafunc.fixturenames:
                continue
            if "world_size" in metafunc.fixturenames:
                both = [(c, n) for c in chosen for n in WORLD_SIZES if usable(c, n)]
                ids = [f"{c.option.label}-{n}" for c, n in both]
                metafunc.parametrize((name, "world_size"), both, ids=ids)
            else:
                able = [c for c in chosen if usable(c, 4)]
                metafunc.parametrize(name, able, ids=[c.option.label for c in able])

    def step(
        self,
        case: Case,
        grads: Sequence[Tensor],
        *,
        option: Option | None = None,
        step: int = 5,
        residuals: Sequence[Tensor] | None = None,
        memories: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> VirtualStep:
        """Return one virtual step of a case."""
        return virtual_step(
            option or case.option,
            grads,
            residuals,
            step=step,
            bucket="b",
            seed=3,
            shapes=self.shapes(grads[0].numel()),
            compressor=case.compressor,
            memories=memories,
        )

    def run_steps(
        self,
        case: Case,
        count: int,
        start: VirtualStep | None = None,
        *,
        n: int = 1025,
        world_size: int = 4,
    ) -> VirtualStep:
        """Return the last of so many steps in a row, with residuals and memories handed on."""
        step = start
        for number in range(count):
            step = self.step(
                case,
                gradients(n, world_size, seed=number),
                step=number,
                residuals=step.residuals if step else None,
                memories=step.memories if step else None,
            )
        assert step is not None
        return step

    # --- the declaration -----------------------------------------------------------------------

    def test_an_option_names_it(self, case: Case) -> None:
        """Registry, option and instance agree."""
        assert COMPRESSORS.get(case.compressor.name) is type(case.compressor)
        assert create(case.option) == case.compressor

    def test_ladder_is_usable(self) -> None:
        """The ladder consists of distinct members of this class with plausible declarations."""
        for kind in {type(c) for c in self.compressors}:
            ladder = kind.ladder()
            assert ladder, f"{kind.name}: the ladder is empty"
            assert len(set(ladder)) == len(ladder), f"{kind.name}: the ladder repeats a member"
            for member in ladder:
                assert type(member) is kind
                assert 0.0 < member.ratio <= 1.0
                assert member.estimator in ESTIMATORS
                assert 0.0 <= member.efficiency_exponent <= 1.0
                assert [s.name for s in member.settings] == sorted(s.name for s in member.settings)
                assert set(member.collectives) & {"native", "allgather", "alltoall"}
            assert kind.gain_model in ("energy", "ratio", "constant")
            assert kind.source, f"{kind.name}: says nothing of where it comes from"

    def test_settings_are_bounded(self, case: Case) -> None:
        """Every setting is refused beyond its bounds, with a message that names it."""
        for name, bounds in bounds_of(type(case.compressor)).items():
            wrong = "no such word" if bounds.choices else bounds.high * 2 + 1
            with refusal(ConfigError, name):
                replace(cast(Any, case.compressor), **{name: wrong})

    # --- the wire ------------------------------------------------------------------------------

    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """``wire`` equals the requests that were made, in kind, bytes and skippability."""
        for n in SIZES:
            made = self.step(case, gradients(n, world_size)).wire
            stated = case.compressor.wire(n, self.shapes(n), world_size)
            assert made == tuple(stated), f"n={n}: made {made}, stated {stated}"
            if case.compressor.single_round:
                assert [r.collective for r in made] == ["all_reduce"]

    # --- the result ----------------------------------------------------------------------------

    def test_all_ranks_get_the_same_bits(self, case: Case, world_size: int) -> None:
        """Means are bit-identical over ranks."""
        for n in SIZES:
            means = [e.mean for e in self.step(case, gradients(n, world_size)).estimates]
            assert all(same_bits(m, means[0]) for m in means), f"n={n}: means differ over ranks"

    def test_mean_has_the_form_of_the_gradient(self, case: Case) -> None:
        """Same numel and dtype, contiguous, finite."""
        for dtype in DTYPES:
            for n in SIZES:
                mean = self.step(case, gradients(n, 3, dtype=dtype)).mean
                assert (mean.dtype, mean.shape) == (dtype, (n,)), f"{dtype}, n={n}: got {mean}"
                assert mean.is_contiguous(), f"{dtype}, n={n}: not contiguous"
                assert bool(mean.isfinite().all()), f"{dtype}, n={n}: not finite"

    def test_one_huge_value_harms_nobody(self, case: Case) -> None:
        """The result stays finite and alike, and nothing is lost but to rounding."""
        for where in (0, 4096):
            grads = gradients(4097, 3)
            grads[1][where] = 1e30
            step = self.step(case, grads)
            assert bool(step.mean.isfinite().all())
            assert all(bool(r.isfinite().all()) for r in step.residuals)
            assert all(same_bits(e.mean, step.mean) for e in step.estimates)

    def test_zero_gradient(self, case: Case) -> None:
        """Nothing comes of nothing."""
        step = self.step(case, [torch.zeros(64) for _ in range(3)])
        assert not step.mean.any()
        assert not any(bool(r.any()) for r in step.residuals)

    def test_gives_the_dense_mean(self, dense_case: Case, world_size: int) -> None:
        """An instance that keeps all gives the mean and leaves (next to) nothing behind."""
        for n in SIZES:
            grads = gradients(n, world_size)
            step = self.step(dense_case, grads)
            error = relative_error(step.mean, average(grads))
            assert error <= self.tolerance, f"n={n}: relative error {error}"
            for grad, residual in zip(grads, step.residuals, strict=True):
                left = relative_error(grad - residual, grad)
                assert left <= self.tolerance, f"n={n}: left behind {left}"

    def test_mean_is_the_average_of_what_was_sent(self, case: Case, world_size: int) -> None:
        """What ranks count as sent is what arrived: nothing lost, nothing twice."""
        self._needs_conservation()
        for n in SIZES:
            grads = gradients(n, world_size)
            step = self.step(case, grads)
            sent = average(
                [dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)]
            )
            error = relative_error(step.mean, sent)
            assert error <= self.tolerance, f"n={n}: relative error {error}"

    def test_same_place_same_bits(self, case: Case) -> None:
        """Step, bucket, seed and rank determine everything."""
        grads = gradients(4097, 4)
        first, second = self.step(case, grads), self.step(case, grads)
        assert same_bits(first.mean, second.mean)
        assert all(map(same_bits, first.residuals, second.residuals))

    def test_resumes_bit_equal_from_a_checkpoint(self, case: Case) -> None:
        """Residuals and memories that went through a file continue as those that did not."""
        kept = self.run_steps(case, 4)
        owner = owner_of(case.option)
        files = []
        for memory in kept.memories:
            store = MemoryStore()
            store.stage("b", owner, memory)
            store.commit()
            file = io.BytesIO()
            torch.save(store.state_dict(), file)
            file.seek(0)
            loaded = MemoryStore()
            loaded.load_state_dict(torch.load(file, weights_only=True))
            files.append(loaded.recall("b", owner))
        resumed = replace(kept, memories=files)
        first, second = self.run_steps(case, 2, kept), self.run_steps(case, 2, resumed)
        assert same_bits(first.mean, second.mean)
        assert all(map(same_bits, first.residuals, second.residuals))

    # --- what it promises ----------------------------------------------------------------------

    def test_estimator_is_what_it_declares(self, case: Case) -> None:
        """Exact, unbiased or contractive, on what a rank sends."""
        grads = gradients(257, 2, seed=4)
        estimator = case.compressor.estimator
        sents = []
        count = self.seeds if estimator == "unbiased" else 1 if estimator == "exact" else 4
        for number in range(count):
            step = self.step(case, grads, step=number)
            sents.append(
                [dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)]
            )
        for rank, grad in enumerate(grads):
            mine = torch.stack([s[rank].double() for s in sents])
            if estimator == "exact":
                assert relative_error(mine[0], grad) <= self.tolerance
            elif estimator == "unbiased":
                # A mean of so many draws errs by their deviation over the root of their number;
                # over 257 elements the sum of squares comes close to its expectation.
                error = torch.linalg.vector_norm(mine.mean(0) - grad.double())
                expected = torch.linalg.vector_norm(mine.std(0)) / len(mine) ** 0.5
                floor = 1e-6 * torch.linalg.vector_norm(grad.double())
                assert error <= 1.3 * expected + floor, f"biased: {error} for {expected}"
            elif estimator == "contractive":
                for one in mine:
                    left = relative_error(one, grad)
                    assert left <= 1.0 + 1e-6, f"the residual outgrows the gradient: {left}"

    # --- error feedback ------------------------------------------------------------------------

    def test_sent_plus_residual_is_corrected(self, case: Case, world_size: int) -> None:
        """The identity of error feedback, bit for bit where it is declared."""
        for n in SIZES:
            grads = gradients(n, world_size)
            step = self.run_steps(case, 1, n=n, world_size=world_size)
            grads = [g + r for g, r in zip(grads, step.residuals, strict=True)]
            estimates = self.step(case, grads, memories=step.memories).estimates
            for grad, estimate in zip(grads, estimates, strict=True):
                if isinstance(estimate.sent, Sparse):
                    indices = estimate.sent.indices
                    assert indices.dtype in (torch.int32, torch.int64)
                    assert len(set(indices.tolist())) == indices.numel(), "indices repeat"
                residual = leave_residual_(grad.clone(), estimate)
                restored = residual + dense_sent(estimate.sent, grad)
                started = grad if estimate.carried is None else grad + estimate.carried
                if self.exact:
                    assert torch.equal(restored, started), f"n={n}: not bit-exact"
                else:
                    assert relative_error(restored, started) <= 1e-6, f"n={n}: not restored"

    def test_gradient_stays_unless_feedback_is_off(self, case: Case) -> None:
        """With feedback the gradient is not touched; without, the mean is the same."""
        grads = gradients(4097, 4)
        work = [g.clone() for g in grads]
        kept = self._run(case, work, feedback=True)
        assert all(map(torch.equal, grads, work)), "the gradient was changed"
        given = self._run(case, work, feedback=False)
        assert all(same_bits(a.mean, b.mean) for a, b in zip(kept, given, strict=True))

    def test_mean_is_left_where_the_caller_wants_it(self, case: Case) -> None:
        """In ``At.out`` whatever was there, else in the gradient if that is not needed."""
        for dtype in DTYPES:
            grads = gradients(4097, 4, dtype=dtype)
            kept = self._run(case, grads, feedback=True)
            places = [torch.full_like(g, torch.nan) for g in grads]
            given = self._run(case, grads, feedback=True, places=places)
            work = [g.clone() for g in grads]
            bare = self._run(case, work, feedback=False)
            for there, here, asked in ((places, given, "out"), (work, bare, "grad")):
                for place, estimate, expected in zip(there, here, kept, strict=True):
                    assert estimate.mean.data_ptr() == place.data_ptr(), f"not left in {asked}"
                    assert same_bits(estimate.mean, expected.mean), f"other mean in {asked}"

    def test_nothing_is_lost_through_switches(self) -> None:
        """Over 50 steps of changing options: N means + residuals == gradients, added up."""
        self._needs_conservation()
        world_size, n = 3, 257
        able = [c for c in self.cases(self.compressors) if usable(c, world_size)]
        choices = [*able, Case(create(DENSE), DENSE)]
        generator = random.Random(0)
        residuals = [torch.zeros(n) for _ in range(world_size)]
        stores = [MemoryStore() for _ in range(world_size)]
        given, arrived = torch.zeros(n).double(), torch.zeros(n).double()
        for number in range(50):
            case = generator.choice(choices)
            grads = gradients(n, world_size, seed=number)
            step = virtual_step(
                case.option,
                grads,
                residuals,
                step=number,
                shapes=self.shapes(n),
                compressor=case.compressor,
                memories=[store.recall("", owner_of(case.option)) for store in stores],
            )
            residuals = step.residuals
            given += average(grads)
            given += average(
                [e.carried if e.carried is not None else torch.zeros(n) for e in step.estimates]
            )
            arrived += step.mean.double()
            for store, memory in zip(stores, step.memories, strict=True):
                store.stage("", owner_of(case.option), memory)
                store.commit()
        error = relative_error(arrived + average(residuals), given)
        assert error <= max(1e-5, self.tolerance), f"relative error {error}"

    def test_nothing_is_held_after_a_switch(self, case: Case) -> None:
        """Another compressor on the bucket frees what this one remembered."""
        memory = self.run_steps(case, 2).memories[0]
        store = MemoryStore()
        store.stage("b", owner_of(case.option), memory)
        store.commit()
        assert store.recall("b", owner_of(case.option)) == memory
        assert not store.recall("b", owner_of(DENSE))
        store.stage("b", owner_of(DENSE), {})
        store.commit()
        assert store.elements == 0

    # --- non-finite gradients ------------------------------------------------------------------

    def test_nonfinite_on_one_rank_is_seen_by_all(self, case: Case, world_size: int) -> None:
        """One bad element anywhere: a non-finite mean everywhere, residuals as before."""
        option = self._skipping(case, world_size, world_size - 1)
        for n in (1, 3, min_skip_elements(world_size)):
            before = self.run_steps(case, 1, n=n, world_size=world_size).memories
            for odd, bad in ((0, torch.nan), (world_size - 1, torch.inf)):
                grads = gradients(n, world_size)
                grads[odd][n // 2] = bad
                step = self.step(case, grads, option=option, memories=before)
                assert all(a is b for a, b in zip(step.memories, before, strict=True))
                for rank, estimate in enumerate(step.estimates):
                    finite = bool(estimate.mean.isfinite().all())
                    assert not finite, f"n={n}: rank {rank} misses {bad} of rank {odd}"
                assert not any(bool(r.any()) for r in step.residuals)

    # --- skipped ring steps --------------------------------------------------------------------

    def test_skipping_equals_masking(self, ring_case: Case, world_size: int) -> None:
        """A ring that skips gives what an all-reduce of masked payloads gives."""
        grads = self.skip_gradients(world_size)
        for skip in _skips(world_size):
            for divisor in ("skip", "drop"):
                option = self._skipping(ring_case, world_size, skip, divisor)
                step = self.step(ring_case, grads, option=option)
                ats = self._ats(world_size, 4097, feedback=True)
                masked = run_lockstep(
                    [
                        _masked(ring_case.compressor.rounds(g, at), at, option)
                        for g, at in zip(grads, ats, strict=True)
                    ],
                    ats,
                )
                error = relative_error(step.mean, masked[0].mean)
                assert error <= 4 * self.tolerance, f"skip={skip} {divisor}: error {error}"
                assert all(same_bits(e.mean, step.mean) for e in step.estimates)

    def test_skip_feedback_keeps_what_was_omitted(self, ring_case: Case, world_size: int) -> None:
        """With ``skip_feedback`` the mean is still the average of what counts as sent."""
        self._needs_conservation()
        grads = gradients(4097, world_size)
        for skip in _skips(world_size):
            option = self._skipping(ring_case, world_size, skip, feedback=True)
            step = self.step(ring_case, grads, option=option)
            sent = average([g - r for g, r in zip(grads, step.residuals, strict=True)])
            error = relative_error(step.mean, sent)
            assert error <= max(4 * self.tolerance, 1e-5), f"skip={skip}: error {error}"

    # --- helpers -------------------------------------------------------------------------------

    def _needs_conservation(self) -> None:
        """Skip, visibly, what a compressor that loses part of the sum cannot fulfil."""
        if not self.conserving:
            raise SkipTest("declared not to conserve what is sent")  # pytest skips on it, too

    def _skipping(
        self,
        case: Case,
        world_size: int,
        skip: int,
        divisor: str = "skip",
        feedback: bool = False,
    ) -> Option:
        """Return the option of a case with skipped steps, where its collective can skip."""
        if case.option.collective != "ring":
            return case.option
        return option_of(
            case.compressor, "ring", skip=skip, divisor=divisor, skip_feedback=feedback
        )

    def _ats(self, world_size: int, n: int, feedback: bool) -> list[At]:
        shapes = self.shapes(n)
        return [At(r, world_size, 5, "b", 3, shapes, feedback=feedback) for r in range(world_size)]

    def _run(
        self,
        case: Case,
        grads: Sequence[Tensor],
        feedback: bool,
        places: Sequence[Tensor] | None = None,
    ) -> list[Estimate]:
        ats = self._ats(len(grads), grads[0].numel(), feedback)
        if places is not None:
            ats = [replace(at, out=place) for at, place in zip(ats, places, strict=True)]
        rounds = [case.compressor.rounds(g, at) for g, at in zip(grads, ats, strict=True)]
        return run_lockstep(rounds, ats, case.option)


def usable(case: Case, world_size: int) -> bool:
    """Return whether a case says that it serves so many ranks."""
    try:
        case.compressor.check(world_size, case.option.collective)
    except ConfigError:
        return False
    return True


def _skips(world_size: int) -> list[int]:
    """Return the least, a middle and the greatest number of steps to skip; none for one rank."""
    return sorted({1, world_size // 2, world_size - 1} - {0}) if world_size > 1 else []


def _masked(rounds: Rounds, at: At, option: Option) -> Rounds:
    """Pass requests on, all-reduces with zeros where the option would omit a slice."""
    try:
        request = next(rounds)
        while True:
            if isinstance(request, AllReduce) and not backend_carries(option, request):
                schedule = schedule_for(option, at, request)
                for part in omitted_parts(schedule, request.payload.numel()):
                    request.payload[part].zero_()
                request.payload = yield request
                reply = settle(option, at, schedule, request)
            else:
                reply = yield request
            request = rounds.send(reply)
    except StopIteration as stop:
        estimate: Estimate = stop.value
        return estimate
