"""Flexible Communication: one ratio for all, all-gather or AR-Topk, solved when the link changes.

Tyagi and Swany, *Flexible Communication for Optimal Distributed Learning over Unpredictable
Networks* (IEEE BigData 2023). The method has one variable, the ratio c in [0.001, 0.1]. It measures
what survives at five candidates, takes the cheapest of three ways to send (top-k by all-gather,
AR-Topk by ring or by tree), and a knee between time and 1 / gain.

Where the paper and the authors' code (ARTopk) differ, and what is done here:

* Objectives. Paper: compression time, synchronisation time, 1 / gain. Code: without compression
  time, and only the code has weights, .6 for time and .4 for 1 / gain. Here: the code's two with
  its weights, and the paper's compression time added to the time, since top-k is not free.
* Solver. Both: NSGA-II over the one variable. Here: a grid over the same range; the two knees lie
  within a tenth of each other (tested), and the grid needs no seed.
* Time. Paper: the affine models. Code: an exponential fitted to the five candidates, far too much
  at small ratios. Here: the affine models. A message is a bucket here, so the rules see the mean
  bucket; with one bucket they are the published ones. The link is measured, not scheduled.
* Gain. Both: ten training steps per candidate from a checkpoint. Here: the energy curve of the live
  gradient at the same five ratios, in squared norms (paper; the code takes roots), for both
  compressors that of top-k: AR-Topk's published gain is the top-k of its source.
* When. Paper: a search whenever the link has changed by more than a threshold it does not name
  (here ``dwell.LINK_FACTOR``), gains measured again when their smoothed change reaches 10 %. Code:
  nothing is solved before the first change, and new gains wait for the next. Here: solved at the
  first look, and at once with new gains. Gains are compared under one plan only, or every switch
  would be a change.
* Warm-up. Only the code has one, over five epochs. Epochs are not known here; there is none.
* As in both, dense is no candidate: the method never gives up compression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.cost import SPARSE, cheapest_sparse, coefficients
from gradpilot.policies.dwell import link_changed
from gradpilot.policies.front import non_dominated, weighted_values
from gradpilot.policies.gain import SMALLEST, usable_gain
from gradpilot.policies.guards import sane
from gradpilot.policies.history import Departure
from gradpilot.policies.host import Host, find_host
from gradpilot.policies.probing import link_or_answer, link_text
from gradpilot.policies.published import answer, recall, remember, unmeasured
from gradpilot.protos.messages import LinkEstimate

Floats = NDArray[np.float64]

NAME = "flexible"


@dataclass(frozen=True, slots=True)
class Published:
    """Constants of the method.

    Attributes:
        candidates: Ratios at which gain is measured; the ends bound the search.
        weights: Of time and of 1 / gain in the choice of the knee (code).
        gain_change: Relative change of the smoothed gain from which gains are measured again.
        smoothing: Weight of a new gain in the moving average: 2 / (window + 1) of the code's window
            of five. Its factor of .01 is for every step, we look once a decision.
        grid: Points of the search.
    """

    candidates: tuple[float, ...] = (0.001, 0.004, 0.011, 0.033, 0.1)
    weights: tuple[float, float] = (0.6, 0.4)
    gain_change: float = 0.10
    smoothing: float = 1 / 3
    grid: int = 401


PUBLISHED = Published()


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered.

    Attributes:
        ratio: Ratio of the last solution.
        form: Its way to send, a key of ``cost.SPARSE``.
        alpha_seconds: Link it was found for.
        beta_seconds_per_byte: Link it was found for.
        gains: Gain at every candidate when last measured.
        plan: Plan under which ``gain`` was measured, "term.id".
        gain: Smoothed gain measured in the job under that plan; -1 if not yet.
    """

    ratio: float
    form: str
    alpha_seconds: float
    beta_seconds_per_byte: float
    gains: tuple[float, ...]
    plan: str = ""
    gain: float = -1.0


@POLICIES.register(NAME)
class Flexible:
    """Knee between step time and 1 / gain over one ratio, by all-gather or AR-Topk."""

    source: ClassVar[str] = "Tyagi and Swany, Flexible Communication, IEEE BigData 2023"
    grain: ClassVar[str] = "uniform"
    uses: ClassVar[tuple[str, ...]] = ("link", "energy curve", "compression seconds", "gain")

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome; the knee is searched when the link or the gain has changed."""
        problem = sane(inputs) or unmeasured(inputs)
        if problem:
            return Outcome("keep", f"kept: {problem}", link=inputs.link)
        link = link_or_answer(inputs)
        if isinstance(link, Outcome):
            return link
        forms = ways(inputs, link)
        if not forms:
            return Outcome("keep", "kept: the agents have neither topk nor artopk[star]", link=link)
        before = recall(inputs, NAME, State)
        plan, gain, moved = _watched(inputs, before)
        why = _reason_to_solve(inputs, link, before, moved)
        if before is None or why or before.form not in forms:
            gains = before.gains if before is not None and not moved else _measure(forms)
            solved = solve(inputs, link, forms, gains)
            if solved is None:
                return Outcome("keep", "kept: no ratio has a finite time and gain", link=link)
            ratio, form, how = solved
            state = State(
                ratio, form, link.alpha_seconds, link.beta_seconds_per_byte, gains, plan, gain
            )
            text = f"solved because {why or 'a way to send is gone'}: {how}"
        else:
            known = (before.alpha_seconds, before.beta_seconds_per_byte, before.gains)
            state = State(before.ratio, before.form, *known, plan, gain)
            text = "not solved again, neither link nor gain changed enough"
        options = (forms[state.form].option(state.ratio),) * len(inputs.layout.buckets)
        text = f"{text}. {link_text(link)}"
        return answer(inputs, options, text, link, remember(inputs, NAME, state))


def ways(inputs: Inputs, link: LinkEstimate) -> Mapping[str, Host]:
    """Return the ways to send that the agents have and the operator allows, by key of SPARSE.

    The paper's ring is the backend's. On gloo that announces every message first and our own ring
    does not, so the cheaper of the two stands for it.
    """
    rings = sorted(
        ("native", "ring"),
        key=lambda name: _alphas(inputs, "all_reduce" if name == "native" else name),
    )
    hosts = {
        "all_gather": find_host(inputs, "topk", ("allgather",)),
        "art_ring": find_host(inputs, "artopk", rings, "star"),
        "art_tree": find_host(inputs, "artopk", ("tree",), "star"),
    }
    return {form: host for form, host in hosts.items() if host is not None}


def sparse_form(
    n: int, alpha: float, beta: float, value_bytes: float, able: Mapping[str, object]
) -> str:
    """Return the way to send: the paper's switch rules, or the least time of what is able."""
    best = cheapest_sparse(n, alpha, beta, value_bytes)
    if best in able:
        return best
    return min(able, key=lambda form: SPARSE[form](n).seconds(alpha, beta, value_bytes))


def solve(
    inputs: Inputs, link: LinkEstimate, forms: Mapping[str, Host], gains: tuple[float, ...]
) -> tuple[float, str, str] | None:
    """Return ratio, way to send and an explanation of the knee; None if nothing is finite.

    Args:
        inputs: What is known.
        link: Latency and bandwidth.
        forms: Ways to send.
        gains: Gain at every candidate.
    """
    candidates = np.array(PUBLISHED.candidates)
    ratios = np.geomspace(candidates[0], candidates[-1], PUBLISHED.grid)
    ratios = np.unique([float(f"{ratio:.3g}") for ratio in ratios])
    n, buckets = inputs.world_size, len(inputs.layout.buckets)
    alpha, beta = link.alpha_seconds, link.beta_seconds_per_byte
    message = 4.0 * inputs.layout.elements / buckets
    chosen = [sparse_form(n, alpha, beta, message * c, forms) for c in ratios]
    wire = np.array(
        [
            buckets * SPARSE[form](n).seconds(alpha, beta, message * c)
            for form, c in zip(chosen, ratios, strict=True)
        ]
    )
    codec = {form: forms[form].codec_seconds(ratios).sum(axis=1) for form in forms}
    timed = all(np.isfinite(seconds).all() for seconds in codec.values())
    work = np.array([codec[form][i] if timed else 0.0 for i, form in enumerate(chosen)])
    gain = np.interp(np.log(ratios), np.log(candidates), np.maximum.accumulate(gains))
    objectives = np.stack([wire + work, 1 / gain], axis=1)
    front = non_dominated(objectives)
    if not len(front):
        return None
    values = weighted_values(objectives[front], PUBLISHED.weights)
    at = int(front[int(values.argmin())])
    others = ", ".join(
        f"{form} {1e3 * buckets * SPARSE[form](n).seconds(alpha, beta, message * ratios[at]):.3g}"
        for form in forms
    )
    x = alpha / (message * ratios[at] * beta) if beta > 0 else float("inf")
    text = (
        f"knee at ratio {ratios[at]:.3g} of {ratios[0]:g} to {ratios[-1]:g}, gain {gain[at]:.3g},"
        f" on the wire {1e3 * wire[at]:.3g} ms, "
        + (f"compression {1e3 * work[at]:.3g} ms" if timed else "compression not timed, left out")
        + f"; ways to send in ms: {others} (latency is {x:.3g} times the push of a message)"
    )
    return float(ratios[at]), chosen[at], text


def _measure(forms: Mapping[str, Host]) -> tuple[float, ...]:
    """Return the gain of the whole gradient at every candidate, as top-k has it."""
    host = forms.get("all_gather") or next(iter(forms.values()))
    gains = host.gain(np.array(PUBLISHED.candidates)) @ host.weights
    gains = np.clip(gains / max(host.family.gain_factor, SMALLEST), SMALLEST, 1.0)
    return tuple(float(gain) for gain in gains)


def _watched(inputs: Inputs, before: State | None) -> tuple[str, float, float]:
    """Return the plan in force, the smoothed gain under it, and its change if that is enough."""
    plan = f"{inputs.current.term}.{inputs.current.id}" if inputs.current is not None else ""
    known = [b.gain for b in inputs.buckets if usable_gain(b.gain)]
    old = before.gain if before is not None and before.plan == plan else -1.0
    if len(known) < len(inputs.buckets):
        return plan, old, 0.0
    energies = np.array([b.gradient_sq for b in inputs.buckets])
    shares = (
        energies / energies.sum() if energies.sum() > 0 else np.full(len(known), 1 / len(known))
    )
    now = float(np.array(known) @ shares)
    if old <= 0:
        return plan, now, 0.0
    smooth = old + PUBLISHED.smoothing * (now - old)
    change = abs(smooth - old) / old
    return plan, smooth, change if change >= PUBLISHED.gain_change else 0.0


def _reason_to_solve(inputs: Inputs, link: LinkEstimate, before: State | None, moved: float) -> str:
    if before is None:
        return "nothing was solved yet"
    solved = Departure((), (), inputs.step, before.alpha_seconds, before.beta_seconds_per_byte)
    if link_changed(solved, link, inputs):
        old = 8e-9 / before.beta_seconds_per_byte if before.beta_seconds_per_byte > 0 else 0.0
        return f"the link changed from {1e3 * before.alpha_seconds:.3g} ms, {old:.3g} Gbit/s"
    return f"the gain moved by {100 * moved:.0f} %" if moved else ""


def _alphas(inputs: Inputs, collective: str) -> float:
    return coefficients(collective, inputs.world_size, 0, inputs.backend)[0]
