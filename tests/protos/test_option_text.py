from __future__ import annotations

import pytest

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.protos.option_text import parse_option


def test_an_option_is_read_from_words() -> None:
    assert parse_option("topk ratio=0.01, collective=allgather  selection=star,b=2") == Option(
        "topk",
        0.01,
        "allgather",
        settings=(Setting("b", "2"), Setting("selection", "star")),
    )
    assert parse_option("none collective=ring skip=2 skip_feedback=true") == Option(
        collective="ring", skip=2, skip_feedback=True
    )


@pytest.mark.parametrize(
    "text",
    ["", ",", "ratio=0.1", "topk 0.1", "topk ratio=x", "topk ratio=2", "topk skip_feedback=yes"],
)
def test_an_option_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_option(text)
