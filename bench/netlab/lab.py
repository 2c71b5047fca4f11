"""A lab: up, changed, used, down."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.netlab import build, counters, names, probes
from bench.netlab.control import Helper
from bench.netlab.errors import BadRequestError, CommandError, LabExistsError
from bench.netlab.link import Link
from bench.netlab.signals import end_on_sigterm, undisturbed
from bench.netlab.state import State, locked
from bench.netlab.status import describe
from bench.netlab.system import environment, require
from bench.netlab.teardown import leftovers, remove, take_down
from bench.netlab.trace import Applied, Change, Replay, Trace

DEFAULT_LINK = Link()

MACHINE_TRIPS = 20
MOST_MACHINE_MS = 0.2
"""A machine that needs longer is busy, and will be faster later."""


class Lab:
    """N hosts on this machine, with links as slow as asked for.

    As a context manager it is up inside and gone afterwards, also on an exception, SIGINT and
    SIGTERM; after SIGKILL, ``take_down(name)`` clears it away::

        with Lab("demo", hosts=4, link=Link(rate_mbit=100, rtt_ms=5)) as lab:
            print(lab.run(0, ["ping", "-U", "-c3", lab.address(1)], seconds=10).stdout)
            lab.set(rate_mbit=20, hosts=[2])

    Several processes may use one lab: each change is a transaction on what is kept in ``/run``.
    """

    def __init__(
        self,
        name: str = "lab",
        *,
        hosts: int = 4,
        link: Link | Sequence[Link] = DEFAULT_LINK,
        mtu: int = 1500,
        congestion: str = "cubic",
        replace: bool = False,
    ) -> None:
        """Describe a lab; nothing is made yet.

        Args:
            name: 1 to 16 of a-z and 0-9; a lab of another name can be up at the same time.
            hosts: How many hosts.
            link: The link of every host, or one for each.
            mtu: Largest IP packet, bytes.
            congestion: TCP's congestion control.
            replace: Whether a lab of that name is taken down first.

        Raises:
            BadRequestError: Name, number or links make no sense.
        """
        self.name = names.valid_name(name)
        links = [link] * hosts if isinstance(link, Link) else list(link)
        if not 2 <= hosts <= names.MOST_HOSTS:
            raise BadRequestError(f"a lab has 2 to {names.MOST_HOSTS} hosts, got {hosts}")
        if len(links) != hosts:
            raise BadRequestError(f"{hosts} hosts need as many links, got {len(links)}")
        if not 576 <= mtu <= 9000:
            raise BadRequestError(f"an MTU is 576 to 9000 bytes, got {mtu}")
        self._plan = State(self.name, mtu, congestion, links)
        self._replace = replace
        self._restore: Callable[[], None] = lambda: None

    @staticmethod
    def open(name: str = "lab") -> Lab:
        """Return a lab that is up.

        Raises:
            NoLabError: It is not.
        """
        state = State.load(names.valid_name(name))
        return Lab(
            name,
            hosts=state.hosts,
            link=state.links,
            mtu=state.mtu,
            congestion=state.congestion,
        )

    # --- up and down -----------------------------------------------------------------------------

    def up(self) -> None:
        """Make it; if that fails or is interrupted, nothing is left of it.

        Raises:
            LabExistsError: The name is taken and must not be replaced.
            UnsupportedError: This machine cannot run a lab.
            CommandError: A program of the system failed.
            HelperError: The delay process does not start.
        """
        require()
        with locked(self.name):
            there = leftovers(self.name)
            if there and not self._replace:
                raise LabExistsError(
                    f"there is a lab {self.name!r} already, in use or left over ({there[0]} and "
                    f"{len(there) - 1} more): take it down, replace it, or use another name"
                )
            remove(self.name)
            state = self._plan
            try:
                state.save()
                build.make(state)
                self._delay(state)
                state.complete = True
                state.save()
            except BaseException:
                with undisturbed():
                    remove(self.name)
                    names.lock_file(self.name).unlink(missing_ok=True)
                raise

    def down(self) -> list[str]:
        """Remove it and return what there was; see ``take_down``."""
        return take_down(self.name)

    def __enter__(self) -> Self:
        self._restore = end_on_sigterm()
        try:
            self.up()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with undisturbed():
                self.down()
        finally:
            self._restore()

    # --- changes ---------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what it is set to.

        Raises:
            NoLabError: It is not up.
        """
        return State.load(self.name)

    def set(
        self,
        *,
        rate_mbit: float | None = None,
        rtt_ms: float | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """Change links while they are in use; packets on their way keep their order.

        Args:
            rate_mbit: New rate; None leaves it.
            rtt_ms: New round trip; None leaves it.
            hosts: Whose; None for all.

        Raises:
            BadRequestError: A value or a host makes no sense; nothing was changed.
            NoLabError: The lab is not up.
            CommandError: A program of the system failed.
            HelperError: The delay process does not answer.
        """
        chosen: Sequence[int | None] = [None] if hosts is None else hosts
        self.apply([Change(0.0, i, None, rate_mbit, rtt_ms) for i in chosen])

    def background(self, source: int, target: int, rate_mbit: float) -> None:
        """Set the background traffic from one host to another, Mbit/s; 0 ends it.

        Raises:
            BadRequestError: A host is not there.
            NoLabError: The lab is not up.
            CommandError: A program of the system failed.
            HelperError: The background process does not start or answer.
        """
        self.apply([Change(0.0, None, (source, target), rate_mbit, None)])

    def apply(self, changes: Sequence[Change]) -> None:
        """Put changes in force, all of one moment; see ``set`` and ``background``."""
        self.state()  # there is one: a lock of nothing would be left behind
        with locked(self.name):
            state = self.state()
            Trace(tuple(changes)).check(state.hosts)
            before = list(state.links)
            for change in changes:
                chosen = range(state.hosts) if change.host is None else [change.host]
                for i in chosen if change.flow is None else []:
                    state.links[i] = state.links[i].changed(change.rate_mbit, change.rtt_ms)
            pairs = list(enumerate(zip(before, state.links, strict=True)))
            paced = [i for i, (old, new) in pairs if old.rate_mbit != new.rate_mbit]
            if paced:
                build.shape(state, paced, "change")
            if any(old.rtt_ms != new.rtt_ms for _, (old, new) in pairs):
                self._delay(state)
            for change in changes:
                if change.flow is not None:
                    self._flow(state, *change.flow, change.rate_mbit or 0.0)
            state.save()

    def _delay(self, state: State) -> None:
        """Put the round trips in force; the process starts with the first that is not 0."""
        if not (state.queued or any(link.rtt_ms for link in state.links)):
            return
        helper = Helper(self.name, "delay")
        if not state.queued:
            state.machine_rtt_ms = self._machine_rtt_ms()
            helper.start(state.hosts, state.mtu)
        helper.ask(seconds=state.delays)
        if not state.queued:
            build.queue_arrivals(state)
            state.queued = True

    def _machine_rtt_ms(self) -> float:
        """Return the round trip between two hosts before anything is delayed, ms."""
        pair = (names.host(self.name, 0), names.host(self.name, 1), names.address(1))
        found = probes.round_trips(*pair, MACHINE_TRIPS, lost_after=0.1)
        return min(1e3 * probes.median(found), MOST_MACHINE_MS) if found else 0.0

    def _flow(self, state: State, source: int, target: int, rate_mbit: float) -> None:
        helper = Helper(self.name, "background")
        if helper.process() is None:
            helper.start(state.hosts, state.mtu)
        build.drop_background(state, source, target)
        helper.ask(source=source, target=target, bytes_per_second=rate_mbit * 1e6 / 8)
        state.flows.pop(f"{source}-{target}", None)
        if rate_mbit:
            state.flows[f"{source}-{target}"] = rate_mbit

    def play(
        self,
        trace: Trace,
        *,
        loop_seconds: float | None = None,
        tell: Callable[[Applied], None] | None = None,
    ) -> Replay:
        """Replay a trace in the background; see ``Replay``.

        Raises:
            BadRequestError: The trace does not fit the lab.
            NoLabError: The lab is not up.
        """
        trace.check(self.state().hosts)
        return Replay(trace, self.apply, loop_seconds, tell)

    # --- use -------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return names.address(self._known(host))

    def namespace(self, host: int) -> str:
        """Return the network namespace of a host, as ``ip netns`` names it."""
        return names.host(self.name, self._known(host))

    def _known(self, host: int) -> int:
        if not 0 <= host < self._plan.hosts:
            raise BadRequestError(f"hosts are 0 to {self._plan.hosts - 1}, got {host}")
        return host

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs another on a host."""
        program = shutil.which("ip", path=environment()["PATH"]) or "ip"
        return [program, "netns", "exec", self.namespace(host), *argv]

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on a host, in a session of its own.

        Args:
            host: Where.
            argv: Program and arguments.
            options: As of ``subprocess.Popen``; output is text.
        """
        return subprocess.Popen(
            self.command(host, argv), text=True, start_new_session=True, **options
        )

    def run(
        self,
        host: int,
        argv: Sequence[str],
        *,
        seconds: float,
        text: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host and return what it printed and its exit status.

        Args:
            host: Where.
            argv: Program and arguments.
            seconds: Then it is killed, with its process group.
            text: Its standard input.
            env: Its environment; the caller's if not given.
            cwd: Its folder; the caller's if not given.

        Raises:
            CommandError: It did not end in time; the message has the end of its output.
        """
        pipe = subprocess.PIPE
        with self.popen(
            host, argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd
        ) as process:
            try:
                out, err = process.communicate(text, timeout=seconds)
            except subprocess.TimeoutExpired:
                _kill_group(process)
                out, err = process.communicate()
                raise CommandError(
                    f"{' '.join(argv)!r} on host {host} did not end within {seconds:g} s; "
                    f"its last words: {(out + err)[-500:]!r}"
                ) from None
            except BaseException:
                _kill_group(process)
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def counters(self) -> list[counters.Counters]:
        """Return what each host's link has carried."""
        return counters.read(self.state())

    def carried(self, source: int, target: int) -> int:
        """Return how many bytes of background traffic from one host have reached another."""
        return counters.carried(self.state(), source, target)

    def status(self) -> dict[str, Any]:
        """Return settings, counters, the processes' own words, and ``problems`` in words.

        Raises:
            NoLabError: It is not up.
        """
        return describe(self.state())


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
