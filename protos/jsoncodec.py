"""Frozen dataclasses as JSON text, for the store, for people and for replay; no protobuf here.

The text is strict JSON: numbers that JSON cannot hold are the strings ``"NaN"``, ``"Infinity"`` and
``"-Infinity"``, as in protobuf's JSON. Every float comes back with the same bits (but for the
payload of a NaN), so a decision can be taken again from its text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, TypeVar, cast

from gradpilot.errors import ProtocolError
from gradpilot.protos.reflection import Shape, shapes

T = TypeVar("T")

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(obj: Any) -> str:
    """Return a dataclass instance as one line of JSON; equal instances give equal text.

    Raises:
        TypeError: A value is none of those that ``reflection`` lists.
    """
    return json.dumps(_plain(obj), separators=(",", ":"), allow_nan=False)


def from_json(cls: type[T], text: str) -> T:
    """Return the instance of ``cls`` that ``to_json`` wrote.

    Unknown keys are ignored and missing ones take the field's default, so that text of an older or
    newer version can be read.

    Raises:
        ProtocolError: The text is no JSON, or a field is missing or of another type; names it.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError(
            f"{cls.__name__}: expected JSON text, got {text[:40]!r}: {error}"
        ) from None
    return cast(T, _object(cls, value, cls.__name__))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        # float() also strips subclasses such as numpy's, whose repr json would not write.
        return float(value) if math.isfinite(value) else _nonfinite(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {shape.name: _plain(getattr(value, shape.name)) for shape in shapes(type(value))}
    raise TypeError(
        f"expected a dataclass, tuple, str, bool, int, float or None, got {type(value).__name__}:"
        f" {value!r}; convert it before it is put into a message"
    )


def _nonfinite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _object(cls: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    fields = {}
    for shape in shapes(cls):
        where = f"{path}.{shape.name}"
        if shape.name in value:
            fields[shape.name] = _field(shape, value[shape.name], where)
        elif shape.required:
            raise ProtocolError(f"{where}: expected a value, got none")
    return cls(**fields)


def _field(shape: Shape, value: Any, path: str) -> Any:
    if value is None and shape.optional:
        return None
    if not shape.many:
        return _item(shape, value, path)
    if not isinstance(value, list) or shape.length not in (None, len(value)):
        raise _wrong(path, "a list" if shape.length is None else f"{shape.length} items", value)
    return tuple(_item(shape, item, f"{path}[{i}]") for i, item in enumerate(value))


def _item(shape: Shape, value: Any, path: str) -> Any:
    if shape.nested:
        return _object(shape.item, value, path)
    if shape.item is float:
        if isinstance(value, str) and value in _NONFINITE:
            return _NONFINITE[value]
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is shape.item:
        return value
    raise _wrong(path, f"a value of type {shape.item.__name__}", value)


def _wrong(path: str, expected: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{path}: expected {expected}, got {repr(value)[:80]}")
