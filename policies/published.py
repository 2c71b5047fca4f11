"""What the policies after published methods have in common.

Each steers a compressor that its paper is about, so these policies do name compressors; where the
agents do not have one they say so and keep the plan. Nothing here is a paper's idea: measurements
must be usable, a plan stays ``dwell_steps`` (no paper has such a bound, but it is the operator's,
and protects the run whatever decides), and the prediction shown with an answer is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from gradpilot.errors import ProtocolError
from gradpilot.policies.base import BucketState, Inputs, Outcome
from gradpilot.policies.guards import sane
from gradpilot.policies.history import History
from gradpilot.policies.host import Host, find_host
from gradpilot.policies.link import fit_link
from gradpilot.policies.options import current_options
from gradpilot.policies.problem import Space
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import ENERGY_RATIOS, Candidate, LinkEstimate, Option

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note:
    """What ``History.own`` holds: whose state of which layout, and that as JSON."""

    policy: str
    layout: str
    state: str


def recall(inputs: Inputs, policy: str, state: type[T]) -> T | None:
    """Return what the last decision remembered; None from another policy, layout or version."""
    try:
        note = from_json(Note, inputs.history.own)
        if (note.policy, note.layout) != (policy, inputs.layout.digest):
            return None
        return from_json(state, note.state)
    except ProtocolError:
        return None


def remember(inputs: Inputs, policy: str, state: Any) -> History:
    """Return the history for the next decision with this state (a dataclass) as our own."""
    note = Note(policy, inputs.layout.digest, to_json(state))
    return replace(inputs.history, own=to_json(note))


def link_and_host(
    inputs: Inputs, *, energy: bool = True
) -> tuple[LinkEstimate | None, Host] | Outcome:
    """Return the link, None if nothing was timed, and top-k; or why the plan has to stay.

    Args:
        inputs: What is known.
        energy: Whether energy curves are needed.
    """
    problem = sane(inputs) or unmeasured(inputs, energy=energy)
    if problem:
        return Outcome("keep", f"kept: {problem}", link=inputs.link)
    link = fit_link(inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    host = find_host(inputs, "topk", ("allgather",))
    if host is None:
        return Outcome("keep", "kept: the agents have no topk by allgather", link=link)
    return link, host


def unmeasured(inputs: Inputs, *, energy: bool = True) -> str:
    """Return what is missing of the gradients of some bucket; empty if all are measured.

    Args:
        inputs: What is known.
        energy: Whether energy curves are needed beside the squared norms.
    """
    for bucket, state in zip(inputs.layout.buckets, inputs.buckets, strict=True):
        if not 0 <= state.gradient_sq < math.inf:
            return f"bucket {bucket.index} has no usable gradient norm yet ({state.gradient_sq:g})"
        if energy and not _usable_curve(state):
            return f"bucket {bucket.index} has no usable energy curve yet"
    return ""


def _usable_curve(state: BucketState) -> bool:
    curve = state.energy
    return len(curve) == len(ENERGY_RATIOS) and all(0 <= e < math.inf for e in curve)


def answer(
    inputs: Inputs,
    options: Sequence[Option],
    why: str,
    link: LinkEstimate | None,
    history: History | None = None,
) -> Outcome:
    """Return the outcome for the options wanted: a switch unless in force or too early.

    Args:
        inputs: What is known.
        options: Option per bucket, in layout order.
        why: What decided, with its numbers.
        link: The link now; None if unknown, then nothing is predicted.
        history: What the next decision should know.
    """
    wanted, current = tuple(options), current_options(inputs)
    needed = inputs.settings.dwell_steps
    switch = False
    if wanted == current:
        head = f"kept {labels(wanted)}, in force"
    elif current and inputs.steps_since_switch < needed:
        lasted = f"only {inputs.steps_since_switch} of {needed} steps since the last switch"
        head = f"kept; wanted is {labels(wanted)} ({lasted})"
    else:
        switch = True
        head = f"switch to {labels(wanted)}" + ("" if current else " (first plan)")
    chosen, present = _predict(inputs, link, wanted, current)
    return Outcome(
        outcome="switch" if switch else "keep",
        reason=f"{head}. {why}",
        options=wanted if switch else (),
        chosen=chosen,
        current=present,
        link=link if link is not None else inputs.link,
        history=history,
    )


def labels(options: Sequence[Option], most: int = 4) -> str:
    """Return the distinct options, in layout order, shortened for people."""
    distinct = list(dict.fromkeys(option.label for option in options))
    more = f" + {len(distinct) - most} more" if len(distinct) > most else ""
    return " + ".join(distinct[:most]) + more


@np.errstate(all="ignore")
def _predict(
    inputs: Inputs,
    link: LinkEstimate | None,
    wanted: tuple[Option, ...],
    current: tuple[Option, ...],
) -> tuple[Candidate | None, Candidate | None]:
    """Return the predictions of both plans; None of what is not in the catalog or was not timed."""
    if link is None:
        return None, None
    # Options off the grid are added one by one, so the grid may be small.
    space = Space(replace(inputs, settings=replace(inputs.settings, ratios=2)), link)

    def candidate(options: tuple[Option, ...]) -> Candidate | None:
        numbers = {option: space.add(option) for option in dict.fromkeys(options)}
        row = [k for k in (numbers[option] for option in options) if k is not None]
        if not row or len(row) < len(options):
            return None
        evaluation = space.evaluate(np.array([row], dtype=np.intp))
        return space.candidate(evaluation, 0) if evaluation.valid[0] else None

    return candidate(wanted), candidate(current)
