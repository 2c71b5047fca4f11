from __future__ import annotations

import pytest

from gradpilot.errors import ConfigError
from gradpilot.simulate.jobs import CAP, FIRST_CAP, JOBS, make_job


@pytest.mark.parametrize(
    ("name", "elements"), [("resnet50", 25_557_032), ("transformer", 109_482_240)]
)
def test_parameters_are_those_of_the_models(name: str, elements: int) -> None:
    assert make_job(name).layout.elements == elements


@pytest.mark.parametrize("name", JOBS)
def test_buckets_become_ready_in_order(name: str) -> None:
    job = make_job(name)
    assert job.ready_seconds[0] == 0
    assert list(job.ready_seconds) == sorted(job.ready_seconds)
    assert job.lead_seconds > 0
    assert job.compute_seconds == job.lead_seconds + job.ready_seconds[-1]
    assert len(job.gradients.weights(0.5)) == len(job.layout.buckets)
    assert job.gradients.weights(0.5).sum() == pytest.approx(1)


def test_large_jobs_have_the_buckets_of_ddp() -> None:
    job = make_job("resnet50")
    sizes = [4 * b.elements for b in job.layout.buckets]
    assert sizes[0] >= FIRST_CAP
    assert all(size >= CAP for size in sizes[1:-1])
    backward = job.compute_seconds - job.compute_seconds / 3
    assert job.ready_seconds[-1] == pytest.approx(backward, rel=0.05)  # less the first bucket


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="resnet50, transformer, cnn"):
        make_job("gpt")
