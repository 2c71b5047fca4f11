"""The gradient path: what happens to a bucket between backward and optimizer.

DDP fills a bucket and calls the hook: the bucket is identified, the residual added, the plan's
option looked up, the compressor's rounds are carried out, the mean is written back, the rest kept,
and stamps are noted.

A plan whose buckets are all one all-reduce of the backend takes the *native* path: the hook issues
them itself, asynchronously, as DDP would; where nothing is to be noted either, a step is *quiet*
(``quiet_steps``) and does no more than that. Any other plan takes the *threaded* path: one
communication thread works through the buckets in order while backward goes on. Native or threaded
depends on the plan alone, so it is the same on all ranks and never changes within a step.

This module must not postpone annotations: DDP compares those of the hook with real classes.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradpilot.protos.messages import COLLECTIVES, START_PROBE, Report, WireSample
from gradpilot.worker_agent.buckets import BucketTable, Slot
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds, leave_residual_
from gradpilot.worker_agent.coordinator import Coordinator
from gradpilot.worker_agent.error_feedback import ResidualStore
from gradpilot.worker_agent.finite import is_finite, poison_
from gradpilot.worker_agent.flight_recorder import FlightRecorder
from gradpilot.worker_agent.hook_state import LeftBehind
from gradpilot.worker_agent.loss_scale import LossScale
from gradpilot.worker_agent.memory import MemoryStore
from gradpilot.worker_agent.native_timing import AT_ONCE, NativeTimer
from gradpilot.worker_agent.plan import ActivePlan, Given
from gradpilot.worker_agent.probe import measure
from gradpilot.worker_agent.quiet_steps import QuietSteps
from gradpilot.worker_agent.reporting import BucketStatistics, WindowRecorder
from gradpilot.worker_agent.statistics import energy_curve, gain, magnitudes, squared_norm
from gradpilot.worker_agent.threads import OrderedThread
from gradpilot.worker_agent.unused import UnusedParameters
from gradpilot.worker_agent.wire import Stamp, Timing, Wire, communication_thread

STATISTICS_SHARE = 0.003
STATISTICS_SECONDS = 0.2
"""Gains and energy curves may take this share of the time, and so much at the start."""


@dataclass(slots=True)
class _Step:
    """One synchronised backward pass.

    ``sampled``: its buckets' gains and energy curves are measured. ``guarded``: it changes
    residuals, so all its results must be finite for that to take effect.
    """

    number: int
    plan: ActivePlan
    sampled: bool
    guarded: bool
    last_ready: float = 0.0
    open: int = 0
    closed: bool = False
    finite: bool = True
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class _Work:
    """One bucket of one step on its way."""

    step: _Step
    slot: Slot
    given: Given
    buffer: Tensor
    divide: bool
    corrected: Tensor | None = None


class Pipeline:
    """The gradient path of one model on one rank.

    Args:
        group: DDP's own process group, for the native path.
        wire: Driver of the threaded path, on a group of its own.
        buckets: Identities of the model's buckets.
        coordinator: Says which plan is in force.
        recorder: Takes the stamps.
        send_report: Takes finished window reports; must not block.
        statistics_steps: Steps between two measurements of gains and energy curves.
        divides: Whether DDP itself would divide a bucket, see ``division``.
        device: Where the gradients are.
        seed: Seed of every random choice, the same on all ranks.
        loss_scale: Scale of the gradients.
        unused: Tells whose mean DDP ignored; None if it ignores none.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        wire: Wire,
        buckets: BucketTable,
        coordinator: Coordinator,
        recorder: WindowRecorder,
        send_report: Callable[[Report], None],
        divides: Callable[[GradBucket], bool],
        device: torch.device,
        seed: int,
        statistics_steps: int = 50,
        loss_scale: LossScale | None = None,
        unused: UnusedParameters | None = None,
    ) -> None:
        self.loss_scale = loss_scale or LossScale()
        self.residuals = ResidualStore(revocable=unused is not None)
        self.memories = MemoryStore()
        self.step = 0
        self.nonfinite_steps = 0
        self._wire_bytes = 0
        self._dense_bytes = 0
        self._group = group
        self._wire = wire
        self._buckets = buckets
        self._coordinator = coordinator
        self._recorder = recorder
        self._send_report = send_report
        self._statistics_steps = statistics_steps
        self._divides = divides
        self._unused = unused
        self._device = device
        self._seed = seed
        self._quiet = QuietSteps(group, divides, recorder, self._end_quiet_step)
        self._flight: FlightRecorder | None = None
        self._thread: OrderedThread | None = communication_thread(device)
        self._current: _Step | None = None
        self._sparse_seen = False
        self._native_timer = NativeTimer(AT_ONCE.get(dist.get_backend(group), 1))
        self._started = time.monotonic()
        self._statistics_seconds = 0.0

    @property
    def world_size(self) -> int:
        """Return the number of ranks N."""
        return self._wire.world_size

    @property
    def wire_bytes(self) -> int:
        """Return the bytes of the gradients as they were handed to collectives so far."""
        return self._wire_bytes + self._quiet.bytes

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the gradients themselves so far."""
        return self._dense_bytes + self._quiet.bytes

    def close(self) -> bool:
        """Stop the communication thread; call when no step is under way.

        From then on only a native plan can be carried out.

        Returns:
            Whether the thread ended; if not it is stuck in a collective.
        """
        thread, self._thread = self._thread, None
        return thread is None or thread.stop()

    def fly_with(self, recorder: FlightRecorder) -> None:
        """Note every bucket in a flight recorder from now on."""
        self._flight = self._quiet.flight = recorder

    def settle(self) -> None:
        """Take the last step back for parameters whose mean DDP ignored; between two steps."""
        if self._unused is not None and self.residuals.pending:
            self.residuals.take_back(self._unused.ignored(self._buckets.slots))

    def __reduce__(self) -> tuple[type[LeftBehind], tuple[()]]:
        """Leave a placeholder in a copy of the model: its reducer has no hook registered."""
        return LeftBehind, ()

    # --- the path ------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket of local gradients and return the future of their mean.

        The mean is written into the bucket's own buffer. Every rank calls this for the same buckets
        in the same order.

        Raises:
            AgreementLostError: Whether the other ranks switched plans cannot be learned.
        """
        if self._quiet.left:
            return self._quiet.on_bucket(self.step, bucket)
        step = self._current or self._begin_step()
        slot = self._buckets.identify(bucket)
        self.residuals.place(slot)
        step.last_ready = time.monotonic()
        self._recorder.bucket_ready(slot.index, step.last_ready)
        with step.lock:
            step.open += 1
            step.closed = bucket.is_last()
        given = step.plan.given(slot.key)
        work = _Work(step, slot, given, bucket.buffer(), self._divides(bucket))
        if self._flight is not None:
            self._flight.note(work.buffer, step.number, slot, given.option, step.plan.plan)
        if work.buffer.is_sparse:
            return self._sparse(work)
        if step.plan.native and not self._wire.emulated:
            return self._native(work)
        return self._threaded(work)

    def _native(self, work: _Work) -> Future[Tensor]:
        timing = Timing()
        start = time.monotonic()
        rounds = self._prepare(work)
        request = next(rounds)
        assert isinstance(request, AllReduce)
        size = request.payload.nbytes
        handed_in = time.monotonic()
        timing.compress_seconds = handed_in - start
        number = self._native_timer.hand_in(handed_in)
        pending = dist.all_reduce(request.payload, group=self._group, async_op=True)

        def complete(arrived: Future[list[Tensor]]) -> Tensor:
            reply = arrived.value()[0]  # raises what the collective raised
            now = time.monotonic()
            busy = self._native_timer.end(number, now)
            timing.stamps.append(Stamp("all_reduce", size, 0, busy.seconds, busy.overlapped))
            estimate = _last(rounds, reply)
            timing.decompress_seconds = time.monotonic() - now
            self._finish(work, estimate, timing)
            return work.buffer

        future: Future[Tensor] = pending.get_future().then(complete)
        return future

    def _threaded(self, work: _Work) -> Future[Tensor]:
        ready: torch.cuda.Event | None = None
        devices: list[int | str | torch.device] | None = None
        if self._device.type == "cuda":
            devices = [self._device]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        future: Future[Tensor] = Future(devices=devices)

        def carry_out() -> None:
            try:
                if work.step.failure is not None:
                    raise work.step.failure
                if ready is not None:
                    torch.cuda.current_stream().wait_event(ready)
                start = time.monotonic()
                rounds = self._prepare(work)
                prepared = time.monotonic() - start
                estimate, timing = self._wire.run(rounds, work.given.option, self._at(work))
                timing.compress_seconds += prepared
                self._finish(work, estimate, timing)
            except BaseException as failure:
                work.step.failure = failure
                future.set_exception(failure)  # type: ignore[arg-type]
            else:
                future.set_result(work.buffer)

        assert self._thread is not None
        self._thread.submit(carry_out)
        # DDP can only raise what a callback raised; a plain exception result it cannot read.
        return future.then(lambda done: done.value())

    def _sparse(self, work: _Work) -> Future[Tensor]:
        """Send a sparse gradient as DDP itself would, uncompressed."""
        self._sparse_seen = True
        start = time.monotonic()
        size = work.buffer._indices().nbytes + work.buffer._values().nbytes
        pending = dist.all_reduce(
            work.buffer.div_(self._wire.world_size), group=self._group, async_op=True
        )

        def complete(arrived: Future[list[Tensor]]) -> Tensor:
            reply = arrived.value()[0]
            if work.step.guarded and not is_finite(reply._values()):
                work.step.finite = False
            stamp = Stamp("all_reduce sparse", size, 0, time.monotonic() - start)
            self._note_timing(work, Timing(stamps=[stamp]))
            self._close_bucket(work.step)
            return reply

        future: Future[Tensor] = pending.get_future().then(complete)
        return future

    # --- stages --------------------------------------------------------------------------------

    def _prepare(self, work: _Work) -> Rounds:
        """Add the residual and start the compressor."""
        if self._unused is not None:
            self._unused.note(work.step.number, work.slot)
        if work.given.feedback:
            work.corrected = self.residuals.corrected(work.slot, work.buffer)
            poison_(work.corrected)
            return work.given.compressor.rounds(work.corrected, self._at(work))
        self.residuals.add_to_(work.slot, work.buffer)
        if work.step.sampled:
            work.corrected = work.buffer.clone()
        return work.given.compressor.rounds(work.buffer, self._at(work))

    def _finish(self, work: _Work, estimate: Estimate, timing: Timing) -> None:
        """Write the mean back, keep what was not sent, note the stamps."""
        slot, step = work.slot, work.step
        if step.sampled and work.corrected is not None:
            self._note_statistics(work, estimate)
        start = time.monotonic()
        if work.given.feedback:
            assert work.corrected is not None
            leave_residual_(work.corrected, estimate)
            self.residuals.stage(slot, work.corrected)
        elif slot in self.residuals:
            self.residuals.stage(slot, None)
        self.memories.stage(slot.key, work.given.owner, estimate.memory)
        if step.guarded and not is_finite(estimate.mean):
            step.finite = False
        if estimate.mean.data_ptr() != work.buffer.data_ptr():
            work.buffer.copy_(estimate.mean)
        timing.decompress_seconds += time.monotonic() - start
        self._note_timing(work, timing)
        self._close_bucket(step)

    def _at(self, work: _Work) -> At:
        return At(
            rank=self._wire.rank,
            world_size=self._wire.world_size,
            step=work.step.number,
            bucket=work.slot.key,
            seed=self._seed,
            shapes=work.slot.shapes,
            divide=work.divide,
            feedback=work.given.feedback,
            memory=self.memories.recall(work.slot.key, work.given.owner),
            # Its gradient has been added to the residual by then.
            out=work.buffer if work.given.feedback else None,
        )

    # --- steps ---------------------------------------------------------------------------------

    def _begin_step(self) -> _Step:
        self.settle()
        probe = self._coordinator.begin_step(self.step)
        if probe is not None:
            assert self._thread is not None
            for sample in measure(probe, self.step, self._wire, self._thread, self._device):
                self._recorder.sample(sample)
            if probe != START_PROBE:
                self._recorder.hurry()
        factor = self.loss_scale.look()
        if factor != 1.0:
            self.residuals.rescale(factor)
            self.memories.rescale(factor)
        plan = self._coordinator.active
        # The plan that a job starts with says nothing of how slow its steps are.
        interval = plan.plan.interval if plan.plan.id else None
        self._report(self._recorder.set_plan(plan.plan.key, interval))
        self._recorder.begin_step(self.step, time.monotonic())
        self._current = _Step(
            number=self.step,
            plan=plan,
            sampled=self._wants_statistics(),
            guarded=plan.feedback or self.residuals.elements > 0 or bool(self.memories),
        )
        return self._current

    def _wants_statistics(self) -> bool:
        """Return whether this step is measured: rarely, but early in a run a few times more.

        No collective depends on it, so ranks may differ.
        """
        every = self._statistics_steps
        if self.step % every and not (self.step < every and self.step.bit_count() == 1):
            return False
        elapsed = time.monotonic() - self._started
        return self._statistics_seconds <= STATISTICS_SECONDS + STATISTICS_SHARE * elapsed

    def _quiet_steps(self) -> int:
        """Return how many steps from the next on are quiet: none from the next decision step on.

        That one looks at the buckets anew. To a plan that averages all of them alike their layout
        is nothing, and any other plan comes into force at a decision step.
        """
        plan, step, every = self._coordinator.active, self.step, self._statistics_steps
        if (
            not plan.in_place
            or self._wire.emulated
            or self.residuals.elements
            or bool(self.memories)
            or self._sparse_seen
            or step < every  # statistics are denser there
        ):
            return 0
        to_decision, to_statistics = plan.plan.steps_to_decision(step), -step % every
        return min(to_decision, to_statistics, self._recorder.steps_without_samples(step))

    def _end_quiet_step(self, last_ready: float, done: float) -> None:
        self.step += 1
        if self._flight is not None:
            self._flight.end_step(self.step)
        self._report(self._recorder.end_step(last_ready, done))
        if not self._quiet.left:
            self._coordinator.end_step(self.step, self._buckets, layout_changed=False)

    def _close_bucket(self, step: _Step) -> None:
        """Count a finished bucket; the last one ends the step, before DDP can begin the next."""
        with step.lock:
            step.open -= 1
            if step.open or not step.closed:
                return
        if step.finite:
            self.residuals.commit()
            self.memories.commit()
        else:
            self.residuals.discard()
            self.memories.discard()
            self.nonfinite_steps += 1
        changed = self._buckets.end_step()
        if changed:
            self.residuals.keep_only(self._buckets.slots)
            self.memories.keep_only(slot.key for slot in self._buckets.slots)
        self._report(self._recorder.end_step(step.last_ready, time.monotonic()))
        if changed:
            assert self._buckets.layout is not None
            self._report(self._recorder.set_layout(self._buckets.layout))
        self.step += 1
        if self._flight is not None:
            self._flight.end_step(self.step)
        self._current = None
        self._coordinator.end_step(self.step, self._buckets, changed)
        self._quiet.left = self._quiet_steps()

    def _report(self, report: Report | None) -> None:
        if report is not None:
            self._send_report(report)

    # --- notes ---------------------------------------------------------------------------------

    def _note_timing(self, work: _Work, timing: Timing) -> None:
        self._wire_bytes += timing.wire_bytes
        self._dense_bytes += work.slot.bucket.dense_bytes
        self._recorder.bucket_done(
            work.slot.index,
            timing.compress_seconds,
            timing.decompress_seconds,
            timing.wire_seconds,
            timing.wire_bytes,
        )
        if self._recorder.sampling:
            for number, stamp in enumerate(timing.stamps):
                if stamp.collective not in COLLECTIVES:
                    continue  # of a part of the ranks: tells nothing of the link between all
                self._recorder.sample(
                    WireSample(
                        work.step.number,
                        work.slot.index,
                        number,
                        stamp.collective,
                        stamp.bytes,
                        stamp.skip,
                        stamp.seconds,
                        stamp.overlapped,
                    )
                )

    def _note_statistics(self, work: _Work, estimate: Estimate) -> None:
        assert work.corrected is not None
        start = time.monotonic()
        corrected_sq = squared_norm(work.corrected)
        unscaled = self.loss_scale.value**-2
        self._recorder.bucket_statistics(
            work.slot.index,
            BucketStatistics(
                gain=gain(estimate.sent, corrected_sq),
                gradient_sq=corrected_sq * unscaled,
                residual_sq=self.residuals.squared_norm(work.slot) * unscaled,
                energy=energy_curve(work.corrected),
                magnitudes=magnitudes(work.corrected),
                mean_sq=squared_norm(estimate.mean) * unscaled,
            ),
        )
        self._statistics_seconds += time.monotonic() - start


def _last(rounds: Rounds, reply: Tensor) -> Estimate:
    """Send the reply to the only request of a single-round compressor."""
    try:
        rounds.send(reply)
    except StopIteration as stop:
        estimate: Estimate = stop.value
        return estimate
    raise AssertionError("a single-round compressor asked for a second collective")
