"""Error feedback: what was not sent yet, kept per parameter and committed per step.

The residual follows the parameter, not the bucket: when DDP lays its buckets out anew, each
parameter's part moves to its new place. A step either takes effect as a whole or not at all: new
residuals are staged and committed when every bucket of the step turned out finite on all ranks,
else the old ones stay as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.statistics import squared_norm


class ResidualStore:
    """Residuals of all buckets of one model on one rank.

    Two buffers per compressed bucket alternate between "committed" and "being made", so nothing is
    allocated in the steady state; a bucket that goes dense gives both back.

    Args:
        revocable: Whether a step's commit can be taken back for some parameters until the next.
    """

    def __init__(self, *, revocable: bool = False) -> None:
        self._slots: dict[str, Slot] = {}
        self._committed: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor | None] = {}
        self._loaded: set[str] = set()
        self._revocable = revocable
        self._before: dict[str, Tensor | None] = {}
        """What the newest commit replaced, while it can be taken back."""
        self.resets = 0
        """Parameters whose residual was dropped because they left the layout."""

    def __contains__(self, slot: Slot) -> bool:
        """Return whether the bucket has a residual to send."""
        return slot.key in self._committed

    @property
    def elements(self) -> int:
        """Return the elements held, both buffers counted."""
        held = (*self._committed.values(), *self._spare.values(), *self._before.values())
        return sum(t.numel() for t in {id(t): t for t in held if t is not None}.values())

    @property
    def pending(self) -> bool:
        """Return whether the newest commit can still be taken back; ``take_back`` settles it."""
        return bool(self._before)

    def place(self, slot: Slot) -> None:
        """Give a bucket its place; parts of its parameters held under another layout move here.

        Call before the first use of a slot in every step.
        """
        if slot.key in self._slots:
            return
        self._slots[slot.key] = slot
        flat: Tensor | None = None
        for name, (start, length) in zip(slot.names, slot.spans, strict=True):
            part = self._take(name, except_for=slot.key)
            if part is None:
                continue
            if part.numel() != length:
                self.resets += 1
                continue
            if flat is None:
                flat = part.new_zeros(slot.bucket.elements)
            flat[start : start + length].copy_(part)
        if flat is not None:
            self._committed[slot.key] = flat

    def corrected(self, slot: Slot, grad: Tensor) -> Tensor:
        """Return gradient plus residual in a buffer that the caller may turn into the new residual.

        Args:
            slot: The bucket, placed before.
            grad: 1-D gradient; not changed.
        """
        buffer = self._spare.pop(slot.key, None)
        if buffer is None or buffer.dtype != grad.dtype or buffer.device != grad.device:
            buffer = torch.empty_like(grad)
        residual = self._committed.get(slot.key)
        if residual is None:
            return buffer.copy_(grad)
        return torch.add(grad, residual, out=buffer)

    def add_to_(self, slot: Slot, grad: Tensor) -> None:
        """Add the residual, if any, to the gradient in place; going dense sends it this way."""
        residual = self._committed.get(slot.key)
        if residual is not None:
            grad.add_(residual)

    def stage(self, slot: Slot, residual: Tensor | None) -> None:
        """Note the bucket's new residual (None: everything was sent); effective on ``commit``."""
        self._staged[slot.key] = residual

    def commit(self) -> None:
        """Make the staged residuals of a step the current ones."""
        for key, residual in self._staged.items():
            old = self._committed.pop(key, None)
            if self._revocable:
                self._before[key] = old
            if residual is None:
                self._spare.pop(key, None)
                continue
            self._committed[key] = residual
            if old is not None:
                self._spare[key] = old
        self._staged.clear()

    def take_back(self, names: Set[str]) -> None:
        """Undo the newest commit for these parameters, and make it final for all others.

        Call before the next step uses a slot.

        Args:
            names: Parameters of which nothing arrived, so that nothing was sent.
        """
        before, self._before = self._before, {}
        for key, old in before.items():
            slot = self._slots.get(key)
            if slot is None:
                continue
            for name, (start, length) in zip(slot.names, slot.spans, strict=True):
                if name not in names:
                    continue
                part = slice(start, start + length)
                residual = self._committed.get(key)
                if old is None:
                    if residual is not None:
                        residual[part].zero_()
                elif residual is not None:
                    residual[part].copy_(old[part])
                elif bool(old[part].any()):  # the bucket went dense: this is left of it
                    self._committed[key] = torch.zeros_like(old)
                    self._committed[key][part].copy_(old[part])

    def discard(self) -> None:
        """Forget the staged residuals; those of the step before stay."""
        for key, residual in self._staged.items():
            if residual is not None:
                self._spare[key] = residual
        self._staged.clear()

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, as the loss scale was; between two steps only.

        What would exceed the range of its dtype is held at the limit: an infinite residual would
        make every step after it non-finite.
        """
        for residual in self._committed.values():
            limit = torch.finfo(residual.dtype).max
            residual.mul_(factor).clamp_(-limit, limit)

    def keep_only(self, slots: Sequence[Slot]) -> None:
        """Drop what belongs to no bucket of the present layout, and count what is lost."""
        present = {slot.key for slot in slots}
        names = {name for slot in slots for name in slot.names}
        for key in [k for k in self._slots if k not in present]:
            if key in self._committed:
                # A parameter that is still there took its part along when it was placed.
                self.resets += len(set(self._slots[key].names) - names)
            del self._slots[key]
            self._committed.pop(key, None)
            self._spare.pop(key, None)

    def squared_norm(self, slot: Slot) -> float:
        """Return ||residual||^2 of a bucket, 0 without one."""
        residual = self._committed.get(slot.key)
        return 0.0 if residual is None else squared_norm(residual)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residual of every parameter that has one, flat, by parameter name."""
        state = {name: self._committed[f"loaded:{name}"].clone() for name in self._loaded}
        for key, slot in self._slots.items():
            residual = self._committed.get(key)
            if residual is not None:
                for name, (start, length) in zip(slot.names, slot.spans, strict=True):
                    state[name] = residual[start : start + length].clone()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over residuals by parameter name; buckets pick them up when they are placed."""
        self._slots.clear()
        self._committed.clear()
        self._spare.clear()
        self._staged.clear()
        self._before.clear()
        for name, part in state.items():
            # One pseudo-bucket a parameter, until ``place`` moves its part where it belongs.
            self._committed[f"loaded:{name}"] = part.clone()
        self._loaded = set(state)

    def _take(self, name: str, *, except_for: str) -> Tensor | None:
        """Remove and return the part of a parameter that is held elsewhere."""
        if name in self._loaded:
            self._loaded.discard(name)
            return self._committed.pop(f"loaded:{name}")
        for key, slot in self._slots.items():
            residual = self._committed.get(key)
            if key == except_for or residual is None or name not in slot.names:
                continue
            start, length = slot.spans[slot.names.index(name)]
            part = residual[start : start + length].clone()
            residual[start : start + length].zero_()
            return part
        return None
