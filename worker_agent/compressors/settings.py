"""Settings of a compressor: fields of a frozen dataclass that carry their own bounds.

A field made by ``kept_fraction``, ``whole``, ``real`` or ``choice`` is checked when an instance is
made, read from an option, written to one, and listed by ``gradpilot compressors``, without further
code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradpilot.errors import ConfigError

_KEY = "gradpilot.bounds"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting may be.

    Attributes:
        kind: ``int``, ``float`` or ``str``.
        low: Least value of a number.
        high: Greatest value of a number.
        above: Whether ``low`` itself is excluded.
        choices: Accepted values of a ``str``.
    """

    kind: type
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the bounds in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        what = "a whole number" if self.kind is int else "a number"
        return f"{what} in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"

    def holds(self, value: object) -> bool:
        """Return whether a value of the right type lies within."""
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        # Written so that NaN fails.
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def parse(self, text: str) -> Any:
        """Return the value that ``text`` writes; what it does not write is returned as it is."""
        try:
            return self.kind(text)
        except ValueError:
            return text


SPARSE_RATIOS: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Kept fractions worth trying where the largest elements are chosen, about a factor of 3 apart."""


def kept_fraction(default: float) -> Any:
    """Return a field for the kept fraction of elements, (0, 1]."""
    return _field(default, Bounds(float, 0.0, 1.0, above=True))


def whole(default: int, low: int, high: int) -> Any:
    """Return a field for a whole number in [low, high]."""
    return _field(default, Bounds(int, low, high))


def real(default: float, low: float, high: float, *, above: bool = False) -> Any:
    """Return a field for a number in [low, high], or in (low, high] if ``above``."""
    return _field(default, Bounds(float, low, high, above))


def choice(default: str, *others: str) -> Any:
    """Return a field for one of several words."""
    return _field(default, Bounds(str, choices=(default, *others)))


def bounds_of(kind: type) -> Mapping[str, Bounds]:
    """Return the bounds of every setting of a compressor class, by field name."""
    fields = dataclasses.fields(kind)
    return {f.name: f.metadata[_KEY] for f in fields if _KEY in f.metadata}


def check_bounds(instance: Any) -> None:
    """Check every setting of a compressor.

    Raises:
        ConfigError: Names the setting, its bounds and the value that came.
    """
    for name, bounds in bounds_of(type(instance)).items():
        value = getattr(instance, name)
        if not bounds.holds(value):
            raise ConfigError(
                f"{instance.name}: setting {name} must be {bounds.text}, got {value!r}"
            )


def write(value: object) -> str:
    """Return a setting's value as an option carries it; ``Bounds.parse`` reads it back."""
    return repr(value) if isinstance(value, float) else str(value)


def _field(default: Any, bounds: Bounds) -> Any:
    return dataclasses.field(default=default, metadata={_KEY: bounds})
