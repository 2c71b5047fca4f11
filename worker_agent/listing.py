"""What is registered, as plain data for people and scripts: compressors and collectives."""

from __future__ import annotations

import inspect
import math
from typing import Any

from gradpilot.worker_agent.collectives.base import SCHEDULES, carriers
from gradpilot.worker_agent.compressors.base import COMPRESSORS, Compressor, option_of
from gradpilot.worker_agent.compressors.settings import Bounds, bounds_of

SKIPPED_AT = (2, 4, 8)
STEPS_AT = (4, 8)
"""World sizes for which the properties of a schedule are listed."""

_BACKEND = {
    "native": ("all_reduce", "the backend's own all-reduce"),
    "allgather": ("all_gather", "every rank gets the payloads of all"),
    "alltoall": ("all_to_all", "every rank reduces its part of all payloads, then shares it"),
    "hierarchical": ("all_reduce, all_gather", "dense inside a node, the compressor across nodes"),
    "broadcast": ("broadcast", "one rank's payload for all, such as the indices of artopk"),
    "reduce_scatter": ("reduce_scatter", "every rank gets its part of the sum"),
}


def compressors() -> list[dict[str, Any]]:
    """Return every registered compressor, sorted by name.

    Each has ``name, summary, source, settings, traits, ladder``. Traits are those of the default
    settings. Bounds that a setting does not have are None.
    """
    return [_compressor(COMPRESSORS.get(name)) for name in COMPRESSORS]


def collectives() -> list[dict[str, Any]]:
    """Return our own schedules of an all-reduce, then what is left to the backend.

    Each has ``name, kind, carries, option, summary, source, most_skipped, steps``: ``kind`` is
    ``schedule`` or ``backend``, ``option`` whether an option can name it, ``most_skipped`` and
    ``steps`` are by world size (as text) and empty for the backend's.
    """
    selectable = {c for e in ("all_reduce", "all_gather", "all_to_all") for c in carriers(e)}
    schedules = [_schedule(name) for name in SCHEDULES]
    return schedules + [
        {
            "name": name,
            "kind": "backend",
            "carries": carries.split(", "),
            "option": name in selectable,
            "summary": summary,
            "source": "torch.distributed",
            "most_skipped": {},
            "steps": {},
        }
        for name, (carries, summary) in _BACKEND.items()
    ]


def _compressor(kind: type[Compressor]) -> dict[str, Any]:
    default = kind()
    return {
        "name": kind.name,
        "summary": (inspect.getdoc(kind) or "").split("\n")[0],
        "source": kind.source,
        "settings": [_setting(default, name, b) for name, b in bounds_of(kind).items()],
        "traits": {
            "estimator": default.estimator,
            "exchange": default.exchange,
            "collectives": list(default.collectives),
            "lossless": kind.lossless,
            "single_round": kind.single_round,
            "fixed_wire": default.fixed_wire,
            "needs_matrices": kind.needs_matrices,
            "reduce_scatter": kind.reduce_scatter,
            "calibrated": kind.calibrated,
        },
        "ladder": [_member(member) for member in kind.ladder()],
    }


def _setting(default: Compressor, name: str, bounds: Bounds) -> dict[str, Any]:
    return {
        "name": name,
        "kind": bounds.kind.__name__,
        "default": getattr(default, name),
        "low": bounds.low if math.isfinite(bounds.low) else None,
        "high": bounds.high if math.isfinite(bounds.high) else None,
        "above": bounds.above,
        "choices": list(bounds.choices),
        "text": bounds.text,
    }


def _member(member: Compressor) -> dict[str, Any]:
    values = {name: getattr(member, name) for name in bounds_of(type(member)) if name != "ratio"}
    label = option_of(member, member.collectives[0]).label
    return {"label": label, "ratio": member.ratio, "settings": values}


def _schedule(name: str) -> dict[str, Any]:
    algorithm = SCHEDULES.get(name)
    return {
        "name": name,
        "kind": "schedule",
        "carries": ["all_reduce"],
        "option": True,
        "summary": (inspect.getdoc(inspect.getmodule(algorithm.build)) or "").split("\n")[0],
        "source": algorithm.source,
        "most_skipped": {str(n): algorithm.most_skipped(n) for n in SKIPPED_AT},
        "steps": {str(n): len(algorithm.build(0, n).steps) for n in STEPS_AT},
    }
