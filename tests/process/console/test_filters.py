"""Copies of chosen lines, and what stands in front of a line, as under torchrun."""

from __future__ import annotations

import re

import pytest
from support import script, shell

pytestmark = pytest.mark.process

PROGRAM = """
    import os, sys

    for i in range(3):
        print(f"loss {i}")
        print(f"other {i}")
        print(f"warning {i}", file=sys.stderr)
        print(f"loss in stderr {i}", file=sys.stderr)
    sys.stdout.write("last loss, without an end")
"""
OUTS = [*(f"loss {i}" for i in range(3)), "last loss, without an end"]
ERRS = [f"warning {i}" for i in range(3)]


def prefixed(lines, *, form="[rank {}] ", ranks=(0, 1)):
    return sorted(form.format(rank) + line for rank in ranks for line in lines)


def test_lines_of_all_ranks_are_copied_by_stream(msrun, tmp_path):
    filters = ("--duplicate-stdout-filters", "loss,none", "--duplicate-stderr-filters", "warning")
    job = msrun("--workers-per-node", 2, "--tail", "none", *filters, script(tmp_path, PROGRAM))

    assert job.wait() == 0
    for name, lines in (("stdout", OUTS), ("stderr", ERRS)):
        copied = (job.logs / f"filtered_{name}.log").read_text().splitlines()
        assert sorted(copied) == prefixed(lines)
    assert job.out == ""


def test_a_console_shows_what_is_copied_too(msrun, tmp_path):
    job = msrun("--duplicate-stdout-filters", "loss 2", script(tmp_path, PROGRAM))

    assert job.wait() == 0
    assert job.out.splitlines()[:2] == ["[rank 0] loss 0", "[rank 0] other 0"]
    assert "[rank 0] warning 0" in job.err.splitlines()
    assert (job.logs / "filtered_stdout.log").read_text() == "[rank 0] loss 2\n"
    assert not (job.logs / "filtered_stderr.log").exists()


def test_a_restart_goes_on_with_the_copy(msrun):
    program = 'echo "loss of $MSRUN_GENERATION"; [ "$MSRUN_GENERATION" = 1 ]'
    job = msrun("--max-restarts", 1, "--duplicate-stdout-filters", "loss", *shell(program))

    assert job.wait() == 0
    expected = "[rank 0] loss of 0\n[rank 0] loss of 1\n"
    assert (job.logs / "filtered_stdout.log").read_text() == expected


def test_torchrun_copies_the_same_lines(msrun, torchrun, tmp_path):
    program = script(tmp_path, PROGRAM)
    words = ("--duplicate-stdout-filters", "loss", "--duplicate-stderr-filters", "warning")
    job = msrun("--workers-per-node", 2, "-t", 3, *words, program)
    theirs = torchrun(
        *("--nproc-per-node=2", "--log-dir", tmp_path / "theirs", "-t", "3", *words), program
    )

    assert (job.wait(), theirs.returncode) == (0, 0)
    for name in ("stdout", "stderr"):
        (file,) = (tmp_path / "theirs").rglob(f"filtered_{name}.log")
        their_lines = re.split(r"\[default\d\]:|\n", file.read_text())
        copied = (job.logs / f"filtered_{name}.log").read_text()
        our_lines = re.split(r"\[rank \d\] |\n", copied)
        assert sorted(filter(None, our_lines)) == sorted(filter(None, their_lines))


TEMPLATE = {
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank} ${other}> "
}


def test_the_prefix_follows_torchruns_template(msrun, tmp_path):
    job = msrun(
        *("--workers-per-node", 2, "--role", "trainer", "--duplicate-stdout-filters", "loss"),
        script(tmp_path, PROGRAM),
        env=TEMPLATE,
    )

    assert job.wait() == 0
    form = "<trainer {0} {0} ${{other}}> "
    assert sorted(line for line in job.out.splitlines() if "loss" in line) == prefixed(
        OUTS, form=form
    )
    copied = (job.logs / "filtered_stdout.log").read_text().splitlines()
    assert sorted(copied) == prefixed(OUTS, form=form)
    shown = [line for line in job.err.splitlines() if "warning" in line]
    assert sorted(shown) == prefixed(ERRS, form=form)


def test_torchrun_has_the_same_prefix(msrun, torchrun):
    program = "echo out; echo err >&2"
    words = ("--role", "trainer", "-t", "3")
    job = msrun("--workers-per-node", 2, *words, *shell(program), env=TEMPLATE)
    theirs = torchrun("--nproc-per-node=2", *words, *shell(program), variables=TEMPLATE)

    assert (job.wait(), theirs.returncode) == (0, 0)
    assert sorted(job.out.splitlines()) == sorted(theirs.stdout.splitlines())
    assert {line for line in job.err.splitlines() if line.startswith("<")} == {
        line for line in theirs.stderr.splitlines() if line.startswith("<")
    }
