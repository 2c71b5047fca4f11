"""Errors by which the controller turns a peer down.

    GradpilotError
    +-- RefusedError       this session or catalog cannot be taken; a retry needs a change first
    |   +-- ReplacedError  a newer session of the same rank took over
    +-- NotFoundError      no such run, model or decision
    +-- CapacityError      a bound of the controller is reached
    +-- StoreError         the state file cannot be used

``servicer`` maps each to a gRPC status code.
"""

from __future__ import annotations

from gradpilot.errors import GradpilotError, ProtocolError


class RefusedError(ProtocolError):
    """The peer cannot be served in its present state.

    Args:
        message: What was expected, what came, what to do.
        reason: One word, the value of the label ``reason`` of the refusal metric.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReplacedError(RefusedError):
    """A newer session of the same rank took over."""


class NotFoundError(GradpilotError, LookupError):
    """No such run, model or decision."""


class CapacityError(GradpilotError):
    """A bound of the controller is reached."""


class StoreError(GradpilotError, OSError):
    """The state file cannot be opened, read or written."""
