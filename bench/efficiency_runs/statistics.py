"""What compression did to a gradient: everything that may foretell how many steps it costs.

Letters: N ranks, g_r a rank's gradient, gbar their mean, ghat its estimate, r_r a rank's residual,
rbar their mean, W steps of a window.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradpilot.worker_agent.statistics import gain
from gradpilot.worker_agent.virtual import VirtualStep

WINDOWS = (10, 30)
"""Lengths W over which updates are added up before they are compared."""

SETTLED = 20
"""Steps that the averages leave out: residuals are still filling up."""

LARGEST = 1e30
"""Stands for a sum that is not finite, so that every number can be written as JSON."""


class Watch:
    """Gathers statistics of a training, step by step.

    Args:
        heard: Share of the ranks that a mean holds; below 1 where steps of a ring are skipped.
    """

    def __init__(self, heard: float = 1.0) -> None:
        self._heard = heard
        self._ranks = 1
        self._sums: dict[str, float] = defaultdict(float)
        self._count = 0
        self._paths: dict[int, tuple[Tensor, Tensor]] = {}
        self._residuals: list[float] = []
        self._norms: list[float] = []
        self._burst = 0.0

    def see(
        self,
        step: int,
        grads: Sequence[Tensor],
        residuals: Sequence[Tensor] | None,
        done: VirtualStep,
    ) -> None:
        """Take a step into account.

        Args:
            step: Its number, from 0.
            grads: Gradient of every rank.
            residuals: Residual of every rank before the step; None if there was none.
            done: What the step ended with.
        """
        ranks = self._ranks = len(grads)
        own = torch.stack(list(grads))
        left = torch.stack(done.residuals)
        mean = own.mean(0)
        energy, kept_back, common = _square(own) / ranks, _square(left) / ranks, _square(mean)
        self._residuals.append(kept_back / max(energy, 1e-30))
        self._norms.append(energy)
        self._burst = max(self._burst, _square(done.mean) / max(common, 1e-30))
        if step < SETTLED:
            return
        self._count += 1
        corrected = own if residuals is None else own + torch.stack(list(residuals))
        sums = self._sums
        sums["gain"] += (
            self._heard
            * sum(gain(e.sent, _square(c)) for e, c in zip(done.estimates, corrected, strict=True))
            / ranks
        )
        sums["energy"] += energy
        sums["common"] += common
        sums["error"] += _square(done.mean - mean)
        sums["estimated"] += _square(done.mean)
        sums["along"] += float(torch.dot(done.mean, mean))
        sums["kept_back"] += kept_back
        sums["waiting"] += _square(left.mean(0))
        for window in WINDOWS:
            self._walk(window, mean, done.mean)

    def _walk(self, window: int, true: Tensor, estimated: Tensor) -> None:
        """Add up both over a window; at its end, compare."""
        sums = self._sums
        if window not in self._paths:
            self._paths[window] = (torch.zeros_like(true), torch.zeros_like(true))
        far, near = self._paths[window]
        far.add_(true)
        near.add_(estimated)
        if self._count % window == 0:
            sums[f"path {window}"] += _square(far)
            sums[f"path error {window}"] += _square(near - far)
            sums[f"path estimated {window}"] += _square(near)
            sums[f"path along {window}"] += float(torch.dot(near, far))
            far.zero_()
            near.zero_()

    def summary(self) -> dict[str, float]:
        """Return averages over the steps seen, sums divided by sums; empty if there were too few.

        * ``gain``: ``||sent||^2 / ||corrected||^2``, mean over ranks; with skipping, times the
          share of the ranks that is heard.
        * ``error``: ``||ghat - gbar||^2 / ||gbar||^2`` (vNMSE); ``error W`` the same of both added
          up over W steps, so that what only comes late is no error.
        * ``turn``, ``turn W``: ``1 - cos^2`` between them: the error after the best scaling, which
          a matched learning rate amounts to.
        * ``noise``: ``||ghat - gbar||^2 / (s^2 / N)``: the error in units of the sampling noise
          that the mean has anyway; ``noise W`` the same of added up gradients.
        * ``snr``: ``||mu||^2 / s^2`` of one rank's gradient.
        * ``residual``: ``mean ||r_r||^2 / mean ||g_r||^2``; ``staleness``: ``||rbar|| / ||gbar||``,
          in steps of mean gradient that wait.
        * ``peak`` and ``burst``: the largest residual ratio and ``||ghat||^2 / ||gbar||^2`` of a
          step.
        """
        if self._count < max(WINDOWS):
            return {}
        s, ranks = self._sums, self._ranks
        # s^2, summed over steps: the mean of N has 1/N of it, so N - 1 of N parts show.
        noise = max(s["energy"] - s["common"], 1e-30) * ranks / (ranks - 1)
        found = {
            "gain": s["gain"] / self._count,
            "error": s["error"] / s["common"],
            "turn": _turn(s["along"], s["estimated"], s["common"]),
            "noise": s["error"] / (noise / ranks),
            "snr": max(s["common"] - noise / ranks, 0.0) / noise,
            "residual": s["kept_back"] / s["energy"],
            "staleness": math.sqrt(s["waiting"] / s["common"]),
            "peak": max(self._residuals),
            "burst": self._burst,
        }
        for w in WINDOWS:
            found[f"error {w}"] = s[f"path error {w}"] / s[f"path {w}"]
            found[f"turn {w}"] = _turn(
                s[f"path along {w}"], s[f"path estimated {w}"], s[f"path {w}"]
            )
            found[f"noise {w}"] = s[f"path error {w}"] / (noise / ranks)
        return {name: _finite(value) for name, value in found.items()}

    def residuals(self, every: int) -> list[float]:
        """Return the largest residual ratio within every so many steps."""
        return _largest(self._residuals, every)

    def norms(self, every: int) -> list[float]:
        """Return the largest mean of ``||g_r||^2`` within every so many steps."""
        return _largest(self._norms, every)


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _turn(along: float, one: float, other: float) -> float:
    """Return 1 - cos^2 from a scalar product and two squared norms."""
    return 1.0 - along**2 / max(one * other, 1e-300)


def _largest(values: Sequence[float], every: int) -> list[float]:
    parts = (values[i : i + every] for i in range(0, len(values), every))
    return [float(f"{_finite(max(part)):.4g}") for part in parts]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LARGEST
