"""One run of one launcher: start it, watch it, take its figures, leave nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.bench import processes
from scripts.bench.figures import Figure, Launcher
from scripts.bench.processes import TimeoutReached

ROOT = Path(__file__).resolve().parents[2]
ALL_REDUCE = ROOT / "scripts" / "bench" / "all_reduce.py"
IDLE = ROOT / "scripts" / "bench" / "idle.py"
MODULES = {Launcher.MSRUN: "msrun", Launcher.TORCHRUN: "torch.distributed.run"}
EARLY_VARIABLES = {Figure.WALL_FOLLOWED: "OMP_NUM_THREADS", Figure.WALL_EXEC: "KMP_BLOCKTIME"}
LIMIT = 120.0
"""Seconds after which a run counts as hanging."""

Figures = dict[Figure, float]
# What an outer launcher or the user's shell may have set; both launchers start without it.
_FOREIGN_PREFIXES = ("MSRUN_", "MS_", "PET_", "TORCHELASTIC_", "RANK", "MASTER_", "OMP_")
_FOREIGN = {"WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
# torchrun 2.13 gives a restart the store of the run before it, with the addresses of the
# killed workers in it, and gloo then finds nobody there.  msrun's processes do not read
# this.  Can go with https://github.com/pytorch/pytorch/issues/135712.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class RunFailed(Exception):  # noqa: N818 - it says what happened
    """A launcher did not do what the benchmark asked for; the text says what it did."""


@dataclass(frozen=True, slots=True)
class Note:
    """What one rank of `idle.py` wrote."""

    pid: int
    time: float


@dataclass(frozen=True, slots=True)
class Run:
    """A launcher that is running.

    Args:
        process: The launcher.
        folder: Where `idle.py` and the launcher write.
        started: Monotonic time just before it was started.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    started: float

    def notes(self, word: str, generation: int, workers: int) -> list[Note]:
        """Return the notes of all ranks, by rank, waiting for them.

        Raises:
            RunFailed: They do not all come.
        """
        paths = [self.folder / f"{word}-{generation}-{rank}" for rank in range(workers)]
        deadline = time.monotonic() + LIMIT
        while not all(path.exists() for path in paths):
            if self.process.poll() is not None:
                raise RunFailed(f"exit code {self.process.returncode} before `{word}`")
            if time.monotonic() > deadline:
                raise RunFailed(f"no `{word}` from all ranks within {LIMIT:g} s")
            time.sleep(0.01)
        words = (path.read_text().split() for path in paths)
        return [Note(int(pid), float(moment)) for pid, moment in words]

    def exit_time(self, *expected: int) -> float:
        """Return the monotonic time at which the launcher ended, with one of these codes.

        Raises:
            RunFailed: It ended otherwise or not at all.
        """
        ended = processes.await_exit(self.process.pid, LIMIT)
        code = self.process.wait()
        if code not in expected:
            raise RunFailed(f"exit code {code}")
        return ended


def measure_help(launcher: Launcher) -> Figures:
    """Time `--help`."""
    with _started(launcher, ["--help"]) as run:
        return {Figure.HELP: run.exit_time(0) - run.started}


def measure_start(launcher: Launcher, workers: int) -> Figures:
    """Take wall and CPU time of a job that starts, does one all-reduce and ends."""
    before = _cpu_of_children()
    with _started(launcher, _job(workers), [ALL_REDUCE, workers]) as run:
        wall = run.exit_time(0) - run.started
    return {Figure.WALL: wall, Figure.CPU: _cpu_of_children() - before}


def measure_early_variables(launcher: Launcher, workers: int) -> Figures:
    """Time the same job where the script sets a variable before it imports torch.

    Forked workers follow the first; for the second, each worker of msrun is an interpreter.
    """
    found: Figures = {}
    for figure, name in EARLY_VARIABLES.items():
        first = f"import os\n\nos.environ[{name!r}] = '1'\n"
        with _started(launcher, _job(workers), [ALL_REDUCE, workers], first=first) as run:
            found[figure] = run.exit_time(0) - run.started
    return found


def measure_idle(launcher: Launcher, workers: int) -> Figures:
    """Weigh a job whose workers are all past an all-reduce, then time its end by SIGTERM."""
    with _started(launcher, _job(workers), idle=True) as run:
        pids = [note.pid for note in run.notes("up", 0, workers)]
        found = _memory_figures(run.process.pid, pids)
        asked = time.monotonic()
        run.process.terminate()
        # torchrun: 1 for its own exception; both: 128 + 15, or the signal itself.
        found[Figure.STOP] = run.exit_time(1, 128 + signal.SIGTERM, -signal.SIGTERM) - asked
    return found


def measure_restart(launcher: Launcher, workers: int) -> Figures:
    """Kill one worker, time until all are past an all-reduce again, then time the job's end."""
    options = [*_job(workers), "--max-restarts", "1"]
    with _started(launcher, options, idle=True, env=OWN_STORE) as run:
        victim = run.notes("up", 0, workers)[1]
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        again = max(note.time for note in run.notes("up", 1, workers))
        (run.folder / "stop").touch()
        ended = run.exit_time(0)
        last = max(note.time for note in run.notes("end", 1, workers))
    return {Figure.RESTART: again - killed, Figure.END: ended - last}


def _memory_figures(agent: int, workers: list[int]) -> Figures:
    parent_of = processes.parents()
    tree = [agent, *processes.descendants(agent, parent_of)]
    memory = {pid: processes.memory_mib(pid) for pid in tree}
    pss = {pid: fields.get("Pss", 0.0) for pid, fields in memory.items()}
    found = {
        Figure.MEMORY: sum(pss.values()),
        Figure.WORKER_PSS: sum(pss[pid] for pid in workers) / len(workers),
        Figure.AGENT_RSS: memory[agent]["Rss"],
        Figure.TORCH_MAPPED: float(processes.holds_torch(agent)),
    }
    for pid in tree:
        if pid not in workers and "scheduler" in processes.command(pid):
            found[Figure.SCHEDULER_RSS] = memory[pid]["Rss"]
            found[Figure.TORCH_MAPPED] += processes.holds_torch(pid)
    forkserver = parent_of[workers[0]]
    if forkserver != agent:
        found[Figure.FORKSERVER_PSS] = pss[forkserver]
        # PSS over the whole family counts each of its pages once.  What the forkserver
        # itself maps would be there with no worker at all; the rest came with them.
        family = [forkserver, *processes.descendants(forkserver, parent_of)]
        extra = sum(pss[pid] for pid in family) - memory[forkserver]["Rss"]
        found[Figure.WORKER_EXTRA] = extra / len(workers)
    return found


def _job(workers: int) -> list[str]:
    return ["--nproc-per-node", str(workers)]


@contextmanager
def _started(
    launcher: Launcher,
    options: list[str],
    program: list[Path | int] | None = None,
    *,
    idle: bool = False,
    first: str = "",
    env: dict[str, str] | None = None,
) -> Iterator[Run]:
    """Start a launcher in a folder of its own; in the end nothing of it is left.

    Args:
        launcher: Which one.
        options: Its options.
        program: Script and arguments; none for the launcher alone.
        idle: Run `idle.py` instead.
        first: Lines in front of the script's, in a copy of it.
        env: Variables of the launcher.

    Raises:
        RunFailed: With what the launcher printed last, when the body raises it or hangs.
    """
    with tempfile.TemporaryDirectory(prefix="msrun-bench-") as name:
        folder = Path(name)
        job = idle or program is not None
        argv = [sys.executable, "-m", MODULES[launcher]]
        argv += _own_options(launcher, folder) if job else []
        argv += options
        if program and first:
            copy = folder / "program.py"
            copy.write_text(first + ALL_REDUCE.read_text())
            program = [copy, *program[1:]]
        argv += map(str, [IDLE, folder] if idle else program or [])
        with (folder / "output").open("wb") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment() | (env or {}),
                cwd=ROOT,
                start_new_session=True,
            )
        try:
            yield Run(process, folder, started)
            processes.reap(timeout=10)
        except (RunFailed, TimeoutReached) as problem:
            tail = (folder / "output").read_text(errors="replace").splitlines()[-60:]
            raise RunFailed("\n    ".join([f"{launcher.value}: {problem}", *tail])) from problem
        finally:
            processes.end_all()


def _own_options(launcher: Launcher, folder: Path) -> list[str]:
    """Return what keeps a job on the loopback interface and in `folder`."""
    if launcher is Launcher.MSRUN:
        return ["--log-dir", str(folder / "logs")]
    return ["--standalone", "--local-addr", "127.0.0.1"]


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    return kept | {"GLOO_SOCKET_IFNAME": "lo"}


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
