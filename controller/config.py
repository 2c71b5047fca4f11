"""Settings of the controller: command line > environment > TOML file > default.

Every field has one name in all four places: ``--grpc-address``, ``GRADPILOT_CTL_GRPC_ADDRESS``,
``grpc_address = ...`` in the file named by ``--config`` or ``GRADPILOT_CTL_CONFIG``. Fields of
``policy_settings`` nest: ``--policy-settings.choice``, ``GRADPILOT_CTL_POLICY_SETTINGS__CHOICE``,
``[policy_settings]``. What is not known is refused, in each place.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from gradpilot.errors import ConfigError
from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import Option, Setting, check_option

ENV_PREFIX = "GRADPILOT_CTL_"
ENV_CONFIG = f"{ENV_PREFIX}CONFIG"
ENV_NESTED = "__"
GRPC_PORT = 47800
HTTP_PORT = 47801

_MAX_WORLD = 1 << 20
"""World size under which an option is checked before any run is known."""


class OptionConfig(BaseModel):
    """``messages.Option`` as it is written in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    compressor: str = Field(default="none", description="registered name of the compressor")
    ratio: float = Field(default=1.0, description="kept fraction of elements, (0, 1]")
    collective: str = Field(default="native", description="who carries it, such as ring")
    skip: int = Field(default=0, description="reduce steps left out")
    rotation: str = Field(default="random", description="random or static")
    divisor: str = Field(default="skip", description="skip, drop or shrink")
    skip_feedback: bool = Field(
        default=False, description="keep what a skipped step omitted as residual"
    )
    shrink: float = Field(default=1.0, description="factor (0, 1] of divisor shrink")
    settings: dict[str, str] = Field(default={}, description="further settings of the compressor")

    def option(self) -> Option:
        """Return the option."""
        fields = self.model_dump()
        settings = tuple(Setting(k, v) for k, v in sorted(fields.pop("settings").items()))
        return Option(**fields, settings=settings)

    @model_validator(mode="after")
    def _usable(self) -> OptionConfig:
        check_option(self.option(), _MAX_WORLD)
        return self


class PolicyConfig(BaseModel):
    """``policies.base.PolicySettings`` as it is written in a file; same names and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    choice: Literal["tta", "knee", "weighted"] = Field(
        default="tta", description="least predicted time to accuracy, knee of the front, or weights"
    )
    weights: tuple[float, float, float] = Field(
        default=(0.4, 0.2, 0.4),
        description="of statistical loss, compression, synchronisation (weighted)",
    )
    gain_floor: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="least expected gain, [0, 1]; of powersgd 0.27 of it, whose gain says less",
    )
    gain_band: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="share of the floor by which a plan in force may fall below it",
    )
    warm_floor: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="the same while training is young or in a critical phase, if it is more",
    )
    min_improvement: float = Field(
        default=0.05, ge=0, lt=1, description="a switch must cut the predicted cost by this share"
    )
    dwell_steps: int = Field(
        default=20, ge=0, description="least number of steps between two switches"
    )
    trial_steps: int = Field(
        default=20, ge=0, description="first steps under a new plan, in which it is not judged"
    )
    trial_margin: float = Field(
        default=0.1, ge=0, description="a plan that costs this share more than the last is undone"
    )
    blacklist_steps: int = Field(
        default=1000,
        ge=0,
        description="for how long an option that did harm is not chosen; doubles every time",
    )
    residual_limit: float = Field(
        default=30.0,
        gt=0,
        description="largest residual that is put up with, in gradients (squared norms)",
    )
    interval: int = Field(
        default=50, ge=1, description="decision step N of the plans made, at most"
    )
    interval_seconds: float = Field(
        default=5.0, gt=0, description="the same in seconds: fewer steps if they are slow"
    )
    fixed: OptionConfig = Field(default=OptionConfig(), description="option of the policy 'fixed'")
    per_bucket: bool = Field(default=False, description="whether buckets may get different options")
    solver_seconds: float = Field(default=1.0, gt=0, description="wall-clock cap of one solve")
    ratios: int = Field(default=24, ge=1, le=1000, description="ratios per family in the log grid")
    selective: Literal["continuous", "once", "off"] = Field(
        default="continuous", description="sparing important buckets from skips: how often measured"
    )
    skip_divisor: Literal["skip", "drop", "shrink"] = Field(
        default="skip", description="divisor of options that skip"
    )
    collectives: tuple[str, ...] = Field(
        default=("native", "ring", "allgather"),
        description="carriers that may be chosen; the costs of others are derived, not measured",
    )

    def settings(self) -> PolicySettings:
        """Return the settings as policies take them."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return PolicySettings(**{**fields, "fixed": self.fixed.option()})

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(0 <= w < float("inf") for w in weights) or not sum(weights):
            raise ValueError("weights must be finite, not negative and not all 0")
        return weights


class ControllerConfig(BaseSettings):
    """Settings of one controller process."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_NESTED,
    )

    grpc_address: str = Field(
        default=f"127.0.0.1:{GRPC_PORT}",
        description="host:port for agents and operators; port 0: any free",
    )
    http_address: str = Field(
        default=f"127.0.0.1:{HTTP_PORT}", description="host:port of /metrics, /healthz, /readyz"
    )
    insecure: bool = Field(
        default=False, description="allow addresses that other machines reach; nothing is encrypted"
    )
    state: str = Field(
        default="",
        description="SQLite file, or :memory:; empty: controller.sqlite3 in $STATE_DIRECTORY or"
        " $XDG_STATE_HOME/gradpilot",
    )
    report_seconds: float = Field(
        default=2.0, gt=0, le=3600, description="wanted time between two reports of a rank"
    )
    plan_ttl_seconds: float = Field(
        default=600.0,
        gt=0,
        description="ranks without a controller for longer agree on the safe plan",
    )
    min_decision_seconds: float = Field(
        default=5.0, ge=0, description="least time between two decisions of a run"
    )
    decision_timeout_seconds: float = Field(
        default=30.0, gt=0, description="a policy that takes longer is stopped, the plan kept"
    )
    policy: str = Field(default="adaptive", description="name of the policy")
    policy_settings: PolicyConfig = Field(
        default=PolicyConfig(), description="settings of the policy"
    )
    seed: int = Field(
        default=0, ge=0, lt=1 << 63, description="seed of everything random in a decision"
    )
    run_grace_seconds: float = Field(
        default=60.0, ge=0, description="how long the series of a run stay after its last rank left"
    )
    max_runs: int = Field(
        default=1000, ge=1, description="runs served at once; bounds memory and series"
    )
    decisions_kept: int = Field(default=200, ge=1, description="decisions kept per run and model")
    drain_seconds: float = Field(
        default=1.0, ge=0, le=600, description="how long open calls may go on after SIGTERM"
    )
    log_format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto: text on a terminal, else JSON, one object a line"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    parent_pid: int = Field(default=0, ge=0, description="exit when this process is gone; 0: never")
    ready_file: str = Field(
        default="", description="where to write ports and pid as JSON when ready; empty: nowhere"
    )

    @field_validator("grpc_address", "http_address")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @model_validator(mode="after")
    def _exposed(self) -> ControllerConfig:
        for name in ("grpc_address", "http_address"):
            if not self.insecure and not is_loopback(getattr(self, name)):
                raise ValueError(
                    f"{name} {getattr(self, name)} can be reached from other machines, and nothing"
                    " is encrypted or authenticated; add --insecure if the network is trusted"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take explicit arguments only: ``load`` adds the other sources itself."""
        return (init_settings,)


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> ControllerConfig:
    """Return the settings from the command line, the environment and the file they name.

    Raises:
        ConfigError: Something is unknown or out of bounds; one message names all of it.
        SystemExit: ``--help`` was asked for.
    """
    environ = os.environ if environ is None else environ
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=environ.get(ENV_CONFIG, ""))
    with _argument_errors():
        known, rest = first.parse_known_args(list(argv))
        command_line: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
            ControllerConfig,
            cli_prog_name="gradpilot controller",
            cli_parse_args=rest,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_prefix="",
            cli_exit_on_error=False,
            root_parser=_Parser(
                prog="gradpilot controller",
                description="The controller: decides for many runs. Settings may also be given as"
                f" {ENV_PREFIX}NAME, or as name = value in the TOML file that --config FILE or"
                f" {ENV_CONFIG} names.",
                allow_abbrev=False,
            ),
        )
    _refuse_unknown_environment(environ)
    file = _read_file(known.config) if known.config else {}
    try:
        sources: list[Mapping[str, Any]] = [file, _from_environment(environ), command_line()]
        merged: dict[str, Any] = {}
        for source in sources:
            merged = _merge(merged, source)
        return ControllerConfig(**merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_complaints(error, known.config))) from None
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}") from None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[ipv6]:port``.

    Raises:
        ConfigError: It is neither.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host) or not port.isdecimal():
        raise ConfigError(f"expected host:port or [ipv6]:port, got {address!r}")
    if int(port) > 65535:
        raise ConfigError(f"port must lie in 0..65535, got {address!r}")
    return bare, int(port)


def state_path(config: ControllerConfig, environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the state file, or ``:memory:``."""
    environ = os.environ if environ is None else environ
    if config.state:
        return config.state
    if folder := environ.get("STATE_DIRECTORY", ""):  # systemd; several are separated by colons
        return str(Path(folder.split(":")[0]) / "controller.sqlite3")
    home = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(home) / "gradpilot" / "controller.sqlite3")


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the address."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every source complains in the same way."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


@contextlib.contextmanager
def _argument_errors() -> Iterator[None]:
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            yield
    except SystemExit as exit_:
        if exit_.code in (0, None):  # --help
            raise
        text = captured.getvalue().strip() or "bad arguments"
        raise ConfigError(text.splitlines()[-1]) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(ControllerConfig)
    source.env_vars = {k.lower(): v for k, v in environ.items()}
    return source()


def _read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _names(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, (*prefix, name))


def _refuse_unknown_environment(environ: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + ENV_NESTED.join(path).upper() for path in _names(ControllerConfig)}
    known.add(ENV_CONFIG)
    fixed_settings = f"{ENV_PREFIX}POLICY_SETTINGS__FIXED__SETTINGS__"
    unknown = [
        name
        for name in sorted(environ)
        if name.upper().startswith(ENV_PREFIX)
        and name.upper() not in known
        and not name.upper().startswith(fixed_settings)
    ]
    if unknown:
        hints = [f"{name}{_hint(name.upper(), known)}" for name in unknown]
        raise ConfigError(f"unknown environment variable {', '.join(hints)}")


def _hint(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _complaints(error: ValidationError, path: str) -> Iterator[str]:
    known = {".".join(p) for p in _names(ControllerConfig)}
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"{path or 'settings'}: unknown key {where!r}{_hint(where, known)}"
            continue
        text = problem["msg"].removeprefix("Value error, ")
        got = problem["input"]
        told = isinstance(got, dict) or problem["type"] == "value_error"
        yield (f"{where}: " if where else "") + (text if told else f"{text}, got {got!r}")
