"""Random instances of the protocol's dataclasses, made from their fields."""

import dataclasses
from functools import cache
from typing import Any

from hypothesis import strategies as st

from gradpilot.protos import messages
from gradpilot.protos.reflection import shapes

CLASSES: list[type] = [
    cls
    for cls in vars(messages).values()
    if isinstance(cls, type)
    and dataclasses.is_dataclass(cls)
    and cls.__module__.startswith(messages.__name__)
]
"""Every dataclass of ``messages``."""

SCALARS: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bool: st.booleans(),
    int: st.integers(-(2**31), 2**31 - 1),
    float: st.floats(),
}


@cache
def instances(cls: type) -> st.SearchStrategy[Any]:
    """Return a strategy of well-formed, not necessarily plausible instances."""
    fields = {}
    for shape in shapes(cls):
        field = instances(shape.item) if shape.nested else SCALARS[shape.item]
        if shape.many:
            least, most = (0, 2) if shape.length is None else (shape.length, shape.length)
            field = st.lists(field, min_size=least, max_size=most).map(tuple)
        fields[shape.name] = field | st.none() if shape.optional else field
    return st.builds(cls, **fields)


def same(a: object, b: object) -> bool:
    """Compare by value: NaN equals NaN, and 0.0 differs from -0.0."""
    return type(a) is type(b) and repr(a) == repr(b)
