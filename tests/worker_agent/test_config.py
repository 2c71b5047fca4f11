from __future__ import annotations

import logging
import math
import os
import subprocess
import sys

import pytest

from gradpilot.errors import ConfigError
from gradpilot.worker_agent import config as module
from gradpilot.worker_agent.config import (
    AgentConfig,
    set_up_logging,
    variables,
    warn_of_unknown,
)


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_warned", set())


def test_without_anything_the_job_starts_its_own_controller() -> None:
    config = AgentConfig.load({})
    assert config == AgentConfig()
    assert config.embedded
    assert not config.off


def test_arguments_win_over_the_environment_and_that_over_defaults() -> None:
    env = {"GRADPILOT_CONTROLLER": "ctl:47800", "GRADPILOT_SEED": "7", "GRADPILOT_RUN": "a"}
    config = AgentConfig.load(env, run="b", seed=None)
    assert (config.controller, config.seed, config.run) == ("ctl:47800", 7, "b")
    assert config.report_seconds == AgentConfig().report_seconds
    assert not config.embedded


def test_an_explicit_empty_controller_wins_over_the_environment() -> None:
    assert AgentConfig.load({"GRADPILOT_CONTROLLER": "off"}, controller="").embedded


def test_off_means_no_controller_at_all() -> None:
    config = AgentConfig.load({"GRADPILOT_CONTROLLER": "off"})
    assert config.off
    assert not config.embedded


@pytest.mark.parametrize(
    "address", ["ctl.example:1", "127.0.0.1:65535", "[::1]:47800", "localhost:47800"]
)
def test_addresses_that_can_be_used(address: str) -> None:
    assert AgentConfig(controller=address).controller == address


@pytest.mark.parametrize(
    "address", ["ctl", "ctl:", ":47800", "ctl:0", "ctl:65536", "::1:47800", "http://ctl:1", "c:x"]
)
def test_addresses_that_cannot_are_refused_with_the_form_expected(address: str) -> None:
    with pytest.raises(ConfigError, match=r"host:port.*got"):
        AgentConfig(controller=address)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("control_timeout_seconds", 15.1),
        ("control_timeout_seconds", 0.0),
        ("control_timeout_seconds", math.nan),
        ("report_seconds", 0.0),
        ("queue_reports", 0),
        ("statistics_steps", 0),
        ("sample_block", 0),
        ("sample_steps", -1),
        ("embedded_timeout_seconds", 121.0),
        ("log", "loud"),
        ("model", ""),
        ("run", "x" * 129),
        ("run", "two\nlines"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        AgentConfig(**{field: value})  # type: ignore[arg-type]


def test_text_that_is_no_number_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"GRADPILOT_SEED must be int, got 'x'"):
        AgentConfig.load({"GRADPILOT_SEED": "x"})


def test_an_unknown_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"controler.*did you mean controller"):
        AgentConfig.load({}, controler="off")


def test_every_field_has_its_variable() -> None:
    assert "GRADPILOT_CONTROLLER" in variables()
    assert set(variables()) == {f"GRADPILOT_{n.upper()}" for n in AgentConfig.__slots__}


def test_unknown_variables_give_one_warning_with_suggestion_and_known_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = {"GRADPILOT_CONTROLER": "off", "GRADPILOT_ZZZ": "1", "GRADPILOT_CTL_SEED": "1"}
    env |= {"GRADPILOT_REQUIRE_ALL": "1", "GRADPILOT_RUN": "a", "PATH": "/bin"}
    AgentConfig.load(env)
    AgentConfig.load(env)
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "GRADPILOT_CONTROLER (did you mean GRADPILOT_CONTROLLER?), GRADPILOT_ZZZ" in text
    assert "GRADPILOT_QUEUE_REPORTS" in text
    assert "CTL" not in text
    assert "REQUIRE_ALL" not in text


def test_only_rank_0_warns(caplog: pytest.LogCaptureFixture) -> None:
    AgentConfig.load({"GRADPILOT_ZZZ": "1", "RANK": "3"})
    assert not caplog.records
    AgentConfig.load({"GRADPILOT_ZZZ": "1", "RANK": "0"})
    assert len(caplog.records) == 1


def test_a_known_environment_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown(dict.fromkeys(variables(), ""))
    assert not caplog.records


def test_an_option_is_checked_when_it_is_configured_and_needs_the_policy_fixed() -> None:
    with pytest.raises(ConfigError, match="ratio"):
        AgentConfig(option="topk ratio=7")
    with pytest.raises(ConfigError, match="adaptive"):
        AgentConfig(option="topk", policy="adaptive")
    assert AgentConfig(option="topk", policy="fixed").option == "topk"


@pytest.fixture
def _restored_logger() -> object:
    logger = logging.getLogger("gradpilot")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield logger
    logger.setLevel(before[0])
    logger.propagate = before[1]
    logger.handlers[:] = before[2]


@pytest.mark.usefixtures("_restored_logger")
def test_logging_is_left_alone_unless_asked_for_and_is_set_up_once() -> None:
    logger = logging.getLogger("gradpilot")
    handlers = len(logger.handlers)
    set_up_logging(AgentConfig(), 0)
    assert len(logger.handlers) == handlers
    set_up_logging(AgentConfig(log="debug"), 0)
    set_up_logging(AgentConfig(log="info"), 0)
    assert len(logger.handlers) == handlers + 1
    assert logger.level == logging.INFO
    set_up_logging(AgentConfig(log="debug"), 1)
    assert logger.level == logging.ERROR


def _python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_importing_the_agent_is_cheap_and_sets_fork_support_before_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    code = (
        "import os, sys, gradpilot.worker_agent.config, gradpilot.worker_agent.client as c;"
        "import gradpilot.worker_agent as w;"
        "heavy = {'grpc', 'torch', 'numpy', 'pydantic', 'pymoo'} & set(sys.modules);"
        "print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], sorted(heavy), w.GRPC_IMPORTED_EARLY)"
    )
    assert _python(code) == "0 [] False"


def test_an_early_import_of_grpc_is_noticed_and_the_users_choice_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    code = (
        "import os, grpc, gradpilot.worker_agent as w;"
        "print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], w.GRPC_IMPORTED_EARLY)"
    )
    assert _python(code) == "0 True"
    assert _python(code, GRPC_ENABLE_FORK_SUPPORT="0") == "0 False"
    assert _python(code, GRPC_ENABLE_FORK_SUPPORT="1") == "1 True"
