"""Dense steps of which nothing is to be noted: what DDP does without a hook, and hardly more.

A job that has nothing to gain pays for every line of Python in every step, since the caches are
full of gradients by then and each line is fetched anew. So such steps are counted out in advance,
and a bucket of theirs is averaged where it lies, without a look at its identity or the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradpilot.worker_agent.division import divide_
from gradpilot.worker_agent.flight_recorder import FlightRecorder
from gradpilot.worker_agent.reporting import WindowRecorder


class QuietSteps:
    """Carries out steps of a plan that averages every bucket in place by the backend's all-reduce.

    Ranks may differ in which of their steps are quiet: either way a bucket is one all-reduce of the
    same elements on the same group.

    Args:
        group: DDP's own process group.
        divides: Whether DDP itself would divide a bucket, see ``division``.
        recorder: Takes the step's times and tells for how many steps it wants no more.
        end_step: Called with the moments when a step's last bucket was ready and had its mean,
            seconds of the monotonic clock, before DDP goes on. Of the others, which nobody waits
            for one by one, one may still be under way if the backend carries out several at once.

    Attributes:
        left: Number of steps from the present one on that are quiet. Written between steps only.
        bytes: Gradient bytes handed in so far; sent and dense are the same here.
        flight: Flight recorder that notes every bucket, if there is one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        divides: Callable[[GradBucket], bool],
        recorder: WindowRecorder,
        end_step: Callable[[float, float], None],
    ) -> None:
        self.left = 0
        self.bytes = 0
        self.flight: FlightRecorder | None = None
        self._group = group
        self._world_size = group.size()
        self._divides = divides
        self._recorder = recorder
        self._end_step = end_step
        self._options = dist.AllreduceOptions()
        if hasattr(self._options, "asyncOp"):  # not in every torch that we accept
            self._options.asyncOp = True
        self._under_way = False

    def on_bucket(self, step: int, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket of a quiet step in place; see ``Pipeline.on_bucket``.

        Args:
            step: Number of the step.
            bucket: A dense bucket.
        """
        if not self._under_way:
            self._under_way = True
            self._recorder.begin_step(step, time.monotonic())
        buffer = bucket.buffer()
        divide_(buffer, self._world_size, self._divides(bucket))
        self.bytes += buffer.nbytes
        if self.flight is not None:
            self.flight.note_again(buffer, step, bucket.index())
        # The group's own method: what dist.all_reduce adds to it costs a third of the hook's time.
        pending = self._group.allreduce([buffer], self._options).get_future()
        future: Future[Tensor]
        if not bucket.is_last():
            # While gloo's thread is in here, the hook of the next bucket waits for the GIL.
            future = pending.then(_first)
            return future
        ready = time.monotonic()
        self._under_way = False

        def complete(arrived: Future[list[Tensor]]) -> Tensor:
            mean = arrived.value()[0]
            self.left -= 1
            self._end_step(ready, time.monotonic())
            return mean

        future = pending.then(complete)
        return future


def _first(arrived: Future[list[Tensor]]) -> Tensor:
    return arrived.value()[0]  # raises what the collective raised
