"""Puts a method on a DDP model, and says what it does at a step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.tta import checks
from bench.tta.methods import Method
from bench.tta.records import Decided, Pin
from gradpilot.demo.operator import decisions
from gradpilot.operate import OperatorClient, OperatorError
from gradpilot.protos.explanations import Explanation, Seen
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import Decision, Option, RunRef
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle

RUN = "tta"


class Carrier:
    """A method on a model of PyTorch's own, or under gradpilot's control.

    Args:
        method: The method.
        ddp: The model.
        ranks: Ranks N.
        controller: ``host:port``, empty without.
        seed: Seed of the compressors.
        start: Option to begin with; None for the method's own.
    """

    def __init__(
        self,
        method: Method,
        ddp: DistributedDataParallel,
        ranks: int,
        controller: str = "",
        seed: int = 0,
        start: Option | None = None,
    ) -> None:
        self._method = method
        self._handle: Handle | None = None
        self._pinning: _Pinning | None = None
        if method.kind == "torch" and start is None:
            _register(ddp, method.hook)
            return
        self._handle = attach(
            ddp,
            controller=controller or "off",
            run=RUN,
            seed=seed,
            start=method.start(ranks) if start is None else start,
        )

    def observe(self, loss: float, rate: float) -> None:
        """Tell the controller what a job tells it."""
        if self._handle is not None:
            self._handle.observe(loss=loss, lr=rate)

    def labels(self) -> tuple[str, ...]:
        """Return the options in force, for people."""
        if self._handle is None:
            return (self._method.name,)
        return tuple(option.label for option in self._handle.plan.options())

    def tolerance(self) -> float:
        """Return ``Check.tolerance`` of the step that just ended."""
        if self._handle is not None:
            return checks.tolerance_of(self._handle.plan.options())
        if not self._method.readable:
            return -1.0
        return checks.SIXTEEN_BIT if self._method.hook == "fp16" else checks.TOLERANCE

    def residuals(self) -> Mapping[str, Tensor]:
        """Return the residual of every parameter that has one, flat, by name."""
        if self._handle is None:
            return {}
        held: Mapping[str, Tensor] = self._handle.state_dict()["residuals"]
        return held

    def counts(self) -> dict[str, Any]:
        """Return ``switches``, ``nonfinite`` and ``frozen`` of ``RankRecord``."""
        if self._handle is None:
            return {}
        counters = self._handle.counters
        return {
            "switches": counters.switches,
            "nonfinite": counters.nonfinite_steps,
            "frozen": self._handle.frozen,
        }

    def decided(self) -> tuple[Decided, ...]:
        """Return the decisions of the controller; call on one rank."""
        if self._handle is None or not self._handle.controller:
            return ()
        found = []
        with contextlib.suppress(OperatorError):
            for taken in decisions(self._handle.controller, RunRef(RUN, self._handle.model)):
                found.append(_decided(from_json(Decision, taken.decision)))
        return tuple(found)

    def follow(self, pins: Sequence[Pin]) -> None:
        """Give the controller orders at their times, counted from now; call on one rank."""
        if pins and self._handle is not None:
            self._pinning = _Pinning(self._handle, pins)

    def close(self) -> None:
        """End everything that the method started on this rank."""
        if self._pinning is not None:
            self._pinning.close()
        if self._handle is not None:
            self._handle.close()


class _Pinning:
    """Pins options by the clock, as an operator who knows the network would."""

    def __init__(self, handle: Handle, pins: Sequence[Pin]) -> None:
        self._handle, self._pins = handle, pins
        self._begun = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tta-oracle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        with OperatorClient(self._handle.controller) as client:
            for pin in self._pins:
                if self._stop.wait(max(0.0, self._begun + pin.seconds - time.monotonic())):
                    return
                while not self._stop.is_set():
                    try:
                        client.pin(RUN, self._handle.model, pin.option)
                        break
                    except OperatorError:  # the run is known after its first report only
                        self._stop.wait(0.2)


def _decided(one: Decision) -> Decided:
    seen = Seen()
    if one.explanation_json:
        seen = from_json(Explanation, one.explanation_json).seen or seen
    beta = one.link.beta_seconds_per_byte if one.link is not None else 0.0
    return Decided(
        step=one.step,
        outcome=one.outcome,
        reason=one.reason,
        predicted_seconds=one.chosen.step_seconds if one.chosen is not None else 0.0,
        link_mbit=round(8e-6 / beta, 3) if beta > 0 else 0.0,
        link_ms=round(1e3 * one.link.alpha_seconds, 4) if one.link is not None else 0.0,
        slowest_rank=seen.slowest_rank,
        slowest_seconds=seen.slowest_seconds,
    )


def _register(ddp: DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, powerSGD_hook)
