"""Names and addresses of a lab: everything that it makes carries its name.

A lab ``demo`` has the namespaces ``netlab-demo-hub`` (the bridge) and ``netlab-demo-h0`` ... (the
hosts), and its files are ``/run/netlab/demo.*``. Devices and addresses live inside those
namespaces, so two labs use the same ones without meeting, and leftovers are found by name alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.netlab.errors import BadRequestError

RUN = Path("/run/netlab")
NAMESPACES = Path("/run/netns")

MOST_HOSTS = 100
DEVICE = "eth0"
"""The only device of a host, beside its loopback."""

_NAME = re.compile(r"[a-z][a-z0-9]{0,15}")


def valid_name(name: str) -> str:
    """Return a lab's name if it can be one.

    Raises:
        BadRequestError: It cannot.
    """
    if not _NAME.fullmatch(name):
        raise BadRequestError(
            f"a lab's name is 1 to 16 of a-z and 0-9 and begins with a letter, got {name!r}"
        )
    return name


def hub(name: str) -> str:
    """Return the namespace of a lab's bridge."""
    return f"netlab-{name}-hub"


def host(name: str, index: int) -> str:
    """Return the namespace of a host."""
    return f"netlab-{name}-h{index}"


def port(index: int) -> str:
    """Return the bridge's end of a host's link."""
    return f"p{index}"


def address(index: int) -> str:
    """Return the address of a host, in every lab."""
    return f"10.77.0.{index + 1}"


NETWORK = "10.77.0.0/24"


def belongs(namespace: str, name: str) -> bool:
    """Return whether a namespace is part of a lab."""
    return re.fullmatch(rf"netlab-{re.escape(name)}-(hub|h\d+)", namespace) is not None


def state_file(name: str) -> Path:
    """Return where a lab's state is kept."""
    return RUN / f"{name}.json"


def lock_file(name: str) -> Path:
    """Return the file that is locked while a lab changes."""
    return RUN / f"{name}.lock"


def pid_file(name: str, kind: str) -> Path:
    """Return where a helper process notes its number and start time."""
    return RUN / f"{name}.{kind}.pid"


def socket_file(name: str, kind: str) -> Path:
    """Return where a helper process takes requests."""
    return RUN / f"{name}.{kind}.sock"


def log_file(name: str, kind: str) -> Path:
    """Return where a helper process writes what it has to say."""
    return RUN / f"{name}.{kind}.log"
