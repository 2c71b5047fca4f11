"""Settings of the agent: explicit arguments, else environment, else defaults.

Every field has a variable: ``GRADPILOT_`` and its name in capitals (``GRADPILOT_CONTROLLER``).
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from gradpilot.errors import ConfigError
from gradpilot.protos.option_text import parse_option

PREFIX = "GRADPILOT_"
OFF = "off"

_NOT_THE_AGENTS = ("GRADPILOT_CTL_", "GRADPILOT_REQUIRE_ALL")
"""Beginnings of variables that belong to the controller and to the test suite."""

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

_log = logging.getLogger(__name__)
_warned: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent.

    Attributes:
        controller: ``host:port`` of a controller, ``off`` for none at all, empty for an embedded
            one that the job starts itself.
        run: Run id; empty lets ``identity.propose`` find one.
        model: Name of the wrapped model within the run.
        policy: Policy of the embedded controller; empty for the controller's default.
        option: One option for all buckets, as ``parse_option`` reads it; the embedded controller
            then runs the policy ``fixed``. Empty for what its policy chooses.
        state: Folder in which the embedded controller keeps its state and log; empty for a
            temporary one that goes away with it.
        log: Level at which the agent logs to stderr: ``debug`` .. ``critical``; empty leaves
            logging as the program set it up.
        seed: Seed of every random choice of the compressors; must be equal on all ranks.
        control_timeout_seconds: Longest wait for the other ranks on the control group and for the
            controller's answer, (0, 15].
        report_seconds: Time between two reports until the controller asks for another, [0.1, 300].
        plan_ttl_seconds: Time without a controller after which the ranks agree on the safe plan,
            until the controller sets another; > 0.
        embedded_timeout_seconds: Longest wait for the embedded controller to start, (0, 120].
        queue_reports: Reports kept while the controller cannot be reached, >= 1; then the oldest
            goes.
        statistics_steps: Steps between two measurements of gain and energy curve, >= 1.
        sample_block: Of every block of this many steps ..., >= 1.
        sample_steps: ... the collectives of the first so many are reported one by one, >= 0.
        watchdog_seconds: Time without a synchronised backward pass after which every rank's last
            buckets and stacks are written to ``dumps``, 0 for never, else [0.5, 86400].
        dumps: Folder for that; empty for one of the user's in the folder for temporary files.
    """

    controller: str = ""
    run: str = ""
    model: str = "model"
    policy: str = ""
    option: str = ""
    state: str = ""
    log: str = ""
    seed: int = 0
    control_timeout_seconds: float = 10.0
    report_seconds: float = 5.0
    plan_ttl_seconds: float = 300.0
    embedded_timeout_seconds: float = 20.0
    queue_reports: int = 64
    statistics_steps: int = 50
    sample_block: int = 32
    sample_steps: int = 4
    watchdog_seconds: float = 300.0
    dumps: str = ""

    def __post_init__(self) -> None:
        if self.controller and not self.off:
            _check_address(self.controller)
        if not self.model:
            raise ConfigError("model must be a name, got an empty one")
        for name in ("run", "model"):
            value = getattr(self, name)
            if len(value) > 128 or not value.isprintable():
                raise ConfigError(f"{name} must be at most 128 printable characters, got {value!r}")
        if self.option:
            parse_option(self.option)
            if self.policy not in ("", "fixed"):
                raise ConfigError(f"option goes with policy fixed only, got {self.policy!r}")
        if self.log and self.log not in _LOG_LEVELS:
            raise ConfigError(f"log must be one of {', '.join(_LOG_LEVELS)}, got {self.log!r}")
        _check_range("control_timeout_seconds", self.control_timeout_seconds, 0.001, 15.0)
        _check_range("report_seconds", self.report_seconds, 0.1, 300.0)
        _check_range("plan_ttl_seconds", self.plan_ttl_seconds, 0.001, math.inf)
        _check_range("embedded_timeout_seconds", self.embedded_timeout_seconds, 0.001, 120.0)
        _check_range("queue_reports", self.queue_reports, 1, 1 << 20)
        _check_range("statistics_steps", self.statistics_steps, 1, math.inf)
        _check_range("sample_block", self.sample_block, 1, math.inf)
        _check_range("sample_steps", self.sample_steps, 0, math.inf)
        if self.watchdog_seconds:
            _check_range("watchdog_seconds (unless 0)", self.watchdog_seconds, 0.5, 86400.0)

    @property
    def off(self) -> bool:
        """Return whether there shall be no controller."""
        return self.controller == OFF

    @property
    def embedded(self) -> bool:
        """Return whether the job shall start its own controller."""
        return not self.controller

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, **explicit: object) -> AgentConfig:
        """Return the settings in force.

        Args:
            env: Environment; that of the process if not given.
            **explicit: Fields that win over the environment; None counts as not given.

        Raises:
            ConfigError: A field is unknown, or a value cannot be used; names the variable.
        """
        env = os.environ if env is None else env
        kinds = {field.name: _PARSERS[str(field.type)] for field in fields(cls)}
        for name in explicit:
            if name not in kinds:
                raise ConfigError(f"unknown setting {name!r}{_hint(name, kinds)}")
        if env.get("RANK", "0") == "0":  # the others have the same environment
            warn_of_unknown(env)
        values: dict[str, object] = {}
        for name, parse in kinds.items():
            if explicit.get(name) is not None:
                values[name] = explicit[name]
            elif text := env.get(PREFIX + name.upper(), "").strip():
                try:
                    values[name] = parse(text)
                except ValueError:
                    raise ConfigError(
                        f"{PREFIX}{name.upper()} must be {parse.__name__}, got {text!r}"
                    ) from None
        return cls(**values)  # type: ignore[arg-type]


_PARSERS: dict[str, type[str] | type[int] | type[float]] = {"str": str, "int": int, "float": float}


def variables() -> tuple[str, ...]:
    """Return the environment variables of the agent."""
    return tuple(PREFIX + field.name.upper() for field in fields(AgentConfig))


def warn_of_unknown(env: Mapping[str, str]) -> None:
    """Log one warning that names the ``GRADPILOT_`` variables that nobody reads, once each."""
    known = variables()
    unknown = sorted(
        name
        for name in env
        if name.startswith(PREFIX)
        and not name.startswith(_NOT_THE_AGENTS)
        and name not in known
        and name not in _warned
    )
    if not unknown:
        return
    _warned.update(unknown)
    named = ", ".join(f"{name}{_hint(name, known)}" for name in unknown)
    _log.warning("ignored unknown environment: %s; known: %s", named, ", ".join(known))


def set_up_logging(config: AgentConfig, rank: int) -> None:
    """Log to stderr if the configuration asks for it; ranks other than 0 log errors only."""
    if not config.log:
        return
    logger = logging.getLogger("gradpilot")
    logger.setLevel(config.log.upper() if rank == 0 else logging.ERROR)
    if not any(getattr(handler, "is_gradpilots", False) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"gradpilot rank {rank} %(levelname)s: %(message)s"))
        handler.is_gradpilots = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
        logger.propagate = False


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    valid_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not (host and colon and valid_port) or bare_ipv6 or "/" in address:
        raise ConfigError(
            f"controller must be host:port, [ipv6]:port or {OFF}, got {address!r};"
            " leave it unset for an embedded controller"
        )


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not (least <= value <= most):  # also catches NaN
        raise ConfigError(f"{name} must lie in {least:g} .. {most:g}, got {value!r}")


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
