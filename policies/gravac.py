"""GraVAC: compress as much as the gain allows and throughput rewards, explored window by window.

Tyagi and Swany, *GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training*
(IEEE CLOUD 2023). Two compression factors (1 / ratio) are watched: theta_min, the floor, and
theta_s theta_min, the strong one. The strong one is sent while its gain is at least eps, else the
floor while its gain is, else everything. After every window theta_s grows; where the strong factor
loses next to nothing against the floor it becomes the floor. Compression throughput, samples per
second times gain, ends the search: once the best two factors are within omega of each other, the
milder is kept.

What is different here:

* The paper compresses twice in every iteration to know both gains. Here one compression is in use
  and both gains are read off the energy curve of the live error-corrected gradient, which costs
  nothing more and, for top-k, is the same number.
* The paper chooses per iteration. Here a choice holds for a decision interval; ``window`` takes the
  part of ``dwell_steps``, which holds as well.
* The batch size b is not known here, but N b is the same for all factors: throughput is gain per
  second of step time.
* The paper does not say what follows when theta_s cannot grow any more. Here the best measured
  throughput is kept (within omega of it the mildest). The code stops at the greatest factor.
* The code and the paper differ on ties: the code takes the smaller ratio, here the smaller factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.gain import usable_gain
from gradpilot.policies.host import Host
from gradpilot.policies.options import current_options
from gradpilot.policies.published import answer, link_and_host, recall, remember
from gradpilot.protos.messages import DENSE

NAME = "gravac"


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of the method.

    Attributes:
        eps: Least gain of what is sent compressed; the paper's are .7 and .9.
        window: Steps between two growths; the paper's are 500 and 2000.
        omega: Relative difference that counts as none.
        weakest: First theta_min.
        strongest: Greatest theta_s theta_min.
        growth: ``exponential`` (theta_s = 2, 4, 16, 256) or ``geometric`` (2, 4, 8, 16 ...).
        smoothing: A new gain counts N times this for every step since the last.
    """

    eps: float = 0.7
    window: int = 500
    omega: float = 0.01
    weakest: float = 10.0
    strongest: float = 1000.0
    growth: str = "exponential"
    smoothing: float = 0.01


PUBLISHED = Published()


@dataclass(frozen=True, slots=True)
class Throughput:
    """Newest compression throughput of a factor: gain per second of step time."""

    factor: float
    value: float


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered.

    Attributes:
        floor: theta_min.
        growths: How often theta_s has grown.
        window_step: First step of the present window.
        step: Step of the last look.
        gains: Smoothed gains of the floor and of the strong factor; empty if they just changed.
        measured: Throughput of every factor that was in use.
        settled: Factor at which the search ended; 0 while it goes on.
    """

    floor: float
    window_step: int
    step: int
    growths: int = 0
    gains: tuple[float, ...] = ()
    measured: tuple[Throughput, ...] = ()
    settled: float = 0.0


@POLICIES.register(NAME)
class GraVAC:
    """Strongest compression that keeps the gain, searched by gain times samples per second."""

    source: ClassVar[str] = "Tyagi and Swany, GraVAC, IEEE CLOUD 2023"
    grain: ClassVar[str] = "uniform"
    uses: ClassVar[tuple[str, ...]] = ("energy curve", "gain", "step seconds")

    def __init__(self, published: Published = PUBLISHED) -> None:
        self._constants = published

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome: strong, floor or dense by their gains now."""
        ready = link_and_host(inputs)
        if isinstance(ready, Outcome):
            return ready
        link, host = ready
        constants = self._constants
        state = recall(inputs, NAME, State)
        if state is None or inputs.step < state.step:
            state = State(_bounds(constants, host)[0], inputs.step, inputs.step)
        state = _look(constants, inputs, host, state)
        text = ""
        if not state.settled and inputs.step - state.window_step >= constants.window:
            state, text = _next_window(constants, host, state)
            state = _look(constants, inputs, host, state)
        factor, why = _choice(constants, host, state)
        option = DENSE if factor == 1 else host.option(1 / factor)
        options = (option,) * len(inputs.layout.buckets)
        text = f"{why}{text}. {_search_text(constants, inputs, host, state)}"
        return answer(inputs, options, text, link, remember(inputs, NAME, state))


def _bounds(constants: Published, host: Host) -> tuple[float, float]:
    """Return the weakest and the strongest factor that the catalog's ladder allows."""
    low = max(constants.weakest, 1 / host.highest)
    return low, max(low, min(constants.strongest, 1 / host.lowest))


def strong_factor(constants: Published, host: Host, state: State) -> float:
    """Return theta_s theta_min, or where the search ended."""
    if state.settled:
        return state.settled
    power = 1 << min(state.growths, 6) if constants.growth == "exponential" else state.growths + 1
    return min(math.ldexp(state.floor, min(power, 64)), _bounds(constants, host)[1])


def _look(constants: Published, inputs: Inputs, host: Host, state: State) -> State:
    """Return the state with the gains and the throughput of now."""
    now = [_gain(host, f) for f in (state.floor, strong_factor(constants, host, state))]
    elapsed = inputs.step - state.step
    weight = 1 - (1 - min(inputs.world_size * constants.smoothing, 1.0)) ** elapsed
    gains = tuple(
        old + weight * (new - old) for old, new in zip(state.gains or now, now, strict=True)
    )
    measured = {m.factor: m for m in state.measured}
    used = _in_use(inputs, host)
    if used is not None:
        measured[used.factor] = used
    points = tuple(measured[factor] for factor in sorted(measured))
    return replace(state, step=inputs.step, gains=gains, measured=points)


def _gain(host: Host, factor: float) -> float:
    """Return the gain of the whole gradient by the energy curve."""
    if factor <= 1:
        return 1.0
    return float(host.gain(np.array([1 / factor]))[0] @ host.weights)


def _in_use(inputs: Inputs, host: Host) -> Throughput | None:
    """Return the throughput of the factor in use; None of another method or without a time."""
    options = set(current_options(inputs))
    if len(options) != 1 or not 0 < inputs.step_seconds < math.inf:
        return None
    option = options.pop()
    if option == DENSE:
        return Throughput(1.0, 1 / inputs.step_seconds)
    if option != host.option(option.ratio) or not 0 < option.ratio <= 1:
        return None
    known = [usable_gain(b.gain) for b in inputs.buckets]
    if all(known):
        gain = float(np.array([b.gain for b in inputs.buckets]) @ host.weights)
    else:
        gain = _gain(host, 1 / option.ratio)
    # Rounded, so that a factor that went through a ratio and back is the same one.
    return Throughput(float(f"{1 / option.ratio:.6g}"), gain / inputs.step_seconds)


def _next_window(constants: Published, host: Host, state: State) -> tuple[State, str]:
    """Return the state of the next window, and what changed."""
    floor, strong = state.floor, strong_factor(constants, host, state)
    texts = []
    if abs(state.gains[0] - state.gains[1]) <= constants.omega * state.gains[0]:
        texts.append(f"floor raised from {floor:g}x to {strong:g}x, which loses nothing")
        floor = strong
    settled = _settled(constants, state.measured, exhausted=strong >= _bounds(constants, host)[1])
    if settled:
        texts.append(f"search ended at {settled:g}x")
    state = State(floor, state.step, state.step, state.growths + 1, (), state.measured, settled)
    return state, "".join(f"; {text}" for text in texts)


def _settled(constants: Published, measured: Sequence[Throughput], *, exhausted: bool) -> float:
    """Return the factor at which the search ends; 0 if it goes on."""
    best = sorted(measured, key=lambda m: -m.value)
    if not best:
        return 0.0
    near = [m.factor for m in best if best[0].value - m.value <= constants.omega * best[0].value]
    return min(near) if exhausted or len(near) > 1 else 0.0


def _choice(constants: Published, host: Host, state: State) -> tuple[float, str]:
    """Return the factor to send with, 1 for dense, and why."""
    floor, strong = state.floor, strong_factor(constants, host, state)
    low, high = state.gains
    if high >= constants.eps:
        return strong, f"gain {high:.3g} at {strong:g}x is at least {constants.eps:g}"
    if low >= constants.eps and floor < strong:
        why = f"gain {high:.3g} at {strong:g}x is below {constants.eps:g}, {low:.3g} at {floor:g}x"
        return floor, f"{why} is not"
    return 1.0, f"gain {min(low, high):.3g} at {min(floor, strong):g}x is below {constants.eps:g}"


def _search_text(constants: Published, inputs: Inputs, host: Host, state: State) -> str:
    points = ", ".join(f"{m.factor:g}x {m.value:.4g}" for m in state.measured) or "none yet"
    left = state.window_step + constants.window - inputs.step
    search = "search ended" if state.settled else f"next growth in {max(left, 0)} steps"
    strong = strong_factor(constants, host, state)
    return f"floor {state.floor:g}x, strong {strong:g}x, {search}; gain per second: {points}"
