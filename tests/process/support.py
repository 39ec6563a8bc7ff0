"""A real launcher as a test sees it: its console, its logs, its processes, what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from ports import free_port

from msrun.supervise import process
from msrun.supervise.machine import read_machine

PATIENCE = 25.0
"""Seconds in which anything must have happened on a busy machine; below pytest's timeout."""
_PAUSE = 0.002
_OURS = ("MSRUN_", "PET_", "TORCHELASTIC_", "MS_")
_KEPT = "MSRUN_TESTS_SESSION"
# They outdo the size of a test's terminal.
_SIZES = ("COLUMNS", "LINES")

Value = TypeVar("Value")

STALL = """
    import os, time
    import msrun

    def next_batch():
        while True:
            time.sleep(0.05)

    def all_reduce():
        while True:
            time.sleep(0.05)

    if os.environ["MSRUN_GENERATION"] == "0":
        for _ in range(3):
            msrun.beat()
            time.sleep(0.05)
        print("waiting")
        next_batch() if os.environ["RANK"] == "STUCK" else all_reduce()
    print("done")
"""


def until(
    condition: Callable[[], Value],
    what: str,
    *,
    seconds: float = PATIENCE,
    pause: float = _PAUSE,
) -> Value:
    """Return the first true value of `condition`; fail when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s: {what}")
        time.sleep(pause)
    return value


class Job:
    """One launcher, started at once, and what belongs to it.

    Args:
        folder: Working directory; console, logs and runtime directory are made in it.
        arguments: Words after `msrun`.
        runtime: Value of XDG_RUNTIME_DIR, by which the job's processes are known.
        wrapper: A command that runs the launcher.
        env: Variables on top of this process's own.
        plain: Give it neither job id nor log directory.
        python: Its interpreter.
        streams: Standard streams other than files and /dev/null.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        runtime: Path,
        wrapper: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        plain: bool = False,
        python: str = sys.executable,
        **streams: int,
    ) -> None:
        number = uuid.uuid4().hex[:8]
        self.folder = folder
        self.runtime = runtime
        self.name = f"test-{number}"
        self.logs = folder / f"logs-{number}"
        self._out = folder / f"out-{number}"
        self._err = folder / f"err-{number}"
        words = [str(word) for word in arguments]
        given = {} if plain else {"--job-id": self.name, "--log-dir": str(self.logs)}
        own = [word for option in given if option not in words for word in (option, given[option])]
        if "--job-id" in words:
            self.name = words[words.index("--job-id") + 1]
        self.started_at = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **streams}
            self.process = subprocess.Popen(
                [*wrapper, python, "-m", "msrun", *own, *words],
                cwd=folder,
                env=environment(runtime) | dict(env or {}),
                **options,
            )

    # The launcher.

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the launcher's exit code, as a shell shows it."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher did not end within {seconds:g} s")
        return 128 - code if code < 0 else code

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def until_said(self, text: str, *, times: int = 1) -> None:
        """Wait until the launcher has said `text`, so many times."""
        until(lambda: self.err.count(text) >= times or self._ended(), f"for {text!r} on stderr")
        assert self.err.count(text) >= times

    def until_begun(self) -> float:
        """Wait for the launcher's first words and return when they were there.

        How long Python takes to start is the machine's, and counts for none of our promises.
        """
        self.until_said("contained by")
        return time.monotonic()

    def until_logged(self, text: str, *ranks: int) -> None:
        """Wait until the logs of `ranks`, 0 alone by default, hold `text`."""
        for rank in ranks or (0,):
            until(
                lambda rank=rank: text in self.log(rank) or self._ended(), f"for {text!r} in a log"
            )
            assert text in self.log(rank)

    def _ended(self) -> bool:
        return self.process.poll() is not None

    # What it writes.

    def log(self, rank: int = 0) -> str:
        try:
            return (self.logs / f"worker_{rank}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def verdict(self) -> dict[str, object]:
        return json.loads((self.logs / "verdict.json").read_bytes())

    def block(self) -> str:
        """Return the last thing on stderr from `error:` on, with what differs each time masked."""
        text = self.err[self.err.rindex("error: ") :]
        return self.mask(text)

    def mask(self, text: str) -> str:
        text = text.replace(str(self.logs), "LOGS").replace(str(self.folder), "FOLDER")
        text = text.replace(self.name, "JOB").replace(f"node {os.uname().nodename}", "node HOST")
        text = re.sub(r"\bon \S+, contained by .*;", "on HOST, contained by CONTAINMENT;", text)
        return re.sub(r"\bpid \d+", "pid N", re.sub(r"\b\d+(\.\d+)?s\b", "Ns", text))

    # Its processes and what it leaves.

    @property
    def run_dir(self) -> Path:
        return self.runtime / "msrun" / self.name

    def members(self) -> list[psutil.Process]:
        """Return every living process that was started below this runtime directory."""
        return [p for p in map(_process, alive(self.runtime)) if p]

    def find(self, name: str) -> psutil.Process:
        """Wait for a process whose name or command line holds `name`."""
        return until(lambda: self._find(name), f"for a process {name!r}")

    def _find(self, name: str) -> psutil.Process | None:
        """Return the parent of all that have the name, which what it has just forked has too."""
        found = {}
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                if name in member.name() or name in " ".join(member.cmdline()):
                    found[member.pid] = (member.ppid(), member)
        firsts = (member for parent, member in found.values() if parent not in found)
        return next(firsts, None)

    def cgroups(self) -> list[Path]:
        own = read_machine({}).cgroup
        return list(Path(own).glob(f"msrun-{self.name}.*")) if own else []

    def leftovers(self) -> list[str]:
        """Describe what an ended job has left on the machine."""
        processes = [f"{pid} {process.command_line(pid)}" for pid in alive(self.runtime)]
        directories = [self.run_dir] if self.run_dir.exists() else []
        return [*processes, *map(str, directories), *map(str, self.cgroups())]

    def report(self) -> str:
        """Return everything that helps to understand a failed test."""
        parts = [f"== stdout\n{self.out}", f"== stderr\n{self.err}"]
        if self.logs.is_dir():
            for path in sorted(path for path in self.logs.iterdir() if path.is_file()):
                text = path.read_text(errors="replace")
                parts.append(f"== {path.name}\n{text[-4000:]}")
        return "\n".join(parts)


def environment(runtime: Path) -> dict[str, str]:
    """Return this process's environment without anything that would configure a launcher."""
    dropped = (*_OURS, *_SIZES)
    kept = {k: v for k, v in os.environ.items() if k == _KEPT or not k.startswith(dropped)}
    return kept | {"XDG_RUNTIME_DIR": str(runtime)}


def alive(runtime: Path) -> list[int]:
    """Return the pids of living processes whose first environment names `runtime`."""
    found = process.with_variable(f"XDG_RUNTIME_DIR={runtime}".encode())
    return [pid for pid in found if pid != os.getpid() and process.is_alive(pid)]


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def kill(*victims: psutil.Process) -> None:
    """SIGKILL processes of a job; psutil checks that the pid is still theirs."""
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def script(folder: Path, text: str, name: str = "program.py") -> str:
    """Write a Python program and return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def stalls(folder: Path, rank: int) -> str:
    """Write a program of which `rank` hangs in the first generation, and the others wait for it."""
    return script(folder, STALL.replace("STUCK", str(rank)), "stall.py")


def shell(text: str) -> list[str]:
    """Return the words after `msrun` that run a shell program."""
    return ["--no-python", "sh", "-c", textwrap.dedent(text)]


def together(text: str) -> list[str]:
    """Return the words that run a shell program on two ranks, each once the other runs, too.

    A launcher says that all ranks run only if no rank ended before the last one began.
    """
    both = 'touch "up-$RANK"; until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.01; done'
    return shell(f"{both}\n{text}")


def listening(members: Sequence[psutil.Process]) -> Iterator[tuple[str, int]]:
    """Yield the addresses on which processes listen."""
    for member in members:
        with contextlib.suppress(psutil.Error):
            for connection in member.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    yield connection.laddr.ip, connection.laddr.port


def answers(host: str, port: int) -> bool:
    """Return whether somebody takes connections there."""
    with socket.socket() as probe:
        # The kernel might choose the very port, which would then answer itself.
        probe.bind((host, free_port()))
        return probe.connect_ex((host, port)) == 0


STOPS = {
    signal.SIGTERM: 143,
    signal.SIGINT: 130,
    signal.SIGHUP: 129,
    signal.SIGQUIT: 131,
}
