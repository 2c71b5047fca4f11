"""Changes of a lab over time, from a file, and their replay.

A trace is CSV with the columns ``seconds,host,rate_mbit,rtt_ms``::

    seconds,host,rate_mbit,rtt_ms
    0,*,500,1
    10,2,50,
    10,0-1,200,
    20,0-1,0,
    20,*,100,5

``host`` is a number, ``*`` for all, or ``FROM-TO`` for background traffic, whose rate is
``rate_mbit`` (0 ends it) and which has no ``rtt_ms``. An empty cell leaves a value as it is.
"""

from __future__ import annotations

import csv
import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.netlab.errors import BadRequestError
from bench.netlab.link import MOST_MBIT, Link, parse_flow, parse_number

COLUMNS = ["seconds", "host", "rate_mbit", "rtt_ms"]


@dataclass(frozen=True, slots=True)
class Change:
    """One row.

    Attributes:
        seconds: When, since the replay began.
        host: Which host; None for all, or for a flow.
        flow: Source and target of background traffic; None for a link.
        rate_mbit: New rate, Mbit/s; None leaves it.
        rtt_ms: New round trip, ms; None leaves it.
    """

    seconds: float
    host: int | None
    flow: tuple[int, int] | None
    rate_mbit: float | None
    rtt_ms: float | None

    def __post_init__(self) -> None:
        if self.flow is None:
            if self.rate_mbit is None and self.rtt_ms is None:
                raise BadRequestError("rate_mbit and rtt_ms are both empty: nothing would change")
            Link().changed(self.rate_mbit, self.rtt_ms)  # within bounds, or it raises
            return
        if self.rate_mbit is None or self.rtt_ms is not None:
            raise BadRequestError("background traffic has a rate_mbit and no rtt_ms")
        if self.flow[0] == self.flow[1]:
            raise BadRequestError(f"background traffic needs two hosts, got {self.flow}")
        if not 0 <= self.rate_mbit <= MOST_MBIT:
            raise BadRequestError(
                f"background traffic has 0 to {MOST_MBIT:g} Mbit/s, got {self.rate_mbit}"
            )


@dataclass(frozen=True, slots=True)
class Trace:
    """Changes in order of time."""

    changes: tuple[Change, ...]

    @property
    def seconds(self) -> float:
        """When the last change comes."""
        return self.changes[-1].seconds

    @staticmethod
    def read(path: Path) -> Trace:
        """Read a file; see ``parse``."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequestError(f"trace {path} cannot be read: {error}") from error
        return Trace.parse(text, str(path))

    @staticmethod
    def parse(text: str, name: str = "trace") -> Trace:
        """Return the trace that a text holds; lines that are empty or begin with # do not count.

        Raises:
            BadRequestError: A row is not as it should be; the message has its line.
        """
        rows = [
            (i, line)
            for i, line in enumerate(text.splitlines(), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not rows or next(csv.reader(io.StringIO(rows[0][1]))) != COLUMNS:
            raise BadRequestError(f"{name} must begin with the line {','.join(COLUMNS)}")
        changes: list[Change] = []
        for number, line in rows[1:]:
            where = f"{name}, line {number}"
            cells = [cell.strip() for cell in next(csv.reader(io.StringIO(line)))]
            if len(cells) != len(COLUMNS):
                raise BadRequestError(f"{where}: expected {len(COLUMNS)} cells, got {len(cells)}")
            try:
                change = _change(*cells)
            except BadRequestError as error:
                raise BadRequestError(f"{where}: {error}") from None
            if changes and change.seconds < changes[-1].seconds:
                raise BadRequestError(
                    f"{where}: time must not go back, {change.seconds:g} s "
                    f"comes after {changes[-1].seconds:g} s"
                )
            changes.append(change)
        if not changes:
            raise BadRequestError(f"{name} has no row, so nothing would change")
        return Trace(tuple(changes))

    def check(self, hosts: int) -> None:
        """Check that a lab of so many hosts can follow this.

        Raises:
            BadRequestError: It names a host that is not there.
        """
        named = {c.host for c in self.changes if c.host is not None}
        named |= {i for c in self.changes if c.flow for i in c.flow}
        beyond = sorted(i for i in named if not 0 <= i < hosts)
        if beyond:
            raise BadRequestError(f"hosts are 0 to {hosts - 1}, but the trace names {beyond}")

    def groups(self) -> Iterator[tuple[float, list[Change]]]:
        """Yield each moment with all that changes then."""
        group: list[Change] = []
        for change in self.changes:
            if group and change.seconds != group[0].seconds:
                yield group[0].seconds, group
                group = []
            group.append(change)
        yield group[0].seconds, group


def _change(seconds: str, host: str, rate: str, rtt: str) -> Change:
    when = parse_number(seconds, "seconds")
    rate_mbit = parse_number(rate, "rate_mbit") if rate else None
    rtt_ms = parse_number(rtt, "rtt_ms") if rtt else None
    if "-" in host:
        return Change(when, None, parse_flow(host), rate_mbit, rtt_ms)
    if host != "*" and not host.isdecimal():
        raise BadRequestError(f"host must be a number, * or FROM-TO, got {host!r}")
    return Change(when, None if host == "*" else int(host), None, rate_mbit, rtt_ms)


@dataclass(frozen=True, slots=True)
class Applied:
    """A moment of a replay.

    Attributes:
        asked_seconds: When it should have been, since the replay began.
        done_seconds: When all of it was in force.
        changes: What.
    """

    asked_seconds: float
    done_seconds: float
    changes: tuple[Change, ...]


class Replay:
    """A trace that is being replayed, in a thread."""

    def __init__(
        self,
        trace: Trace,
        apply: Callable[[list[Change]], None],
        loop_seconds: float | None = None,
        tell: Callable[[Applied], None] | None = None,
    ) -> None:
        """Start it.

        Args:
            trace: What to replay.
            apply: Puts changes in force.
            loop_seconds: Start over so many seconds after the beginning, for ever.
            tell: Called after each moment, from the thread.

        Raises:
            BadRequestError: A round would be over before its last change.
        """
        if loop_seconds is not None and loop_seconds <= trace.seconds:
            raise BadRequestError(
                f"a round must be longer than the trace's {trace.seconds:g} s, got {loop_seconds:g}"
            )
        self._trace, self._apply, self._round, self._tell = trace, apply, loop_seconds, tell
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.applied: list[Applied] = []
        self.begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="netlab trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            base = 0.0
            while True:
                for seconds, changes in self._trace.groups():
                    if self._stop.wait(max(0.0, self.begun + base + seconds - time.monotonic())):
                        return
                    self._apply(changes)
                    done = time.monotonic() - self.begun
                    self.applied.append(Applied(base + seconds, done, tuple(changes)))
                    if self._tell is not None:
                        self._tell(self.applied[-1])
                if self._round is None:
                    return
                base += self._round
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the last change is in force and return whether it is.

        Raises:
            NetlabError: A change could not be made.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it; what is in force stays so.

        Raises:
            NetlabError: A change could not be made.
        """
        self._stop.set()
        self.wait()
