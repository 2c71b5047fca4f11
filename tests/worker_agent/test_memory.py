from __future__ import annotations

import io

import torch

from gradpilot.protos.messages import DENSE, Option, Setting
from gradpilot.worker_agent.memory import MemoryStore, owner_of

OWNER = owner_of(Option("powersgd", settings=(Setting("rank", "4"),)))


def held(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"q": torch.full((3, 2), value)}


def stored(*buckets: str) -> MemoryStore:
    store = MemoryStore()
    for bucket in buckets:
        store.stage(bucket, OWNER, held())
    store.commit()
    return store


def test_a_memory_takes_effect_on_commit_only() -> None:
    store = MemoryStore()
    memory = held()
    store.stage("b", OWNER, memory)
    assert not store
    assert not store.recall("b", OWNER)
    store.commit()
    assert store
    assert store.recall("b", OWNER) is memory


def test_a_step_that_fails_leaves_the_memory_of_the_step_before() -> None:
    store = stored("b")
    before = store.recall("b", OWNER)
    store.stage("b", OWNER, held(2.0))
    store.discard()
    store.commit()
    assert store.recall("b", OWNER) is before


def test_only_its_owner_reads_a_memory() -> None:
    store = stored("b")
    assert not store.recall("b", owner_of(DENSE))
    assert not store.recall("b", owner_of(Option("powersgd", settings=(Setting("rank", "2"),))))
    assert not store.recall("c", OWNER)


def test_another_ratio_is_the_same_owner() -> None:
    assert owner_of(Option("dgc", 0.1)) == owner_of(Option("dgc", 0.01))


def test_a_compressor_without_memory_frees_that_of_the_one_before() -> None:
    store = stored("b", "c")
    assert store.elements == 12
    store.stage("b", owner_of(DENSE), {})
    store.commit()
    assert store.elements == 6
    assert not store.recall("b", OWNER)


def test_buckets_that_are_no_more_are_dropped() -> None:
    store = stored("b", "c")
    store.keep_only(["c"])
    assert not store.recall("b", OWNER)
    assert store.recall("c", OWNER)


def test_state_goes_through_a_file_and_owns_its_tensors() -> None:
    store = stored("b")
    file = io.BytesIO()
    state = store.state_dict()
    torch.save(state, file)
    file.seek(0)
    loaded = MemoryStore()
    loaded.stage("x", OWNER, held())
    loaded.load_state_dict(torch.load(file, weights_only=True))
    store.recall("b", OWNER)["q"].zero_()
    assert loaded.recall("b", OWNER)["q"].tolist() == held()["q"].tolist()
    loaded.commit()
    assert not loaded.recall("x", OWNER), "what was staged before belongs to no step any more"
