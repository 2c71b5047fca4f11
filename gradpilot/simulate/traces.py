"""What a network does over time: latency and bandwidth, constant between changes."""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradpilot.errors import ConfigError

HEADER = ("seconds", "alpha_ms", "gbps")
"""Columns of a trace as CSV."""

GBPS = 1.25e8
"""Bytes per second of one Gbit/s."""

PIECES = 120
"""Constant pieces of a trace whose link changes all the time."""

RANGE_MS = (0.05, 5.0)
RANGE_GBPS = (0.2, 25.0)
"""One-way latency and bandwidth that made-up traces stay between."""


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and inverse bandwidth of one hop: s, s/byte."""

    alpha: float
    beta: float

    @staticmethod
    def of(alpha_ms: float, gbps: float) -> Link:
        """Return the link with a one-way latency in ms and a bandwidth in Gbit/s."""
        return Link(1e-3 * alpha_ms, 1.0 / (GBPS * gbps))


@dataclass(frozen=True, slots=True)
class Trace:
    """A link as a function of time.

    Attributes:
        name: For people.
        starts: Seconds at which each piece begins; the first is 0, ascending.
        links: The link of each piece.
        period: Seconds after which it starts over; infinite if the last piece lasts for ever.
    """

    name: str
    starts: tuple[float, ...]
    links: tuple[Link, ...]
    period: float = math.inf

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.links) or not self.starts or self.starts[0] != 0:
            raise ConfigError(f"trace {self.name!r}: the first piece must start at 0 s")
        if any(b <= a for a, b in zip(self.starts, self.starts[1:], strict=False)):
            raise ConfigError(f"trace {self.name!r}: pieces must start later and later")
        if not self.period > self.starts[-1]:
            raise ConfigError(f"trace {self.name!r}: it starts over before its last piece begins")

    def at(self, seconds: float) -> Link:
        """Return the link at a time."""
        return self.links[self._piece(seconds)[0]]

    def next_change(self, seconds: float) -> float:
        """Return when the piece that holds at a time ends; infinite if never."""
        piece, base = self._piece(seconds)
        after = self.starts[piece + 1] if piece + 1 < len(self.starts) else self.period
        return base + after

    def _piece(self, seconds: float) -> tuple[int, float]:
        """Return the piece at a time, and when the present round began."""
        base = 0.0
        if math.isfinite(self.period):
            # Times that ``next_change`` returned must not fall into the round before by rounding.
            base = math.floor(seconds / self.period + 1e-12) * self.period
        piece = bisect_right(self.starts, max(seconds - base, 0.0) + 1e-9) - 1
        return piece, base


# --- made up -----------------------------------------------------------------------------------


def constant(alpha_ms: float, gbps: float) -> Trace:
    """Return a network that never changes."""
    return Trace("constant", (0.0,), (Link.of(alpha_ms, gbps),))


def steps(seed: int, seconds: float) -> Trace:
    """Return four links drawn log-uniformly, a quarter of the time each, again and again."""
    draw = np.random.default_rng([seed, 1])
    return _even("steps", _drawn(draw, 4), seconds)


def walk(seed: int, seconds: float) -> Trace:
    """Return a random walk of the logarithms of latency and bandwidth, reflected at the ends."""
    draw = np.random.default_rng([seed, 2])
    at = draw.uniform(0, 1, 2)
    places = []
    for _ in range(PIECES):
        at = at + draw.normal(0, 0.06, 2)
        at = np.abs(at)
        at = np.where(at > 1, 2 - at, at)
        places.append(at)
    return _even("walk", [_place(*p) for p in places], seconds)


def diurnal(seed: int, seconds: float) -> Trace:
    """Return a bandwidth that falls to about a tenth and comes back, latency rising meanwhile."""
    draw = np.random.default_rng([seed, 3])
    top, depth, latency = draw.uniform(0.6, 1), draw.uniform(0.35, 0.6), draw.uniform(0, 0.6)
    phase = 2 * math.pi * draw.uniform()
    links = []
    for i in range(PIECES):
        busy = 0.5 - 0.5 * math.cos(2 * math.pi * i / PIECES + phase)
        links.append(_place(latency + 0.3 * busy, max(top - depth * busy, 0.0)))
    return _even("diurnal", links, seconds)


def burst(seed: int, seconds: float) -> Trace:
    """Return a good link whose bandwidth collapses to a tenth for short times."""
    draw = np.random.default_rng([seed, 4])
    good = _place(draw.uniform(0, 0.5), draw.uniform(0.6, 1.0))
    bad = Link(2 * good.alpha, 10 * good.beta)
    links = [good] * PIECES
    for at in draw.choice(PIECES - 4, size=6, replace=False):
        length = int(draw.integers(1, 4))
        links[at : at + length] = [bad] * length
    return _even("burst", links, seconds)


C1 = ((12, 1, 25), (12, 1, 1), (12, 50, 1), (14, 50, 25))
C2 = ((4, 1, 25), (4, 2, 20), (4, 4, 15), (4, 8, 10), (4, 16, 5), (8, 32, 1), (4, 16, 5),
      (4, 8, 10), (4, 4, 15), (4, 2, 20), (6, 1, 25))  # fmt: skip
"""Epochs, ms and Gbit/s of the two schedules of Tyagi and Swany, *Flexible Communication* (IEEE
BigData 2023), for 50 epochs."""


def published(name: str, phases: Sequence[tuple[float, float, float]], seconds: float) -> Trace:
    """Return a schedule given as (share, ms, Gbit/s), stretched to so many seconds."""
    total = sum(share for share, _, _ in phases)
    ends = np.cumsum([share for share, _, _ in phases]) / total * seconds
    starts = (0.0, *(float(end) for end in ends[:-1]))
    return Trace(name, starts, tuple(Link.of(ms, gbps) for _, ms, gbps in phases), seconds)


MAKERS: dict[str, Callable[[int, float], Trace]] = {
    "steps": steps,
    "walk": walk,
    "diurnal": diurnal,
    "burst": burst,
    "c1": lambda _, seconds: published("c1", C1, seconds),
    "c2": lambda _, seconds: published("c2", C2, seconds),
}
"""Changing networks by name: from a seed and the seconds of one round."""


def make_trace(name: str, seed: int, seconds: float) -> Trace:
    """Return a trace by name, or the one in a CSV file.

    Args:
        name: ``constant`` (drawn), a name of ``MAKERS``, or a path that ends in ``.csv``.
        seed: Seed of what is drawn.
        seconds: Length of one round; of no meaning for ``constant`` and files.

    Raises:
        ConfigError: No such trace, or the file is no trace.
    """
    if name.endswith(".csv"):
        return read_trace(Path(name))
    if name == "constant":
        (link,) = _drawn(np.random.default_rng([seed, 0]), 1)
        return Trace("constant", (0.0,), (link,))
    if name not in MAKERS:
        known = ", ".join(("constant", *MAKERS))
        raise ConfigError(f"unknown trace {name!r}; known: {known}, or a file NAME.csv")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"a trace must last longer than 0 s, got {seconds}")
    return MAKERS[name](seed, seconds)


def _even(name: str, links: Sequence[Link], seconds: float) -> Trace:
    """Return pieces of equal length; neighbours that are equal become one."""
    starts, kept = [0.0], [links[0]]
    for i, link in enumerate(links[1:], 1):
        if link != kept[-1]:
            starts.append(i * seconds / len(links))
            kept.append(link)
    return Trace(name, tuple(starts), tuple(kept), seconds)


def _drawn(draw: np.random.Generator, count: int) -> list[Link]:
    return [_place(*draw.uniform(0, 1, 2)) for _ in range(count)]


def _place(latency: float, bandwidth: float) -> Link:
    """Return the link at two places in [0, 1] of the logarithmic ranges."""
    ms = RANGE_MS[0] * (RANGE_MS[1] / RANGE_MS[0]) ** float(latency)
    gbps = RANGE_GBPS[0] * (RANGE_GBPS[1] / RANGE_GBPS[0]) ** float(bandwidth)
    return Link.of(ms, gbps)


# --- files -------------------------------------------------------------------------------------


def read_trace(path: Path) -> Trace:
    """Read a CSV file with the columns of ``HEADER``; its last row holds for ever.

    Raises:
        ConfigError: It cannot be read or says something impossible; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from None
    return parse_trace(text, path.name)


def parse_trace(text: str, name: str) -> Trace:
    """Return the trace that CSV text describes; see ``read_trace``."""
    starts: list[float] = []
    links: list[Link] = []
    rows = csv.reader(io.StringIO(text))
    header = tuple(cell.strip() for cell in next(rows, []))
    if header != HEADER:
        raise ConfigError(f"{name} line 1: expected {','.join(HEADER)}, got {','.join(header)!r}")
    for row in rows:
        where = f"{name} line {rows.line_num}"
        if not any(cell.strip() for cell in row):
            continue
        seconds, ms, gbps = _numbers(row, where)
        expected = "0" if not starts else f"more than {starts[-1]:g}"
        if (seconds != 0) if not starts else seconds <= starts[-1]:
            raise ConfigError(f"{where}: seconds must be {expected}, got {seconds:g}")
        if ms < 0 or gbps <= 0:
            raise ConfigError(f"{where}: needs alpha_ms >= 0 and gbps > 0, got {ms:g}, {gbps:g}")
        starts.append(seconds)
        links.append(Link.of(ms, gbps))
    if not starts:
        raise ConfigError(f"{name}: a trace needs at least one row below its header")
    return Trace(name, tuple(starts), tuple(links))


def _numbers(row: Sequence[str], where: str) -> list[float]:
    if len(row) != len(HEADER):
        raise ConfigError(f"{where}: expected {len(HEADER)} numbers, got {len(row)}")
    found = []
    for name, cell in zip(HEADER, row, strict=True):
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {name} must be a finite number, got {cell.strip()!r}")
        found.append(value)
    return found


def format_trace(trace: Trace) -> str:
    """Return one round of a trace as CSV; ``parse_trace`` gives the same pieces back."""
    return "".join(_lines(trace))


def _lines(trace: Trace) -> Iterable[str]:
    yield ",".join(HEADER) + "\n"
    for start, link in zip(trace.starts, trace.links, strict=True):
        yield f"{start!r},{1e3 * link.alpha!r},{1.0 / (GBPS * link.beta)!r}\n"
