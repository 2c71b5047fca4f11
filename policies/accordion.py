"""Accordion: little compression while gradients change fast, much of it otherwise.

Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, *Accordion: Adaptive Gradient Communication via
Critical Learning Regime Identification* (MLSys 2021). Once in a detection interval the norm of
every layer's gradient is compared with that of the interval before. A relative change of eta or
more is a critical regime. So are the first interval, a norm that was zero, and the interval after
the learning rate has decayed.

What is different here:

* The unit is the bucket, not the layer, and the norm that of the newest sampled gradient, not of
  the sum over the interval.
* The interval of ten epochs is one of steps; it takes the part of ``dwell_steps``, which holds as
  well. The start of an interval is critical at once after a decay, not at its end.
* The authors' top-k keeps 99 % in critical regimes. With its indices that takes twice the bytes of
  the whole gradient, so here the bucket is sent dense, which loses nothing.
* Decay is told by ``handle.observe(lr=...)``; without it only norms count. A fall since the last
  look counts from a tenth on: smooth schedules fall a little all the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.published import answer, link_and_host, recall, remember
from gradpilot.protos.messages import DENSE

NAME = "accordion"


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of the method.

    Attributes:
        eta: Relative change of the norm from which a regime is critical (code).
        high: Ratio of top-k outside critical regimes (code).
        interval_steps: Steps of a detection interval; ours, the paper has ten epochs.
        decay: Share by which the learning rate must fall to count as decayed; ours.
    """

    eta: float = 0.5
    high: float = 0.1
    interval_steps: int = 500
    decay: float = 0.1


PUBLISHED = Published()


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered.

    Attributes:
        step: First step of the present interval.
        norms: ||gradient|| of every bucket there.
        critical: Whether every bucket is in a critical regime.
        lr: Newest learning rate; NaN if never told.
        how: What the last detection found.
    """

    step: int
    norms: tuple[float, ...]
    critical: tuple[bool, ...]
    lr: float
    how: str


@POLICIES.register(NAME)
class Accordion:
    """Dense where the gradient's norm changes fast or the learning rate fell, else top-k 10 %."""

    source: ClassVar[str] = "Agarwal et al., Accordion, MLSys 2021"
    grain: ClassVar[str] = "per bucket"
    uses: ClassVar[tuple[str, ...]] = ("gradient norm", "learning rate")

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome; norms are compared once in an interval."""
        ready = link_and_host(inputs, energy=False)
        if isinstance(ready, Outcome):
            return ready
        link, host = ready
        state = _next(inputs, recall(inputs, NAME, State))
        mild = host.option(host.clamp(PUBLISHED.high))
        options = tuple(DENSE if critical else mild for critical in state.critical)
        left = max(state.step + PUBLISHED.interval_steps - inputs.step, 0)
        text = (
            f"{sum(state.critical)} of {len(state.critical)} buckets in a critical regime:"
            f" {state.how}; next detection in {left} steps"
        )
        return answer(inputs, options, text, link, remember(inputs, NAME, state))


def _next(inputs: Inputs, before: State | None) -> State:
    """Return the regimes of now."""
    norms = tuple(math.sqrt(bucket.gradient_sq) for bucket in inputs.buckets)
    every = (True,) * len(norms)
    told = 0 < inputs.lr < math.inf
    if before is None or inputs.step < before.step:
        lr = inputs.lr if told else math.nan
        return State(inputs.step, norms, every, lr, "the first interval is critical")
    lr = inputs.lr if told else before.lr
    if lr < before.lr * (1 - PUBLISHED.decay):  # never with NaN
        how = f"the learning rate fell from {before.lr:g} to {lr:g}"
        return State(inputs.step, norms, every, lr, how)
    if inputs.step - before.step < PUBLISHED.interval_steps:
        return State(before.step, before.norms, before.critical, lr, before.how)
    changes = [_change(old, new) for old, new in zip(before.norms, norms, strict=True)]
    critical = tuple(change >= PUBLISHED.eta for change in changes)
    how = (
        f"norms changed by {100 * min(changes):.3g} to {100 * max(changes):.3g} % since step"
        f" {before.step}, critical from {100 * PUBLISHED.eta:g} %"
    )
    return State(inputs.step, norms, critical, lr, how)


def _change(old: float, new: float) -> float:
    """Return the relative change of a norm; without bound where it was zero."""
    return abs(old - new) / old if old > 0 else math.inf
