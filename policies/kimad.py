"""Kimad: compress to the bytes that the bandwidth carries in the time a round may take.

Xin, Ilin, Zhang, Canini and Richtarik, *Kimad: Adaptive Gradient Compression with Bandwidth
Awareness* (2023). Every round has a budget, estimated bandwidth times (target time of a round less
compute). Kimad takes one ratio for all; Kimad+ spreads the budget over layers by dynamic
programming, least total squared error. Known from the abstract, the algorithm from memory (medium).

Here ``per_bucket`` of the settings chooses Kimad+, with buckets for layers. What is different:

* Target. The paper leaves the time of a round to the user; ``Published.stretch`` stands for that.
* Bandwidth. The paper divides bytes by the seconds they took, which hides latency in it. Our link
  has the two apart, so latency and compression are taken off the time before bandwidth counts.
* Carrier. Its star of server and workers becomes top-k by all-gather: a payload of one rank costs
  the link (N-1) times its bytes.
* If the whole gradient fits in the time it is sent whole, as a budget above its size means.
* The residual is plain error feedback, not EF21.
* A round is a decision interval. Ratios lie on a grid, so that noise of the estimate does not
  change the plan every time; ``dwell_steps`` has no equivalent and holds as well.

Nothing is remembered between decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from gradpilot.policies.allocation import Indices, allocate
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.cost import coefficients
from gradpilot.policies.guards import sane
from gradpilot.policies.host import Floats, Host, find_host
from gradpilot.policies.probing import link_or_answer, link_text
from gradpilot.policies.published import answer, unmeasured
from gradpilot.protos.messages import DENSE, LinkEstimate, Option


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of the method.

    Attributes:
        stretch: Target time of a step over its compute; ours, the paper leaves it to the user.
    """

    stretch: float = 1.5


PUBLISHED = Published()


@POLICIES.register("kimad")
class Kimad:
    """Largest ratio whose bytes the bandwidth carries in what a step may take beside compute."""

    source: ClassVar[str] = "Xin et al., Kimad, 2023"
    grain: ClassVar[str] = "uniform, per bucket (Kimad+) with per_bucket"
    uses: ClassVar[tuple[str, ...]] = ("link", "compute seconds", "compression seconds",
                                       "energy curve (Kimad+)")  # fmt: skip

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome for the budget of now."""
        plus = inputs.settings.per_bucket
        problem = sane(inputs) or (unmeasured(inputs) if plus else "")
        if problem:
            return Outcome("keep", f"kept: {problem}", link=inputs.link)
        link = link_or_answer(inputs)
        if isinstance(link, Outcome):
            return link
        host = find_host(inputs, "topk", ("allgather",))
        if host is None:
            return Outcome("keep", "kept: the agents have no topk by allgather", link=link)
        slack = (PUBLISHED.stretch - 1) * inputs.compute_seconds
        text = (
            f"a step may take {PUBLISHED.stretch:g} times its compute of"
            f" {1e3 * inputs.compute_seconds:.4g} ms, {link_text(link)}"
        )
        if dense_seconds(inputs, link) <= slack:
            text = f"the whole gradient fits in {1e3 * slack:.4g} ms: {text}"
            return answer(inputs, (DENSE,) * len(inputs.layout.buckets), text, link)
        ratios = host.grid()
        budget = budget_of(host, ratios, link, slack)
        options, how = _spend(host, ratios, budget.bytes, plus=plus)
        taken = (
            f"of {1e3 * slack:.4g} ms beside compute latency takes {1e3 * budget.latency:.3g} ms"
            f" and compression {1e3 * budget.codec:.3g} ms"
        )
        return answer(inputs, options, f"{how}; {taken}: {text}", link)


def dense_seconds(inputs: Inputs, link: LinkEstimate) -> float:
    """Return the wire time of the whole fp32 gradient by the backend's all-reduce."""
    a, b = coefficients("all_reduce", inputs.world_size, 0, inputs.backend)
    latency = a * len(inputs.layout.buckets) * link.alpha_seconds
    return latency + b * 4.0 * inputs.layout.elements * link.beta_seconds_per_byte


class Budget(NamedTuple):
    """Payload bytes of one rank that fit, and the seconds that latency and compression take."""

    bytes: float
    latency: float
    codec: float


def budget_of(host: Host, ratios: Floats, link: LinkEstimate, slack: float) -> Budget:
    """Return what fits in ``slack`` seconds.

    The most that compressing costs at any ratio comes off first, so that the target holds whatever
    is chosen; nothing where it was never timed.
    """
    latency, transfer = (float(part.sum()) for part in host.wire(ratios[-1:], link))
    codec = float(np.nan_to_num(host.codec_seconds(ratios).sum(axis=1)).max())
    left = max(slack - latency - codec, 0.0)
    per_byte = transfer / max(float(host.payload(ratios[-1:]).sum()), 1.0)
    if per_byte > 0:
        return Budget(left / per_byte, latency, codec)
    return Budget(math.inf if left > 0 else 0.0, latency, codec)


def _spend(
    host: Host, ratios: Floats, budget: float, *, plus: bool
) -> tuple[Sequence[Option], str]:
    """Return the option per bucket within the budget, and how; the least ratio if none is."""
    sizes = host.payload(ratios).T
    totals = sizes.sum(axis=0)
    fits = np.flatnonzero(totals <= budget)
    column = int(fits[-1]) if len(fits) else 0
    row: Indices = np.full(len(sizes), column, dtype=np.intp)
    limit = f"budget of {budget / 1e3:.4g} kB a rank"
    if not len(fits):
        how = f"{limit} is less than the {totals[0] / 1e3:.4g} kB of the least ratio"
        return [host.option(ratios[k]) for k in row], how
    if not plus:
        how = f"{limit} holds {totals[column] / 1e3:.4g} kB at ratio {ratios[column]:.3g}"
        return [host.option(ratios[k]) for k in row], how
    errors = ((1 - host.gain(ratios)) * host.weights).T
    uniform = float(errors[:, column].sum())
    found = allocate(errors, sizes, min(budget, float(totals[-1])))
    row = found.columns if found is not None else row
    rows = np.arange(len(row))
    how = (
        f"{limit} holds {sizes[rows, row].sum() / 1e3:.4g} kB at ratios {ratios[row].min():.3g} to"
        f" {ratios[row].max():.3g}, error {errors[rows, row].sum():.4g} of ||gradient||^2 instead"
        f" of {uniform:.4g} with {ratios[column]:.3g} for all"
    )
    return [host.option(ratios[k]) for k in row], how
