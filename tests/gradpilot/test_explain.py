from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradpilot.explain import as_json, headline, lines
from gradpilot.protos.explanations import (
    BANNED,
    BELOW_FLOOR,
    CHOSEN,
    IN_FORCE,
    BucketAdvice,
    Explanation,
    Interval,
    Ranked,
    Seen,
    Since,
)
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import BF16, DENSE, Candidate, Decision, LinkEstimate, Option


def candidate(option: Option, step: float, efficiency: float = 1.0, gain: float = 1.0) -> Candidate:
    return Candidate((option,), 1 - efficiency, 0.01, 0.1, gain, efficiency, step, option.ratio)


TOPK = candidate(Option("topk", 0.01, "allgather"), 0.12, 0.8, 0.5)
NOW = candidate(BF16, 0.2)
BEST = (
    Ranked(candidate(Option("topk", 0.001, "allgather"), 0.08, 0.7, 0.2), (BELOW_FLOOR,)),
    Ranked(candidate(Option("thc", 1.0, "native"), 0.1), (BANNED,)),
    Ranked(TOPK, (CHOSEN,)),
    Ranked(NOW, (IN_FORCE,)),
    Ranked(candidate(DENSE, 0.4)),
)
SEEN = Seen(8, 200, 0.21, 0.05, 0.012, 3, 0.008, 0.62, 0.7, 3.2)
TOLD = Explanation(
    SEEN,
    BEST,
    Interval(0.95, 1.1, 0.9, 19, "plans before their first use"),
    (BucketAdvice(1.0, 90, 0.11), BucketAdvice(25.0, 4, 0.13)),
)
SINCE = Since(
    12, "bf16 native", 0.21, 1.0, 0.12, 0.8, 1460, 1859, (0.125, 0.13, 0.121), 0.48
)  # fmt: skip


def decision(
    told: Explanation | None = TOLD, since: Since | None = SINCE, **fields: object
) -> Decision:
    values = {
        "link": LinkEstimate(1e-3, 8e-8, 3e-5, 1.6e-9, 240, 3.0),
        "current": NOW,
        "chosen": TOPK,
        "front": (TOPK, NOW),
        "inputs_json": '{"step":1}',
        **fields,
    }
    made = Decision(
        "run", "model", 1, 12, 1450, 0.0, "adaptive", "switch", "saves 25 %. link 1 ms. 69 seen"
    )
    return replace(
        made,
        explanation_json=to_json(told) if told is not None else "",
        since_json=to_json(since) if since is not None else "",
        **values,  # type: ignore[arg-type]
    )


def text(of: Decision) -> str:
    return "\n".join(lines(of))


def row(of: Decision, label: str) -> str:
    (found,) = (line for line in lines(of) if f" {label} " in line and " ms " in line[44:])
    return found


def test_it_reads_as_an_operator_wants() -> None:
    shown = text(decision())
    parts = [line for line in shown.split("\n") if line.endswith(":") and line[0] != " "]
    assert parts == [
        "measured:",
        "predicted (* in force after this decision):",
        "why:",
        "since then:",
        "advice on DDP's bucket size:",
    ]
    assert shown.startswith(headline(decision()))
    assert "1970-01-01 00:00:00 UTC: switch (adaptive)" in shown
    for figure in (
        "1 ms +/- 30 us one way, 0.1 Gbit/s +/- 2 %; 240 collectives, the newest 3 s old",
        "210 ms, of it 50 ms compute; 8 ranks, 200 steps",
        "12 ms a step for slower ranks; slowest is rank 3, 8 ms behind the first",
        "gain 0.620, signal-to-noise 0.7, residual 3.2 times the gradient",
        "0.950 to 1.100 times the predicted step time, 114 ms to 132 ms"
        " (90 % by 19 looks at plans before their first use)",
        "front: 2 points",
        "in force; 400 steps under it, 1460 to 1859",
        "measured 125 ms a step, median of 3 looks; predicted 120 ms, so +4.2 %",
        "before it bf16 native took 210 ms a step: 1.68 times as fast; 1.34 times as fast in"
        " progress",
        "gain 0.480 as measured",
        "1 MB    90 buckets     110 ms   -8.3 %",
    ):
        assert figure in shown, figure
    assert [line for line in shown.split("\n") if line in ("  saves 25 %", "  69 seen")]


def test_every_candidate_has_its_figures_and_marks() -> None:
    of = decision()
    cells = row(of, "topk 1% allgather").split()
    assert cells == ["*", "topk", "1%", "allgather", "120", "ms", "0.800", "150", "ms", "0.500",
                     "0.01", "chosen"]  # fmt: skip
    assert row(of, "topk 0.1% allgather").endswith("below the floor")
    assert row(of, "thc native").endswith("black-listed")
    assert row(of, "bf16 native").endswith("in force")
    order = [line.split()[0] for line in lines(of) if " ms " in line[44:60]]
    assert order == ["topk", "thc", "*", "bf16", "none"]


def test_after_a_keep_the_plan_in_force_has_the_star() -> None:
    of = replace(decision(since=replace(SINCE, id=9)), outcome="keep")
    assert row(of, "bf16 native").lstrip().startswith("*")
    assert not row(of, "topk 1% allgather").lstrip().startswith("*")
    assert "the plan in force is that of decision 9" in text(of)
    assert "190 ms to 220 ms" in text(of)  # what is expected of bf16, which stays


@pytest.mark.parametrize(
    ("since", "shown"),
    [
        (replace(SINCE, end="undone", cause="cost", ended_by=15), "undone by decision 15 (cost)"),
        (replace(SINCE, end="replaced", ended_by=14), "replaced by decision 14"),
        (Since(12), "no rank has reported under the plan"),
        (replace(SINCE, measured=(0.42,)), "2.00 times as slow"),
        (replace(SINCE, measured=()), "in force; 400 steps"),
    ],
    ids=["undone", "replaced", "not taken", "slower", "no look"],
)
def test_what_came_of_it(since: Since, shown: str) -> None:
    assert shown in text(decision(since=since))


def test_unknown_figures_are_left_out() -> None:
    nan = float("nan")
    bare = Since(12, first_step=1, last_step=9, measured=(0.1,))
    assert "nan" not in text(decision(since=bare))
    unknown = replace(SINCE, predicted_seconds=nan, before_efficiency=nan, gain=-1.0)
    shown = text(decision(Explanation(Seen()), unknown, link=None))
    assert "nan" not in shown
    assert "link      not known" in shown
    assert "slowest" not in shown
    assert "signal-to-noise" not in shown


def test_a_link_that_cannot_be_separated_says_so() -> None:
    shown = text(decision(link=LinkEstimate(1e-3, 0.0, separable=False)))
    assert "latency and bandwidth cannot be told apart" in shown
    assert "no limit of bandwidth seen" in shown


def test_a_policy_without_explanation_shows_its_front() -> None:
    of = decision(None, None)
    assert row(of, "topk 1% allgather").endswith("chosen")
    assert "since then" not in text(of)
    assert "advice" not in text(of)
    nothing = replace(decision(None, None), front=(), chosen=None, link=None)
    assert "predicted" not in text(nothing)
    assert "saves 25 %" in text(nothing)


def test_json_has_it_all_in_one_object() -> None:
    found = json.loads(as_json(decision()))
    assert found["explanation"]["best"][2]["marks"] == [CHOSEN]
    assert found["explanation"]["seen"]["slowest_rank"] == 3
    assert found["since"]["measured"] == [0.125, 0.13, 0.121]
    assert found["inputs_json"] == '{"step":1}'
    assert found["chosen"]["options"][0]["compressor"] == "topk"
    assert not {"explanation_json", "since_json"} & set(found)
    assert json.loads(as_json(decision(None, None)))["explanation"] is None


def test_what_another_version_wrote_is_not_read_wrongly() -> None:
    odd = replace(decision(), explanation_json='{"best":[1]}', since_json='{"id":"x"}')
    assert "since then" not in text(odd)
    assert row(odd, "topk 1% allgather")
    assert json.loads(as_json(odd))["since"] is None


def test_figures_of_since() -> None:
    assert SINCE.steps == 400
    assert SINCE.measured_seconds == 0.125
    assert Since(1).steps == 0
