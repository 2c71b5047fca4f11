"""Just enough SVG for charts: scales, axes and shapes, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 860.0
"""Width of a chart in its own units; the page scales it."""


_LOG_STEPS = ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
"""Ticks within a decade, from few to many; the first that gives three is taken."""


class Scale:
    """Maps values to positions, linearly or by logarithm.

    Args:
        values: What must fit in.
        start: Position of the low end.
        end: Position of the high end.
        log: Whether positions follow the logarithm; values that are not positive are left out.
        zero: Whether a linear scale must begin at 0.
    """

    def __init__(
        self,
        values: Iterable[float],
        start: float,
        end: float,
        *,
        log: bool = False,
        zero: bool = False,
    ) -> None:
        known = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        if log:
            low, high = low / 1.25, high * 1.25
        else:
            low = 0.0 if zero else low
            room = 0.06 * (high - low) or 1.0
            low, high = (low if zero else low - room), high + room
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        """Return the position of a value; outside the scale it is clamped."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, wanted: int = 7) -> list[float]:
        """Return round values inside the scale."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            inside: list[float] = []
            for steps in _LOG_STEPS:
                every = [m * 10.0**d for d in decades for m in steps]
                inside = [v for v in every if self.low <= v <= self.high]
                if len(inside) >= 3:
                    break
            return inside
        rough = (self.high - self.low) / wanted
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1.0, 2.0, 5.0, 10.0) if m * unit >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


class Canvas:
    """Shapes in the order in which they were added.

    Args:
        title: What the chart shows, also for screen readers.
        height: Height in the chart's units.
        width: Width in the chart's units.
    """

    def __init__(self, title: str, height: float, width: float = WIDTH) -> None:
        self._title, self._height, self._width = title, height, width
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, tip: str = ""
    ) -> None:
        """Add a rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}"'
            f' height="{max(height, 0.0):.1f}" {css}>{_tip(tip)}</rect>'
        )

    def circle(self, x: float, y: float, radius: float, css: str, tip: str = "") -> None:
        """Add a circle."""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {css}>{_tip(tip)}</circle>'
        )

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """Add a line through points."""
        if points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._parts.append(f'<polyline points="{path}" {css}/>')

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """Add a text whose anchor (start, middle, end) is at ``x``."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {css}>{escape(text)}</text>'
        )

    def bottom_axis(self, scale: Scale, y: float, label: str, top: float | None = None) -> None:
        """Add ticks and a label below ``y``, with grid lines up to ``top`` if given."""
        for value in scale.ticks():
            x = scale(value)
            if top is not None:
                self.line([(x, top), (x, y)], 'class="grid"')
            self.text(x, y + 15, number(value), 'class="tick"', "middle")
        self.line([(scale.start, y), (scale.end, y)], 'class="axis"')
        self.text((scale.start + scale.end) / 2, y + 32, label, 'class="label"', "middle")

    def left_axis(self, scale: Scale, x: float, right: float, label: str) -> None:
        """Add grid lines from ``x`` to ``right`` with ticks, and a label above the axis."""
        for value in scale.ticks():
            y = scale(value)
            self.line([(x, y), (right, y)], 'class="grid"')
            self.text(x - 6, y + 4, number(value), 'class="tick"', "end")
        self.text(x, scale.end - 24, label, 'class="label"')

    def render(self) -> str:
        """Return the SVG element."""
        title = escape(self._title, quote=True)
        return (
            f'<svg viewBox="0 0 {self._width:g} {self._height:g}" role="img"'
            f' aria-label="{title}"><title>{title}</title>{"".join(self._parts)}</svg>'
        )


def number(value: float) -> str:
    """Return a number for an axis, short and without exponent where that reads better."""
    return f"{value:,.6g}" if value == 0 or 1e-4 <= abs(value) < 1e6 else f"{value:.0e}"


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
