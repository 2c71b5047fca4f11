"""One registry type for everything that plugs in: compressors, collectives, policies.

A plug-in is one module in its package. The registry imports every public module of the package
the first time it is asked, so adding a file needs no other edit.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from gradpilot.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes (or factories) of one kind.

    Args:
        kind: What is registered, for error messages ("compressor").
        package: Dotted package whose public modules register members when imported.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._members: dict[str, T] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under ``name``.

        Raises:
            ConfigError: ``name`` is taken by something else.
        """

        def add(member: T) -> T:
            taken = self._members.get(name)
            if taken is not None and taken is not member:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: {taken!r}, {member!r}"
                )
            self._members[name] = member
            return member

        return add

    def get(self, name: str) -> T:
        """Return the member called ``name``.

        Raises:
            UnknownNameError: No such member; the message lists the known names.
        """
        self._discover()
        try:
            return self._members[name]
        except KeyError:
            known = ", ".join(sorted(self._members))
            raise UnknownNameError(f"unknown {self.kind} {name!r}; known: {known}") from None

    def names(self) -> tuple[str, ...]:
        """Return all names in sorted order."""
        self._discover()
        return tuple(sorted(self._members))

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _discover(self) -> None:
        if self._discovered:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self._package}.{module.name}")
        # Set last: a failed import must be reported again on the next call, not hidden.
        self._discovered = True
