"""Every page of docs/tutorial does what it says, typed as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from support import environment

pytestmark = [pytest.mark.process, pytest.mark.torch]

HOME = Path(__file__).parents[3]
PAGES = sorted((HOME / "docs" / "tutorial").glob("*.md"))
# `<!-- WHAT: OF WHICH -->` and the block that follows it.
STEP = re.compile(r"^<!-- (\w+)(?:: ([^>]*))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 60


@pytest.fixture
def shell(tmp_path):
    """Start commands in a directory of their own, with our msrun and Python first on PATH."""
    (tmp_path / "bin").mkdir()
    for name, words in {"python": "", "msrun": "-m msrun"}.items():
        (tmp_path / "bin" / name).write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n'
        )
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    variables = environment(tmp_path / "run") | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(HOME),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "MSRUN_MASTER_PORT": str(free_port()),  # another test may have the default
    }

    def start(command):
        return subprocess.Popen(
            ["sh", "-ec", command],
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, shell, tmp_path):
    beside = []
    output = ""
    for kind, which, text in STEP.findall(page.read_text()):
        match kind, which:
            case "file", name:
                (tmp_path / name).write_text(text)
            case "run", "together":
                beside.append(shell(text))
            case "run", _:
                process = shell(text)
                output, _ = process.communicate(timeout=SECONDS)
                assert process.returncode == int(which.removeprefix("exit code ") or 0), output
            case "prints", _:
                assert text in output
            case _:
                pytest.fail(f"{page.name}: a step called {kind}")
        if not beside or kind != "run" or which == "together":
            continue
        for process in beside:
            waited, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, waited
        beside.clear()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_is_shown_is_run(page):
    text = page.read_text()

    assert text.count("```sh\n") == sum(kind == "run" for kind, _, _ in STEP.findall(text))
