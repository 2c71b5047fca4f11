"""What a clairvoyant would do: the option with the least time to accuracy in every phase.

Step times are swept: every static option, in every phase of the network, without a controller. What
a step is worth is known afterwards: the static rows of the same task tell how many steps each
option took to the target. The oracle minimises the product, and is told when a phase begins.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.tta.matrix import Row
from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS
from bench.tta.reached import steps_to
from bench.tta.records import Pin
from bench.tta.rows import SECONDS_PER_STEP, phase_key, sweep
from bench.tta.store import Store
from bench.tta.tasks import TASKS, Task
from gradpilot.protos.messages import Option


class NothingKnownError(Exception):
    """There are no static rows to choose from."""


def candidates(ranks: int) -> dict[str, Option]:
    """Return the methods that are one option all the time, and that option."""
    found = {name: method.equals(ranks) for name, method in METHODS.items()}
    return {name: option for name, option in found.items() if option is not None}


def steps_needed(rows: Sequence[Mapping[str, Any]], task: Task) -> dict[str, float]:
    """Return the median steps to the hardest target that any static method reaches, by method.

    Args:
        rows: Finished rows of one task, of any network: steps do not depend on it.
        task: The task.
    """
    for target in reversed(task.targets):
        found: dict[str, list[float]] = {}
        for row in rows:
            steps = steps_to(row, task, target)
            if steps is not None:
                found.setdefault(row["method"], []).append(steps)
        if found:
            return {name: statistics.median(steps) for name, steps in found.items()}
    return {}


def choose(seconds: Mapping[str, float], steps: Mapping[str, float]) -> str:
    """Return the method with the least step time times steps.

    Args:
        seconds: Step time by method.
        steps: Steps to the target by method; who is not there did not reach it.
    """
    able = [name for name in seconds if name in steps]
    return min(able, key=lambda name: seconds[name] * steps[name])


def pins(row: Row, store: Store, finished: Sequence[Mapping[str, Any]]) -> list[Pin]:
    """Return the orders of an oracle's row, sweeping the network if that was not done yet.

    Args:
        row: The oracle's row.
        store: Where sweeps are kept.
        finished: Finished rows of any kind.

    Raises:
        NothingKnownError: No static row of the task has reached any target.
    """
    every = candidates(row.ranks)
    static = [
        one
        for one in finished
        if one["task"] == row.task
        and one["method"] in every
        and (one["ranks"], one["steps"]) == (row.ranks, row.steps)
    ]
    steps = steps_needed(static, TASKS[row.task])
    if not steps:
        raise NothingKnownError(
            f"the oracle needs finished rows of static methods that reached a target of {row.task}"
        )
    able = [name for name in every if name in steps]
    name = f"sweep-{row.ranks}.{row.task}.{row.network}.json"
    kept = store.read(name)
    if kept is None or kept["methods"] != able:
        kept = {"methods": able, "phases": sweep(row, store.folder, [every[one] for one in able])}
        store.write(name, kept)
    network = NETWORKS[row.network].turned(row.seed)
    found = []
    for begun, phase in network.beginnings(SECONDS_PER_STEP * row.steps):
        seconds = dict(zip(able, kept["phases"][phase_key(*phase.state)], strict=True))
        found.append(Pin(begun, every[choose(seconds, steps)]))
    return found
