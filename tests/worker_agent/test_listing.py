from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent import listing
from gradpilot.worker_agent.collectives.base import SCHEDULES, carriers
from gradpilot.worker_agent.compressors.base import COMPRESSORS, Compressor, create
from gradpilot.worker_agent.compressors.settings import choice, kept_fraction, real, whole


def by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in entries}


def test_every_registered_compressor_is_listed_once_in_order() -> None:
    assert [entry["name"] for entry in listing.compressors()] == list(COMPRESSORS.names())


def test_it_is_plain_data() -> None:
    for entries in (listing.compressors(), listing.collectives()):
        assert json.loads(json.dumps(entries, allow_nan=False)) == entries
        assert len({frozenset(entry) for entry in entries}) == 1, "entries differ in their keys"
        for entry in entries:
            assert entry["summary"], entry["name"]
            assert entry["source"], entry["name"]
            assert "\n" not in entry["summary"]


def test_a_listed_member_can_be_asked_for() -> None:
    # What is listed is enough to write the option.
    for entry in listing.compressors():
        kind = COMPRESSORS.get(entry["name"])
        for listed, member in zip(entry["ladder"], kind.ladder(), strict=True):
            settings = tuple(Setting(k, str(v)) for k, v in sorted(listed["settings"].items()))
            option = Option(
                entry["name"], listed["ratio"], member.collectives[0], settings=settings
            )
            assert create(option) == member
            assert listed["label"].split()[0].split("[")[0] == entry["name"]


@dataclass(frozen=True, kw_only=True)
class Odd(Compressor):
    """Has one of each.

    And more text.
    """

    name: ClassVar[str] = "odd"
    source: ClassVar[str] = "nowhere"
    estimator = "biased"
    exchange = "all_gather"
    needs_matrices: ClassVar[bool] = True

    ratio: float = kept_fraction(0.5)
    bits: int = whole(4, 2, 8)
    momentum: float = real(0.9, 0.0, 1.0, above=True)
    mode: str = choice("plain", "fancy")

    @classmethod
    def ladder(cls) -> tuple[Odd, ...]:
        return (cls(), cls(ratio=0.1, bits=3))

    def wire(self, n: int, shapes: object = (), ranks: int = 1) -> tuple[()]:
        return ()

    def rounds(self, grad: object, at: object) -> Any:
        raise NotImplementedError


@pytest.fixture
def odd() -> Iterator[dict[str, Any]]:
    COMPRESSORS.names()
    COMPRESSORS.register("odd")(Odd)
    try:
        yield by_name(listing.compressors())["odd"]
    finally:
        del COMPRESSORS._members["odd"]


def test_all_of_a_compressor_is_said(odd: dict[str, Any]) -> None:
    assert (odd["summary"], odd["source"]) == ("Has one of each.", "nowhere")
    assert odd["traits"] == {
        "estimator": "biased",
        "exchange": "all_gather",
        "collectives": list(carriers("all_gather")),
        "lossless": False,
        "single_round": False,
        "fixed_wire": True,
        "needs_matrices": True,
        "reduce_scatter": False,
        "calibrated": False,
    }
    ratio, bits, momentum, mode = odd["settings"]
    assert bits == {
        "name": "bits",
        "kind": "int",
        "default": 4,
        "low": 2,
        "high": 8,
        "above": False,
        "choices": [],
        "text": "a whole number in [2, 8]",
    }
    assert (ratio["name"], ratio["kind"], ratio["above"]) == ("ratio", "float", True)
    assert momentum["text"] == "a number in (0, 1]"
    assert (mode["kind"], mode["choices"]) == ("str", ["plain", "fancy"])
    assert (mode["low"], mode["high"]) == (None, None)
    assert odd["ladder"] == [
        {
            "label": "odd[4] 50% allgather",
            "ratio": 0.5,
            "settings": {"bits": 4, "momentum": 0.9, "mode": "plain"},
        },
        {
            "label": "odd[3] 10% allgather",
            "ratio": 0.1,
            "settings": {"bits": 3, "momentum": 0.9, "mode": "plain"},
        },
    ]


def test_schedules_come_first_then_what_the_backend_does() -> None:
    entries = listing.collectives()
    names = [entry["name"] for entry in entries]
    assert names[: len(SCHEDULES.names())] == list(SCHEDULES.names())
    assert {
        "native",
        "allgather",
        "alltoall",
        "hierarchical",
        "broadcast",
        "reduce_scatter",
    } <= set(names)
    assert len(set(names)) == len(names)
    ring = by_name(entries)["ring"]
    assert ring["most_skipped"] == {"2": 1, "4": 3, "8": 7}
    assert ring["steps"] == {"4": 6, "8": 14}  # 2 (N - 1)


def test_what_an_option_can_name_is_told_apart() -> None:
    named = {entry["name"] for entry in listing.collectives() if entry["option"]}
    exchanges = ("all_reduce", "all_gather", "all_to_all")
    assert named == {carrier for exchange in exchanges for carrier in carriers(exchange)}
    carried = {c for entry in listing.compressors() for c in entry["traits"]["collectives"]}
    assert carried <= named
