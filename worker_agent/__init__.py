"""The agent inside every rank.

Importing this package decides how grpc treats ``fork()``: DataLoader workers fork while the control
stream is open, and grpc's fork handlers then slow training fourfold or kill a worker. grpc reads
the variable when it is first imported, so it is set here, before any module of the agent can.
"""

from __future__ import annotations

import os
import sys

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

GRPC_IMPORTED_EARLY = "grpc" in sys.modules and os.environ.get(_FORK_SUPPORT) != "0"
"""Whether grpc was imported first, and without the setting; the client then warns."""

os.environ.setdefault(_FORK_SUPPORT, "0")
