"""What the processes of a benchmark that stand for ranks of a job inherit."""

from __future__ import annotations

import os
from pathlib import Path

import gradpilot

MASTER_PORT = 29500
"""In a lab; its addresses are its own, so a fixed port meets nobody."""

ROOT = Path(gradpilot.__file__).resolve().parent.parent

_DROPPED = ("GRADPILOT_", "TORCHELASTIC_", "SLURM_", "GLOO_")


def environment() -> dict[str, str]:
    """Return ours without what would configure a job from outside: one thread, this package."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(_DROPPED) or name.lower().endswith("_proxy"))
    }
    path = os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH", "")) if p)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**kept, **threads, "PYTHONPATH": path}
