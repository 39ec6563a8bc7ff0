"""Compare how long msrun and torchrun need until all ranks step again, side by side.

    python scripts/bench/recover.py                     # once each, all cases
    python scripts/bench/recover.py --runs 3 --case add,kill
    python scripts/bench/recover.py --markdown

Needs root on Linux, torch, and `ip`, `nsenter` and `tc`: the nodes are hosts made of
namespaces (`tests/lab`), one worker on each, with a step every 20 ms.  torchrun runs with a
rendezvous of its own kind (c10d), one second of last call and a store for each generation,
without which it recovers from little; where it has not recovered within the limit, or has
ended, the table says so.
"""

from __future__ import annotations

import argparse
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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lab")]

import hosts  # type: ignore[import-not-found]  # noqa: E402 - the tests' own, beside this

from scripts.bench import runs  # noqa: E402
from scripts.bench.figures import Launcher  # noqa: E402

STEPPING = ROOT / "scripts" / "bench" / "stepping.py"
FORMING_SECONDS = 60.0


class NotRecovered(Exception):  # noqa: N818 - it is a result
    """The ranks did not all step again; the text says what happened."""


@dataclass(slots=True)
class Cluster:
    """One job on hosts of a lab.

    Args:
        launcher: Who runs it.
        lab: The hosts.
        nnodes: `N` or `MIN:MAX`.
    """

    launcher: Launcher
    lab: Any
    nnodes: str
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
            words = [*self._launch(name), STEPPING, self.folder]
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
        inside = [path.name.rsplit("-", 1)[1] for path in self.folder.glob(f"up-{name}-*[0-9]")]
        for process in self.lab.host(name).processes():
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            numbers = next(line.split() for line in status if line.startswith("NSpid"))
            if numbers[-1] in inside:
                return int(process.pid)
        raise NotRecovered(f"no worker on {name}")


def _crash(cluster: Cluster) -> int:
    os.kill(cluster.worker_on("b"), signal.SIGKILL)
    return len(cluster.nodes)


def _kill(cluster: Cluster) -> int:
    cluster.lose("b")
    cluster.lab.host("b").kill_all()
    return len(cluster.nodes)


def _pull(cluster: Cluster) -> int:
    cluster.lose("b")
    cluster.lab.host("b").power_off()
    return len(cluster.nodes)


def _leave(cluster: Cluster) -> int:
    cluster.lose("b").terminate()
    return len(cluster.nodes)


def _add(cluster: Cluster) -> int:
    cluster.start("c")
    return len(cluster.nodes)


def _replace(cluster: Cluster) -> int:
    _kill(cluster)
    cluster.start("c")
    return len(cluster.nodes)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that happens to a job.

    Args:
        words: What happens, for a reader.
        nnodes: Size of the job.
        hosts: Where it runs at first.
        change: Does it; returns the nodes that are to step again.
    """

    words: str
    nnodes: str
    hosts: str
    change: Callable[[Cluster], int]


CASES = {
    "crash": Case("`kill -9` of a worker", "3", "abc", _crash),
    "kill": Case("`kill -9` of all on a node", "1:3", "abc", _kill),
    "pull": Case("power of a node cut", "1:3", "abc", _pull),
    "leave": Case("SIGTERM to a node's launcher", "1:3", "abc", _leave),
    "add": Case("a node added", "1:3", "ab", _add),
    "replace": Case("a node killed and another started", "2", "ab", _replace),
}


def measure(launcher: Launcher, case: Case, limit: float) -> float | str:
    """Return the seconds until all step again, or what happened instead."""
    with (
        tempfile.TemporaryDirectory(prefix="msrun-bench-") as name,
        hosts.Lab(Path(name), "a", "b", "c") as lab,
    ):
        cluster = Cluster(launcher, lab, case.nnodes)
        cluster.start(*case.hosts)
        try:
            cluster.until_stepping(len(case.hosts), 0.0, FORMING_SECONDS)
            began = time.monotonic()
            count = case.change(cluster)
            return cluster.until_stepping(count, began, limit) - began
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
            for launcher in list(Launcher) if run % 2 == 0 else list(reversed(Launcher)):
                found = measure(launcher, CASES[name], options.limit)
                results.setdefault((name, launcher), []).append(found)
                _say(f"{name:8} {launcher.value:8} {_render([found])}")
    for line in _table(options.case, results, is_markdown=options.markdown):
        print(line)
    ours = [found for name in options.case for found in results[name, Launcher.MSRUN]]
    return int(any(isinstance(found, str) for found in ours))


def _table(
    names: Sequence[str],
    results: dict[tuple[str, Launcher], list[float | str]],
    *,
    is_markdown: bool,
) -> list[str]:
    """Return the lines of the table: the median where all runs recovered."""
    rows = [["until all step again", "msrun", "torchrun"]]
    for name in names:
        cells = [_render(results[name, launcher]) for launcher in Launcher]
        rows.append([CASES[name].words, *cells])
    if is_markdown:
        rows.insert(1, ["---"] * 3)
        return ["| " + " | ".join(row) + " |" for row in rows]
    return [f"{row[0]:36} {row[1]:>12} {row[2]:>24}" for row in rows]


def _render(found: Sequence[float | str]) -> str:
    problems = [one for one in found if isinstance(one, str)]
    if problems:
        return problems[0]
    return f"{statistics.median(one for one in found if not isinstance(one, str)):.2f} s"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs of each")
    parser.add_argument("--case", type=_names, default=list(CASES), metavar="NAME,...")
    parser.add_argument("--limit", type=float, default=90.0, metavar="SECONDS")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
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
