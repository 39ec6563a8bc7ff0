"""What `main` returns and writes when something ends a verb."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msrun.cli.main import main
from msrun.cli.options.table import PLAN_TABLE
from msrun.errors import MsrunError, UsageError


@pytest.mark.parametrize("code", [0, 1, 3, 137])
def test_the_code_of_the_job(msrun, system, code):
    system.launcher.code = code

    assert msrun("train.py").code == code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MsrunError("no more processes"), 70, "error: no more processes\n"),
        (
            UsageError("a taken name", hint="choose one"),
            2,
            "error: a taken name\n  hint: choose one\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_job(msrun, system, error, code, text):
    system.launcher.error = error

    outcome = msrun("train.py")

    assert (outcome.code, outcome.err) == (code, text)


def test_notes_come_before_the_job(msrun, system):
    system.launcher.notes = ("no cgroup",)

    assert msrun("--lease 4s train.py").err == (
        "note: --lease 4s has no effect on one node\nnote: no cgroup\n"
    )


def test_our_own_mistake(msrun, system, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    system.launcher.error = KeyError("a\x1b[2J")

    outcome = msrun("train.py")

    first, second = outcome.err.splitlines()
    assert first == r"error: this is a bug in msrun: KeyError: 'a\x1b[2J'"
    file = Path(
        second.removeprefix("  hint: ")
        .removesuffix(" has the traceback")
        .replace("HERE", str(tmp_path))
    )
    assert "Traceback (most recent call last)" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert outcome.code == 70


def test_our_own_mistake_with_nowhere_to_write(msrun, system, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    system.launcher.error = RuntimeError("broken")

    outcome = msrun("train.py")

    assert outcome.err.startswith("Traceback (most recent call last)")
    assert outcome.err.endswith("error: this is a bug in msrun: RuntimeError: broken\n")
    assert outcome.code == 70


def test_a_reader_that_has_enough():
    code = "import sys; from msrun.cli.main import main; sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert (process.returncode, errors) == (141, b"")


WORDS = st.one_of(
    st.sampled_from([spelling for option in PLAN_TABLE for spelling in option.spellings]),
    st.sampled_from(
        ["train.py", "plan", "run", "python", "-u", "-m", "pytest", "--", "-", "app", "pkg", "prog"]
    ),
    st.sampled_from(
        [
            "0",
            "1",
            "-1",
            "2",
            "auto",
            "true",
            "none",
            "inf",
            "",
            "{",
            "{}",
            "=",
            "a=b",
            "0:3",
            "[::]",
        ]
    ),
    st.sampled_from(
        ['{"device0": ["0"]}', '{"device0": [0]}', "localhost:0", "::1", "{rank}", "{"]
    ),
    st.text(max_size=8).filter(lambda text: "\0" not in text),
)
ARGV = st.lists(st.one_of(WORDS, st.tuples(WORDS, WORDS).map("=".join)), max_size=8)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.usefixtures("here")
@given(ARGV)
def test_no_words_are_too_strange(system, capsys, argv):
    code = main(argv, system=system)

    _, err = capsys.readouterr()
    assert code in {0, 2}, (argv, err)
    assert not re.search(r"Traceback|bug in msrun", err)
    assert err.startswith("error: ") if code else True
    system.launcher.jobs.clear()
