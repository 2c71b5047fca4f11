"""What a torch whose FSDP2 cannot be managed is told."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gradpilot.errors import AttachError
from gradpilot.worker_agent.sharded import fsdp2, is_sharded


def test_an_older_torch_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(AttachError, match=r"has no set_custom_reduce_scatter.*needs torch 2\.9"):
        fsdp2.find_units(nn.Linear(2, 2))


def test_a_newer_torch_that_looks_different_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(nn.Module, FSDPModule):
        def _get_fsdp_state(self) -> object:  # type: ignore[override]
            return object()

    monkeypatch.setattr(FSDPModule, "__new__", object.__new__)
    with pytest.raises(AttachError, match="looks different from what gradpilot knows"):
        fsdp2.find_units(Changed())


def test_other_modules_are_not_sharded() -> None:
    assert not is_sharded(nn.Linear(2, 2))
