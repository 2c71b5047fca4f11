"""Errors that gradpilot raises on purpose.

    GradpilotError
    +-- ConfigError            a setting, option or plan that cannot be used as given
    |   +-- UnknownNameError   a name that no registry knows
    +-- AttachError            this model or process cannot be managed
    +-- ProtocolError          a message that the other side must not have sent
    |   +-- MessageTooLargeError
    +-- AgreementLostError     the verdict of a plan switch cannot be learned; the rank must stop

Every message says what was expected, what came, and what to do.
"""

from __future__ import annotations


class GradpilotError(Exception):
    """Base class of every error that gradpilot raises on purpose."""


class ConfigError(GradpilotError, ValueError):
    """A setting, option or plan cannot be used as given."""


class UnknownNameError(ConfigError):
    """A name is not in its registry."""


class AttachError(GradpilotError, RuntimeError):
    """The model or the process cannot be managed; training itself is not affected."""


class ProtocolError(GradpilotError):
    """A peer sent a message that does not follow the protocol."""


class MessageTooLargeError(ProtocolError):
    """A message exceeds the size cap of the protocol."""


class AgreementLostError(GradpilotError, RuntimeError):
    """Whether the other ranks switched cannot be learned, so this rank must not go on."""
