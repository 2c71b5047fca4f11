"""A decision for people: what was measured and predicted, why, and what came of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from gradpilot.errors import ProtocolError
from gradpilot.protos.explanations import (
    CHOSEN,
    IN_FORCE,
    Explanation,
    Interval,
    Ranked,
    Seen,
    Since,
)
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import Candidate, Decision, LinkEstimate

T = TypeVar("T")

MOST_OF_FRONT = 5
"""Points of the front that are shown where the policy ranks nothing itself."""

ROW = "  {:1} {:40} {:>10} {:>10} {:>10} {:>6} {:>7}  {}"
TABLE = ("", "OPTION", "STEP", "EFFICIENCY", "COST", "GAIN", "WIRE", "")


def headline(decision: Decision) -> str:
    """Return when and by whom it was taken, and how it ended."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(decision.created))
    return (
        f"decision {decision.id} of term {decision.term} at step {decision.step}, {when} UTC:"
        f" {decision.outcome} ({decision.policy})"
    )


def as_json(decision: Decision) -> str:
    """Return the decision as JSON, what is nested in it as text taken apart.

    ``inputs_json`` stays a text: it is long, and what takes it reads it as one.
    """
    told, since = _told(decision), _since(decision)
    plain = json.loads(to_json(replace(decision, explanation_json="", since_json="")))
    for name, value in (("explanation", told), ("since", since)):
        del plain[f"{name}_json"]
        plain[name] = json.loads(to_json(value)) if value is not None else None
    return json.dumps(plain)


def lines(decision: Decision) -> Iterator[str]:
    """Yield the explanation line by line."""
    told, since = _told(decision) or Explanation(), _since(decision)
    yield headline(decision)
    yield from _section("measured", [*_link(decision.link), *_seen(told.seen)])
    yield from _section("predicted (* in force after this decision)", _best(decision, told))
    yield from _section("why", [f"  {part}" for part in decision.reason.split(". ")])
    yield from _section("since then", _after(since, decision))
    yield from _section("advice on DDP's bucket size", _advice(decision, told))


def _section(title: str, body: Sequence[str]) -> Iterator[str]:
    if body:
        yield ""
        yield f"{title}:"
        yield from body


# --- measured -------------------------------------------------------------------------------------


def _link(link: LinkEstimate | None) -> list[str]:
    if link is None:
        return ["  link      not known"]
    alpha, beta = link.alpha_seconds, link.beta_seconds_per_byte
    rate = "no limit of bandwidth seen"
    if beta > 0:
        rate = f"{8e-9 / beta:.3g} Gbit/s +/- {100 * link.beta_error / beta:.2g} %"
    tell = "" if link.separable else "; latency and bandwidth cannot be told apart"
    return [
        f"  link      {_seconds(alpha)} +/- {_seconds(link.alpha_error)} one way, {rate};"
        f" {link.samples} collectives, the newest {link.age_seconds:.0f} s old{tell}"
    ]


def _seen(seen: Seen | None) -> list[str]:
    if seen is None:
        return []
    told = []
    if seen.step_seconds > 0:
        told.append(
            f"  step      {_seconds(seen.step_seconds)}, of it {_seconds(seen.compute_seconds)}"
            f" compute; {seen.ranks} ranks, {seen.steps} steps since the last switch"
        )
    waiting = f"{_seconds(seen.straggle_seconds)} a step for slower ranks"
    if seen.slowest_rank >= 0:
        waiting += (
            f"; slowest is rank {seen.slowest_rank}, {_seconds(seen.slowest_seconds)} behind the"
            " first at a collective"
        )
    told.append(f"  waiting   {waiting}")
    figures = []
    if seen.gain >= 0:
        figures.append(f"gain {seen.gain:.3f}")
    if seen.snr >= 0:
        figures.append(f"signal-to-noise {seen.snr:.3g}")
    if seen.residual_ratio >= 0:
        figures.append(f"residual {seen.residual_ratio:.3g} times the gradient (squared norms)")
    return [*told, f"  gradient  {', '.join(figures)}"] if figures else told


# --- predicted ------------------------------------------------------------------------------------


def _best(decision: Decision, told: Explanation) -> list[str]:
    best = told.best
    if not best:
        order = sorted(decision.front, key=_cost)[:MOST_OF_FRONT]
        chosen = decision.chosen.options if decision.chosen is not None else None
        best = tuple(Ranked(c, (CHOSEN,) if c.options == chosen else ()) for c in order)
    if not best:
        return []
    taken = CHOSEN if decision.outcome == "switch" else IN_FORCE
    table = [ROW.format(*TABLE).rstrip()]
    for one in best:
        star = "*" if taken in one.marks else ""
        table.append(ROW.format(star, *_cells(one.candidate), ", ".join(one.marks)).rstrip())
    table.append("  cost: step time / efficiency, the time of a dense step's worth of progress")
    if told.interval is not None:
        after = decision.chosen if decision.outcome == "switch" else decision.current
        table.append(_interval(told.interval, after))
    if decision.front:
        table.append(f"  front: {len(decision.front)} points, listed by --output json")
    return table


def _cells(candidate: Candidate) -> tuple[str, ...]:
    labels = list(dict.fromkeys(option.label for option in candidate.options))
    return (
        " | ".join(labels),
        _seconds(candidate.step_seconds),
        f"{candidate.efficiency:.3f}",
        _seconds(_cost(candidate)),
        f"{candidate.gain:.3f}",
        f"{candidate.wire_ratio:.2g}",
    )


def _interval(sure: Interval, candidate: Candidate | None) -> str:
    text = f"  expected: {sure.low:.3f} to {sure.high:.3f} times the predicted step time"
    if candidate is not None:
        low, high = (candidate.step_seconds * edge for edge in (sure.low, sure.high))
        text += f", {_seconds(low)} to {_seconds(high)}"
    return f"{text} ({100 * sure.share:.0f} % by {sure.looks} looks at {sure.of})"


def _cost(candidate: Candidate) -> float:
    return candidate.step_seconds / candidate.efficiency if candidate.efficiency else math.inf


# --- since then -----------------------------------------------------------------------------------


def _after(since: Since | None, decision: Decision) -> list[str]:
    if since is None:
        return []
    told = []
    if since.id != decision.id:
        told.append(f"  the plan in force is that of decision {since.id}")
    if since.first_step < 0:
        return [*told, "  no rank has reported under the plan: not taken yet, or turned down"]
    ends = {
        "": "in force",
        "replaced": f"replaced by decision {since.ended_by}",
        "undone": f"undone by decision {since.ended_by} ({since.cause})",
    }
    told.append(
        f"  {ends.get(since.end, since.end)}; {since.steps} steps under it,"
        f" {since.first_step} to {since.last_step}"
    )
    measured = since.measured_seconds
    if not measured > 0:
        return told
    text = f"  measured {_seconds(measured)} a step, median of {len(since.measured)} looks"
    if since.predicted_seconds > 0:
        off = 100 * (measured / since.predicted_seconds - 1)
        text += f"; predicted {_seconds(since.predicted_seconds)}, so {off:+.1f} %"
    told.append(text)
    told += _won(since, measured)
    if since.gain >= 0:
        told.append(f"  gain {since.gain:.3f} as measured")
    return told


def _won(since: Since, measured: float) -> list[str]:
    """Tell the difference to the plan before, in step time and in progress."""
    if not since.before_seconds > 0:
        return []
    steps = since.before_seconds / measured
    text = (
        f"  before it {since.before or 'unknown'} took {_seconds(since.before_seconds)} a step:"
        f" {_factor(steps)}"
    )
    progress = steps * since.predicted_efficiency / since.before_efficiency
    if progress > 0:
        text += f"; {_factor(progress)} in progress, at the efficiencies predicted"
    return [text]


def _factor(factor: float) -> str:
    return f"{factor:.2f} times as fast" if factor >= 1 else f"{1 / factor:.2f} times as slow"


# --- advice ---------------------------------------------------------------------------------------


def _advice(decision: Decision, told: Explanation) -> list[str]:
    if not told.advice or decision.chosen is None:
        return []
    now = decision.chosen.step_seconds
    told_ = [
        f"  under {' | '.join(dict.fromkeys(o.label for o in decision.chosen.options))}, which is"
        f" predicted to take {_seconds(now)} with the buckets as they are:"
    ]
    for one in told.advice:
        change = f"{100 * (one.step_seconds / now - 1):+.1f} %" if now > 0 else ""
        told_.append(
            f"  {one.megabytes:4g} MB {one.buckets:>5} buckets {_seconds(one.step_seconds):>10}"
            f" {change:>8}"
        )
    return told_


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 or value <= 0 else f"{1e6 * value:.3g} us"


def _told(decision: Decision) -> Explanation | None:
    return _read(Explanation, decision.explanation_json)


def _since(decision: Decision) -> Since | None:
    return _read(Since, decision.since_json)


def _read(kind: type[T], text: str) -> T | None:
    """Return what a text holds; None if it is empty or of a version that we cannot read."""
    try:
        return from_json(kind, text) if text else None
    except ProtocolError:
        return None
