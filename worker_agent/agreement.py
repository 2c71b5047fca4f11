"""How all ranks switch on the same step, or none does.

At a decision step every rank puts one row on the control group; the rows are the same everywhere,
so every rank draws the same conclusion from them. If there is something to do (a newer plan, the
safe plan, a probe), the ranks vote and the verdict is committed through the store with a
compare-and-set: the first writer decides for all. A rank that failed before or after the vote
writes "abort" and takes what stands there, so a failure on the control group ends alike everywhere.
Only a rank that cannot reach the store either cannot learn the verdict; it must stop, since the
others may have switched and would wait for it in another collective.

The exchange runs in a thread of its own from the end of one step to the start of the next, so it
overlaps with the forward pass.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradpilot.errors import AgreementLostError, GradpilotError
from gradpilot.protos.codec import dumps, loads
from gradpilot.protos.messages import Plan, ProbeRequest
from gradpilot.worker_agent.threads import OrderedThread
from gradpilot.worker_agent.wire import all_gather_flat

_FIELDS = 9
"""Integers in a row: see ``Row.numbers``."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank puts up at a decision step.

    Attributes:
        step: First step that a switch would apply to.
        version: Code version; ranks with different code never switch.
        layout: Layout digest.
        active: ``(term, id)`` of the plan in force.
        held: Newest plan held for this layout; None if none is newer than ``active``.
        controller_lost: Whether the controller has been away for longer than the time to live.
        probe: Newest probe request not yet run; None if none.
    """

    step: int
    version: str
    layout: str
    active: tuple[int, int]
    held: Plan | None
    controller_lost: bool
    probe: ProbeRequest | None

    def numbers(self) -> list[int]:
        """Return the row as ``_FIELDS`` integers; texts and pairs as 63-bit hashes."""
        held = self.held.key if self.held is not None else (0, 0)
        probe = self.probe or ProbeRequest(0, 0, 0)
        return [
            self.step,
            _hash63(f"{self.version}|{self.layout}|{self.active}"),
            held[0],
            held[1],
            int(self.controller_lost),
            probe.id,
            probe.small_bytes,
            probe.large_bytes,
            1,
        ]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do at the decision step.

    Attributes:
        plan: Plan to switch to; None to stay.
        safe: Whether to fall back to the safe plan.
        probe: Probe to run now.
        rejected: Why a proposal was turned down, "" if none was.
        error: Why decisions are frozen from now on, "" if they are not.
    """

    plan: Plan | None = None
    safe: bool = False
    probe: ProbeRequest | None = None
    rejected: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What is voted on: a plan, a probe, or, with neither, the safe plan."""

    plan_bytes: bytes = b""
    probe: ProbeRequest | None = None


class Agreement:
    """Runs exchanges; all ranks must start them at the same steps.

    Args:
        group: Control group (gloo), used by nothing else; its timeout bounds every wait.
        store: Store that all ranks reach, for the commit.
        prefix: Prefix of the keys written there, the same on all ranks and new for each start.
        timeout_seconds: Bound of the wait in ``finish``; a little more than the group's own.
        check: Raises ``GradpilotError`` if this rank cannot carry out a plan.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        prefix: str,
        timeout_seconds: float,
        check: Callable[[Plan], None],
    ) -> None:
        self._group = group
        self._store = store
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds
        self._check = check
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._thread = OrderedThread("gradpilot-agreement")
        self._running: concurrent.futures.Future[Verdict] | None = None
        self.frozen = ""
        """Why no further exchange takes place, "" while they do."""

    def start(self, row: Row) -> None:
        """Begin the exchange of a decision step, without waiting."""
        if self.frozen:
            return
        running: concurrent.futures.Future[Verdict] = concurrent.futures.Future()

        def run() -> None:
            try:
                running.set_result(self._exchange(row))
            except BaseException as failure:
                running.set_exception(failure)

        self._running = running
        self._thread.submit(run)

    def finish(self) -> Verdict:
        """Return the verdict of the exchange begun last; the empty verdict if none is under way.

        Raises:
            AgreementLostError: The verdict cannot be learned; this rank must not go on.
        """
        running, self._running = self._running, None
        if running is None:
            return Verdict()
        try:
            # Every wait inside is bounded by the group's or the store's timeout.
            verdict = running.result(4 * self._timeout_seconds)
        except concurrent.futures.TimeoutError:
            raise AgreementLostError(
                f"no verdict of the plan exchange within {4 * self._timeout_seconds:.0f} s although"
                " every wait in it is bounded; restart the job (torchrun does with --max-restarts)"
            ) from None
        if verdict.error:
            self.frozen = verdict.error
        return verdict

    def close(self) -> bool:
        """Stop the thread after the exchange at hand, which all ranks have begun alike.

        Returns:
            Whether it ended; if not, it waits for a rank that is gone, and the group is not free.
        """
        return self._thread.stop()

    def _exchange(self, row: Row) -> Verdict:
        proposal: _Proposal | None = None
        try:
            rows = self._gather(row.numbers())
            odd = [r for r, other in enumerate(rows) if other[:2] != rows[0][:2]]
            if odd:
                return Verdict(
                    error=f"ranks {odd} differ from rank 0 in step, code version, bucket layout or"
                    " plan in force; plans stay as they are. Check that all nodes run the same code"
                )
            proposal = self._proposal(row, rows)
            if proposal is None:
                return Verdict()
            objection = self._objection(proposal)
            if not self._all_agree(not objection):
                return Verdict(rejected=objection or "another rank cannot carry the plan out")
            committed = self._resolve(row.step, "commit")
            error = ""
        except AgreementLostError:
            raise
        except Exception as failure:
            committed = self._resolve(row.step, "abort")
            error = f"control group failed at step {row.step}: {type(failure).__name__}: {failure}"
            if committed == "commit" and proposal is None:
                raise AgreementLostError(
                    "the other ranks switched plans and this one does not know to what:"
                    f" {error}; restart the job"
                ) from failure
        if committed != "commit" or proposal is None:
            return Verdict(error=error or "another rank failed during the plan exchange")
        if proposal.plan_bytes:
            return Verdict(plan=loads(proposal.plan_bytes), error=error)
        return Verdict(safe=proposal.probe is None, probe=proposal.probe, error=error)

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        mine = torch.tensor(numbers, dtype=torch.int64)
        rows = mine.new_empty(self._world_size * _FIELDS)
        all_gather_flat(rows, mine, group=self._group)
        gathered: list[list[int]] = rows.view(self._world_size, _FIELDS).tolist()
        return gathered

    def _proposal(self, row: Row, rows: list[list[int]]) -> _Proposal | None:
        """Return what the rows ask for; a pure function of them, but for the plan's bytes."""
        newest = max((r[2], r[3]) for r in rows)
        if newest > row.active:
            source = next(i for i, r in enumerate(rows) if (r[2], r[3]) == newest)
            return _Proposal(plan_bytes=self._fetch(row, source))
        if all(r[4] for r in rows):
            return _Proposal()
        if rows[0][5] and all(r[5:8] == rows[0][5:8] for r in rows):
            return _Proposal(probe=ProbeRequest(*rows[0][5:8]))
        return None

    def _fetch(self, row: Row, source: int) -> bytes:
        """Broadcast the newest plan from the lowest rank that holds it."""
        data = b""
        if self._rank == source:
            assert row.held is not None
            data = dumps(row.held)
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, group=self._group, group_src=source)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8)
        if self._rank == source:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, group=self._group, group_src=source)
        return bytes(buffer.tolist())

    def _objection(self, proposal: _Proposal) -> str:
        """Return why this rank cannot carry the proposal out, "" if it can."""
        if not proposal.plan_bytes:
            return ""
        try:
            self._check(loads(proposal.plan_bytes))
        except GradpilotError as error:
            return str(error)
        return ""

    def _all_agree(self, agree: bool) -> bool:
        vote = torch.tensor([int(agree)], dtype=torch.int64)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def _resolve(self, step: int, wish: str) -> str:
        """Return the fate of the exchange: the wish that reached the store first."""
        try:
            fate = self._store.compare_set(f"{self._prefix}/exchange/{step}", "", wish)
        except Exception as failure:
            raise AgreementLostError(
                f"the verdict of the plan exchange at step {step} cannot be learned: the store does"
                f" not answer ({failure}); this rank stops, restart the job"
            ) from failure
        return bytes(fate).decode()


def control_timeout(seconds: float) -> timedelta:
    """Return the control group's timeout, 1 to 15 s: long enough for a stall, short for a user."""
    return timedelta(seconds=min(max(seconds, 1.0), 15.0))


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
