"""What a host's link shall be, and the words for it that ``tc`` understands."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bench.netlab.errors import BadRequestError

LEAST_MBIT, MOST_MBIT = 0.1, 40_000.0
MOST_RTT_MS = 2_000.0

BURST_SECONDS = 1e-4
"""Credit of an idle link: more makes small messages too fast, less loses no throughput."""

QUEUE_SECONDS = 0.05
LEAST_QUEUE_BYTES = 512 << 10
"""The queue before a link: a buffer of 50 ms, and never less than a few large packets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between a host and the bridge.

    Attributes:
        rate_mbit: Mbit/s in each direction, Ethernet frames without preamble and gap, so TCP
            carries 1448 / 1514 of it at an MTU of 1500.
        rtt_ms: Round trip, ms, between two hosts of this setting. Between hosts that differ it is
            the mean of theirs: half of it is added to whatever arrives at a host.
    """

    rate_mbit: float = 1000.0
    rtt_ms: float = 0.0

    def __post_init__(self) -> None:
        if not LEAST_MBIT <= self.rate_mbit <= MOST_MBIT:
            raise BadRequestError(
                f"a rate is {LEAST_MBIT:g} to {MOST_MBIT:g} Mbit/s, got {self.rate_mbit}"
            )
        if not 0 <= self.rtt_ms <= MOST_RTT_MS:
            raise BadRequestError(f"a round trip is 0 to {MOST_RTT_MS:g} ms, got {self.rtt_ms}")

    def changed(self, rate_mbit: float | None, rtt_ms: float | None) -> Link:
        """Return this link with what is not None replaced."""
        return replace(
            self,
            rate_mbit=self.rate_mbit if rate_mbit is None else rate_mbit,
            rtt_ms=self.rtt_ms if rtt_ms is None else rtt_ms,
        )

    @property
    def one_way_seconds(self) -> float:
        """What is added to whatever arrives, s."""
        return self.rtt_ms / 2e3

    def shaping(self, device: str, verb: str) -> list[str]:
        """Return the ``tc`` commands that add or change the limits of a device.

        Args:
            device: On which everything that leaves is limited.
            verb: ``add`` or ``change``.
        """
        bits = round(self.rate_mbit * 1e6)
        burst = max(3200, int(bits / 8 * BURST_SECONDS))
        queue = max(LEAST_QUEUE_BYTES, int(bits / 8 * QUEUE_SECONDS))
        root = [f"qdisc add dev {device} root handle 1: htb default 1"] if verb == "add" else []
        return [
            *root,
            f"class {verb} dev {device} parent 1: classid 1:1 htb rate {bits}bit ceil {bits}bit "
            f"burst {burst} cburst {burst} quantum 60000",
            f"qdisc {verb} dev {device} parent 1:1 handle 10: bfifo limit {queue}",
        ]


def between(a: Link, b: Link) -> Link:
    """Return what two hosts have between them: the lesser rate, the mean round trip."""
    return Link(rate_mbit=min(a.rate_mbit, b.rate_mbit), rtt_ms=(a.rtt_ms + b.rtt_ms) / 2)


def parse_number(text: str, what: str) -> float:
    """Return a number that is finite and not below 0.

    Raises:
        BadRequestError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadRequestError(f"{what} must be a number, 0 or more, got {text!r}")
    return value


def parse_flow(text: str) -> tuple[int, int]:
    """Return source and target of ``FROM-TO``.

    Raises:
        BadRequestError: It is not of that form, or both are one host.
    """
    source, _, target = text.partition("-")
    if not (source.isdecimal() and target.isdecimal()) or int(source) == int(target):
        raise BadRequestError(f"a flow is FROM-TO, two different hosts such as 0-1, got {text!r}")
    return int(source), int(target)
