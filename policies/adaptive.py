"""The policy that follows the measurements: link, candidates, front, choice, guards."""

from __future__ import annotations

import numpy as np

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.choice import Choice, allowed, choose, improvement
from gradpilot.policies.evaluation import Evaluation, Indices
from gradpilot.policies.guards import judge, sane
from gradpilot.policies.link import changed_operations, fit_link, wide_enough
from gradpilot.policies.problem import Space
from gradpilot.policies.solver import per_bucket
from gradpilot.protos.messages import DENSE, Candidate, LinkEstimate

PROBE_BYTES = (4 << 10, 1 << 20)

MOST_FRONT = 100
"""Points of a front that are stored; the rest is thinned evenly."""


@POLICIES.register("adaptive")
class Adaptive:
    """Least predicted time to accuracy from the job's own measurements."""

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome; equal inputs give equal outcomes unless the solver's clock stops."""
        problem = sane(inputs)
        if problem:
            return Outcome("keep", f"kept: {problem}", link=inputs.link)
        with np.errstate(all="ignore"):  # impossible numbers end as NaN and are rejected
            return _decide(inputs)


def _decide(inputs: Inputs) -> Outcome:
    args = (inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    link = fit_link(*args)
    if link is None:
        return Outcome("keep", "kept: no collective has been timed yet", link=inputs.link)
    if not link.separable and not wide_enough(*args):
        small, large = _probe_sizes(inputs)
        return Outcome(
            "probe",
            f"{link.samples} collectives cannot tell latency from bandwidth:"
            f" probing {small} and {large} bytes",
            link=link,
            probe_bytes=(small, large),
        )
    space = Space(inputs, link)
    if len(space) == 0:
        return Outcome("keep", "kept: the catalog has no usable family", link=link)

    current = space.current()  # first, so that the plan in force is a candidate, too
    evaluation = space.uniform()
    how = f"{len(evaluation.gain)} candidates"
    if inputs.settings.per_bucket:
        evaluation, how = _mixed(inputs, space, evaluation)
    choice = choose(evaluation, inputs.settings)
    if choice is None:
        return Outcome("keep", "kept: no candidate has usable measurements", link=link)

    options = space.options(evaluation.rows[choice.index])
    reference = current
    if reference is None and not space.current_options:
        reference = _dense(space)
    saving, permitted = float("nan"), True
    if reference is not None and reference.valid[0]:
        saving = improvement(evaluation, choice, reference, inputs.settings)
        permitted = bool(allowed(reference, inputs.settings)[0])
    verdict = judge(inputs, space.current_options, options, saving, permitted)
    chosen = space.candidate(evaluation, choice.index)
    return Outcome(
        outcome="switch" if verdict.switch else "keep",
        reason=". ".join(
            [
                _headline(verdict.switch, verdict.reason, chosen, choice),
                *_versus(space, reference),
                _link_text(inputs, link),
                *_carrier_text(space, evaluation, choice),
                how,
            ]
        ),
        options=options if verdict.switch else (),
        chosen=chosen,
        current=space.candidate(current, 0) if current is not None else None,
        front=tuple(space.candidate(evaluation, int(i)) for i in _thin(choice)),
        link=link,
    )


def _mixed(inputs: Inputs, space: Space, uniform: Evaluation) -> tuple[Evaluation, str]:
    """Add candidates with different options per bucket group; the uniform ones if that fails."""
    groups = space.groups()
    alone = f"{len(uniform.gain)} candidates"
    if groups.max() == 0 or not uniform.valid.any():
        return uniform, alone
    try:
        mixed, how = per_bucket(space, uniform, groups, lambda e: allowed(e, inputs.settings))
    except Exception as error:  # a broken solver must not cost the decision
        return (
            uniform,
            f"{alone}, uniform only: the solver failed ({type(error).__name__}: {error})",
        )
    return uniform.join(mixed), f"{alone} and {how}"


def _dense(space: Space) -> Evaluation | None:
    number = space.add(DENSE)
    if number is None:
        return None
    return space.evaluate(np.full((1, len(space.inputs.layout.buckets)), number, dtype=np.intp))


def _probe_sizes(inputs: Inputs) -> tuple[int, int]:
    """Return a small and a large payload; the large one no larger than the gradient itself."""
    small, large = PROBE_BYTES
    large = max(64, min(large, 4 * inputs.layout.elements))
    return max(4, min(small, large // 16)), large


def _thin(choice: Choice) -> Indices:
    """Return at most MOST_FRONT points of the front, evenly, the choice among them if it is."""
    front = choice.front
    if len(front) <= MOST_FRONT:
        return front
    picks = np.unique(np.linspace(0, len(front) - 1, MOST_FRONT - 1).round().astype(np.intp))
    kept = set(front[picks].tolist())
    if choice.index in front:
        kept.add(choice.index)
    return np.array(sorted(kept), dtype=np.intp)


# --- reasons -----------------------------------------------------------------------------------


def _name(candidate: Candidate) -> str:
    return " + ".join(dict.fromkeys(option.label for option in candidate.options))


def _predicted(candidate: Candidate) -> str:
    cost = candidate.step_seconds / candidate.efficiency
    return (
        f"{_seconds(candidate.step_seconds)} a step at efficiency {candidate.efficiency:.2f},"
        f" {_seconds(cost)} per dense step's worth"
    )


def _headline(switch: bool, why: str, chosen: Candidate, choice: Choice) -> str:
    verb = "switch to" if switch else "kept; best is"
    nothing = "" if choice.pays else "; no compression pays"
    return f"{verb} {_name(chosen)} ({why}{nothing}): {_predicted(chosen)}"


def _versus(space: Space, reference: Evaluation | None) -> list[str]:
    if reference is None:
        return []
    old = space.candidate(reference, 0)
    word = "in force" if space.current_options else "without a plan"
    return [f"{word}: {_name(old)}, {_predicted(old)}"]


def _link_text(inputs: Inputs, link: LinkEstimate) -> str:
    beta = link.beta_seconds_per_byte
    rate = f"{8e-9 / beta:.3g} Gbit/s" if beta > 0 else "no bandwidth limit seen"
    text = f"link {1e3 * link.alpha_seconds:.3g} ms, {rate} from {link.samples} collectives"
    old = changed_operations(inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    return text + (f" ({old} from before it changed)" if old else "")


def _carrier_text(space: Space, evaluation: Evaluation, choice: Choice) -> list[str]:
    """Explain all-gather against all-reduce: the chosen one and its nearest rival of the other."""
    table = space.table
    assert table is not None
    row = evaluation.rows[choice.index]
    own = int(row[0])
    if not (row == own).all() or table.ratio[own] == 1:
        return []
    heads = np.array([space.gathers(h) for h in range(len(space.heads))])
    gathers = bool(heads[table.head[own]])
    whole = np.array([head.skip == 0 for head in space.heads])
    rivals = np.flatnonzero((heads[table.head] != gathers) & whole[table.head] & (table.ratio < 1))
    if len(rivals) == 0:
        return []
    away = np.abs(np.log(table.ratio[rivals] / table.ratio[own]))
    rivals = rivals[away <= away.min() + 1e-9]
    wire = (table.latency + table.transfer).sum(axis=1)
    rival = int(rivals[int(np.nan_to_num(wire[rivals], nan=np.inf).argmin())])
    kinds = ("all-gather", "all-reduce") if gathers else ("all-reduce", "all-gather")
    return [
        f"on the wire {kinds[0]} {_seconds(wire[own])},"
        f" {kinds[1]} {_seconds(wire[rival])} ({space.option(rival).label})"
    ]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
