"""Imported by every interpreter that has this folder on ``PYTHONPATH``; see ``gradpilot.auto``.

It acts in the ranks of a job only, waits until the program itself imports torch, and imports the
module of the same name that it hides.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_TARGET = "torch.nn.parallel.distributed"


class _Loader(Loader):
    """Loads a module as its own loader does, then has its DDP models managed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            from gradpilot.worker_agent.managing import manage_every_model

            manage_every_model(module.DistributedDataParallel)
        except Exception as error:  # whatever it is, it must not keep the program from its torch
            sys.stderr.write(f"gradpilot.auto: models stay plain DDP: {error!r}\n")


class _Finder(MetaPathFinder):
    """Finds nothing but the module that defines DDP, and that once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _import_what_this_hides() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    sys.meta_path.insert(0, _Finder())
_import_what_this_hides()
