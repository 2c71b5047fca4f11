"""The link as far as it can be told; where it cannot, what to probe."""

from __future__ import annotations

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.cost import coefficients
from gradpilot.policies.link import fit_link, wide_enough
from gradpilot.protos.messages import LinkEstimate

PROBE_BYTES = (4 << 10, 1 << 20)
"""A small and a large payload to time."""


NEGLIGIBLE = 0.05
"""Share of a step that an unknown latency may be without any probe."""

CREDIBLE = 0.15
"""Relative error up to which the bandwidth is known well enough by itself."""


def link_or_answer(inputs: Inputs) -> LinkEstimate | Outcome:
    """Return the link, or the outcome that is left without one: ``keep`` or ``probe``."""
    args = (inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    link = fit_link(*args)
    if link is None:
        return Outcome("keep", "kept: no collective has been timed yet", link=inputs.link)
    if link.separable or wide_enough(*args) or _bandwidth_bound(inputs, link):
        return link
    small, large = probe_sizes(inputs)
    return Outcome(
        "probe",
        f"{link.samples} collectives cannot tell latency from bandwidth:"
        f" probing {small} and {large} bytes",
        link=link,
        probe_bytes=(small, large),
    )


def _bandwidth_bound(inputs: Inputs, link: LinkEstimate) -> bool:
    """Return whether the bandwidth is known and the latency is too small to matter.

    On a link that changes all the time there are never enough collectives of its present state to
    tell a small latency, and asking for a probe each time would leave no decision.
    """
    alphas, _ = coefficients("all_reduce", inputs.world_size, 0, inputs.backend)
    latency = alphas * len(inputs.layout.buckets) * (link.alpha_seconds + link.alpha_error)
    known = link.beta_error <= CREDIBLE * link.beta_seconds_per_byte
    return known and latency <= NEGLIGIBLE * inputs.step_seconds


def probe_sizes(inputs: Inputs) -> tuple[int, int]:
    """Return a small and a large payload; the large one no larger than the gradient itself."""
    small, large = PROBE_BYTES
    large = max(64, min(large, 4 * inputs.layout.elements))
    return max(4, min(small, large // 16)), large


def link_text(link: LinkEstimate) -> str:
    """Return latency and bandwidth for people."""
    beta = link.beta_seconds_per_byte
    rate = f"{8e-9 / beta:.3g} Gbit/s" if beta > 0 else "no bandwidth limit seen"
    return f"link {1e3 * link.alpha_seconds:.3g} ms, {rate} from {link.samples} collectives"
