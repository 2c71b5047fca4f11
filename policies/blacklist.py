"""Options that did harm are not chosen again for a while.

An entry expires; each time that the same option does harm again it lasts twice as long, up to a
bound. What was only too slow is forgiven at once when the link has changed, since that was about
the link. Dense fp32 is never banned, and bf16 only for overflowing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradpilot.policies.base import Inputs
from gradpilot.policies.dwell import MOST_DOUBLINGS, link_changed, whole
from gradpilot.policies.history import ratio_bucket
from gradpilot.policies.watches import Ban
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option

DEEDS = {
    "cost": "cost more than the plan before it",
    "loss": "made the loss rise",
    "residual": "let the residual grow",
    "nonfinite": "made gradients overflow",
}
"""What an option can have done, by cause."""

CAUSES = tuple(DEEDS)

MOST_BANS = 32
"""Entries remembered; the oldest go first."""

SLOW_OPTIONS = 2
"""Slow options of a family that make all of it suspect."""

MOST_TOLD = 3
"""Entries that a reason names."""


def active(inputs: Inputs, link: LinkEstimate) -> tuple[Ban, ...]:
    """Return the entries that count now.

    Args:
        inputs: For step, settings and history.
        link: The link as it is now.
    """
    return tuple(
        ban
        for ban in inputs.history.bans
        if ban.step <= inputs.step < ban.until and not _forgiven(ban, inputs, link)
    )


def covering(bans: Sequence[Ban], option: Option) -> Ban | None:
    """Return the entry that forbids an option; None if none does.

    Overflows are expected of the whole family, other harm to training of every stronger ratio by
    any carrier, slowness of that one option at ratios near the one that was tried. Where several
    options of a family were too slow the models are wrong about the family, and it is left alone.
    """
    if option.family == DENSE.family and not option.skip:
        return None
    bf16 = option.family == BF16.family and not option.skip
    related = [ban for ban in bans if (ban.compressor, ban.settings) == option.family]
    slow = [ban for ban in related if ban.cause == "cost"]
    if len(slow) >= SLOW_OPTIONS and not bf16:
        return slow[-1]
    for ban in related:
        if ban.skip > option.skip or (bf16 and ban.cause != "nonfinite"):
            continue
        tried, wanted = ratio_bucket(ban.ratio), ratio_bucket(option.ratio)
        alike = (ban.collective, ban.skip, tried) == (option.collective, option.skip, wanted)
        stronger = ban.cause != "cost" and wanted <= tried
        if alike or stronger or ban.cause == "nonfinite":
            return ban
    return None


def banned_again(
    inputs: Inputs, options: Sequence[Option], cause: str, link: LinkEstimate
) -> tuple[Ban, ...]:
    """Return all entries after these options did harm.

    Args:
        inputs: For step, settings and history.
        options: Options that did harm; those that send everything are left out where ``covering``
            would not heed them anyway.
        cause: One of ``CAUSES``.
        link: The link as it is now.
    """
    bans = remembered(inputs)
    for option in dict.fromkeys(options):
        made = Ban(
            option.compressor, option.settings, option.ratio, option.collective, option.skip, cause,
            inputs.step, inputs.step, 1, link.alpha_seconds, link.beta_seconds_per_byte,
        )  # fmt: skip
        if covering((made,), option) is None:
            continue
        before = [ban for ban in bans if _same(ban, made)]
        times = 1 + max((ban.times for ban in before), default=0)
        steps = inputs.settings.blacklist_steps * 2 ** min(times - 1, MOST_DOUBLINGS)
        made = replace(made, times=times, until=inputs.step + steps)
        bans = (*(ban for ban in bans if ban not in before), made)
    return bans[-MOST_BANS:]


def remembered(inputs: Inputs) -> tuple[Ban, ...]:
    """Return the entries that count or that would make another one longer.

    An expired one is kept for as long again as it lasted.
    """
    return tuple(
        ban for ban in inputs.history.bans if ban.step <= inputs.step < 2 * ban.until - ban.step
    )


def patience(bans: Sequence[Ban], options: Sequence[Option], inputs: Inputs) -> int:
    """Return how many steps a plan must stay before compression is tried again after a failure.

    A quarter of ``blacklist_steps``, doubled by every entry for slowness: where compression keeps
    costing more than it is predicted to, the models do not know this job.
    """
    slow = sum(ban.cause == "cost" for ban in bans)
    if not slow or whole(options):
        return 0
    return int(inputs.settings.blacklist_steps // 4 * 2 ** min(slow - 1, MOST_DOUBLINGS))


def tell(bans: Sequence[Ban], inputs: Inputs) -> list[str]:
    """Return for people what is not chosen, why and until when; the newest entries first."""
    texts = []
    for ban in bans[::-1][:MOST_TOLD]:
        option = Option(ban.compressor, ban.ratio, ban.collective, ban.skip, settings=ban.settings)
        again = f", {ban.times} times" if ban.times > 1 else ""
        texts.append(
            f"{option.label} is black-listed for {ban.until - inputs.step} more steps:"
            f" it {DEEDS.get(ban.cause, ban.cause)}{again}"
        )
    if len(bans) > MOST_TOLD:
        texts.append(f"{len(bans) - MOST_TOLD} more options are black-listed")
    return texts


def _same(one: Ban, other: Ban) -> bool:
    return (one.compressor, one.settings, one.collective, one.skip, one.cause) == (
        other.compressor,
        other.settings,
        other.collective,
        other.skip,
        other.cause,
    ) and ratio_bucket(one.ratio) == ratio_bucket(other.ratio)


def _forgiven(ban: Ban, inputs: Inputs, link: LinkEstimate) -> bool:
    return ban.cause == "cost" and link_changed(ban, link, inputs)
