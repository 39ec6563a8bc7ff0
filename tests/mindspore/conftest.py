"""Real MindSpore beside msrun: in this interpreter, or in that of MINDSPORE_PYTHON."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from mindspores import real_python
from support import alive, environment, until

# MindSpore's own launcher takes seconds to start, and half a minute to end after a failure.
PATIENCE = 110.0
ROOT = Path(__file__).parents[2]


@dataclass
class Side:
    """One run of a program by one of the two commands."""

    process: subprocess.Popen[str]
    folder: Path
    err: str = ""

    def wait(self) -> int:
        _, self.err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def written(self) -> dict[str, str]:
        """Return what the workers left in their working directory, by name of the file."""
        return {path.name: path.read_text() for path in sorted(self.folder.glob("said-*"))}

    def logs(self, pattern: str = "logs/*.log") -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


@pytest.fixture(scope="session")
def mindspore_python():
    return real_python()


@pytest.fixture
def launch(tmp_path, mindspore_python):
    """Start one of the two commands in a folder of its own; nothing of it may be left."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    started = []

    def start(command, words, *, env=None):
        place = tmp_path / command.partition(".")[0]
        place.mkdir(exist_ok=True)
        # MindSpore's msrun runs the `python` of PATH.
        path = f"{Path(mindspore_python).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
        process = subprocess.Popen(
            [mindspore_python, "-m", command, *map(str, words)],
            cwd=place,
            env=environment(runtime) | own | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Side(process, place))
        return started[-1]

    yield start
    for side in started:
        if side.process.poll() is None:
            side.process.kill()
            side.process.communicate()
        print(f"======== {side.folder.name}, exit code {side.process.returncode}\n{side.err}")
        for log in side.folder.glob("**/*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}")
    until(lambda: not alive(runtime), "for the processes of both commands")
