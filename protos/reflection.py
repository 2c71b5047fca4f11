"""What a frozen dataclass is made of, for the codecs.

Fields may be ``str``, ``bool``, ``int``, ``float``, another such dataclass, ``tuple[X, ...]``,
``tuple[X, X, X]`` or ``X | None``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from functools import cache

SCALARS: tuple[type, ...] = (str, bool, int, float)


@dataclass(frozen=True, slots=True)
class Shape:
    """One field of a dataclass.

    Attributes:
        name: Name of the field.
        item: Scalar or dataclass: the type of the value, or of each item if ``many``.
        many: Whether the field is a tuple.
        length: Number of items of a tuple of fixed length; None for ``tuple[X, ...]``.
        optional: Whether None is allowed.
        required: Whether the field has no default.
    """

    name: str
    item: type
    many: bool
    length: int | None
    optional: bool
    required: bool

    @property
    def nested(self) -> bool:
        """Return whether items are dataclasses."""
        return self.item not in SCALARS


@cache
def shapes(cls: type) -> tuple[Shape, ...]:
    """Return the fields of a dataclass in order.

    Raises:
        TypeError: ``cls`` is no dataclass, or a field has a type that the codecs cannot carry.
    """
    hints = typing.get_type_hints(cls)
    return tuple(_shape(cls, field, hints[field.name]) for field in dataclasses.fields(cls))


def _shape(cls: type, field: dataclasses.Field[typing.Any], hint: typing.Any) -> Shape:
    item, many, length, optional = hint, False, None, False
    if typing.get_origin(item) in (types.UnionType, typing.Union):
        rest = [a for a in typing.get_args(item) if a is not types.NoneType]
        optional = len(rest) < len(typing.get_args(item))
        item = rest[0] if len(rest) == 1 else None
    if typing.get_origin(item) is tuple:
        many, inner = True, typing.get_args(item)
        if inner[1:] != (Ellipsis,):
            length = len(inner)
        item = inner[0] if set(inner) - {Ellipsis} == {inner[0]} else None
    if item not in SCALARS and not (isinstance(item, type) and dataclasses.is_dataclass(item)):
        raise TypeError(f"{cls.__name__}.{field.name}: the codecs cannot carry {hint!r}")
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return Shape(field.name, item, many, length, optional, required)
