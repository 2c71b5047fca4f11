"""L-GreCo: the fewest bytes at the error of a uniform reference, by dynamic programming.

Alimohammadi, Markov, Frantar and Alistarh, *L-GreCo: Layerwise-Adaptive Gradient Compression for
Efficient and Accurate Deep Learning* (MLSys 2024). Every layer has a table of squared error and
bytes per setting of the compressor; the settings that need the fewest bytes are taken whose total
error is no more than that of one setting for all. Known from the abstract, the algorithm from
memory (medium).

What is different here: the unit is the bucket, not the layer. The error of a ratio is the part of
the live energy curve that it does not send, times the bucket's ||gradient||^2; the paper measures
it on the gradient accumulated since the last allocation. Epochs are not known here, so the
allocation is renewed after a number of steps. ``per_bucket`` of the settings has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradpilot.policies.allocation import allocate
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.host import Host
from gradpilot.policies.published import answer, link_and_host, recall, remember

NAME = "lgreco"


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of the method.

    Attributes:
        reference: Ratio of top-k whose total error is the budget (the usual 1 % of its baselines;
            from memory, low).
        renew_steps: Steps after which the allocation is made anew; the paper's "about an epoch".
            Takes the part of ``dwell_steps``, which holds as well.
    """

    reference: float = 0.01
    renew_steps: int = 500


PUBLISHED = Published()


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered.

    Attributes:
        step: Step of the newest allocation.
        ratios: Its ratio per bucket, in layout order.
        how: How it came about.
    """

    step: int
    ratios: tuple[float, ...]
    how: str


@POLICIES.register(NAME)
class LGreCo:
    """Fewest bytes per bucket within the error that a uniform ratio would make."""

    source: ClassVar[str] = "Alimohammadi et al., L-GreCo, MLSys 2024"
    grain: ClassVar[str] = "per bucket"
    uses: ClassVar[tuple[str, ...]] = ("energy curve", "gradient norm", "wire bytes")

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome; a new allocation every ``renew_steps`` steps."""
        ready = link_and_host(inputs)
        if isinstance(ready, Outcome):
            return ready
        link, host = ready
        state = recall(inputs, NAME, State)
        if state is None or not 0 <= inputs.step - state.step < PUBLISHED.renew_steps:
            state = allocation(inputs, host)
        options = tuple(host.option(ratio) for ratio in state.ratios)
        text = (
            f"allocation of step {state.step}, renewed every {PUBLISHED.renew_steps}: {state.how}"
        )
        return answer(inputs, options, text, link, remember(inputs, NAME, state))


def allocation(inputs: Inputs, host: Host) -> State:
    """Return the ratio per bucket with the fewest bytes within the error of the reference."""
    reference = host.clamp(PUBLISHED.reference)
    ratios = host.grid(also=(reference,))
    sizes = host.payload(ratios).T
    errors = ((1 - host.gain(ratios)) * host.weights).T
    at = int(np.flatnonzero(ratios == reference)[0])
    budget = float(errors[:, at].sum())
    found = allocate(sizes, errors, budget)
    # The reference itself always fits.
    row = found.columns if found is not None else np.full(len(sizes), at, dtype=np.intp)
    rows = np.arange(len(row))
    taken, uniform = float(sizes[rows, row].sum()), float(sizes[:, at].sum())
    how = (
        f"{taken / 1e3:.4g} kB instead of {uniform / 1e3:.4g} kB a step with {reference:g} for all,"
        f" error {errors[rows, row].sum():.4g} of ||gradient||^2, budget {budget:.4g},"
        f" ratios {ratios[row].min():.3g} to {ratios[row].max():.3g}"
    )
    return State(inputs.step, tuple(float(ratio) for ratio in ratios[row]), how)
