"""The one way out of a process that used gloo.

A gloo worker thread drops the tensors of its last operation just after it ended, and needs the GIL
for that. If the main thread is already finalizing the interpreter, Python ends the worker inside a
destructor that must not throw, and the process dies with SIGABRT although training went well. This
happens to plain DDP jobs, too (seen with torch 2.13.0 on CPU). Waiting a moment without the GIL
after the last collective lets the workers finish; joining them by destroying the groups needs no
luck, but only works when nothing else holds the group any more.
"""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

SETTLE_SECONDS = 0.2
"""Workers need microseconds; this leaves room for a machine that is busy with other ranks."""


def settle() -> None:
    """Give gloo's worker threads the GIL for a moment; harmless at any time."""
    time.sleep(SETTLE_SECONDS)


def leave_process_group() -> None:
    """Join the workers by destroying all groups; call when training went well, on all ranks.

    The caller must have dropped its DDP models, whose references keep a group's workers alive.
    """
    gc.collect()
    settle()
    if dist.is_initialized():
        dist.destroy_process_group()
    settle()
