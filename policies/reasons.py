"""What a decision says about itself to people, with the numbers that decided."""

from __future__ import annotations

import numpy as np

from gradpilot.policies.base import Inputs
from gradpilot.policies.choice import Choice
from gradpilot.policies.correction import freshness
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.history import ratio_bucket
from gradpilot.policies.link import changed_operations
from gradpilot.policies.probing import link_text
from gradpilot.policies.problem import Space
from gradpilot.protos.explanations import Interval
from gradpilot.protos.messages import Candidate, LinkEstimate


def _name(candidate: Candidate) -> str:
    return " + ".join(dict.fromkeys(option.label for option in candidate.options))


def _predicted(candidate: Candidate) -> str:
    cost = candidate.step_seconds / candidate.efficiency
    return (
        f"{_seconds(candidate.step_seconds)} a step at efficiency {candidate.efficiency:.2f},"
        f" {_seconds(cost)} per dense step's worth"
    )


def headline(switch: bool, why: str, chosen: Candidate, choice: Choice) -> str:
    """Tell what is done and why.

    Args:
        switch: Whether the plan is replaced.
        why: Verdict of the guards.
        chosen: The best candidate.
        choice: How it was chosen.
    """
    verb = "switch to" if switch else "kept; best is"
    nothing = "" if choice.pays else "; no compression pays"
    return f"{verb} {_name(chosen)} ({why}{nothing}): {_predicted(chosen)}"


def versus(space: Space, present: Evaluation | None) -> str:
    """Tell what the choice is compared with: the plan in force, or what the ranks started with.

    Args:
        space: Options and models.
        present: Prediction for it; None if an option of it is unknown.
    """
    word = "in force" if space.current_options else "without a plan"
    if not space.present_options:
        return f"{word}: not known, the agents did not say what they started with"
    if present is None:
        names = " + ".join(o.label for o in dict.fromkeys(space.present_options))
        return f"{word}: {names}, which the catalog does not have"
    old = space.candidate(present, 0)
    return f"{word}: {_name(old)}, {_predicted(old)}"


def experience(inputs: Inputs, space: Space, chosen: Candidate) -> list[str]:
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


def accuracy(sure: Interval | None, chosen: Candidate | None) -> list[str]:
    """Tell where the step time is to be expected, by how earlier predictions turned out.

    Args:
        sure: Interval of measured / predicted; None if too little is known.
        chosen: What is switched to; None if the plan is kept.
    """
    if sure is None:
        return []
    looks = f"{100 * sure.share:.0f} % of {sure.looks} looks at {sure.of}"
    if chosen is None:
        return [
            f"measured step times were {sure.low:.3f} to {sure.high:.3f} of predicted ({looks})"
        ]
    low, high = (_seconds(chosen.step_seconds * edge) for edge in (sure.low, sure.high))
    return [f"expect {low} to {high} a step ({looks})"]


def network(inputs: Inputs, link: LinkEstimate) -> str:
    """Tell what the link is like, and whether it changed."""
    old = changed_operations(inputs.operations, inputs.world_size, inputs.backend, inputs.link)
    return link_text(link) + (f" ({old} from before it changed)" if old else "")


def carriers(space: Space, evaluation: Evaluation, choice: Choice) -> list[str]:
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
