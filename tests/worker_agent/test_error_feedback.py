from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.worker_agent.buckets import BucketTable, Slot
from gradpilot.worker_agent.error_feedback import ResidualStore
from tests.worker_agent.buckets import fake_bucket, named


def _slots(
    table: BucketTable, parameters: dict[str, torch.Tensor], order: Sequence[Sequence[int]]
) -> list[Slot]:
    """Lay the parameters out in buckets of these indices."""
    p = list(parameters.values())
    slots = [table.identify(fake_bucket([p[i] for i in group], b)) for b, group in enumerate(order)]
    table.end_step()
    return slots


def _by_name(store: ResidualStore) -> dict[str, list[float]]:
    return {name: part.tolist() for name, part in store.state_dict().items()}


def _one_bucket(n: int = 8) -> tuple[ResidualStore, Slot]:
    parameters = named([n])
    (slot,) = _slots(BucketTable(parameters.items()), parameters, [[0]])
    store = ResidualStore()
    store.place(slot)
    return store, slot


def test_corrected_is_gradient_plus_residual_and_leaves_the_gradient_alone() -> None:
    store, slot = _one_bucket()
    grad = torch.arange(8.0)
    corrected = store.corrected(slot, grad)
    assert torch.equal(corrected, grad)
    corrected[:4] = 0.0
    store.stage(slot, corrected)
    store.commit()
    again = store.corrected(slot, grad)
    assert torch.equal(again, grad + torch.tensor([0, 0, 0, 0, 4.0, 5, 6, 7]))
    assert torch.equal(grad, torch.arange(8.0))


def test_a_discarded_step_leaves_the_residual_as_it_was() -> None:
    store, slot = _one_bucket()
    store.stage(slot, store.corrected(slot, torch.ones(8)))
    store.commit()
    before = _by_name(store)
    poisoned = store.corrected(slot, torch.full((8,), float("nan")))
    store.stage(slot, poisoned)
    store.discard()
    assert _by_name(store) == before
    assert torch.equal(store.corrected(slot, torch.zeros(8)), torch.ones(8))


def test_going_dense_sends_the_residual_once_and_frees_it() -> None:
    store, slot = _one_bucket()
    store.stage(slot, store.corrected(slot, torch.ones(8)))
    store.commit()
    grad = torch.zeros(8)
    store.add_to_(slot, grad)
    assert torch.equal(grad, torch.ones(8))
    store.stage(slot, None)
    store.commit()
    assert slot not in store
    assert store.elements == 0
    store.add_to_(slot, grad)
    assert torch.equal(grad, torch.ones(8))


def test_the_steady_state_allocates_nothing() -> None:
    store, slot = _one_bucket()
    buffers = set()
    for _ in range(6):
        corrected = store.corrected(slot, torch.ones(8))
        buffers.add(corrected.data_ptr())
        store.stage(slot, corrected)
        store.commit()
    assert len(buffers) == 2
    assert store.elements == 16


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Draw parameter sizes and a few ways to lay them out in buckets."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    orders = []
    for _ in range(3):
        order = draw(st.permutations(range(len(sizes))))
        cuts = draw(st.sets(st.integers(1, len(sizes)), max_size=3))
        bounds = [0, *sorted(c for c in cuts if c < len(sizes)), len(sizes)]
        orders.append([list(order[a:b]) for a, b in itertools.pairwise(bounds)])
    return sizes, orders


@given(layouts(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=60)
def test_residuals_follow_their_parameters_through_any_change_of_layout(
    drawn: tuple[list[int], list[list[list[int]]]], seed: int
) -> None:
    sizes, orders = drawn
    parameters = named(sizes)
    table = BucketTable(parameters.items())
    store = ResidualStore()
    generator = torch.Generator().manual_seed(seed)
    expected = {name: torch.zeros(p.numel()) for name, p in parameters.items()}
    for order in orders:
        for slot in _slots(table, parameters, order):
            store.place(slot)
            grad = torch.randn(slot.bucket.elements, generator=generator)
            store.stage(slot, store.corrected(slot, grad))  # nothing is ever sent
            for name, (start, length) in zip(slot.names, slot.spans, strict=True):
                expected[name] += grad[start : start + length]
        store.commit()
        store.keep_only(table.slots)
    assert _by_name(store) == {name: value.tolist() for name, value in expected.items()}
    assert store.resets == 0


def test_a_parameter_that_leaves_the_layout_is_counted() -> None:
    parameters = named([3, 4])
    table = BucketTable(parameters.items())
    store = ResidualStore()
    for slot in _slots(table, parameters, [[0], [1]]):
        store.place(slot)
        store.stage(slot, store.corrected(slot, torch.ones(slot.bucket.elements)))
    store.commit()
    (slot,) = _slots(table, parameters, [[1]])
    store.place(slot)
    store.keep_only(table.slots)
    assert store.resets == 1
    assert _by_name(store) == {"p1": [1.0] * 4}


def test_the_state_survives_a_checkpoint_bit_for_bit_in_another_layout() -> None:
    parameters = named([3, 4])
    table = BucketTable(parameters.items())
    store = ResidualStore()
    generator = torch.Generator().manual_seed(1)
    for slot in _slots(table, parameters, [[0, 1]]):
        store.place(slot)
        grad = torch.randn(slot.bucket.elements, generator=generator)
        store.stage(slot, store.corrected(slot, grad))
    store.commit()
    file = io.BytesIO()
    torch.save(store.state_dict(), file)
    file.seek(0)

    resumed = ResidualStore()
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert _by_name(resumed) == _by_name(store), "also before any bucket is placed"
    for slot in _slots(BucketTable(parameters.items()), parameters, [[1], [0]]):
        resumed.place(slot)
    assert _by_name(resumed) == _by_name(store)


def test_rescaling_follows_a_loss_scale_within_the_range_of_the_dtype() -> None:
    store, slot = _one_bucket(2)
    store.stage(slot, torch.tensor([6e4, 1.0], dtype=torch.float16))
    store.commit()
    store.rescale(2.0)
    corrected = store.corrected(slot, torch.zeros(2, dtype=torch.float16))
    assert corrected.tolist() == [65504.0, 2.0]


def test_a_step_is_taken_back_for_the_parameters_that_nobody_used() -> None:
    parameters = named([2, 3])
    (slot,) = _slots(BucketTable(parameters.items()), parameters, [[0, 1]])
    store = ResidualStore(revocable=True)
    store.place(slot)

    def step(residual: list[float] | None) -> None:
        store.stage(slot, None if residual is None else torch.tensor(residual))
        store.commit()
        assert store.pending

    step([1.0, 2, 3, 4, 5])
    store.take_back({"p1"})  # nothing was left of p1 before
    assert _by_name(store) == {"p0": [1.0, 2], "p1": [0.0, 0, 0]}
    step([9.0, 8, 7, 6, 5])
    store.take_back(set())
    step([0.5, 0.5, 0.5, 0.5, 0.5])
    store.take_back({"p0"})
    assert _by_name(store) == {"p0": [9.0, 8], "p1": [0.5, 0.5, 0.5]}
    assert not store.pending
    step(None)  # all was sent
    assert slot not in store
    store.take_back({"p1"})
    assert _by_name(store) == {"p0": [0.0, 0], "p1": [0.5, 0.5, 0.5]}
    step(None)
    store.take_back(set())
    assert slot not in store
    assert store.elements == 0
