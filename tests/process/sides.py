"""Runs of one program by two commands, side by side."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from support import alive, environment, until


@dataclass
class Side:
    """One run of a program by one of the two commands.

    Args:
        process: The command.
        folder: Its working directory.
        patience: Seconds in which it must end.
        out: What it wrote to standard output, once it ended.
        err: What it wrote to standard error.
    """

    process: subprocess.Popen[str]
    folder: Path
    patience: float
    out: str = ""
    err: str = ""

    def wait(self) -> int:
        self.out, self.err = self.process.communicate(timeout=self.patience)
        return self.process.returncode

    def written(self) -> list[str]:
        """Return what the workers left in their working directory, in the order of the files."""
        return list(self.files().values())

    def files(self) -> dict[str, str]:
        """Return the same and the names of the files."""
        return {path.name: path.read_text() for path in sorted(self.folder.glob("said-*"))}

    def logs(self, pattern: str = "logs/*.log") -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


class Start(Protocol):
    """Starts a command in a folder, which is made if it is not there."""

    def __call__(
        self, words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None
    ) -> Side: ...


@contextmanager
def side_by_side(runtime: Path, patience: float) -> Iterator[Start]:
    """Yield what starts a command; at the end nothing of any may be left, and all logs are said.

    Args:
        runtime: Folder for their runtime files, which is made.
        patience: Seconds in which each must end.
    """
    runtime.mkdir(mode=0o700)
    started: list[Side] = []

    def start(words: Sequence[object], folder: Path, env: Mapping[str, str] | None = None) -> Side:
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [*map(str, words)],
            cwd=folder,
            env=environment(runtime) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(Side(process, folder, patience))
        return started[-1]

    yield start
    for side in started:
        if side.process.poll() is None:
            side.process.kill()
        if side.process.stdout and not side.process.stdout.closed:  # nobody waited for its end
            side.wait()
        print(f"======== {side.folder.name}, exit code {side.process.returncode}")
        print(f"{side.out}\n{side.err}")
        for log in side.folder.glob("**/*.log"):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}")
    until(lambda: not alive(runtime), "for the processes of both commands")
