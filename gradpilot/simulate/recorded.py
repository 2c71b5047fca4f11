"""What real trainings showed, and what the agents' compressors are and cost.

``recorded.json`` is made by ``bench/record_gradients.py``, which needs torch; reading it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradpilot.errors import ConfigError
from gradpilot.policies.compute import FamilyKey, bracket
from gradpilot.protos.messages import DENSE, ENERGY_RATIOS, Setting

Floats = NDArray[np.float64]

FIELDS = ("gain", "gradient_sq", "residual_sq", "mean_sq")

SMALLEST = 1e-30
"""Stands for zero where logarithms are taken."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training under one option.

    Attributes:
        key: Compressor and settings.
        ratio: Kept fraction.
        values: (phases, B, 4) values of ``FIELDS``.
        energy: (phases, B, ratios) energy curves.
    """

    key: FamilyKey
    ratio: float
    values: Floats
    energy: Floats


@dataclass(frozen=True, slots=True)
class Task:
    """A training that was recorded.

    Attributes:
        name: Its name.
        what: One line for people.
        ranks: Ranks N of the recording.
        elements: Elements per bucket.
        lead_seconds: From the beginning of a step to its first bucket being ready.
        ready_seconds: From there to each bucket.
        runs: Trainings.
    """

    name: str
    what: str
    ranks: int
    elements: tuple[int, ...]
    lead_seconds: float
    ready_seconds: tuple[float, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """What agents would see under an option, per bucket: (B,) and (B, ratios)."""

    gain: Floats
    gradient_sq: Floats
    residual_sq: Floats
    mean_sq: Floats
    energy: Floats


class Gradients:
    """A recorded training as a function of option, ratio and progress.

    Between ratios and between the middles of phases everything is linear in the logarithm; above
    the largest ratio recorded it goes towards the dense run, below the smallest the gain shrinks in
    proportion.

    Args:
        task: The recording.
        buckets: Which recorded bucket stands for each bucket of the job.
        elements: Elements of each bucket of the job; squares grow in proportion to them.
    """

    def __init__(self, task: Task, buckets: Sequence[int], elements: Sequence[int]) -> None:
        self.task = task
        self._pick = np.array(buckets, dtype=np.intp)
        self._scale = np.array(elements) / np.array(task.elements)[self._pick]
        dense = [run for run in task.runs if run.key == DENSE.family]
        if not dense:
            raise ConfigError(f"recording {task.name!r} has no dense run")
        self._dense = dense[0]
        self._runs: dict[FamilyKey, tuple[Floats, Floats]] = {}
        for key in {run.key for run in task.runs}:
            runs = sorted((r for r in task.runs if r.key == key), key=lambda run: run.ratio)
            if runs[-1].ratio < 1:
                runs.append(self._dense)
            stacked = np.stack([_logs(run) for run in runs])
            self._runs[key] = np.log([run.ratio for run in runs]), stacked

    def knows(self, key: FamilyKey, ratio: float = 1.0) -> bool:
        """Return whether something can be said of a family; all that keep everything are alike."""
        return key in self._runs or ratio == 1

    def seen(self, key: FamilyKey, ratio: float, progress: float, ranks: int) -> Seen:
        """Return what agents would see.

        Args:
            key: Compressor and settings.
            ratio: Kept fraction.
            progress: Share of the training that is done, [0, 1].
            ranks: Ranks N of the job; the mean over more ranks has less noise.
        """
        values = np.exp(self._at(key, np.array([ratio]), progress)[0])[self._pick]
        gain = values[:, 0]
        gradient, residual, mean = values[:, 1:4].T * self._scale
        if key not in self._runs:
            gain = np.ones_like(gain)
        mean = _mean_square(gradient, mean, self.task.ranks, ranks)
        energy = np.maximum.accumulate(np.clip(values[:, 4:], 0.0, 1.0), axis=1)
        return Seen(np.clip(gain, 0.0, 1.0), gradient, residual, mean, energy)

    def gain(self, key: FamilyKey, ratios: Floats, progress: float) -> Floats:
        """Return true gains, (ratios, B)."""
        if key not in self._runs:
            if (ratios == 1).all():
                return np.ones((len(ratios), len(self._pick)))
            raise ConfigError(f"no training was recorded under {key[0]!r}")
        gains = np.exp(self._at(key, ratios, progress)[:, :, 0])[:, self._pick]
        least = float(np.exp(self._runs[key][0][0]))
        gains = gains * np.minimum(ratios / least, 1.0)[:, None]
        return np.clip(gains, 0.0, 1.0)

    def weights(self, progress: float) -> Floats:
        """Return each bucket's share of ||gradient||^2 while everything is sent, (B,)."""
        squares = (
            np.exp(self._at(DENSE.family, np.ones(1), progress)[0])[self._pick, 1] * self._scale
        )
        return np.asarray(squares / squares.sum(), dtype=np.float64)

    def _at(self, key: FamilyKey, ratios: Floats, progress: float) -> Floats:
        """Return logarithms, (ratios, recorded buckets, fields and curve)."""
        knots, logs = self._runs.get(key, self._runs[DENSE.family])
        phases = logs.shape[1]
        middles = (np.arange(phases) + 0.5) / phases
        low, high, share = bracket(middles, np.array([progress]))
        now = logs[:, low[0]] + share[0] * (logs[:, high[0]] - logs[:, low[0]])
        low, high, share = bracket(knots, np.log(ratios))
        return np.asarray(now[low] + share[:, None, None] * (now[high] - now[low]))


def _logs(run: Run) -> Floats:
    both = np.concatenate([run.values, run.energy], axis=2)
    return np.asarray(np.log(np.maximum(both, SMALLEST)))


def _mean_square(gradient: Floats, mean: Floats, recorded: int, ranks: int) -> Floats:
    """Return ||mean over N ranks||^2 from that over the recorded ranks; see ``policies.signal``."""
    noise = np.maximum(gradient - mean, 0.0) * recorded / (recorded - 1)
    signal = np.maximum(mean - noise / recorded, 0.0)
    return np.asarray(signal + noise / ranks)


# --- the file ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def document() -> Mapping[str, Any]:
    """Return the recorded file."""
    text = resources.files("gradpilot.simulate").joinpath("recorded.json").read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@lru_cache(maxsize=8)
def task(name: str) -> Task:
    """Return a recorded training.

    Raises:
        ConfigError: There is none of that name.
    """
    recorded = document()
    for entry in recorded["tasks"]:
        if entry["name"] == name:
            runs = tuple(_run(run) for run in entry["runs"])
            return Task(
                name, entry["what"], recorded["ranks"], tuple(entry["elements"]),
                entry["lead_seconds"], tuple(entry["ready_seconds"]), runs,
            )  # fmt: skip
    known = ", ".join(entry["name"] for entry in recorded["tasks"])
    raise ConfigError(f"no training {name!r} was recorded; there are: {known}")


def _run(entry: Mapping[str, Any]) -> Run:
    values = [[[bucket[f] for f in FIELDS] for bucket in phase] for phase in entry["phases"]]
    energy = [[bucket["energy"] for bucket in phase] for phase in entry["phases"]]
    curves = np.array(energy, dtype=np.float64)
    if curves.shape[2] != len(ENERGY_RATIOS):
        raise ConfigError("recorded energy curves have other ratios than this version")
    return Run(
        (entry["compressor"], settings(entry["settings"])),
        float(entry["ratio"]),
        np.array(values, dtype=np.float64),
        curves,
    )


def settings(entry: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return settings as messages hold them."""
    return tuple(Setting(name, value) for name, value in sorted(entry.items()))
