"""The link as far as it can be told; where it cannot, what to probe."""

from __future__ import annotations

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.link import fit_link, wide_enough
from gradpilot.protos.messages import LinkEstimate

PROBE_BYTES = (4 << 10, 1 << 20)
"""A small and a large payload to time."""


def link_or_answer(inputs: Inputs) -> LinkEstimate | Outcome:
    """Return the link, or the outcome that is left without one: ``keep`` or ``probe``."""
    args = (inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    link = fit_link(*args)
    if link is None:
        return Outcome("keep", "kept: no collective has been timed yet", link=inputs.link)
    if link.separable or wide_enough(*args):
        return link
    small, large = probe_sizes(inputs)
    return Outcome(
        "probe",
        f"{link.samples} collectives cannot tell latency from bandwidth:"
        f" probing {small} and {large} bytes",
        link=link,
        probe_bytes=(small, large),
    )


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
