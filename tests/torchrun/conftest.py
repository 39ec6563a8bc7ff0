"""torchrun and msrun side by side: the same words, the same program, the same surroundings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import alive, environment, until

# Both start at once on a busy machine, and torchrun alone takes seconds.
PATIENCE = 90.0
OURS, THEIRS = "msrun", "torchrun"


@dataclass
class Side:
    """One run of a program by one of the two commands."""

    process: subprocess.Popen[str]
    folder: Path
    out: str = ""
    err: str = ""

    def wait(self) -> int:
        self.out, self.err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def written(self) -> list[str]:
        """Return what the workers left in their working directory, by name of the file."""
        return [path.read_text() for path in sorted(self.folder.glob("said-*"))]


@pytest.fixture
def launch(tmp_path):
    """Start one of the two commands in a folder of its own; nothing of it may be left."""
    assert shutil.which(THEIRS), "torchrun is not on PATH"
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    started = []

    def start(command, words, *, folder="", env=None):
        place = tmp_path / (folder or command)
        place.mkdir(exist_ok=True)
        module = "msrun" if command == OURS else "torch.distributed.run"
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=place,
            env=environment(runtime) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
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
        print(f"======== {side.folder.name}, exit code {side.process.returncode}")
        print(f"{side.out}\n{side.err}")
    until(lambda: not alive(runtime), "for the processes of both commands")


@pytest.fixture
def both(launch):
    """Run the same words under both commands, at once; return ours and theirs, ended."""

    def run(words, *, env=None):
        sides = [launch(command, words, env=env) for command in (OURS, THEIRS)]
        for side in sides:
            side.wait()
        return sides

    return run
