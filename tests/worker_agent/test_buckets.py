from __future__ import annotations

import torch

from gradpilot.worker_agent.buckets import BucketTable
from tests.worker_agent.buckets import fake_bucket, named


def test_the_slot_tells_names_spans_and_shapes() -> None:
    parameters = {"w": torch.zeros(3, 4), "b": torch.zeros(4)}
    table = BucketTable(parameters.items())
    slot = table.identify(fake_bucket([parameters["b"], parameters["w"]]))
    assert slot.names == ("b", "w")
    assert slot.spans == ((0, 4), (4, 12))
    assert slot.shapes == (torch.Size([4]), torch.Size([3, 4]))
    assert (slot.bucket.elements, slot.bucket.dtype, slot.bucket.parameters) == (16, "float32", 2)


def test_identity_is_made_of_parameters_not_of_the_index() -> None:
    parameters = named([5, 6, 7])
    p = list(parameters.values())
    table = BucketTable(parameters.items())
    first = table.identify(fake_bucket([p[0], p[1]], index=0))
    again = table.identify(fake_bucket([p[0], p[1]], index=3))
    other = table.identify(fake_bucket([p[1], p[0]], index=0))
    assert first.key == again.key
    assert first.key != other.key


def test_a_changed_layout_is_noticed_at_the_end_of_its_step() -> None:
    parameters = named([5, 6, 7])
    p = list(parameters.values())
    table = BucketTable(parameters.items())

    def step(*groups: list[torch.Tensor]) -> bool:
        for index, group in enumerate(groups):
            table.identify(fake_bucket(group, index, last=index == len(groups) - 1))
        return table.end_step()

    assert step([p[0]], [p[1], p[2]])
    before = table.layout
    assert before is not None
    assert not step([p[0]], [p[1], p[2]])
    assert step([p[2], p[1]], [p[0]])
    assert table.layout is not None
    assert table.layout.digest != before.digest
    assert table.layout.elements == before.elements == 18


def test_two_ranks_with_equal_models_agree_on_the_digest() -> None:
    digests = set()
    for _ in range(2):
        parameters = named([9, 2])
        table = BucketTable(parameters.items())
        table.identify(fake_bucket(list(parameters.values())))
        table.end_step()
        assert table.layout is not None
        digests.add(table.layout.digest)
    assert len(digests) == 1
