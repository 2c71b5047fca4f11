"""Where the gradients of a unit lie, and that a residual follows its parameter."""

from __future__ import annotations

import torch

from gradpilot.worker_agent.error_feedback import ResidualStore
from gradpilot.worker_agent.sharded.slots import Columns, Unit


def test_parameters_are_columns_of_a_matrix_with_a_row_for_each_shard() -> None:
    unit = Unit("block", 4, lambda: (("w", 3), ("b", 1)))
    slot = unit.slot(2, torch.float32)
    assert slot.names == ("w#0", "b#0", "w#1", "b#1")
    assert slot.spans == ((0, 3), (3, 1), (4, 3), (7, 1))
    assert (slot.bucket.elements, slot.index, slot.bucket.dtype) == (8, 4, "float32")
    assert unit.slot(2, torch.float32) is slot
    assert unit.slot(1, torch.float32).names == ("w", "b")


def test_identity_depends_on_all_that_matters() -> None:
    keys = {
        unit.slot(n, dtype).key
        for unit in (Unit("a", 0, lambda: (("w", 3),)), Unit("b", 0, lambda: (("w", 3),)))
        for n in (2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 8


def test_a_residual_stays_with_its_parameter_when_another_one_is_frozen() -> None:
    columns: Columns = (("w", 2), ("b", 1))
    unit = Unit("block", 0, lambda: columns)
    store = ResidualStore()
    before = unit.slot(2, torch.float32)
    store.place(before)
    store.stage(before, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    store.commit()
    columns = (("b", 1),)
    after = unit.slot(2, torch.float32)
    store.place(after)
    assert store.corrected(after, torch.zeros(2)).tolist() == [3.0, 6.0]
    # What was frozen keeps its part, without that of the others.
    assert store.corrected(before, torch.zeros(6)).tolist() == [1.0, 2.0, 0.0, 4.0, 5.0, 0.0]
