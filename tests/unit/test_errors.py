import pytest

from msrun.errors import (
    ExitCode,
    MsrunError,
    ProtocolError,
    UsageError,
    signal_exit_code,
)


def test_an_error_is_rendered_with_its_hint():
    assert MsrunError("no job").render() == "error: no job"
    assert MsrunError("no job", hint="start one").render() == "error: no job\n  hint: start one"
    assert str(MsrunError("no job", hint="start one")) == "no job"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MsrunError, 70),
        (UsageError, 2),
        (ProtocolError, 70),
    ],
)
def test_exit_code_of_every_error(error, code):
    assert error("why").exit_code == code


def test_exit_codes_are_a_promise():
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "USAGE": 2,
        "INTERNAL": 70,
        "NODE_LOST": 120,
        "JOIN_TIMEOUT": 121,
        "AUTHENTICATION": 122,
        "DO_NOT_REQUEUE": 123,
        "HUNG": 124,
    }


def test_a_signal_is_told_as_shells_do():
    assert signal_exit_code(15) == 143
