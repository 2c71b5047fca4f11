"""Records what the simulator must not make up: gradients of real trainings, and costs.

    python -m bench.record_gradients [--output FILE] [--tasks NAME,...] [--steps N]

Small models are trained on virtual ranks, each once for every option of ``OPTIONS``, with the
compressors' own code and error feedback. Per bucket and phase of training the file keeps what
agents report: gain, ||corrected||^2, ||residual||^2, ||mean||^2 and the energy curve. Beside that
it keeps the catalog of the agents as forms in the elements of a bucket, and what their compressors
cost here.

The file is ``gradpilot/simulate/recorded.json`` and part of the package.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench import results_file
from bench._recorded_tasks import TASKS, Task
from gradpilot.protos.messages import DENSE, ENERGY_RATIOS, Bucket, Family, Option, Setting
from gradpilot.worker_agent import catalog
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.compressors.base import COMPRESSORS
from gradpilot.worker_agent.statistics import energy_curve, gain, squared_norm
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step

PATH = Path(__file__).parents[1] / "gradpilot" / "simulate" / "recorded.json"

RANKS, STEPS, PHASES, EVERY, SEED = 4, 100, 4, 5, 0

RATIOS = (0.1, 0.01, 0.001)

OPTIONS: tuple[Option, ...] = (
    DENSE,
    *(Option("topk", ratio, "allgather") for ratio in RATIOS),
    *(
        Option("artopk", ratio, settings=(Setting("selection", selection),))
        for selection in ("star", "var")
        for ratio in RATIOS
    ),
)

FORM_RANKS = (2, 4, 8, 16, 32, 64, 1024)
"""World sizes for which families are listed."""

CALIBRATED_RANKS = (4, 64)
"""World sizes at which compressors are timed: the replies of an all-gather grow with N."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one bucket showed in one step, mean over ranks; see ``messages.BucketReport``."""

    gain: float
    gradient_sq: float
    residual_sq: float
    mean_sq: float
    energy: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Record and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=PATH)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python -m bench.record_gradients",
        "machine": results_file.machine(),
        "versions": results_file.versions(),
        "seed": SEED,
        "ranks": RANKS,
        "steps": arguments.steps,
        "families": family_forms(),
        "calibration": calibration(),
        "tasks": [record(TASKS[name], arguments.steps) for name in arguments.tasks.split(",")],
    }
    arguments.output.write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")
    return 0


# --- trainings ---------------------------------------------------------------------------------


def record(task: Task, steps: int) -> dict[str, Any]:
    """Train a task under every option and return what its buckets showed."""
    groups = buckets(task.model(SEED))
    return {
        "name": task.name,
        "what": task.what,
        "elements": [sum(p.numel() for p in group) for group in groups],
        **step_times(task),
        "runs": [train(task, option, steps) for option in OPTIONS],
    }


def train(task: Task, option: Option, steps: int) -> dict[str, Any]:
    """Train under one option; statistics are means over the sampled steps of a phase."""
    begun = time.monotonic()
    model = task.model(SEED)
    groups = buckets(model)
    optimizer = task.optimizer(model)
    samples = task.batches(SEED, RANKS)
    residuals: list[list[Tensor] | None] = [None] * len(groups)
    found: list[list[list[Statistics]]] = [[[] for _ in groups] for _ in range(PHASES)]
    losses = []
    for step in range(steps):
        per_rank = []
        loss = 0.0
        for x, y in next(samples):
            optimizer.zero_grad()
            value = cross_entropy(model(x).flatten(0, -2), y.flatten())
            value.backward()  # type: ignore[no-untyped-call]
            loss += value.item() / RANKS
            per_rank.append([flat(group) for group in groups])
        losses.append(loss)
        for b, group in enumerate(groups):
            grads = [grads[b] for grads in per_rank]
            before = residuals[b]
            done = virtual_step(option, grads, before, step=step, bucket=str(b), seed=SEED)
            residuals[b] = done.residuals
            if step % EVERY == EVERY - 1:
                phase = step * PHASES // steps
                found[phase][b].append(statistics(grads, before, done))
            give_back(group, done.mean)
        optimizer.step()
    tell(f"{task.name} {option.label}: loss {losses[0]:.3f} to {fmean(losses[-20:]):.3f},"
         f" {time.monotonic() - begun:.0f} s")  # fmt: skip
    return {
        "compressor": option.compressor,
        "settings": {s.name: s.value for s in option.settings},
        "ratio": option.ratio,
        "loss": [short(losses[0]), short(fmean(losses[-20:]))],
        "phases": [[summary(rows) for rows in phase] for phase in found],
    }


def statistics(
    grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, done: VirtualStep
) -> Statistics:
    """Return what the agents would have found in this bucket, as the hook finds it."""
    corrected = list(grads)
    if residuals is not None:
        corrected = [g + r for g, r in zip(grads, residuals, strict=True)]
    squares = [squared_norm(c) for c in corrected]
    curves = [curve for c in corrected if (curve := energy_curve(c))]
    return Statistics(
        gain=fmean(gain(e.sent, sq) for e, sq in zip(done.estimates, squares, strict=True)),
        gradient_sq=fmean(squares),
        residual_sq=fmean(squared_norm(r) for r in done.residuals),
        mean_sq=squared_norm(done.mean),
        energy=tuple(fmean(column) for column in zip(*curves, strict=True)),
    )


def summary(rows: Sequence[Statistics]) -> dict[str, Any]:
    """Return the means of one bucket and phase."""
    curves = [row.energy for row in rows if len(row.energy) == len(ENERGY_RATIOS)]
    return {
        **{
            name: short(fmean(getattr(row, name) for row in rows))
            for name in ("gain", "gradient_sq", "residual_sq", "mean_sq")
        },
        "energy": [short(fmean(column)) for column in zip(*curves, strict=True)],
    }


def step_times(task: Task) -> dict[str, Any]:
    """Time a rank's step without communication: median seconds, and when buckets are ready."""
    model = task.model(SEED)
    groups = buckets(model)
    samples = task.batches(SEED, RANKS)
    last: dict[int, float] = {}
    for b, group in enumerate(groups):
        for parameter in group:
            parameter.register_post_accumulate_grad_hook(_stamp(last, b))  # type: ignore[no-untyped-call]
    forwards, readies = [], []
    for _ in range(25):
        x, y = next(samples)[0]
        model.zero_grad()
        begun = time.monotonic()
        value = cross_entropy(model(x).flatten(0, -2), y.flatten())
        value.backward()  # type: ignore[no-untyped-call]
        forwards.append(min(last.values()) - begun)
        offsets = (last[b] - min(last.values()) for b in range(len(groups)))
        readies.append(list(accumulate(offsets, max)))  # DDP hands them out in order
    middle = len(forwards) // 2
    return {
        "lead_seconds": short(sorted(forwards)[middle]),
        "ready_seconds": [short(sorted(column)[middle]) for column in zip(*readies, strict=True)],
    }


def _stamp(last: dict[int, float], bucket: int) -> Callable[[Tensor], None]:
    def note(_: Tensor) -> None:
        last[bucket] = time.monotonic()

    return note


def buckets(model: nn.Module, cap: int = 1 << 16) -> list[list[nn.Parameter]]:
    """Group parameters as DDP does: in reverse order, a bucket closes when it reaches the cap.

    Args:
        model: What is trained.
        cap: Bytes.
    """
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(list(model.parameters())):
        if sum(p.numel() for p in groups[-1]) * 4 >= cap:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def flat(group: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of a bucket as one vector."""
    return torch.cat([p.grad.reshape(-1) for p in group if p.grad is not None])


def give_back(group: Sequence[nn.Parameter], mean: Tensor) -> None:
    """Write a bucket's mean to its parameters' gradients."""
    parts = torch.split(mean, [p.numel() for p in group])
    for parameter, part in zip(group, parts, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(part.view_as(parameter))


# --- catalog -----------------------------------------------------------------------------------


def family_forms() -> list[dict[str, Any]]:
    """Return the agents' families with their rounds as bytes per kept element plus a constant.

    Those whose bytes depend on the shapes of parameters or on the ranks are left out: PowerSGD, and
    two-stage exchanges.

    Raises:
        ValueError: Another family's bytes are not linear in what it keeps, or depend on the ranks.
    """
    return list(_forms())


def _forms() -> Iterator[dict[str, Any]]:
    sizes = (1_024_000, 3_072_000)  # whole blocks of all quantizers
    slots = tuple(_slot(i, n) for i, n in enumerate(sizes))
    tables = {ranks: catalog.families(slots, ranks) for ranks in FORM_RANKS}
    for family in tables[FORM_RANKS[0]]:
        if not _expressible(family):
            continue
        same = {
            ranks: other
            for ranks, table in tables.items()
            for other in table
            if _key(other) == _key(family)
        }
        for other in same.values():
            if other.collectives != family.collectives or _sizes(other) != _sizes(family):
                raise ValueError(f"{family.compressor} depends on the number of ranks")
        most = max(same)
        if list(same) != [ranks for ranks in FORM_RANKS if ranks <= most]:
            raise ValueError(f"{family.compressor} serves {list(same)} ranks and none in between")
        yield {
            "compressor": family.compressor,
            "settings": {s.name: s.value for s in family.settings},
            "collectives": list(family.collectives),
            "ratios": [point.ratio for point in family.ladder],
            "gain_model": family.gain_model,
            "gain_factor": family.gain_factor,
            "efficiency_exponent": family.efficiency_exponent,
            "gathers": family.memory_payloads > 1,
            "most_ranks": None if most == FORM_RANKS[-1] else most,
            "rounds": _rounds(family, sizes),
        }


def _expressible(family: Family) -> bool:
    """Return whether bytes follow from elements alone; the simulator knows no shapes."""
    kind = COMPRESSORS.get(family.compressor)
    to_all = any(r.collective == "all_to_all" for r in family.ladder[0].buckets[0].rounds)
    return not (kind.needs_matrices or to_all)


def _key(family: Family) -> tuple[str, tuple[Setting, ...]]:
    return family.compressor, family.settings


def _rounds(family: Family, sizes: Sequence[int]) -> list[list[Any]]:
    """Return [collective, bytes per kept element, constant bytes, skippable] of every round."""
    found = []
    for number, first in enumerate(family.ladder[0].buckets[0].rounds):
        points = []
        for point in family.ladder:
            for n, bucket in zip(sizes, point.buckets, strict=True):
                points.append((max(1, int(n * point.ratio)), bucket.rounds[number].bytes))
        (k0, b0), (k1, b1) = points[0], points[-1]
        each = (b1 - b0) / (k1 - k0)
        rest = b0 - each * k0
        if any(abs(each * k + rest - b) > 1e-6 for k, b in points):
            raise ValueError(f"{family.compressor}: bytes are not linear in the kept elements")
        large = family.ladder[-1].buckets[-1].rounds[number]
        # Scales of blocks are a fraction of a byte for every element.
        found.append([first.collective, float(f"{each:.9g}"), round(rest), large.skippable])
    return found


def _sizes(family: Family) -> list[tuple[str, int]]:
    return [(r.collective, r.bytes) for p in family.ladder for b in p.buckets for r in b.rounds]


def _slot(index: int, elements: int) -> Slot:
    shape = torch.Size([elements])
    bucket = Bucket(f"b{index}", index, elements)
    return Slot(bucket, (f"p{index}",), ((0, elements),), (shape,))


def calibration() -> list[dict[str, Any]]:
    """Time the agents' compressors on this machine at ``CALIBRATED_RANKS``; the best of three."""
    # At attach a job must not wait; here all points are wanted.
    catalog.CALIBRATION_SECONDS = 600.0
    rows = []
    for ranks in CALIBRATED_RANKS:
        tries = [catalog.calibrate(ranks, torch.device("cpu")) for _ in range(3)]
        for same in zip(*tries, strict=True):
            first = same[0]
            rows.append(
                {
                    "ranks": ranks,
                    "compressor": first.compressor,
                    "settings": {s.name: s.value for s in first.settings},
                    "ratio": first.ratio,
                    "elements": first.elements,
                    "compress_seconds": short(min(s.compress_seconds for s in same)),
                    "decompress_seconds": short(min(s.decompress_seconds for s in same)),
                }
            )
    return rows


def short(value: float) -> float:
    """Return four significant digits: more than the spread between seeds deserves."""
    return float(f"{value:.4g}")


def tell(text: str) -> None:
    """Print progress; the result goes to the file."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
