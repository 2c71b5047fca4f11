"""Signals while a lab goes up or down."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


def end_on_sigterm() -> Callable[[], None]:
    """Let SIGTERM end the program as an exception does, if nobody else handles it.

    Returns:
        What undoes that.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        return lambda: None

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)

    def undo() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return undo


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM: taking down takes a second and must not stop half-way."""
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
