"""The catalog: what this agent can do on a layout, with exact wire sizes and measured costs."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import (
    Ability,
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    Setting,
    WireRound,
)
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.collectives.base import AllGather, AllToAll
from gradpilot.worker_agent.collectives.skipping import min_skip_elements
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, leave_residual_

CALIBRATION_ELEMENTS = (1 << 14, 1 << 19)
"""Sizes at which compressors are timed at attach; costs in between interpolate."""

CALIBRATION_SECONDS = 1.0
"""Bound of the whole calibration; what it does not reach is measured when it is first used."""


def families(slots: tuple[Slot, ...], world_size: int) -> tuple[Family, ...]:
    """Return the calibrated compressors as families with their wire rounds on these buckets.

    The others can be pinned; no policy could weigh them against each other.
    """
    return tuple(
        Family(
            compressor=members[0].name,
            settings=settings,
            collectives=_able(members[0], world_size),
            ladder=tuple(
                LadderPoint(
                    member.ratio,
                    tuple(BucketRounds(_rounds(member, slot, world_size)) for slot in slots),
                )
                for member in members
            ),
            gain_model=members[0].gain_model,
            gain_factor=members[0].gain_factor,
            efficiency_exponent=members[0].efficiency_exponent,
            memory_payloads=world_size if members[0].exchange == "all_gather" else 1,
            floor_factor=members[0].floor_factor,
        )
        for settings, members in _grouped(world_size)
        if _able(members[0], world_size)
    )


def abilities(world_size: int, layered: bool) -> tuple[Ability, ...]:
    """Return every registered compressor with who can carry its defaults or its ladder.

    Args:
        world_size: Ranks N.
        layered: Whether the job has several nodes with several ranks on one of them.
    """
    found = []
    for name in COMPRESSORS:
        kind = COMPRESSORS.get(name)
        members = [kind(), *kind.ladder()]
        carriers = {c: None for member in members for c in _able(member, world_size)}
        if layered and any("hierarchical" in member.collectives for member in members):
            carriers["hierarchical"] = None
        if carriers:
            found.append(Ability(name, tuple(carriers)))
    return tuple(found)


def calibrate(world_size: int, device: torch.device) -> tuple[ComputeSample, ...]:
    """Time the calibrated compressors on this rank's device and threads, without communication.

    Replies are made up locally, with the shape that N ranks would give them. Two repetitions, the
    faster counts: the first one pays for memory.
    """
    deadline = time.monotonic() + CALIBRATION_SECONDS
    samples: list[ComputeSample] = []
    generator = torch.Generator().manual_seed(0)
    for elements in CALIBRATION_ELEMENTS:
        # Cubed normal values have the heavy tail of gradients, which selection costs depend on.
        grad = torch.randn(elements, generator=generator).pow_(3).to(device)
        for settings, members in _grouped(world_size):
            for member in members:
                if time.monotonic() > deadline:
                    return tuple(samples)
                best = min(_dry_run(member, grad, world_size) for _ in range(2))
                samples.append(ComputeSample(member.name, settings, member.ratio, elements, *best))
    return tuple(samples)


def _able(member: Compressor, world_size: int) -> tuple[str, ...]:
    """Return who can carry a compressor with so many ranks."""
    able = []
    for name in member.collectives:
        if name != "hierarchical":
            with contextlib.suppress(ConfigError):
                member.check(world_size, name)
                able.append(name)
    return tuple(able)


def _rounds(member: Compressor, slot: Slot, world_size: int) -> tuple[WireRound, ...]:
    """Return a bucket's rounds as they would be carried: small payloads are never skipped."""
    # Payloads of 16 bits have up to twice as many elements; near the floor nothing is at stake.
    floor = 4 * min_skip_elements(world_size)
    return tuple(
        replace(wire_round, skippable=False) if wire_round.bytes < floor else wire_round
        for wire_round in member.wire(slot.bucket.elements, slot.shapes, world_size)
    )


def _grouped(world_size: int) -> list[tuple[tuple[Setting, ...], list[Compressor]]]:
    """Return the calibrated part of all ladders as families, each ascending in ratio."""
    grouped = []
    for name in COMPRESSORS:
        able = [m for m in COMPRESSORS.get(name).ladder() if m.calibrated_for(world_size)]
        ladder = sorted(able, key=lambda c: (repr(c.settings), c.ratio))
        for settings, members in itertools.groupby(ladder, key=lambda c: c.settings):
            grouped.append((settings, list(members)))
    return grouped


def _dry_run(compressor: Compressor, grad: Tensor, world_size: int) -> tuple[float, float]:
    """Return compress and decompress seconds of one run with made-up replies."""
    feedback = not compressor.lossless
    out = torch.zeros_like(grad)  # stands for the bucket's own buffer
    # One matrix, as square as powers of two can be: what a matrix costs depends on its elements.
    rows = 1 << (grad.numel().bit_length() - 1) // 2
    shapes = (torch.Size([rows, grad.numel() // rows]),)
    at = At(rank=0, world_size=world_size, step=0, shapes=shapes, feedback=feedback, out=out)
    compress, mark = 0.0, _now(grad)
    work = grad.clone()  # stands for adding the residual, which the hook counts as compression
    rounds = compressor.rounds(work, at)
    try:
        request = next(rounds)
        while True:
            compress += _now(grad) - mark
            reply = request.payload
            if isinstance(request, AllGather):
                reply = reply.expand(world_size, -1).contiguous()
            elif isinstance(request, AllToAll):
                reply = reply.view(world_size, -1)
            mark = _now(grad)
            request = rounds.send(reply)
    except StopIteration as stop:
        if feedback:
            leave_residual_(work, stop.value)
        return compress, _now(grad) - mark


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return time.monotonic()
