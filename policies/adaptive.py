"""The policy that follows the measurements: link, candidates, front, choice, guards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.choice import Choice, allowed, choose, improvement
from gradpilot.policies.correction import freshness
from gradpilot.policies.dwell import dwell
from gradpilot.policies.evaluation import Evaluation, Indices
from gradpilot.policies.guards import judge, sane
from gradpilot.policies.history import ratio_bucket
from gradpilot.policies.learning import next_history
from gradpilot.policies.link import changed_operations, fit_link, wide_enough
from gradpilot.policies.problem import Space
from gradpilot.policies.protection import explain, look, refine, snr, warm_up
from gradpilot.policies.solver import per_bucket
from gradpilot.protos.messages import Candidate, LinkEstimate

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

    present = space.present()
    evaluation = space.uniform()
    how = f"{len(evaluation.gain)} candidates"
    if inputs.settings.per_bucket:
        evaluation, how = _mixed(inputs, space, evaluation)
    choice = choose(evaluation, inputs.settings)
    if choice is None:
        return Outcome("keep", "kept: no candidate has usable measurements", link=link)

    importance, ratio = look(inputs), snr(inputs, space.present_options)
    options = refine(inputs, space.options(evaluation.rows[choice.index]), importance, ratio)
    saving, permitted = float("nan"), True
    if present is not None and present.valid[0]:
        saving = improvement(evaluation, choice, present, inputs.settings)
        permitted = bool(allowed(present, inputs.settings)[0])
    needed = dwell(inputs, options, link)
    verdict = judge(inputs, space.current_options, options, saving, permitted, needed)
    chosen = space.candidate(evaluation, choice.index)
    taken = options if verdict.switch else ()
    in_force = present if space.current_options else None
    return Outcome(
        outcome="switch" if verdict.switch else "keep",
        reason=". ".join(
            [
                _headline(verdict.switch, verdict.reason, chosen, choice),
                _versus(space, present),
                *explain(inputs, options, importance),
                *_memory_text(inputs, space, chosen),
                _link_text(inputs, link),
                *_carrier_text(space, evaluation, choice),
                how,
            ]
        ),
        options=taken,
        chosen=chosen,
        current=space.candidate(in_force, 0) if in_force is not None else None,
        front=tuple(space.candidate(evaluation, int(i)) for i in _thin(choice)),
        link=link,
        history=replace(
            next_history(inputs, space.gains, space.present_options, taken, link),
            importance=importance,
            warmth=warm_up(inputs, ratio),
            snr=ratio,
        ),
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


def _versus(space: Space, present: Evaluation | None) -> str:
    word = "in force" if space.current_options else "without a plan"
    if not space.present_options:
        return f"{word}: not known, the agents did not say what they started with"
    if present is None:
        names = " + ".join(o.label for o in dict.fromkeys(space.present_options))
        return f"{word}: {names}, which the catalog does not have"
    old = space.candidate(present, 0)
    return f"{word}: {_name(old)}, {_predicted(old)}"


def _memory_text(inputs: Inputs, space: Space, chosen: Candidate) -> list[str]:
    """Tell which earlier experience went into the gain of what is not in use."""
    texts = []
    for option in dict.fromkeys(chosen.options):
        for record in inputs.history.gains:
            same = (record.compressor, record.settings) == option.family
            if not same or ratio_bucket(record.ratio) != ratio_bucket(option.ratio):
                continue
            if option not in space.present_options and freshness(record, inputs.step) > 0:
                texts.append(
                    f"gain of {option.label} was {record.factor:.2f} of the predicted one"
                    f" {inputs.step - record.step} steps ago"
                )
    return texts


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
