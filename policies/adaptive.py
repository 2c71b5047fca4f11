"""The policy that follows the measurements: link, candidates, front, choice, guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies import accuracy, reasons
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.blacklist import covering, patience
from gradpilot.policies.bucket_advice import advise
from gradpilot.policies.choice import Choice, allowed, choose, improvement, safest
from gradpilot.policies.dwell import dwell
from gradpilot.policies.evaluation import Evaluation, Indices
from gradpilot.policies.guards import Verdict, judge, sane, undo
from gradpilot.policies.learning import next_history
from gradpilot.policies.probing import link_or_answer
from gradpilot.policies.problem import Space
from gradpilot.policies.protection import explain, look, refine
from gradpilot.policies.ranking import best
from gradpilot.policies.regime import total_gain
from gradpilot.policies.solver import per_bucket
from gradpilot.policies.trial import begin
from gradpilot.policies.watching import Watch, watch
from gradpilot.protos.explanations import Explanation
from gradpilot.protos.messages import LinkEstimate, Option

MOST_FRONT = 100
"""Points of a front that are stored; the rest is thinned evenly."""


@POLICIES.register("adaptive")
class Adaptive:
    """Least predicted time to accuracy from the job's own measurements."""

    source: ClassVar[str] = "this project; docs/architecture.md"
    grain: ClassVar[str] = "uniform, per bucket with per_bucket"
    uses: ClassVar[tuple[str, ...]] = ("link", "compute seconds", "compression seconds",
                                       "energy curve", "gain", "gradient norm", "wire bytes",
                                       "step seconds", "straggling",
                                       "residual norm", "non-finite steps", "loss",
                                       "learning rate")  # fmt: skip

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome; equal inputs give equal outcomes unless the solver's clock stops."""
        problem = sane(inputs)
        if problem:
            return Outcome("keep", f"kept: {problem}", link=inputs.link)
        with np.errstate(all="ignore"):  # impossible numbers end as NaN and are rejected
            return _decide(inputs)


def _decide(inputs: Inputs) -> Outcome:
    link = link_or_answer(inputs)
    if isinstance(link, Outcome):
        return link
    space = Space(inputs, link)
    if len(space) == 0:
        return Outcome("keep", "kept: the catalog has no usable family", link=link)

    present = space.present()
    watched = watch(inputs, space, link, present)
    settings, banned = watched.settings(inputs), watched.banned(space)
    evaluation = space.uniform()
    how = f"{len(evaluation.gain)} candidates"

    def fit(candidates: Evaluation) -> NDArray[np.bool_]:
        return allowed(candidates, settings, banned)

    if settings.per_bucket:
        evaluation, how = _mixed(inputs, space, evaluation, fit)
    choice = choose(evaluation, settings, banned)
    if choice is None:
        return Outcome("keep", "kept: no candidate has usable measurements", link=link)
    importance = look(inputs)
    if watched.cause:
        evaluation, choice, options = _retreat(inputs, space, evaluation, choice, watched, fit)
        verdict = undo(space.current_options, options, watched.reason)
    else:
        options = space.options(evaluation.rows[choice.index])
        options = refine(inputs, options, importance, watched.snr)
        verdict = _verdict(inputs, space, evaluation, choice, options, watched, link, present)
    chosen = space.candidate(evaluation, choice.index)
    taken = options if verdict.switch else ()
    in_force = present if space.current_options else None
    known = replace(inputs, history=watched.history)
    history = accuracy.next_errors(known, space.current_options, doubt=bool(watched.doubt))
    if not watched.doubt:
        known = replace(inputs, history=history)
        history = replace(
            next_history(known, space.gains, space.present_options, taken, link),
            importance=importance,
        )
        predicted = evaluation.step_seconds[choice.index] if taken else _seconds(in_force)
        wanted = taken or space.current_options
        history = accuracy.forecast(inputs, history, wanted, predicted, untried=bool(taken))
    sure = accuracy.interval(history.errors, taken or space.current_options, untried=bool(taken))
    if taken:
        on_trial = None
        if not watched.cause:
            args = (space.present_options, taken, present, evaluation, choice.index)
            on_trial = begin(replace(inputs, history=history), *args)
        history = replace(history, trial=on_trial)
    return Outcome(
        outcome="switch" if verdict.switch else "keep",
        reason=". ".join(
            [
                reasons.headline(verdict.switch, verdict.reason, chosen, choice),
                reasons.versus(space, present),
                *watched.notes,
                *explain(inputs, options, importance),
                *reasons.experience(inputs, space, chosen),
                *reasons.accuracy(sure, chosen if taken else None),
                reasons.network(inputs, link),
                *reasons.carriers(space, evaluation, choice),
                how,
            ]
        ),
        options=taken,
        chosen=chosen,
        current=space.candidate(in_force, 0) if in_force is not None else None,
        front=tuple(space.candidate(evaluation, int(i)) for i in _thin(choice)),
        link=inputs.link or link if watched.doubt else link,
        history=history,
        undone=watched.cause if verdict.switch else "",
        explanation=Explanation(
            best=best(space, evaluation, choice, settings, banned, present),
            interval=sure,
            advice=advise(space, evaluation.rows[choice.index]),
        ),
    )


def _seconds(evaluation: Evaluation | None) -> float:
    """Return the predicted step time of the only candidate; NaN if there is none."""
    return float(evaluation.step_seconds[0]) if evaluation is not None else float("nan")


def _verdict(
    inputs: Inputs,
    space: Space,
    evaluation: Evaluation,
    choice: Choice,
    options: tuple[Option, ...],
    watched: Watch,
    link: LinkEstimate,
    present: Evaluation | None,
) -> Verdict:
    """Return whether the choice replaces the plan in force."""
    saving, permitted, why = float("nan"), True, ""
    if present is not None and present.valid[0]:
        saving = improvement(evaluation, choice, present, inputs.settings)
        gain, credit = float(present.gain[0]), float(present.credit[0])
        own_floor = watched.least * gain / credit
        if total_gain(inputs) < 0 < watched.history.regime.gain:  # measured before, but not now
            credit *= watched.history.regime.gain / gain
        least = watched.least * (1 - inputs.settings.gain_band)
        permitted = bool(present.safe[0]) or credit >= least
        why = f"is below the gain floor of {own_floor:.3g}"
    elif present is not None and inputs.step_seconds > 0:  # it cannot be predicted, but measured
        cost = inputs.step_seconds / float(present.efficiency[0])
        saving = 1 - float(evaluation.cost[choice.index]) / cost
    if any(covering(watched.bans, option) for option in space.current_options):
        permitted, why = False, "is black-listed"
    needed = dwell(inputs, options, link)
    wait = patience(watched.bans, options, inputs)
    needed = needed._replace(steps=max(needed.steps, wait))
    return judge(
        inputs, space.current_options, options, saving, permitted, needed,
        why=why, doubt=watched.doubt,
    )  # fmt: skip


def _retreat(
    inputs: Inputs,
    space: Space,
    evaluation: Evaluation,
    choice: Choice,
    watched: Watch,
    fit: Callable[[Evaluation], NDArray[np.bool_]],
) -> tuple[Evaluation, Choice, tuple[Option, ...]]:
    """Return where to go from a plan that did harm: back, or to the best that sends everything."""
    if watched.back:
        numbers = [space.add(option) for option in watched.back]
        if None not in numbers:
            old = space.evaluate(np.array([numbers], dtype=np.intp))
            if fit(old)[0]:
                whole = evaluation.join(old)
                return whole, replace(choice, index=len(whole.gain) - 1, pays=True), watched.back
    best = safest(evaluation, watched.settings(inputs), watched.banned(space))
    if best is None:
        return evaluation, choice, space.current_options
    return (
        evaluation,
        replace(choice, index=best, pays=True),
        space.options(evaluation.rows[best]),
    )


def _mixed(
    inputs: Inputs,
    space: Space,
    uniform: Evaluation,
    fit: Callable[[Evaluation], NDArray[np.bool_]],
) -> tuple[Evaluation, str]:
    """Add candidates with different options per bucket group; the uniform ones if that fails."""
    groups = space.groups()
    alone = f"{len(uniform.gain)} candidates"
    if groups.max() == 0 or not uniform.valid.any():
        return uniform, alone
    try:
        mixed, how = per_bucket(space, uniform, groups, fit)
    except Exception as error:  # a broken solver must not cost the decision
        return (
            uniform,
            f"{alone}, uniform only: the solver failed ({type(error).__name__}: {error})",
        )
    return uniform.join(mixed), f"{alone} and {how}"


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
