"""The shape of what ``gradpilot demo --output json`` prints."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)

RESULT: dict[str, Any] = {
    "schema": int,
    "world_size": int,
    "steps": int,
    "dataset": str,
    "seed": int,
    "link": str,
    "phases": list,
    "decisions": list,
    "decisions_taken": int,
    "switches": int,
    "in_sync": bool,
    "final_accuracy": NUMBER,
    "baseline_accuracy": NUMBER,
    "seconds": NUMBER,
    "baseline_seconds": NUMBER,
    "elapsed_seconds": NUMBER,
    "claims": list,
}
LINK = {
    "latency_seconds": NUMBER,
    "bits_per_second": (*NUMBER, type(None)),
    "separable": bool,
}
PHASE = {
    "name": str,
    "first_step": int,
    "last_step": int,
    "latency_seconds": NUMBER,
    "bits_per_second": NUMBER,
    "estimate": (dict, type(None)),
    "options": list,
    "steps_to_first_switch": (int, type(None)),
    "seconds": NUMBER,
    "baseline_seconds": NUMBER,
    "step_seconds": NUMBER,
    "baseline_step_seconds": NUMBER,
}
DECISION = {
    "step": int,
    "plan_id": int,
    "in_force_from": (int, type(None)),
    "phase": str,
    "options": list,
    "reason": str,
    "link": (dict, type(None)),
    "chosen": (dict, type(None)),
    "front": list,
}
CANDIDATE = {
    "options": list,
    "statistical_loss": NUMBER,
    "compression_seconds": NUMBER,
    "synchronisation_seconds": NUMBER,
    "gain": NUMBER,
    "efficiency": NUMBER,
    "step_seconds": NUMBER,
    "wire_ratio": NUMBER,
}
CLAIM = {"name": str, "target": str, "measured": (*NUMBER, str), "holds": bool}


def check(result: dict[str, Any]) -> None:
    """Fail where the result is not of this shape."""
    _fields(result, RESULT, "result")
    for phase in result["phases"]:
        _fields(phase, PHASE, "phase")
        if phase["estimate"] is not None:
            _fields(phase["estimate"], LINK, "estimate")
    for decision in result["decisions"]:
        _fields(decision, DECISION, "decision")
        for candidate in decision["front"]:
            _fields(candidate, CANDIDATE, "candidate")
    for claim in result["claims"]:
        _fields(claim, CLAIM, "claim")


def _fields(value: dict[str, Any], kinds: dict[str, Any], what: str) -> None:
    assert value.keys() == kinds.keys(), f"{what}: {value.keys() ^ kinds.keys()}"
    for name, kind in kinds.items():
        is_flag = isinstance(value[name], bool)
        assert isinstance(value[name], kind), f"{what}.{name} is {value[name]!r}"
        assert is_flag == (kind is bool), f"{what}.{name} is {value[name]!r}"
