"""gradpilot: an autopilot for gradient communication in PyTorch distributed training.

    import gradpilot
    handle = gradpilot.attach(ddp_model)

Public names are loaded on first use, so that the controller never imports torch and the agent never
imports the solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradpilot.worker_agent.agent import attach
    from gradpilot.worker_agent.handle import Handle
    from gradpilot.worker_agent.hook_state import HookState, hook
    from gradpilot.worker_agent.sharded.settings import Sharding

__version__ = "0.1.0"
__all__ = ["Handle", "attach", "HookState", "hook", "Sharding", "__version__"]

_PUBLIC = {
    "attach": "gradpilot.worker_agent.agent",
    "Handle": "gradpilot.worker_agent.handle",
    "HookState": "gradpilot.worker_agent.hook_state",
    "hook": "gradpilot.worker_agent.hook_state",
    "Sharding": "gradpilot.worker_agent.sharded.settings",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'gradpilot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
