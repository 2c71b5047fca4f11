"""Parameters that no rank used in a step, whose mean DDP ignores.

With ``find_unused_parameters`` DDP leaves the gradient of such a parameter as it was, whatever the
hook returns. A residual that a lossy plan sent for it in that step would be lost, so the step is
taken back for it. DDP learns which parameters these are only after the last bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradpilot.worker_agent.buckets import Slot

log = logging.getLogger("gradpilot.agent")


class UnusedParameters:
    """Tells after a step which parameters' means DDP ignored.

    Args:
        model: Wrapped model with ``find_unused_parameters``; not kept alive.
        in_backward: Whether this is called from a hook. DDP holds its lock then, so what it counts
            can be looked at from the next forward pass on.
    """

    def __init__(self, model: DistributedDataParallel, *, in_backward: bool = False) -> None:
        self._parameters = dict(model.module.named_parameters())
        self._as_views = bool(model.gradient_as_bucket_view)
        self._step = -1
        self._received: set[str] = set()
        self._warned = False
        # By how many ranks each parameter was used: a tensor of DDP's, which writes into it after
        # the last bucket of a step. The hook cannot ask for it: DDP holds its lock while it calls.
        self._used: Tensor | None = None
        if not in_backward:
            self._look(model)
            return

        def before_forward(model: DistributedDataParallel, _: object) -> None:
            registration.remove()
            self._look(model)

        untraced = torch.compiler.disable(before_forward)  # type: ignore[no-untyped-call]
        registration = model.register_forward_pre_hook(untraced)

    @classmethod
    def of(
        cls, model: DistributedDataParallel, *, in_backward: bool = False
    ) -> UnusedParameters | None:
        """Return what watches this model; None if DDP does not look for unused parameters."""
        # With a static graph they are the same in every step, so they never have a residual.
        if not model.find_unused_parameters or model.static_graph:
            return None
        return cls(model, in_backward=in_backward)

    def _look(self, model: DistributedDataParallel) -> None:
        self._used = model.reducer._get_local_used_map()

    def note(self, step: int, slot: Slot) -> None:
        """Look at a bucket before its mean is written.

        Where gradients are views of the bucket, a gradient that was zeroed instead of removed
        receives the mean in any case.
        """
        if step != self._step:
            self._step, self._received = step, set()
        if self._as_views:
            for name in slot.names:
                if name in self._parameters and self._parameters[name].grad is not None:
                    self._received.add(name)

    def ignored(self, slots: Iterable[Slot]) -> set[str]:
        """Return the parameters whose mean was ignored in the newest step.

        Args:
            slots: All buckets of that step.
        """
        if self._used is None:
            return set()
        there = {name for slot in slots for name in slot.names}
        # DDP counts its parameters in the order of the module.
        order = [name for name in self._parameters if name in there]
        if self._used.numel() != len(order):
            if not self._warned:
                log.warning(
                    "DDP counts %d parameters, its buckets hold %d: what is not sent yet of a"
                    " parameter that no rank uses in a step may be lost in that step",
                    self._used.numel(),
                    len(order),
                )
            self._warned = True
            return set()
        unused = torch.nonzero(self._used == 0).flatten().tolist()
        return {order[i] for i in unused} - self._received
