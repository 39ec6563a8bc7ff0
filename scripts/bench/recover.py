"""Measure how long a cluster needs to notice what happens to it, and to step again.

    python scripts/bench/recover.py                     # once each, all cases
    python scripts/bench/recover.py --runs 3 --case add,kill
    python scripts/bench/recover.py --markdown --check  # exit 1 and name the missed bars

Needs root on Linux, torch, and `ip`, `nsenter` and `tc`: the nodes are hosts made of
namespaces (`tests/lab`), one worker on each.  Where torchrun can do the same it does it beside,
in the same run: all ranks of a gloo group step every 20 ms.  It runs with a rendezvous of its
own kind (c10d), one second of last call and a store for each generation, without which it
recovers from little; where it has not recovered within the limit, or has ended, the table says
so.  In the other cases workers step alone, so that only msrun can tell them of each other.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lab")]

import hosts  # type: ignore[import-not-found]  # noqa: E402 - the tests' own, beside this

from scripts.bench import runs  # noqa: E402
from scripts.bench.figures import Launcher  # noqa: E402

STEPPING = ROOT / "scripts" / "bench" / "stepping.py"
LIVING = ROOT / "scripts" / "bench" / "living.py"
FORMING_SECONDS = 60.0
LEASE = 10.0
HANG_SECONDS = 5.0
# What must not happen is waited for so long.
UNNOTICED_SECONDS = LEASE + 2.0


T = TypeVar("T")


class NotRecovered(Exception):  # noqa: N818 - it is a result
    """The ranks did not all step again; the text says what happened."""


@dataclass(slots=True)
class Cluster:
    """One job on hosts of a lab.

    Args:
        launcher: Who runs it.
        lab: The hosts.
        nnodes: `N` or `MIN:MAX`.
        worker: Its program.
    """

    launcher: Launcher
    lab: Any
    nnodes: str
    worker: Path
    nodes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the workers write."""
        return Path(self.lab.folder)

    def start(self, *names: str) -> None:
        """Start the launcher on hosts."""
        for name in names:
            host = self.lab.host(name)
            log = (self.folder / f"log-{name}").open("a")
            env = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", **runs.OWN_STORE}
            words = [*self._launch(name), self.worker, self.folder]
            self.nodes[name] = host.popen(
                [sys.executable, "-m", *map(str, words)],
                env=env,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def _launch(self, name: str) -> list[str]:
        own = ["--nproc-per-node", "1", "--max-restarts", "3", "--nnodes", self.nnodes]
        if self.launcher is Launcher.MSRUN:
            words = ["--master-addr", "a", "--job-id", "bench", "--last-call", "1s"]
            words += ["--lease", f"{LEASE:g}s", "--hang-timeout", f"{HANG_SECONDS:g}s"]
            return ["msrun", *own, *words, "--log-dir", str(self.folder / f"logs-{name}")]
        words = ["--rdzv-backend", "c10d", "--rdzv-id", "bench", "--rdzv-endpoint", "a:29500"]
        words += ["--rdzv-conf", "last_call_timeout=1", "--local-addr", self.lab.host(name).ipv4]
        return ["torch.distributed.run", *own, *words]

    def until_stepping(self, count: int, after: float, seconds: float) -> float:
        """Return when the last of `count` workers that began after `after` had stepped.

        Raises:
            NotRecovered: They did not all do so in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            notes = [path.read_text().split() for path in self.folder.glob("up-*-*[0-9]")]
            times = [float(at) for at, size, _ in notes if int(size) == count]
            new = [at for at in times if at > after]
            if len(new) == count:
                return max(new)
            ended = {n: p.returncode for n, p in self.nodes.items() if p.poll() is not None}
            waited = time.monotonic() - after
            if ended and len(ended) == len(self.nodes):
                raise NotRecovered(f"ended after {waited:.0f} s")
            if time.monotonic() > deadline:
                raise NotRecovered(f"not within {seconds:.0f} s")
            time.sleep(0.01)

    def lose(self, name: str) -> subprocess.Popen[str]:
        """Count a launcher no more among those that must live."""
        return self.nodes.pop(name)

    def worker_on(self, name: str) -> int:
        """Return the pid of the worker on a host, as this machine numbers it."""
        inside = [path.name.rsplit("-", 1)[1] for path in self.folder.glob(f"*-{name}-*[0-9]")]
        for process in self.lab.host(name).processes():
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            numbers = next(line.split() for line in status if line.startswith("NSpid"))
            if numbers[-1] in inside:
                return int(process.pid)
        raise NotRecovered(f"no worker on {name}")


@dataclass(frozen=True, slots=True)
class Life:
    """What a worker that steps alone has written: when it did what."""

    host: str
    generation: int
    notes: list[tuple[str, float]]

    def at(self, what: str) -> float | None:
        """Return when it first noted `what`; None when it has not."""
        return next((at for word, at in self.notes if word == what), None)


def _lives(cluster: Cluster, generation: int) -> list[Life]:
    """Return the workers of a generation."""
    found = []
    for path in cluster.folder.glob("life-*-*"):
        whole = path.read_text().rpartition("\n")[0]  # the rest is being written
        notes = [(what, float(at)) for what, at in map(str.split, whole.splitlines())]
        if notes and notes[0][0] == f"generation-{generation}":
            found.append(Life(path.name.split("-")[1], generation, notes))
    return found


def _wait(condition: Callable[[], T], seconds: float, what: str) -> T:
    """Return the first true value of `condition`.

    Raises:
        NotRecovered: None came in time.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotRecovered(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.01)
    return value


# What happens.  Each returns when it did.


def _crash(cluster: Cluster) -> float:
    victim = cluster.worker_on("b")
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return at


def _kill(cluster: Cluster) -> float:
    cluster.lose("b")
    at = time.monotonic()
    cluster.lab.host("b").kill_all()
    return at


def _pull(cluster: Cluster) -> float:
    cluster.lose("b")
    at = time.monotonic()
    cluster.lab.host("b").power_off()
    return at


def _leave(cluster: Cluster) -> float:
    at = time.monotonic()
    cluster.lose("b").terminate()
    return at


def _add(cluster: Cluster) -> float:
    at = time.monotonic()
    cluster.start("c")
    return at


def _replace(cluster: Cluster) -> float:
    at = _kill(cluster)
    cluster.start("c")
    return at


def _kill_with_a_spare(cluster: Cluster) -> float:
    cluster.start("c")
    log = cluster.folder / "log-c"
    _wait(lambda: "stands by as a spare" in log.read_text(), FORMING_SECONDS, "a spare")
    time.sleep(FORMING_SECONDS / 10)  # for its imports, of which nothing is said
    return _kill(cluster)


def _kill_scheduler(cluster: Cluster) -> float:
    names = {process.name(): process for process in cluster.lab.host("a").processes()}
    at = time.monotonic()
    names["msrun scheduler"].kill()
    return at


def _cut_and_heal(cluster: Cluster) -> float:
    at = time.monotonic()
    cluster.lab.host("b").cut()
    time.sleep(0.4 * LEASE)
    cluster.lab.host("b").heal()
    return at


def _hang(cluster: Cluster) -> float:
    (cluster.folder / "hang-1").touch()
    wedged = _wait(lambda: [at for life in _lives(cluster, 0) if (at := life.at("hang"))], 5, "b")
    return wedged[0]


# What is measured about it.

Change = Callable[[Cluster], float]
Measure = Callable[[Cluster, Change, float], float]


def _step_again(cluster: Cluster, change: Change, limit: float) -> float:
    """Return the seconds until all ranks step in one group."""
    began = change(cluster)
    return cluster.until_stepping(len(cluster.nodes), began, limit) - began


def _known(cluster: Cluster, change: Change, limit: float) -> float:
    """Return the seconds until the last worker elsewhere is asked to stop."""
    began = change(cluster)

    def stops() -> list[float]:
        others = [life for life in _lives(cluster, 0) if life.host != "b"]
        asked = [at for life in others if (at := life.at("stop"))]
        return asked if len(asked) == len(others) else []

    return max(_wait(stops, limit, "all workers asked to stop")) - began


def _run_again(cluster: Cluster, change: Change, limit: float) -> float:
    """Return the seconds until all workers of the next generation step."""
    began = change(cluster)

    def steps() -> list[float]:
        steps = [at for life in _lives(cluster, 1) if (at := life.at("step"))]
        return steps if len(steps) == len(cluster.nodes) else []

    return max(_wait(steps, limit, "the next generation")) - began


def _unnoticed(cluster: Cluster, change: Change, limit: float) -> float:
    """Return the longest time between two steps of a worker, none of which may end."""
    began = change(cluster)
    time.sleep(min(UNNOTICED_SECONDS, limit))
    now = time.monotonic()
    longest = 0.0
    for life in _lives(cluster, 0):
        steps = [at for _, at in life.notes if at > began]
        moments = [began, *steps, now]
        longest = max(longest, *(late - early for early, late in itertools.pairwise(moments)))
    if _lives(cluster, 1) or longest > UNNOTICED_SECONDS / 2:
        raise NotRecovered("the generation ended")
    return longest


def _told(cluster: Cluster, change: Change, limit: float) -> float:
    """Return the seconds until the stacks of all ranks are on every node."""
    began = change(cluster)
    files = [cluster.folder / f"logs-{name}" / "hang_0.txt" for name in cluster.nodes]
    _wait(lambda: all(file.exists() for file in files), limit, "stacks")
    told = time.monotonic()
    if not all("living.py" in file.read_text() for file in files):
        raise NotRecovered("stacks without the program")
    return told - began


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that happens to a job, and what is measured.

    Args:
        words: Both, for a reader.
        nnodes: Size of the job.
        hosts: Where it runs at first.
        change: Does it.
        measure: Measures.
        bar: Seconds that it may take.
    """

    words: str
    nnodes: str
    hosts: str
    change: Change
    measure: Measure
    bar: float

    @property
    def launchers(self) -> list[Launcher]:
        """Who can do it."""
        return list(Launcher) if self.measure is _step_again else [Launcher.MSRUN]


CASES = {
    "crash": Case("`kill -9` of a worker, all step again", "3", "abc", _crash, _step_again, 2),
    "kill": Case("`kill -9` of all on a node, all step again", "1:3", "abc", _kill, _step_again, 3),
    "pull": Case("power of a node cut, all step again", "1:3", "abc", _pull, _step_again, 20),
    "leave": Case(
        "SIGTERM to a node's launcher, all step again", "1:3", "abc", _leave, _step_again, 3
    ),
    "add": Case("a node added, all step again", "1:3", "ab", _add, _step_again, 5),
    "replace": Case("a node killed and another started", "2", "ab", _replace, _step_again, 15),
    "failure": Case("a worker failed, known on all nodes", "3", "abc", _crash, _known, 0.2),
    "reset": Case("all on a node killed, known on all", "1:3", "abc", _kill, _known, 1),
    "silence": Case("power of a node cut, known on all", "1:3", "abc", _pull, _known, LEASE + 1),
    "spare": Case(
        "a node killed, a spare runs its ranks", "2", "ab", _kill_with_a_spare, _run_again, 2
    ),
    "planned": Case("a node left, the others run again", "1:3", "abc", _leave, _run_again, 3),
    "scheduler": Case(
        "scheduler killed: longest step, no restart", "3", "abc", _kill_scheduler, _unnoticed, 1
    ),
    "heal": Case(
        "cut for 0.4 leases: longest step, no restart", "3", "abc", _cut_and_heal, _unnoticed, 1
    ),
    "hang": Case(
        f"a rank hangs, stacks of all on all nodes (limit {HANG_SECONDS:g} s)",
        "3",
        "abc",
        _hang,
        _told,
        HANG_SECONDS + 10,
    ),
}


def measure(launcher: Launcher, case: Case, limit: float) -> float | str:
    """Return the seconds that were measured, or what happened instead."""
    with (
        tempfile.TemporaryDirectory(prefix="msrun-bench-") as name,
        hosts.Lab(Path(name), "a", "b", "c") as lab,
    ):
        is_alone = case.measure is not _step_again
        cluster = Cluster(launcher, lab, case.nnodes, LIVING if is_alone else STEPPING)
        cluster.start(*case.hosts)
        try:
            if is_alone:
                _wait(
                    lambda: (
                        len([life for life in _lives(cluster, 0) if life.at("step")])
                        == len(case.hosts)
                    ),
                    FORMING_SECONDS,
                    "the first generation",
                )
            else:
                cluster.until_stepping(len(case.hosts), 0.0, FORMING_SECONDS)
            return case.measure(cluster, case.change, limit)
        except NotRecovered as problem:
            return str(problem)


def main() -> int:
    """Measure, print, and return the exit code."""
    options = _parse_options()
    if lacks := hosts.missing():
        _say(f"error: hosts cannot be made here: {lacks}")
        return 2
    _say(f"load average {os.getloadavg()[0]:.2f}, {len(os.sched_getaffinity(0))} cores")
    results: dict[tuple[str, Launcher], list[float | str]] = {}
    for run in range(options.runs):
        for name in options.case:
            launchers = [one for one in CASES[name].launchers if one.value in options.launcher]
            for launcher in launchers if run % 2 == 0 else reversed(launchers):
                found = measure(launcher, CASES[name], options.limit)
                results.setdefault((name, launcher), []).append(found)
                _say(f"{name:9} {launcher.value:8} {_render([found])}")
    for line in _table(options.case, results, is_markdown=options.markdown):
        print(line)
    missed = [problem for name in options.case if (problem := _missed(name, results))]
    for problem in missed:
        _say(f"missed: {problem}")
    failed = any(isinstance(found, str) for found in _ours(options.case, results))
    return int(failed or (options.check and bool(missed)))


def _ours(
    names: Sequence[str], results: dict[tuple[str, Launcher], list[float | str]]
) -> list[float | str]:
    return [found for name in names for found in results.get((name, Launcher.MSRUN), [])]


def _missed(name: str, results: dict[tuple[str, Launcher], list[float | str]]) -> str:
    """Return what a case of ours has missed; empty when it has not."""
    found = _ours([name], results)
    if not found:
        return ""
    is_in_time = all(not isinstance(one, str) for one in found) and (
        statistics.median(one for one in found if not isinstance(one, str)) <= CASES[name].bar
    )
    return "" if is_in_time else f"{CASES[name].words}: {_render(found)}, bar {CASES[name].bar:g} s"


def _table(
    names: Sequence[str],
    results: dict[tuple[str, Launcher], list[float | str]],
    *,
    is_markdown: bool,
) -> list[str]:
    """Return the lines of the table: the median where all runs recovered."""
    rows = [["what", "bar", "msrun", "torchrun"]]
    for name in names:
        cells = [_render(results.get((name, launcher), [])) for launcher in Launcher]
        rows.append([CASES[name].words, f"{CASES[name].bar:g} s", *cells])
    if is_markdown:
        rows.insert(1, ["---"] * 4)
        return ["| " + " | ".join(row) + " |" for row in rows]
    return [f"{row[0]:56} {row[1]:>6} {row[2]:>12} {row[3]:>24}" for row in rows]


def _render(found: Sequence[float | str]) -> str:
    problems = [one for one in found if isinstance(one, str)]
    if problems:
        return problems[0]
    if not found:
        return "-"
    return f"{statistics.median(one for one in found if not isinstance(one, str)):.2f} s"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    both = [launcher.value for launcher in Launcher]
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs of each")
    parser.add_argument("--case", type=_names, default=list(CASES), metavar="NAME,...")
    parser.add_argument("--launcher", nargs="+", choices=both, default=both)
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no case (choose {', '.join(CASES)})")
    return names


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
