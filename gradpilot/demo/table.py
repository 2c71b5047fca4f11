"""The live table: one row now and then, and one whenever phase or plan changes."""

from __future__ import annotations

import time
from typing import Any, TextIO

from gradpilot.protos.messages import RunDetail

COLUMNS = (
    ("run", 8),
    ("step", 9),
    ("phase", 12),
    ("ms/step", 8),
    ("link estimate", 21),
    ("plan", 22),
    ("gain", 5),
    ("accuracy", 8),
)

ROW_SECONDS = 4.0
"""Time between two rows that stay; on a terminal the newest is redrawn in between."""


class Table:
    """Writes rows for people.

    Args:
        out: Where to; on a terminal the last row is redrawn in place.
        steps: Number of steps of a run.
    """

    def __init__(self, out: TextIO, steps: int) -> None:
        self._out = out
        self._steps = steps
        self._live = out.isatty()
        self._open = False
        self._stayed = 0.0
        self._key: tuple[Any, ...] = ()

    def line(self, text: str = "") -> None:
        """Write a line of its own."""
        self._end_row()
        self._out.write(text + "\n")
        self._out.flush()

    def header(self) -> None:
        """Write the names of the columns."""
        self.line(_join([name for name, _ in COLUMNS]))
        self.line(_join(["-" * width for _, width in COLUMNS]))

    def row(self, event: dict[str, Any], detail: RunDetail | None) -> None:
        """Show how far a run is.

        Args:
            event: A ``progress`` event of rank 0.
            detail: The run as the controller knows it; None if there is no controller.
        """
        key = (event["kind"], event["phase"], event["plan_id"])
        stays = key != self._key or time.monotonic() - self._stayed >= ROW_SECONDS
        stays = stays or event["step"] + 1 == self._steps
        if not stays and not self._live:
            return
        text = _join(_cells(event, detail, self._steps))
        self._out.write(("\r\x1b[2K" if self._live else "") + text + ("\n" if stays else ""))
        self._out.flush()
        self._open = not stays
        if stays:
            self._key, self._stayed = key, time.monotonic()

    def _end_row(self) -> None:
        if self._open:
            self._out.write("\r\x1b[2K")
            self._open = False


def _cells(event: dict[str, Any], detail: RunDetail | None, steps: int) -> list[str]:
    decision = detail.decision if detail is not None else None
    link = decision.link if decision is not None else None
    current = decision.current if decision is not None else None
    accuracy = event["accuracy"]
    return [
        event["kind"],
        f"{event['step'] + 1}/{steps}",
        event["phase"],
        f"{1e3 * event['step_seconds']:.0f}",
        f"{link_text(link.alpha_seconds, link.beta_seconds_per_byte)}" if link else "-",
        " + ".join(event["options"]),
        f"{current.gain:.2f}" if current is not None else "-",
        f"{100 * accuracy:.1f} %" if accuracy is not None else "-",
    ]


def link_text(alpha: float, beta: float) -> str:
    """Return latency and bandwidth for people.

    Args:
        alpha: One-way latency, seconds.
        beta: Time to push one byte, seconds; 0 if no limit was seen.
    """
    if beta <= 0:
        rate = "no limit seen"
    elif 8e-6 / beta < 999.5:
        rate = f"{8e-6 / beta:.3g} Mbit/s"
    else:
        rate = f"{8e-9 / beta:.3g} Gbit/s"
    return f"{1e3 * alpha:.3g} ms, {rate}"


def _join(cells: list[str]) -> str:
    widths = [width for _, width in COLUMNS]
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
