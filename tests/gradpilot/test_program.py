from __future__ import annotations

from collections.abc import Callable

import pytest

from gradpilot.errors import ConfigError, ProtocolError
from gradpilot.program import exit_code


def raising(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


@pytest.mark.parametrize("code", [0, 1, 7])
def test_a_command_that_ends_says_how(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("x", lambda: code) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("no such run"), 2), (ProtocolError("no such run"), 1)]
)
def test_an_error_is_one_line(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("gradpilot replay", raising(error)) == code
    assert capsys.readouterr().err == "gradpilot replay: no such run\n"


def test_interrupts_have_their_code_and_faults_of_ours_are_not_hidden() -> None:
    assert exit_code("x", raising(KeyboardInterrupt())) == 130
    with pytest.raises(ZeroDivisionError):
        exit_code("x", raising(ZeroDivisionError()))
