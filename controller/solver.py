"""Runs policies in a worker process, so that a solve never holds up a stream.

The worker is started with spawn (gRPC's threads do not survive a fork). It is killed and replaced
when it exceeds the time limit or dies, and it ends by itself when the controller is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from gradpilot.errors import GradpilotError
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.seen import seen
from gradpilot.protos.explanations import Explanation
from gradpilot.protos.jsoncodec import from_json, to_json

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a worker may take to start and import the policies on a busy machine."""

Decide = Callable[[str, Inputs], Outcome]
"""Policy name and inputs to outcome; importable by name in another process."""


class SolverError(GradpilotError):
    """A policy failed or took too long; the message says which."""


def decide(policy: str, inputs: Inputs) -> Outcome:
    """Ask the policy registered under a name; what was measured is told whatever it explains."""
    outcome = POLICIES.get(policy)().decide(inputs)
    told = outcome.explanation or Explanation()
    return replace(outcome, explanation=replace(told, seen=seen(inputs, outcome)))


class Solver:
    """One worker process.

    Args:
        timeout_seconds: Longest time for one decision.
        decide: What the worker calls.
    """

    def __init__(self, timeout_seconds: float = 30.0, decide: Decide = decide) -> None:
        self._timeout = timeout_seconds
        self._decide = decide
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0
        self._lock = asyncio.Lock()
        self.restarts = 0

    async def start(self) -> None:
        """Start the worker and import the policies in it; a decision starts it if need be."""
        async with self._lock:
            await self._ensure()

    async def decide(self, policy: str, inputs: Inputs) -> tuple[Outcome, str]:
        """Return the policy's outcome and the inputs as JSON, both made by the worker.

        Raises:
            SolverError: The policy raised, took too long, or its process died.
        """
        async with self._lock:
            pool = await self._ensure()
            try:
                work = asyncio.wrap_future(pool.submit(_work, self._decide, policy, inputs))
                async with asyncio.timeout(self._timeout):
                    return await work
            except TimeoutError:
                self._discard()
                raise SolverError(
                    f"policy {policy!r} took longer than {self._timeout:g} s and was stopped"
                ) from None
            except BrokenProcessPool:
                self._discard()
                raise SolverError(f"the process of policy {policy!r} died") from None
            except asyncio.CancelledError:
                self._discard()
                raise
            except Exception as error:
                logger.warning("policy failed", exc_info=error, extra={"policy": policy})
                raise SolverError(
                    f"policy {policy!r} failed: {type(error).__name__}: {error}"
                ) from error

    def close(self) -> None:
        """Kill the worker."""
        if self._pool is not None:
            self._discard()

    async def _ensure(self) -> ProcessPoolExecutor:
        if self._pool is not None:
            return self._pool
        pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
        self._pool = pool
        try:
            started = asyncio.wrap_future(pool.submit(_warm_up))
            async with asyncio.timeout(START_SECONDS):
                self._pid = await started
        except Exception as error:
            self._discard()
            raise SolverError(f"the policy process does not start: {error!r}") from error
        except asyncio.CancelledError:
            self._discard()
            raise
        return pool

    def _discard(self) -> None:
        pool, self._pool = self._pool, None
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = 0
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        self.restarts += 1


def _start_worker() -> None:
    """Leave Ctrl-C to the controller, and end when it is gone, even by SIGKILL."""
    # The controller may share its machine with training, which must not notice.
    os.nice(10)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(0)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _warm_up() -> int:
    POLICIES.names()
    return os.getpid()


def _work(decide: Decide, policy: str, inputs: Inputs) -> tuple[Outcome, str]:
    # Through text and back, so that numpy's scalars neither travel nor reach the store.
    outcome = from_json(Outcome, to_json(decide(policy, inputs)))
    return outcome, to_json(inputs)
