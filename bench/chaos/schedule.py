"""What goes wrong, and when: drawn from a seed, so that every schedule can be had again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from gradpilot.protos.messages import BF16, DENSE, Option, Setting

KINDS = ("delay", "drop", "duplicate", "reorder")

OPTIONS = (
    DENSE,
    BF16,
    Option("topk", 0.1, "allgather"),
    Option("artopk", 0.2, "native", settings=(Setting("selection", "var"),)),
    Option("none", collective="ring"),
    Option("bf16", collective="ring", skip=1, skip_feedback=True),
    Option("powersgd"),
    Option("int8"),
)
"""Each has another sequence of collectives, so that ranks under different plans cannot go on."""

LONGEST_GAP_SECONDS = 0.15
LONGEST_DELAY_SECONDS = 0.4
KILL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to one plan on its way to one rank.

    Attributes:
        kind: One of ``KINDS``.
        rank: The rank.
        nth: Which of the plans to this rank within the schedule, from 0.
        seconds: How late it comes (delay), or its second copy (duplicate).
    """

    kind: str
    rank: int
    nth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A few orders in quick succession, and what goes wrong meanwhile.

    Attributes:
        number: Its number.
        orders: Seconds to wait, and the option that is then ordered for all buckets.
        faults: What happens to plans.
        kill_before: Index of the order before which the controller is killed; len(orders) for
            after the last one, -1 for never.
        kill_after_seconds: How long after the order before it.
        down_seconds: How long until it is started again.
    """

    number: int
    orders: tuple[tuple[float, Option], ...]
    faults: tuple[Fault, ...]
    kill_before: int
    kill_after_seconds: float
    down_seconds: float


def draw(seed: int, number: int, world_size: int, last: Option) -> Schedule:
    """Return a schedule.

    Args:
        seed: Seed of all.
        number: Its number.
        world_size: Ranks N.
        last: What was ordered last; an order is never the same as the one before.
    """
    chance = random.Random(f"{seed}/{number}")
    orders = []
    for _ in range(chance.randint(1, 3)):
        last = chance.choice([option for option in OPTIONS if option != last])
        orders.append((chance.uniform(0.0, LONGEST_GAP_SECONDS), last))
    odd = chance.randrange(world_size)
    faults = tuple(
        Fault(chance.choice(KINDS), odd, nth, chance.uniform(0.0, LONGEST_DELAY_SECONDS))
        for nth in range(len(orders))
        if chance.random() < 0.8
    )
    killed = chance.random() < KILL_SHARE
    return Schedule(
        number,
        tuple(orders),
        faults,
        chance.randint(0, len(orders)) if killed else -1,
        chance.uniform(0.0, 0.1),
        chance.uniform(0.0, 0.5),
    )
