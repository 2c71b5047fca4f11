"""Rows of the benchmark that were never run, for tests of what is made of them."""

from __future__ import annotations

import math
from typing import Any


def finished(
    method: str = "bf16",
    step_seconds: float = 0.1,
    *,
    network: str = "c1",
    seed: int = 0,
    gains: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    """Return a row that was never run: accuracy rises by steps, time by ``step_seconds``."""
    steps = 100
    at = list(range(9, steps, 10))
    return {
        "task": "cnn",
        "network": network,
        "method": method,
        "seed": seed,
        "ranks": 4,
        "steps": steps,
        "seconds": steps * step_seconds,
        "attach_seconds": 0.1,
        "ends": [(i + 1) * step_seconds for i in range(steps)],
        "losses": [1.0] * steps,
        "evaluated_steps": at,
        "values": [0.9 - 0.5 * math.exp(-gains * (i + 1) / 12) for i in at],
        "plan_steps": [0, 50],
        "plan_seconds": [step_seconds, 50 * step_seconds],
        "plans": ["none native", "topk 1% allgather"],
        "in_sync": True,
        "sync_checks": [4, 4],
        "conserved": True,
        "conserved_checks": [4, 4],
        "switches": 1,
        "nonfinite": 0,
        "frozen": "",
        "decisions": [],
        "wall_seconds": 1.0,
        "others_cpu": 0.1,
        "phases_met": 2,
        "sent_bytes": [1_000_000] * 4,
        "received_bytes": [1_000_000] * 4,
        "dropped_packets": 0,
        "background_bytes": 0,
        "late_seconds": 0.0,
        **more,
    }
