"""Signal and noise of one rank's gradient, and the factor by which a partial mean should shrink.

Model: the gradient of rank r is mu + e_r with independent e_r; E||e||^2 = s. From A, the mean over
ranks of ||g_r||^2, and B = ||mean of g_r||^2 follow s = (A - B) N / (N - 1) and
||mu||^2 = B - s / N, as for the gradient noise scale. q = ||mu||^2 / s.

The mean of C of N ranks errs to mu by s / C. Of its multiples the one by q / (q + 1 / C) errs
least: that is the usual shrinkage of an estimate with this much signal. (Derived here.)

Letters: N ranks, C contributions.
"""

from __future__ import annotations

import math

MOST = 1e6
"""Ratio beyond which there is no noise to speak of."""


def signal_to_noise(gradient_sq: float, mean_sq: float, world_size: int) -> float:
    """Return q = ||mu||^2 / s, [0, MOST]; -1 if it cannot be told.

    Args:
        gradient_sq: A, the mean over ranks of ||gradient||^2.
        mean_sq: B, ||mean gradient||^2, of all ranks.
        world_size: Ranks N.
    """
    if world_size < 2 or not (0.0 < gradient_sq < math.inf and 0.0 <= mean_sq < math.inf):
        return -1.0
    noise = (gradient_sq - mean_sq) * world_size / (world_size - 1)
    signal = mean_sq - noise / world_size
    if noise <= 0.0:  # all ranks alike, up to rounding
        return MOST
    return min(max(signal, 0.0) / noise, MOST)


def shrink_factor(ratio: float, contributions: int) -> float:
    """Return the factor (0, 1] on the mean of so many ranks; 1 where the ratio is not known.

    In steps of 0.05, so that a plan does not change with every measurement, and at least 0.05: an
    estimate that is all noise should be small, but a gradient of zero would end the training.
    """
    if ratio < 0.0:
        return 1.0
    best = ratio / (ratio + 1.0 / max(contributions, 1))
    return min(max(round(best * 20) / 20, 0.05), 1.0)
