"""Peak memory of a call on the CPU, as the kernel counts it.

Linux keeps a high-water mark of a process's resident memory and resets it on request
(``/proc/self/clear_refs``, proc(5)). The mark after a call, less what was resident before, is what
the call needed: tensors, temporaries inside operators, and what libraries allocate past torch's
allocator (``torch.topk`` fills a C++ vector of 16 bytes an element, which neither torch's profiler
nor a dispatch mode sees). Memory that is reserved but never touched does not count; it costs
nothing.

Two things would falsify it. Freed memory that the C library keeps would be used again without
raising the mark, so it is handed back first (``malloc_trim``). Code and buffers of threads that are
touched for the first time do raise it, so a first call goes unmeasured. It is good to about 0.1 MB.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_C = ctypes.CDLL(None)


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Return how far resident memory rises above its present level while ``call`` runs.

    What the call returns counts, too. It runs twice; the second time is measured.
    """
    call()
    gc.collect()
    if hasattr(_C, "malloc_trim"):  # glibc
        _C.malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK)
    before = _kilobytes("VmRSS")
    result = call()
    peak = _kilobytes("VmHWM")
    del result
    return max(peak - before, 0) * 1024


def _kilobytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {field}; peak memory is measured on Linux only")
    return int(found[1])
