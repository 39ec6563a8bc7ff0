"""Time to recover of a job on Kubernetes, by fault, and what is left of it in the end.

    python scripts/bench/kubernetes.py                     # a table in Markdown
    python scripts/bench/kubernetes.py --runs 1 --only preempted

It runs on the stand-in of `tests/lab/kube`, whose pods are processes on hosts made of network
namespaces, which takes root and kubectl.  Pods start there at once; a cluster adds its own time to
find a lost node, to place a pod and to pull its image.  Each row is the time from the fault until
all ranks of the next generation run, as the file says to which each of them adds a line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/lab"))

from tests.lab.hosts import Lab, missing
from tests.lab.kube.cluster import Cluster, missing_client
from tests.lab.kube.operators import Operators, ms_job, msrun_job, running_pods

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
RUN = [sys.executable, "-P", "-m", "msrun"]
LEFT = ("jobs", "pods", "services", "secrets", "configmaps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one run showed: seconds to recover, seconds until nothing was left."""

    recovered: float
    gone: float


class Bench:
    """A cluster and one job of two nodes on it.

    Args:
        cluster: The cluster.
        folder: Directory that every pod can see.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.pods: Any = cluster.pods
        self.folder = folder
        self.up = folder / "up"

    def environ(self) -> dict[str, str]:
        """Return the environment in which msrun finds the cluster."""
        env = {**self.cluster.environ(), "PYTHONPATH": str(ROOT)}
        return {**env, "XDG_RUNTIME_DIR": str(self.folder)}

    def program(self) -> str:
        """Return the shell program of a rank, which says that it runs."""
        return f"echo $RANK $(hostname) $$ >> {self.up}; sleep 600"

    def lines(self) -> int:
        """Return how many ranks have said that they run."""
        return len(self.up.read_text().splitlines()) if self.up.exists() else 0

    def await_lines(self, count: int) -> None:
        """Return when so many ranks have said so."""
        end = time.monotonic() + PATIENCE
        while self.lines() < count:
            if time.monotonic() > end:
                raise TimeoutError(self.cluster.describe())
            time.sleep(0.01)

    def pod(self, index: int) -> str:
        """Return the name of the newest pod of an index."""
        pods = [p for p in self.cluster.store.list("pods") if f"-{index}" in p["metadata"]["name"]]
        return str(max(pods, key=lambda p: p["metadata"]["creationTimestamp"])["metadata"]["name"])

    def submit(self) -> subprocess.Popen[bytes]:
        """Start the job by the backend, and return the msrun that follows it."""
        words = ["--launcher", "kubernetes", "--image", "t", "--job-id", "j", "--nnodes", "2"]
        words += ["--workers-per-node", "1", "--max-restarts", "3", "--lease", "5s"]
        words += ["--no-python", "sh", "-c", self.program()]
        return subprocess.Popen(
            [*RUN, *words],
            cwd=self.folder,
            env=self.environ(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def measure(self, fault: Callable[[Bench], None], count: int = 2) -> float:
        """Return the seconds from a fault until `count` more ranks run."""
        self.await_lines(2)
        before = self.lines()
        began = time.monotonic()
        fault(self)
        self.await_lines(before + count)
        return time.monotonic() - began

    def gone(self, kind: str, name: str) -> float:
        """Delete the job and return the seconds until nothing is left of it."""
        began = time.monotonic()
        self.cluster.kubectl("delete", kind, name, timeout=PATIENCE)

        def is_gone() -> bool:
            found = [o for plural in LEFT for o in self.cluster.store.list(plural, "default")]
            return not [o for o in found if "ca.crt" not in o["metadata"]["name"]]

        self.cluster.await_that(is_gone, PATIENCE)
        return time.monotonic() - began


def kill_worker(bench: Bench) -> None:
    """SIGKILL the rank that was the second to run."""
    index, _, pid = bench.up.read_text().splitlines()[1].split()
    bench.pods.runner(bench.pod(int(index))).host.run(["kill", "-9", pid])


def kill_pod(bench: Bench) -> None:
    """SIGKILL everything in the pod of index 1."""
    bench.cluster.kill_pod(bench.pod(1))


def delete_pod(bench: Bench) -> None:
    """Delete the pod of index 1, with its grace."""
    bench.cluster.kubectl("delete", "pod", bench.pod(1), "--wait=false")


def preempt(bench: Bench) -> None:
    """Have the cluster take the pod of index 1."""
    bench.cluster.preempt(bench.pod(1))


def kill_first(bench: Bench) -> None:
    """SIGKILL everything in the pod that has the scheduler."""
    bench.cluster.kill_pod(bench.pod(0))


def lose_node(bench: Bench) -> None:
    """Switch off the node of the pod of index 1."""
    cluster = bench.cluster
    node = cluster.store.find("pods", "default", bench.pod(1))["spec"]["nodeName"]
    cluster.lose_node(node)
    cluster.remove_node(node)


def without_server(bench: Bench) -> None:
    """Kill a rank while nobody could be asked; it is there again when the server is."""
    with bench.cluster.server_down():
        kill_worker(bench)
        bench.await_lines(4)


def kill_ms_worker(bench: Bench) -> None:
    """SIGKILL everything in a worker's pod of an MSJob."""
    bench.cluster.kill_pod("t-worker-1")


FAULTS: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "a worker is killed": ("backend", kill_worker),
    "a worker is killed while there is no API server": ("backend", without_server),
    "a pod is killed": ("backend", kill_pod),
    "a pod is deleted": ("backend", delete_pod),
    "a pod is preempted": ("backend", preempt),
    "a node of the cluster is lost": ("backend", lose_node),
    "the pod of index 0 is killed": ("backend", kill_first),
    "MsrunJob: a pod is killed": ("msrunjob", kill_pod),
    "MSJob: a worker's pod is killed": ("msjob", kill_ms_worker),
}


@contextlib.contextmanager
def benches() -> Iterator[Bench]:
    """Yield a cluster of three nodes, which ends with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="msrun-bench-") as name,
        Lab(Path(name)) as lab,
        Cluster(Path(name), lab, {"n0": {}, "n1": {}, "n2": {}}) as cluster,
    ):
        yield Bench(cluster, Path(name))


def run(how: str, fault: Callable[[Bench], None]) -> Figure:
    """Return what a fault did to a job of its own."""
    with benches() as bench:
        cluster = bench.cluster
        if how == "backend":
            with bench.submit() as front:
                seconds = bench.measure(fault)
                gone = bench.gone("job", "j")
                front.wait(PATIENCE)
            return Figure(recovered=seconds, gone=gone)
        operators = Operators(cluster, bench.folder)
        operators.start()
        try:
            if how == "msjob":
                script = f"import os, time; os.system('echo x >> {bench.up}'); time.sleep(600)"
                job, count, pods = ms_job(script, policy="ExitCode"), 3, 3
            else:
                job, count, pods = msrun_job(bench.program(), maxRestarts=3), 2, 2
                job["spec"]["options"]["lease"] = "5s"
            cluster.apply(job)
            running_pods(cluster, pods)
            bench.await_lines(count)
            seconds = bench.measure(fault, count)
            gone = bench.gone("msjob" if how == "msjob" else "msrunjob", "t")
        finally:
            operators.kill()
        return Figure(recovered=seconds, gone=gone)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    if lacks := missing() or missing_client():
        print(f"no cluster: {lacks}", file=sys.stderr)
        return 2
    print("| fault | recovered after | gone after `kubectl delete` |\n|---|---|---|")
    for name, (how, fault) in FAULTS.items():
        if asked.only in name:
            figures = [run(how, fault) for _ in range(asked.runs)]
            middle = statistics.median(each.recovered for each in figures)
            gone = statistics.median(each.gone for each in figures)
            print(f"| {name} | {middle:.1f} s | {gone:.1f} s |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores, {asked.runs} runs, medians")
    return 0


if __name__ == "__main__":
    sys.exit(main())
