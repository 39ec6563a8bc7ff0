"""Operators of a cluster of the lab, under the account that they are deployed with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kube.cluster import Cluster

DEPLOY = Path(__file__).parents[3] / "launchers" / "operator" / "deploy"
PATIENCE = 60.0
SLEEPS = "import time; time.sleep(60)"


class Operators:
    """Operators of a cluster, each a process.

    Attributes:
        wrapper: Words before the command of each.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.running: list[subprocess.Popen[bytes]] = []
        self.started = 0
        self.wrapper: list[str] = []
        cluster.kubectl("apply", "-k", str(DEPLOY))
        self.config = folder / "operator-config"
        token = cluster.server.access.token("msrun-system", "msrun-operator")
        cluster.write_kubeconfig(self.config, token)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        self.started += 1
        log = (self.folder / f"operator-{self.started}.log").open("w")
        with log:
            words = [*self.wrapper, sys.executable, "-m", "msrun", "operator", "run", *options]
            # What a killed one leaves is in the directory of the test, as it would be in its pod.
            env = {**self.cluster.environ(), "KUBECONFIG": str(self.config)}
            env["TMPDIR"] = str(self.folder)
            program = subprocess.Popen(words, env=env, stdout=log, stderr=log)
        self.running.append(program)
        return program

    def kill(self) -> None:
        """SIGKILL all of them."""
        for program in self.running:
            program.kill()
            program.wait()
        self.running.clear()

    def status(self, plural: str, name: str = "t") -> dict[str, Any]:
        return self.cluster.store.find(plural, "default", name).get("status") or {}

    def await_phase(self, plural: str, phase: str, name: str = "t") -> dict[str, Any]:
        def holds():
            status = self.status(plural, name)
            return status if status.get("phase") == phase else None

        return self.cluster.await_that(holds, PATIENCE)


def ms_job(
    script: str, *, workers: int = 2, policy: str = "Never", **run_policy: object
) -> dict[str, Any]:
    container = {"name": "mindspore", "image": "m", "command": [sys.executable, "-c", script]}
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}
    roles = {
        "Scheduler": {"restartPolicy": policy, "template": template},
        "Worker": {"replicas": workers, "restartPolicy": policy, "template": template},
    }
    kind = {"apiVersion": "mindspore.gitee.com/v1", "kind": "MSJob", "metadata": {"name": "t"}}
    return {**kind, "spec": {"msReplicaSpecs": roles, "runPolicy": run_policy}}


def msrun_job(script: str, *, nodes: int = 2, **spec: object) -> dict[str, Any]:
    program = ["sh", "-c", script]
    given = {"image": "m", "python": sys.executable, "nodes": nodes, "workersPerNode": 1}
    options = {"no-python": "true"}
    kind = {"apiVersion": "msrun.io/v1", "kind": "MsrunJob", "metadata": {"name": "t"}}
    return {**kind, "spec": {**given, "program": program, "options": options, **spec}}


def running_pods(cluster: Cluster, count: int) -> dict[str, str]:
    def holds():
        pods = cluster.store.list("pods")
        pods = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
        pods = [p for p in pods if p["status"]["phase"] == "Running"]
        return (
            {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods}
            if len(pods) == count
            else None
        )

    return cluster.await_that(holds, PATIENCE)
