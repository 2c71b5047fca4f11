"""Buckets of a native plan share the wire: what agents time of them must still tell the link."""

from __future__ import annotations

import numpy as np
import pytest

from gradpilot.policies.base import Operation
from gradpilot.policies.cost import at_once, coefficients
from gradpilot.policies.link import fit_link
from gradpilot.policies.timeline import wire_end
from gradpilot.protos.messages import LinkEstimate
from gradpilot.worker_agent.native_timing import AT_ONCE, NativeTimer

N = 8
SIZES = (1 << 20, 25 << 20, 27 << 20, 26 << 20, 18 << 20)


def played(
    alpha: float, beta: float, backend: str, gap: float, *, noise: float = 0.03, steps: int = 30
) -> list[Operation]:
    """Time the buckets of some steps as an agent does; they are handed in ``gap`` seconds apart."""
    rng = np.random.default_rng(5)
    a, b = coefficients("all_reduce", N, 0, backend)
    many = at_once(backend)
    made, begin = [], 0.0
    for step in range(steps):
        timer = NativeTimer(many)
        events, free, ends = [], 0.0, [0.0] * many
        for i, size in enumerate(SIZES):
            handed = begin + i * gap
            factor = np.exp(noise * rng.normal())
            free = max(free, handed, ends[-many]) + b * size * beta * factor
            ends.append(max(ends[-1], free + a * alpha * factor))
            events += [(handed, 0, i), (ends[-1], 1, i)]
        for at, what, i in sorted(events):
            if not what:
                timer.hand_in(at)
                continue
            busy = timer.end(i + 1, at)
            made.append(
                Operation(
                    step, "all_reduce", SIZES[i], 0, busy.seconds, 0.0, float(steps - step),
                    overlapped_seconds=busy.overlapped,
                )
            )  # fmt: skip
        begin = ends[-1] + 1.0
    return made


def fitted(operations: list[Operation], backend: str, before: LinkEstimate | None) -> LinkEstimate:
    link = fit_link(operations, N, backend, before)
    assert link is not None
    return link


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("gap", [0.0, 0.02, 1.0], ids=["at once", "queued", "alone"])
@pytest.mark.parametrize(
    ("ms", "gbps"), [(2, 20), (0.05, 1), (5, 1), (0.5, 10)],
    ids=["latency", "bandwidth", "both", "fast"],
)  # fmt: skip
def test_latency_is_seen_behind_the_bytes_of_other_buckets(
    backend: str, gap: float, ms: float, gbps: float
) -> None:
    alpha, beta = 1e-3 * ms, 8e-9 / gbps
    link = fitted(played(alpha, beta, backend, gap), backend, None)
    assert link.separable
    a, b = coefficients("all_reduce", N, 0, backend)
    # Each is needed as exactly as it matters for the time of an ordinary bucket.
    usual = a * alpha + b * SIZES[1] * beta
    assert a * link.alpha_seconds == pytest.approx(a * alpha, abs=0.05 * usual)
    assert link.beta_seconds_per_byte == pytest.approx(beta, abs=0.05 * usual / (b * SIZES[1]))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_link_that_became_slower_is_seen_at_once(backend: str) -> None:
    before = fitted(played(2e-3, 4e-10, backend, 0.02), backend, None)
    for alpha, beta in ((4e-3, 4e-10), (2e-3, 1.6e-9), (5e-4, 4e-10)):
        new = played(alpha, beta, backend, 0.02, steps=12)
        old = played(2e-3, 4e-10, backend, 0.02)
        aged = [
            Operation(
                o.step - 100, o.collective, o.bytes, 0, o.transfer_seconds, 0.0,
                o.age_seconds + 30, True, o.overlapped_seconds,
            )
            for o in old
        ]  # fmt: skip
        link = fitted([*aged, *new], backend, before)
        assert link.alpha_seconds == pytest.approx(alpha, rel=0.15)
        assert link.beta_seconds_per_byte == pytest.approx(beta, rel=0.25)


def test_agents_and_policies_agree_on_what_a_backend_does_at_once() -> None:
    for backend in ("gloo", "nccl", "mpi"):
        assert AT_ONCE.get(backend, 1) == at_once(backend)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_was_fitted_predicts_the_step_that_it_was_fitted_to(backend: str) -> None:
    alpha, beta, gap = 2e-3, 4e-10, 0.02
    link = fitted(played(alpha, beta, backend, gap, noise=0.0), backend, None)
    a, b = coefficients("all_reduce", N, 0, backend)
    ready = np.array([gap * i for i in range(len(SIZES))], dtype=np.float64)
    zero, size = np.zeros((1, len(SIZES))), np.array([SIZES], dtype=np.float64)
    ends = [
        wire_end(
            ready, zero, zero + a * one, b * size * other, zero, np.array([True]), at_once(backend)
        )[0]
        for one, other in ((alpha, beta), (link.alpha_seconds, link.beta_seconds_per_byte))
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)
