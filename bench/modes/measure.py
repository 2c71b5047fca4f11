"""Has ranks measure the modes: all on this machine, or each in an emulated host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.modes.catalog import MODES
from bench.modes.job import Orders, Told, answer
from bench.modes.models import Size
from bench.netlab import Lab, Link
from bench.tta.hosts import START_SECONDS, Processes

RANKS = 2
LAB = f"modes{os.getpid()}"
LINK = Link(rate_mbit=1000, rtt_ms=1)
"""At this rate the gradient takes about as long as the model computes: communication is seen."""

WARM_UP_STEPS = 8
MODE_SECONDS = 120.0
"""No mode takes so long, and the ranks all together not more than that for each."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured in one environment.

    Attributes:
        link: Of both hosts; None over loopback.
        modes: Names of modes.
        size: Of models and data.
        blocks: Blocks of each copy, at least 2.
        block_steps: Steps of a block, at least 2: ``join`` makes one fewer on a rank.
        warm_up_steps: See ``Orders``.
        controller: Whether there is one.
    """

    link: Link | None
    modes: tuple[str, ...] = tuple(MODES)
    size: Size = field(default_factory=Size)
    blocks: int = 18
    block_steps: int = 2
    warm_up_steps: int = WARM_UP_STEPS
    controller: bool = True


FULL = (Setup(None), Setup(LINK, blocks=14))
QUICK = tuple(replace(setup, blocks=2, warm_up_steps=4) for setup in FULL)

Measured = dict[str, tuple[Told, ...]]
"""By mode, what every rank told."""


class Here(Lab):
    """This machine with its loopback, where a lab of emulated hosts is asked for; is never up."""

    def address(self, host: int) -> str:
        """Return the address of every host."""
        return "127.0.0.1"

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program, in a session of its own."""
        return subprocess.Popen(argv, text=True, start_new_session=True, **options)


class Ranks(Processes):
    """Ranks that measure, and their controller; ends them as ``Processes`` does."""

    def start_beside(self) -> str:
        """Start a controller that leaves everything dense; return its address once it serves."""
        ready = self._folder / "controller.json"
        argv = [
            *("nice", "-n", "5", sys.executable, "-m", "gradpilot.controller", "--insecure"),
            *("--grpc-address", f"{self._lab.address(0)}:0", "--http-address", "127.0.0.1:0"),
            *("--state", str(self._folder / "controller.sqlite3"), "--ready-file", str(ready)),
            *("--policy", "fixed"),
        ]
        self._controller = self._start(0, "controller", argv, {})
        self.wait_for(ready.exists, START_SECONDS, "the controller to serve")
        port: int = json.loads(ready.read_text(encoding="utf-8"))["grpc_port"]
        return f"{self._lab.address(0)}:{port}"

    def start_measuring(self, interface: str) -> None:
        """Start all ranks; their orders lie in the folder."""
        port = str(_free_port())
        for rank in range(RANKS):
            names = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": self._lab.address(0),
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": interface,
            }
            argv = [sys.executable, "-m", "bench.modes.job", "--folder", str(self._folder)]
            self._ranks.append(self._start(rank, f"rank{rank}", argv, names))


def measure(setup: Setup, say: Callable[[str], None] = lambda text: None) -> Measured:
    """Measure all modes of a setup.

    Args:
        setup: What.
        say: Is told of every mode that is done.

    Raises:
        NetlabError: There can be no emulated hosts.
        RowFailedError: A process failed, or a mode took too long.
    """
    seconds = START_SECONDS + MODE_SECONDS * len(setup.modes)
    with (
        tempfile.TemporaryDirectory(prefix="modes-") as scratch,
        _hosts(setup.link) as (lab, interface),
        Ranks(lab, Path(scratch)) as ranks,
    ):
        folder = Path(scratch)
        orders = Orders(
            modes=setup.modes,
            size=setup.size,
            controller=ranks.start_beside() if setup.controller else "off",
            blocks=setup.blocks,
            block_steps=setup.block_steps,
            warm_up_steps=setup.warm_up_steps,
            seconds=seconds,
        )
        orders.write(folder)
        ranks.start_measuring(interface)
        found = {}
        for mode in setup.modes:
            answers = [answer(folder, mode, rank) for rank in range(RANKS)]
            ranks.wait_for(
                lambda wanted=answers: all(path.exists() for path in wanted),  # type: ignore[misc]
                START_SECONDS + MODE_SECONDS,
                f"mode {mode}",
            )
            found[mode] = tuple(Told.read(path) for path in answers)
            say(f"{where(setup.link)}: {mode}")
        ranks.wait_for_end(START_SECONDS)
        return found


def where(link: Link | None) -> str:
    """Return an environment in words."""
    if link is None:
        return "loopback"
    return f"{link.rate_mbit:g} Mbit/s, {link.rtt_ms:g} ms"


@contextlib.contextmanager
def _hosts(link: Link | None) -> Iterator[tuple[Lab, str]]:
    """Give a place for the ranks, and the name of the interface between them."""
    if link is None:
        yield Here(LAB, hosts=RANKS), "lo"
        return
    with Lab(LAB, hosts=RANKS, link=link) as lab:
        yield lab, "eth0"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
