"""Workers that keep an account of their lives, and what it says about generations."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from nodes import Node
from support import script, until

LEASE = 5.0
LIVING = ["--lease", f"{LEASE:g}s", "--max-restarts", 5, "--grace", "2s"]
"""Options of jobs that go on when something fails."""
AT_ONCE = ["--last-call", "0s"]
"""Options of jobs that begin with the fewest nodes; others wait for all, however slow they are."""

# Alive every few milliseconds until it is told that the job is done, or to fail.
PROGRAM = """
    import os, signal, sys, time

    folder, name = sys.argv[1], os.uname().nodename
    generation, rank = os.environ["MSRUN_GENERATION"], os.environ["RANK"]
    path = f"{folder}/{generation}-{rank}-{name}-{os.getpid()}"
    account = os.open(path, os.O_WRONLY | os.O_CREAT)

    def note(what):  # also in the midst of itself, when a signal comes
        os.write(account, f"{what} {time.monotonic()}\\n".encode())

    def asked_to_stop(signum, frame):
        note("stop")
        while told("slow"):
            note("stop")
        os._exit(0)

    def told(what):
        return os.path.exists(f"{folder}/{what}")

    signal.signal(signal.SIGTERM, asked_to_stop)
    note(os.environ["WORLD_SIZE"])
    while not told("done"):
        note("alive")
        if told(f"fail-{generation}-{rank}") or told(f"fail-on-{name}"):
            note("fail")
            os._exit(3)
        time.sleep(0.005)
    note("done")
"""


class Life(NamedTuple):
    """One worker; times are of the machine's monotonic clock."""

    generation: int
    rank: int
    host: str
    world_size: int
    began: float
    ended: float
    how: str


class Audit:
    """What the workers of one job have written so far.

    Attributes:
        words: The words after `msrun` that start such workers.
        python_words: The same for workers of its forkserver, which imports torch first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "audit"
        self.folder.mkdir()
        program = script(folder, PROGRAM, "audited.py")
        self.words = ["--no-python", sys.executable, "-I", "-S", program, str(self.folder)]
        self.python_words = [program, str(self.folder)]

    def lives(self, generation: int | None = None) -> list[Life]:
        """Return the workers that have begun, of one generation or of all, by rank."""
        found = [
            self._life(path)
            for path in self.folder.glob("*-*-*-*")
            if not path.name.startswith("fail")
        ]
        whole = [life for life in found if life and generation in (None, life.generation)]
        return sorted(whole)

    def _life(self, path: Path) -> Life | None:
        text = path.read_text()
        lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines:
            return None
        generation, rank, host, _ = path.name.split("-")
        size, began = lines[0]
        how, ended = lines[-1]
        numbers = int(generation), int(rank)
        return Life(*numbers, host, int(size), float(began), float(ended), how)

    def until_running(self, generation: int, *hosts: str, seconds: float = 30.0) -> float:
        """Wait until a generation has a worker on each of `hosts`; return when the last began."""

        def are_up() -> list[Life]:
            lives = self.lives(generation)
            return lives if sorted(life.host for life in lives) == [*hosts] else []

        what = f"for generation {generation} on {', '.join(hosts)}"
        lives = until(are_up, what, seconds=seconds)
        assert {life.world_size for life in lives} == {len(hosts)}
        return max(life.began for life in lives)

    def until_later(self, generation: int, *hosts: str, seconds: float = 30.0) -> int:
        """Wait until a generation after `generation` runs on `hosts`; return its number."""

        def later() -> int:
            lives = self.lives()
            last = max(life.generation for life in lives)
            there = sorted(life.host for life in lives if life.generation == last)
            return last if last > generation and there == sorted(hosts) else 0

        return until(later, f"for another generation on {', '.join(hosts)}", seconds=seconds)

    def stops(self, generation: int) -> dict[str, float]:
        """Return by host when its worker was asked to stop."""
        lives = self.lives(generation)
        return {life.host: life.ended for life in lives if life.how == "stop"}

    def fail(self, generation: int, rank: int) -> None:
        """Have a worker fail."""
        (self.folder / f"fail-{generation}-{rank}").touch()

    def fail_on(self, host: str) -> None:
        """Have every worker on a host fail."""
        (self.folder / f"fail-on-{host}").touch()

    def finish(self) -> None:
        """Have all workers end well."""
        (self.folder / "done").touch()

    def check(self) -> None:
        """Assert that no two generations ever had living workers, nor a rank two of them."""
        lives = self.lives()
        for generation in {life.generation for life in lives}:
            ranks = [life.rank for life in lives if life.generation == generation]
            assert len(set(ranks)) == len(ranks), lives
            began = min(life.began for life in lives if life.generation == generation)
            earlier = [life.ended for life in lives if life.generation < generation]
            assert max(earlier, default=0.0) <= began, lives


def codes(nodes: Iterable[Node]) -> list[int]:
    """Return the exit codes of launchers, which end soon."""
    return [node.wait(40) for node in nodes]


def wait(seconds: float) -> None:
    """Let time pass in which nothing may happen."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, "for time to pass", seconds=seconds + 1)
