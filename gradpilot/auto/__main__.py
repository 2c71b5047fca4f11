"""``python -m gradpilot.auto``: say what ``PYTHONPATH`` has to be, what it was included."""

from __future__ import annotations

import os
import sys


def path(before: str) -> str:
    """Return ``PYTHONPATH`` with this folder first.

    Args:
        before: What it was.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    others = [one for one in before.split(os.pathsep) if one and one != folder]
    return os.pathsep.join([folder, *others])


if __name__ == "__main__":
    sys.stdout.write(f"{path(os.environ.get('PYTHONPATH', ''))}\n")
