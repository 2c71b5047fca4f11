"""How DDP itself would turn a sum into a mean, so that a dense plan gives its very bits.

Without a hook DDP multiplies a gradient by 1/N while copying it into the bucket, but divides it by
N where it already lies there (``gradient_as_bucket_view`` and a gradient that was zeroed, not
removed). For N that is no power of two the two differ in the last bit, and the hook cannot see
afterwards which of them it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel


def divide_(grad: Tensor, world_size: int, divide: bool) -> Tensor:
    """Turn what is to be summed over ranks into this rank's part of the mean, in place.

    Args:
        grad: Gradient of any shape and floating or complex dtype; mutated.
        world_size: Ranks N.
        divide: Whether to divide by N rather than multiply by 1/N, see ``DivisionRule``.

    Returns:
        ``grad``.
    """
    return grad.div_(world_size) if divide else grad.mul_(1.0 / world_size)


class DivisionRule:
    """Tells for each bucket whether DDP would divide it.

    Looks at gradients before they are accumulated, one call per parameter and step, and only where
    the answer matters: elsewhere it costs nothing.

    Args:
        model: Wrapped model.
        world_size: Ranks N.
    """

    def __init__(self, model: DistributedDataParallel, world_size: int) -> None:
        self._in_bucket: dict[int, bool] = {}
        self._matters = model.gradient_as_bucket_view and bool(world_size & (world_size - 1))
        if self._matters:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._watch(parameter)

    def divides(self, bucket: GradBucket) -> bool:
        """Return whether DDP would divide this bucket by N instead of multiplying by 1/N.

        A bucket in which only some gradients lay in place counts as multiplied: its others may
        differ from DDP's in the last bit.
        """
        return self._matters and self._all_in_place(bucket.parameters())

    def _all_in_place(self, parameters: Iterable[Tensor]) -> bool:
        return all(self._in_bucket.get(id(p), False) for p in parameters)

    def _watch(self, parameter: Tensor) -> None:
        key = id(parameter)

        def before_accumulation(_: Tensor) -> None:
            self._in_bucket[key] = parameter.grad is not None

        parameter.register_hook(before_accumulation)  # type: ignore[no-untyped-call]
