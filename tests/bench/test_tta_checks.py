"""What every row verifies: it must see a rank that drifts and a share that is lost."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.tta import checks
from bench.tta.checks import Checker
from bench.tta.methods import METHODS
from bench.tta.records import Check, Pin, RankRecord, Settings, read_settings, write_settings
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.protos.option_text import parse_option


class _Ranks:
    """Two ranks in one process, with a residual each, and an exchange that may be wrong."""

    def __init__(self, kept: float, lost: float = 0.0) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
        self.models = [model, copy.deepcopy(model)]
        self.held: list[dict[str, torch.Tensor]] = [{}, {}]
        self._kept, self._lost = kept, lost

    def step(self, number: int) -> list[Check]:
        checkers, losses = [], []
        for rank, model in enumerate(self.models):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            checkers.append(Checker(model, lambda rank=rank: self.held[rank], number))  # type: ignore[misc]
            checkers[-1].before(model(x).square().mean())
            losses.append(model(x).square().mean())
        sent = []
        for rank, (model, loss) in enumerate(zip(self.models, losses, strict=True)):
            model.zero_grad()
            loss.backward()
            own = {}
            for name, p in model.named_parameters():
                assert p.grad is not None
                corrected = p.grad + self.held[rank].get(name, torch.zeros(p.shape)).view(p.shape)
                self.held[rank][name] = (self._kept * corrected).flatten()
                own[name] = (1 - self._kept) * corrected
            sent.append(own)
        for model in self.models:
            for name, p in model.named_parameters():
                p.grad = (1 - self._lost) * (sent[0][name] + sent[1][name]) / 2
        found = [checker.after(checks.TOLERANCE) for checker in checkers]
        for model in self.models:
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.1)
        return found


def _records(*found: list[Check]) -> list[RankRecord]:
    return [RankRecord(rank, 0.0, (), (), (), (), tuple(own)) for rank, own in enumerate(found)]


@pytest.mark.parametrize("kept", [0.0, 0.7])
def test_sums_add_up_if_what_is_held_back_is_sent_later(kept: float) -> None:
    ranks = _Ranks(kept)
    steps = [ranks.step(number) for number in range(3)]
    records = _records(*(list(own) for own in zip(*steps, strict=True)))
    assert checks.conserved(records) == (3, 3)
    assert checks.in_sync(records) == (3, 3)


def test_a_share_that_is_lost_is_seen() -> None:
    ranks = _Ranks(0.5, lost=0.05)
    steps = [ranks.step(number) for number in range(3)]
    records = _records(*(list(own) for own in zip(*steps, strict=True)))
    assert checks.conserved(records)[0] < 3


def test_a_rank_that_drifts_is_seen_and_dropping_plans_are_not_judged() -> None:
    equal = Check(1, "a", 1.0, 1.0, 1.0, -1.0)
    drifted = Check(2, "b", 1.0, 1.0, 1.0, -1.0)
    records = _records([equal, Check(2, "a", 1.0, 1.0, 1.0, -1.0)], [equal, drifted])
    assert checks.in_sync(records) == (1, 2)
    assert checks.conserved(records) == (0, 0)
    skip = Option(collective="ring", skip=2)
    assert checks.tolerance_of((BF16, skip)) < 0
    assert checks.tolerance_of((BF16, DENSE)) == checks.SIXTEEN_BIT
    assert checks.tolerance_of((METHODS["topkc"].start(4),)) == checks.SIXTEEN_BIT
    assert checks.tolerance_of((parse_option("randomk ratio=0.1 estimate=unbiased"),)) < 0
    assert checks.tolerance_of((METHODS["topk"].start(4),)) == checks.TOLERANCE


def test_settings_survive_the_file(tmp_path: Path) -> None:
    wanted = Settings("cnn", "oracle", 1, 60, "10.77.0.1:1", 0.0, 9.0, (Pin(1.5, BF16),), (DENSE,))
    write_settings(tmp_path, wanted)
    assert read_settings(tmp_path) == wanted
