"""Programs that start jobs of msrun from Python, and what they leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import PATIENCE, alive, environment, process, script, until


class Program:
    """A Python program, started at once.

    Args:
        folder: Working directory.
        runtime: XDG_RUNTIME_DIR, by which its processes are known.
        words: Words after `python`.
    """

    def __init__(self, folder, runtime, words):
        self._out, self._err = folder / "out", folder / "err"
        (folder / "tmp").mkdir(exist_ok=True)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=environment(runtime) | {"TMPDIR": str(folder / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self):
        return self._out.read_text(errors="replace")

    @property
    def err(self):
        return self._err.read_text(errors="replace")

    def wait(self, seconds=3 * PATIENCE):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the program did not end within {seconds} s")

    def until_said(self, text):
        until(lambda: text in self.out or self.process.poll() is not None, f"for {text!r}")
        assert text in self.out


@pytest.fixture
def program(tmp_path, runtime):
    """Start a program; when it has ended, nothing of its jobs may be left."""
    programs = []

    def start(text, *words, name="program.py"):
        path = script(tmp_path, text, name)
        programs.append(Program(tmp_path, runtime, words or [path]))
        return programs[-1]

    yield start
    for each in programs:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        print(f"======== {each.process.returncode}\n== out\n{each.out}\n== err\n{each.err}")
    # A killed program's job ends after it.
    until(lambda: not alive(runtime), f"for {[process.command_line(p) for p in alive(runtime)]}")
    assert [path.name for path in (runtime / "msrun").glob("*")] in ([], [".guard"])
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.fixture
def said(program):
    """Run a program to its end and return what it printed itself, without its workers' lines."""

    def run(text, *words, code=0, **options):
        started = program(text, *words, **options)
        assert started.wait() == code, started.err
        return [line for line in started.out.splitlines() if not line.startswith("[rank ")]

    return run
