"""Asks the controller what it decided, as any operator could."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace

from gradpilot.demo.records import Taken
from gradpilot.operate import NotThereError, OperatorClient, OperatorError
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import RunDetail, RunRef

CALL_SECONDS = 5.0

WATCH_SECONDS = 0.5
"""Time between two looks of a ``Watcher``."""


def decisions(address: str, ref: RunRef) -> Iterator[Taken]:
    """Yield all decisions of a run, oldest first.

    Raises:
        OperatorError: The controller does not answer or does not know the run.
    """
    with OperatorClient(address, CALL_SECONDS) as client:
        newest = client.run(ref).decision
        for number in range(1, newest.id + 1 if newest is not None else 1):
            try:
                decision = client.explain(replace(ref, decision=number))
            except NotThereError:
                continue  # the number belongs to a decision that was dropped
            inputs = json.loads(decision.inputs_json) if decision.inputs_json else {}
            yield Taken(
                to_json(replace(decision, inputs_json="")),
                float(inputs.get("compute_seconds", 0.0)),
            )


class Watcher:
    """Keeps the newest state of a run at hand, from a thread of its own; close it after use.

    Args:
        address: ``host:port`` of the controller.
        run: Run id.
        model: Model name.
    """

    def __init__(self, address: str, run: str, model: str) -> None:
        self.newest: RunDetail | None = None
        self._address, self._ref = address, RunRef(run, model)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; ``newest`` stays."""
        self._stop.set()
        self._thread.join(CALL_SECONDS + 1.0)

    def _run(self) -> None:
        with OperatorClient(self._address, CALL_SECONDS) as client:
            while not self._stop.wait(WATCH_SECONDS):
                with contextlib.suppress(OperatorError):  # not there yet, or gone with the run
                    self.newest = client.run(self._ref)
