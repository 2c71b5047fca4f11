"""What an option means for a sharded gradient: from local gradients to a rank's shard of the mean.

The rounds are those of compressors, with one difference: ``Estimate.mean`` is this rank's shard
alone, and lies in ``At.out`` where that is given. Nothing has to be passed on to the others, so the
second stage of a two-stage exchange, which would round the mean once more, falls away.

Sixteen and eight bits travel all-to-all and are added up in float32: the bytes are those of a
reduce-scatter, without a rounding at each of its N - 1 additions.

Letters: N ranks of the shard group, C elements of a shard (padding included), n = N C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE, Option, check_option
from gradpilot.worker_agent.collectives.base import AllToAll, ReduceScatter
from gradpilot.worker_agent.compressors._blockwise import scratch_for
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds, create
from gradpilot.worker_agent.compressors.int8 import Int8
from gradpilot.worker_agent.compressors.sent import Pieces
from gradpilot.worker_agent.sharded.ring import omitted_shards, ring_order

Exchange = Callable[[Tensor, At], Rounds]
"""Takes the local gradient of one unit, n elements ordered by shard, and where this takes place."""

_KNOWN = (
    '"none", "none collective=ring skip=S", "bf16", "fp16"'
    ' and "int8 collective=alltoall exchange=all_to_all"'
)


@dataclass(frozen=True, slots=True)
class ShardedOption:
    """An option with what carries it out.

    Attributes:
        option: The option.
        exchange: Its rounds; None for what the framework does without us.
        feedback: Whether a residual is kept.
        spreads: Whether a rank whose gradient is NaN spoils the result of every rank.
    """

    option: Option
    exchange: Exchange | None = None
    feedback: bool = False
    spreads: bool = True


DENSE_SHARDED = ShardedOption(DENSE, spreads=False)
"""The framework's own reduce-scatter: only owners of shards that are not finite see it."""


def compile_sharded(option: Option, world_size: int, feedback: bool = True) -> ShardedOption:
    """Return what carries an option out on sharded gradients.

    Args:
        option: The option.
        world_size: Ranks N of the shard group.
        feedback: Whether what rounding takes away is kept and sent with the next step; that needs
            memory for two unsharded gradients on every rank.

    Raises:
        ConfigError: Sharded gradients cannot be given this option; the message says what can.
    """
    check_option(option, world_size)
    if option == DENSE:
        return DENSE_SHARDED
    compressor = create(option)
    if option.compressor == "none" and option.collective == "ring":
        keeps = option.skip > 0 and option.skip_feedback
        if keeps and (option.rotation == "static" or option.skip == world_size - 1):
            raise ConfigError(
                "skip_feedback needs rotation=random and skip below the number of ranks - 1: shards"
                f" stay where they are, so what {option.label!r} omits could never be sent"
            )
        return ShardedOption(option, partial(_skipping, option), keeps, spreads=option.skip == 0)
    if option.skip == 0 and option.collective == "native" and option.compressor in _SIXTEEN:
        exchange = partial(_sixteen_bits, _SIXTEEN[option.compressor])
        return ShardedOption(option, exchange, feedback)
    if isinstance(compressor, Int8) and compressor.exchange == "all_to_all":
        shards = _ShardInt8(block=compressor.block, rounding=compressor.rounding)
        return ShardedOption(option, shards.shard_rounds, feedback)
    raise ConfigError(f"a sharded model can be given {_KNOWN}, got {option.label!r}")


_SIXTEEN = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _room(grad: Tensor, at: At) -> Tensor:
    """Return the tensor for this rank's shard."""
    return grad.new_empty(grad.numel() // at.world_size) if at.out is None else at.out


def _sixteen_bits(wire: torch.dtype, grad: Tensor, at: At) -> Rounds:
    """Send every element in ``wire``, held at its largest finite value, and add up in float32.

    What rounding takes away is exact, so ``sent + residual == corrected`` bit for bit.
    """
    limit = torch.finfo(wire).max
    payload = grad if grad.dtype == wire else grad.to(wire).clamp_(-limit, limit)

    received = yield AllToAll(payload)

    # Divided before they are added up: the sum of values that bf16 can hold may overflow float32.
    total = received[0].to(precise_dtype(received)).div_(at.world_size)
    for row in received[1:]:
        total.add_(row, alpha=1.0 / at.world_size)
    shard = _room(grad, at).copy_(total)
    whole = payload is grad or not at.feedback
    return Estimate(shard, None if whole else payload)


class _ShardInt8(Int8):
    """The first stage of ``int8`` over all-to-all, for parts that are the shards."""

    def shard_rounds(self, grad: Tensor, at: At) -> Rounds:
        """Send each rank the codes and scales of its shard; every rank averages its own.

        Blocks begin anew with every shard, so each shard is a message that needs no other.
        """
        shards = grad.view(at.world_size, -1)
        width = shards.shape[1]
        layout = self._layout(width, precise_dtype(grad))
        messages = torch.empty(at.world_size, layout.bytes, dtype=torch.uint8, device=grad.device)
        scratch = scratch_for(grad.numel(), self.block, layout.scalars_of(messages))
        noise = self._noise(grad, at)
        for number, (message, part) in enumerate(zip(messages, shards, strict=True)):
            self._write(message, layout, part, scratch, noise, number * width)

        received = yield AllToAll(messages.view(-1))

        shard = self._mean(layout, received, _room(grad, at), scratch)
        if not at.feedback:
            return Estimate(shard, None)

        def pieces() -> Iterator[tuple[slice, Tensor]]:
            for number, message in enumerate(messages):
                for where, values in self._sent(layout, message):
                    start = number * width
                    yield slice(start + where.start, start + where.stop), values

        return Estimate(shard, Pieces(pieces))


def _skipping(option: Option, grad: Tensor, at: At) -> Rounds:
    """Leave steps of a ring out; see ``ring``. The driver carries the request by that schedule.

    The partial sum is divided by N (divisor ``skip``), by the N - S that contributed (``drop``), or
    as ``drop`` and then shrunk (``shrink``).
    """
    payload = grad / at.world_size if at.feedback else grad.div_(at.world_size)

    part = yield ReduceScatter(payload)

    shard = _room(grad, at).copy_(part)
    if option.divisor != "skip":
        factor = at.world_size / (at.world_size - option.skip)
        shard.mul_(factor * (option.shrink if option.divisor == "shrink" else 1.0))
    if not at.feedback:
        return Estimate(shard, None)
    omitted = omitted_shards(ring_order(at, option.rotation), at.rank, option.skip)
    width = shard.numel()
    kept = [slice(j * width, (j + 1) * width) for j in range(at.world_size) if j not in omitted]
    return Estimate(shard, Pieces(lambda: ((where, grad[where]) for where in kept)))
