"""How long a decision takes, and how good a search is where it can be checked."""

from __future__ import annotations

from bench.report.results import Result
from bench.report.section import Section, from_verdicts

TEXT = """
To build the space of {candidates} candidates takes {build} ms, to evaluate, filter and choose
among them {choose} ms; NSGA-II with polishing for {buckets} buckets in {groups} groups {nsga} ms,
each bucket alone {alone} ms. With half a thousand candidates per group the solve takes {solve} ms
at the 95th percentile; the whole decision, link and guards included, {decision} ms.

While the policy process decides, the controller's event loop wakes at most {late} ms late (median
of the worst wakes {late_median} ms), where it wakes up to {calm} ms late without a decision on
this machine.

On spaces small enough to enumerate, NSGA-II alone, from random points and without the seeds and
the final polish that a decision gives it, has at least {volume} of the exact front's hypervolume
and finds {found} of its points, {over_random} times as many as equally many random points, at
least; what is chosen from it costs at most {cost} times the exact choice. Spaces of up to 100,000
candidates are enumerated, so this concerns different options per bucket group only.

{targets}
"""

STEEP = (
    "met before efficiencies were measured anew: with steeper exponents and a gain floor few"
    " candidates may be chosen, and they lie in a corner of the space"
)


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""

    def milliseconds(what: str, field: str = "median_ms", digits: int = 1) -> str:
        return f"{result.row(what=what)[field]:.{digits}f}"

    def judged(pattern: str) -> float:
        return float(result.verdict(pattern)["measured"])

    uniform = result.row(what="exact uniform: evaluate, filter, choose")
    groups = result.row(what="NSGA-II and polish, 20 buckets in groups")
    hard = "20 buckets in groups, half a thousand candidates"
    during, without = (
        f"event loop, latest wake {when} a decision" for when in ("during", "without")
    )
    return {
        "candidates": f"{uniform['candidates']:,}",
        "buckets": f"{uniform['buckets']}",
        "groups": f"{groups['groups']}",
        "build": milliseconds("exact uniform: build the space"),
        "choose": f"{uniform['median_ms']:.1f}",
        "nsga": f"{groups['median_ms']:.0f}",
        "alone": milliseconds("NSGA-II and polish, 20 buckets each alone", digits=0),
        "solve": milliseconds(f"solve, {hard}", "p95_ms", 0),
        "decision": milliseconds(f"whole decision, {hard}", "p95_ms", 0),
        "late": milliseconds(during, "max_ms"),
        "late_median": milliseconds(during),
        "calm": milliseconds(without, "max_ms"),
        "volume": f"{judged('^hypervolume'):.2f}",
        "found": f"{100 * judged('^share of the exact'):.0f} %",
        "over_random": f"{judged('^that share over'):.1f}",
        "cost": f"{judged('^cost of NSGA'):.2f}",
    }


SECTION = Section(
    position=60,
    title="How long a decision takes",
    result="solver",
    text=TEXT,
    places=places,
    given={"100,000": "setting of the solver"},
    reasons={
        "event loop": "much of it is the machine's own, as the wakes without a decision show",
        "hypervolume|share of the exact|cost of NSGA": STEEP,
    },
    headlines=from_verdicts("^event loop blocked"),
)
