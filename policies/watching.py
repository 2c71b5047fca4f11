"""One look of all guards at a run: what is wrong, what may not be chosen, what to remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies import blacklist, overflow, regime, residuals, trial
from gradpilot.policies.base import Inputs, PolicySettings
from gradpilot.policies.credibility import believe, values
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.history import History, ratio_bucket
from gradpilot.policies.problem import Space
from gradpilot.policies.protection import snr, warm_up
from gradpilot.policies.watches import Ban, Look, Overflow
from gradpilot.protos.messages import LinkEstimate, Option


@dataclass(frozen=True, slots=True)
class Watch:
    """What the guards found.

    Attributes:
        doubt: Why nothing measured should be acted on; empty if it should.
        cause: Why the plan in force must be undone, one of ``blacklist.CAUSES``; empty if it need
            not be.
        reason: The same for people.
        back: Option per bucket to go back to, empty for the best that sends everything.
        bans: Black-listed options.
        floor: Floor of gain for what is chosen now.
        least: Floor of gain that the plan in force must keep.
        notes: What else people should know.
        snr: Newest signal-to-noise ratio.
        history: What the guards want remembered; the rest is as it was.
    """

    doubt: str
    cause: str
    reason: str
    back: tuple[Option, ...]
    bans: tuple[Ban, ...]
    floor: float
    least: float
    notes: tuple[str, ...]
    snr: float
    history: History

    def settings(self, inputs: Inputs) -> PolicySettings:
        """Return the settings with the floor that holds now."""
        return replace(inputs.settings, gain_floor=self.floor)

    def banned(self, space: Space) -> NDArray[np.bool_]:
        """Return which options are black-listed, (K,)."""
        found = np.zeros(len(space), dtype=np.bool_)
        families = {(ban.compressor, ban.settings) for ban in self.bans}
        table = space.table
        if table is None or not families:
            return found
        suspects = [h for h, head in enumerate(space.heads) if head.key[0] in families]
        known: dict[tuple[int, int], bool] = {}  # nothing else of an option counts
        for k in np.flatnonzero(np.isin(table.head, suspects)):
            key = int(table.head[k]), ratio_bucket(float(table.ratio[k]))
            if key not in known:
                known[key] = blacklist.covering(self.bans, space.option(int(k))) is not None
            found[k] = known[key]
        return found


def watch(inputs: Inputs, space: Space, link: LinkEstimate, present: Evaluation | None) -> Watch:
    """Let all guards look.

    Args:
        inputs: What is known.
        space: Options and models; the plan on trial adds the one before it.
        link: The link as it is now.
        present: Prediction for the plan in force.
    """
    before = inputs.history
    using = tuple(dict.fromkeys(space.present_options))
    belief = believe(before.look, values(inputs, link, space.straggle_seconds), inputs.buckets)
    if belief.doubt:
        look = replace(before.look, believed=belief.believed, doubted=belief.doubted)
        return _watch(inputs, link, replace(before, look=look), before.snr, doubt=belief.doubt)

    steps = inputs.steps_since_switch
    changed = bool(before.look.present) and (
        using != before.look.present or steps < before.look.steps
    )
    rebase = changed or steps < inputs.settings.trial_steps
    counted = overflow.next_overflow(
        before.overflow, inputs.nonfinite_steps, inputs.step, using,
        before.look.present if changed else (),
    )  # fmt: skip
    calm, shock = regime.next_regime(inputs, rebase=rebase)
    found = residuals.watch(inputs, using, rebase=rebase)
    tried = trial.proceed(inputs, space, present)
    ratio = snr(inputs, space.present_options)
    after = replace(
        before,
        look=Look(using, steps, belief.believed, belief.doubted),
        overflow=counted,
        regime=calm,
        residuals=found.trend,
        trial=tried.trial,
        bans=_pardoned(inputs, blacklist.remembered(inputs), before.overflow.dense_step, counted),
        warmth=warm_up(inputs, ratio, shock=shock, rebase=rebase),
        snr=ratio,
    )
    notes = overflow.tell(counted, inputs.step, using)
    in_force = space.current_options
    alarms = (
        ("nonfinite", overflow.alarm(counted, inputs.step, using)),
        ("residual", found.alarm),
        (tried.cause, tried.reason),
    )
    cause, reason = next(((c, r) for c, r in alarms if r and in_force), ("", ""))
    back: tuple[Option, ...] = ()
    if cause:
        now = replace(inputs, history=after)
        guilty = _guilty(inputs, in_force, cause)
        after = replace(after, bans=blacklist.banned_again(now, guilty, cause, link), trial=None)
        if cause in ("cost", "loss") and before.trial is not None:
            back = trial.expand(before.trial.left, inputs)
    return _watch(inputs, link, after, ratio, cause=cause, reason=reason, back=back, notes=notes)


def _watch(
    inputs: Inputs,
    link: LinkEstimate,
    after: History,
    ratio: float,
    *,
    doubt: str = "",
    cause: str = "",
    reason: str = "",
    back: tuple[Option, ...] = (),
    notes: Sequence[str] = (),
) -> Watch:
    settings = inputs.settings
    # As with skips, what was known before counts, but for bad news.
    warmth = after.warmth if after.warmth.critical else inputs.history.warmth
    floor = warmth.floor(settings.gain_floor, settings.warm_floor)
    bans = blacklist.active(replace(inputs, history=after), link)
    return Watch(
        doubt=doubt,
        cause=cause,
        reason=reason,
        back=back,
        bans=bans,
        floor=floor,
        # A run that merely starts is not pushed off the plan that it has.
        least=floor if warmth.critical else settings.gain_floor,
        notes=(
            *notes,
            *regime.tell(warmth, floor),
            *blacklist.tell(bans, inputs),
        ),
        snr=ratio,
        history=after,
    )


def _guilty(inputs: Inputs, in_force: Sequence[Option], cause: str) -> list[Option]:
    """Return which options of the plan in force did it: all, or those of buckets that show it."""
    if cause != "residual":
        return list(dict.fromkeys(in_force))
    kept = [max(state.residual_sq, 0.0) for state in inputs.buckets]
    most = max(kept, default=0.0)
    return list(dict.fromkeys(o for o, r in zip(in_force, kept, strict=True) if r >= 0.1 * most))


def _pardoned(
    inputs: Inputs, bans: tuple[Ban, ...], dense_step: int, now: Overflow
) -> tuple[Ban, ...]:
    """Return the entries without those for overflows, should the same happen under dense plans."""
    if now.dense_step == dense_step or now.dense_step < inputs.step:
        return bans
    return tuple(ban for ban in bans if ban.cause != "nonfinite")
