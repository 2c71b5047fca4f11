"""Emulated hosts on one Linux machine: rates, latency and background traffic, changed live.

For kernels without netem. It needs root, ``ip``, ``tc`` and ``iptables``, and Python's standard
library; it knows nothing of what runs in it. See docs/netlab.md.

* ``Lab``: a lab, as a context manager too; ``Link``: rate and round trip of a host
* ``Trace``: changes over time, from a file; ``Lab.play`` replays it
* ``check``: measures a lab and says what is not as asked for
* ``take_down``: clears away whatever is left of a lab
"""

from bench.netlab.checks import Measured, check
from bench.netlab.counters import Counters
from bench.netlab.errors import (
    BadRequestError,
    CommandError,
    HelperError,
    LabExistsError,
    NetlabError,
    NoLabError,
    UnsupportedError,
)
from bench.netlab.lab import Lab
from bench.netlab.link import Link
from bench.netlab.system import missing
from bench.netlab.teardown import leftovers, take_down
from bench.netlab.trace import Applied, Change, Replay, Trace

__all__ = [
    "Applied",
    "BadRequestError",
    "Change",
    "CommandError",
    "Counters",
    "HelperError",
    "Lab",
    "LabExistsError",
    "Link",
    "Measured",
    "NetlabError",
    "NoLabError",
    "Replay",
    "Trace",
    "UnsupportedError",
    "check",
    "leftovers",
    "missing",
    "take_down",
]
