from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gradpilot.controller.config import (
    GRPC_PORT,
    PolicyConfig,
    is_loopback,
    load,
    split_address,
    state_path,
)
from gradpilot.errors import ConfigError
from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import DENSE, Option, Setting


def test_defaults_are_those_of_the_policies() -> None:
    config = load([], {})
    assert config.grpc_address == f"127.0.0.1:{GRPC_PORT}"
    assert config.policy_settings.settings() == PolicySettings()
    assert set(PolicyConfig.model_fields) == {f.name for f in dataclasses.fields(PolicySettings)}


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(
        'seed = 1\nreport_seconds = 1.5\npolicy = "fixed"\n'
        "[policy_settings]\ninterval = 10\ndwell_steps = 11\nratios = 12\n"
        '[policy_settings.fixed]\ncompressor = "topk"\nratio = 0.01\ncollective = "allgather"\n'
        'settings = {selection = "star"}\n'
    )
    environ = {
        "GRADPILOT_CTL_CONFIG": str(file),
        "GRADPILOT_CTL_SEED": "2",
        "GRADPILOT_CTL_REPORT_SECONDS": "2.5",
        "GRADPILOT_CTL_POLICY_SETTINGS__INTERVAL": "20",
        "GRADPILOT_CTL_POLICY_SETTINGS__DWELL_STEPS": "21",
        "GRADPILOT_CONTROLLER": "elsewhere:1",  # the agent's, not ours
        "GRADPILOT_POLICY": "adaptive",
    }
    config = load(["--seed", "3", "--policy-settings.interval", "30"], environ)
    assert (config.seed, config.report_seconds, config.policy) == (3, 2.5, "fixed")
    settings = config.policy_settings.settings()
    assert (settings.interval, settings.dwell_steps, settings.ratios) == (30, 21, 12)
    assert settings.fixed == Option(
        "topk", 0.01, "allgather", settings=(Setting("selection", "star"),)
    )


def test_fixed_option_as_json_on_the_command_line() -> None:
    json = '{"compressor":"none","ratio":1.0,"collective":"native","skip":0,"settings":{}}'
    assert load(["--policy-settings.fixed", json], {}).policy_settings.settings().fixed == DENSE


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        (["--sed", "3"], {}, "--sed"),
        (["--see", "3"], {}, "--see"),  # no abbreviations
        (["stray"], {}, "stray"),
        (["--seed", "x"], {}, "seed: .*integer.*got 'x'"),
        (["--report-seconds", "nan"], {}, "report_seconds"),
        (["--report-seconds", "0"], {}, "report_seconds: .*greater than 0"),
        (["--plan-ttl-seconds", "inf"], {}, "plan_ttl_seconds: .*finite"),
        (["--policy-settings.fixed.ratio", "2"], {}, r"ratio must lie in \(0, 1\]"),
        (["--policy-settings.weights", "[0,0,0]"], {}, "not all 0"),
        (["--policy-settings.choice", "best"], {}, "choice"),
        (["--grpc-address", "47800"], {}, r"expected host:port or \[ipv6\]:port"),
        (["--grpc-address", "::1:47800"], {}, r"expected host:port or \[ipv6\]:port"),
        (["--grpc-address", "localhost:70000"], {}, "0..65535"),
        (["--config", "/nowhere.toml"], {}, "cannot read .*nowhere.toml"),
        ([], {"GRADPILOT_CTL_POLCY": "x"}, "GRADPILOT_CTL_POLCY .*mean GRADPILOT_CTL_POLICY"),
        ([], {"GRADPILOT_CTL_POLICY_SETTINGS__X": "1"}, "GRADPILOT_CTL_POLICY_SETTINGS__X"),
        ([], {"GRADPILOT_CTL_SEED": "-1"}, "seed"),
        ([], {"GRADPILOT_CTL_POLICY_SETTINGS": "{"}, "policy_settings"),
    ],
)
def test_refusals_name_what_is_wrong(argv: list[str], environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        load(argv, environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("polcy = 1", "unknown key 'polcy' .*mean policy"),
        ("[policy_settings]\nintervall = 1", "unknown key 'policy_settings.intervall'"),
        ("[policy_settings.fixed]\nratoi = 1", "unknown key 'policy_settings.fixed.ratoi'"),
        ("seed = ", "not valid TOML"),
    ],
)
def test_files_with_unknown_keys_are_refused(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "controller.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=text) as error:
        load(["--config", str(file)], {})
    assert str(file) in str(error.value)


@pytest.mark.parametrize("flag", ["--grpc-address", "--http-address"])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.5:1", "host.example:1"])
def test_addresses_that_others_reach_need_insecure(flag: str, address: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        load([flag, address], {})
    assert load([flag, address, "--insecure"], {}).insecure


def test_addresses() -> None:
    assert split_address("[::1]:5") == ("::1", 5)
    assert split_address("localhost:0") == ("localhost", 0)
    assert is_loopback("127.9.9.9:1")
    assert is_loopback("[::1]:1")
    assert is_loopback("localhost:1")
    assert not is_loopback("192.168.0.1:1")


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(["--help"], {})
    assert stop.value.code in (0, None)
    text = capsys.readouterr().out
    for name in ("--config", "--grpc-address", "--policy-settings.gain-floor", "--insecure"):
        assert name in text


def test_the_state_file_has_a_place_everywhere() -> None:
    config = load([], {})
    assert (
        state_path(config, {"STATE_DIRECTORY": "/var/lib/g:/x"}) == "/var/lib/g/controller.sqlite3"
    )
    assert state_path(config, {"XDG_STATE_HOME": "/s"}) == "/s/gradpilot/controller.sqlite3"
    assert state_path(load(["--state", ":memory:"], {}), {"STATE_DIRECTORY": "/x"}) == ":memory:"
