"""How every command of the command line ends: one line for an error, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gradpilot.errors import ConfigError, GradpilotError


def exit_code(name: str, action: Callable[[], int]) -> int:
    """Run a command and return its exit code; 1: it failed, 2: wrong usage, 130: interrupted.

    Args:
        name: What the line on stderr begins with.
        action: The command; its result is the exit code where it ends well.
    """
    try:
        return action()
    except GradpilotError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has enough
        sys.stderr.close()
        return 0
