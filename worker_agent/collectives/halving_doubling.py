"""Recursive halving and doubling that can skip its first halving steps.

Textbook algorithm (Rabenseifner, ICCS 2004; Thakur et al., IJHPCA 2005; from memory). A rank's
label is its number XOR the shift. Halving: ranks whose labels differ in the highest bit swap the
halves of the payload that the other one keeps, then quarters across the next bit, until label v
holds slice v summed. Doubling goes the same way back. As many bytes as a ring, in 2 log2 N steps.

Leaving out the first j halving steps (our construction) means that labels that differ in their j
highest bits are never added up: a slice gets the N / 2^j contributions of the labels that share
these bits with its number. It saves j steps and the largest messages. Ranks exchange with the same
peers under any shift; which half they speak for is what rotates.

Where N is no power of two, the ranks beyond the largest power hand all they have to a partner in a
step before, get the result in a step after, and wait meanwhile. Nothing can be skipped then.

Letters: N world size, j skipped steps, v label.
"""

from __future__ import annotations

from functools import lru_cache

from gradpilot.worker_agent.collectives.base import SCHEDULES, Algorithm, Schedule, Step


def halving_doubling(rank: int, world_size: int, *, skip: int = 0, shift: int = 0) -> Schedule:
    """Return the schedule of ``rank``; see ``ScheduleBuilder``.

    The shift is of no effect where N is no power of two.
    """
    most = most_skipped(world_size)
    label = rank ^ (shift % world_size) if most else rank
    return _halving_doubling(rank, label, world_size, min(max(skip, 0), most))


def most_skipped(world_size: int) -> int:
    """Return log2 N if N is a power of two, else 0.

    With all of them left out, nothing is summed, and every rank publishes one slice of its own.
    """
    power_of_two = world_size & (world_size - 1) == 0
    return world_size.bit_length() - 1 if power_of_two else 0


SCHEDULES.register("halving_doubling")(
    Algorithm(
        halving_doubling,
        most_skipped,
        "Rabenseifner, ICCS 2004; Thakur et al., IJHPCA 2005; skipping is our own",
    )
)


# A bucket meets at most N shifts, step after step.
@lru_cache(maxsize=128)
def _halving_doubling(rank: int, label: int, world_size: int, skip: int) -> Schedule:
    bits = world_size.bit_length() - 1
    core = 1 << bits
    whole = tuple(range(core))

    def block(of: int, bit: int) -> tuple[int, ...]:
        """Return the slices whose numbers agree with a label in all bits from ``bit`` up."""
        first = of >> bit << bit
        return tuple(range(first, first + (1 << bit)))

    def exchange(bit: int, accumulate: bool) -> Step:
        """Swap across ``bit``: what each side keeps when halving, what each has when doubling."""
        peer = rank ^ (1 << bit)
        own, other = block(label, bit), block(label ^ (1 << bit), bit)
        send, receive = (other, own) if accumulate else (own, other)
        return Step(peer, send, peer, receive, accumulate)

    if rank < core:
        halving = [exchange(bit, accumulate=True) for bit in reversed(range(bits - skip))]
        doubling = [exchange(bit, accumulate=False) for bit in range(bits)]
        steps = [*halving, *doubling]
        kept = block(label, bits - skip)
    else:
        steps = [Step(rank, (), rank, (), accumulate=t < bits) for t in range(2 * bits)]
        kept = whole
    if world_size > core:
        before, after = _fold(rank, world_size, core)
        steps = [before, *steps, after]
    return Schedule(
        slices=core,
        steps=tuple(steps),
        omitted=tuple(number for number in whole if number not in kept),
        contributions=world_size >> skip,
    )


def _fold(rank: int, world_size: int, core: int) -> tuple[Step, Step]:
    """Return the steps before and after, in which ranks from ``core`` on use a partner below."""
    whole = tuple(range(core))
    if rank >= core:
        partner = rank - core
        return Step(partner, whole, partner, (), True), Step(partner, (), partner, whole, False)
    partner = rank + core
    if partner < world_size:
        return Step(partner, (), partner, whole, True), Step(partner, whole, partner, (), False)
    return Step(rank, (), rank, (), True), Step(rank, (), rank, (), False)
