"""Fifty faults in one job of the backend: it goes on each time, and leaves nothing in the end."""

from __future__ import annotations

import contextlib
import random
import signal

import pytest
from kube.failures import ApiError
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1800)]
FAULTS = ("kill", "delete", "force", "preempt", "worker", "server")
PATIENCE = 90.0


def inject(cluster, fault, name, pid):
    """Do something to a pod; `pid` is a rank, in that pod or the other one."""
    match fault:
        case "kill":
            cluster.kill_pod(name)
        case "delete":
            cluster.kubectl("delete", "pod", name, "--wait=false")
        case "force":
            cluster.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        case "preempt":
            cluster.preempt(name)
        case "worker":
            for each in running(cluster):
                cluster.pods.runner(each).host.run(["kill", "-9", pid])
        case "server":
            with cluster.server_down():
                cluster.kill_pod(name)


def running(cluster):
    """Return the names of the pods that run and are not to go."""
    found = [p for p in cluster.store.list("pods") if not p["metadata"].get("deletionTimestamp")]
    return sorted(p["metadata"]["name"] for p in found if p["status"]["phase"] == "Running")


def test_fifty_random_faults_leave_nothing(cluster, submit, left, tmp_path):
    chance, up = random.Random(20), tmp_path / "up"
    up.touch()
    words = ["--job-id", "j", "--nnodes", "2", "--workers-per-node", "1", "--max-restarts", "200"]
    words += ["--lease", "3s", "--monitor-interval", "0.1"]
    front = submit(*words, *shell(f"echo $$ >> {up}; while :; do sleep 0.2; done"))

    def lines():
        return len(up.read_text().splitlines())

    done = []
    cluster.await_that(lambda: lines() >= 2, PATIENCE)
    for _ in range(50):
        cluster.await_that(lambda: len(running(cluster)) == 2, PATIENCE)
        before = lines()
        done.append(chance.choice(FAULTS))
        with contextlib.suppress(ApiError, KeyError):  # the pod went by itself meanwhile
            inject(cluster, done[-1], chance.choice(running(cluster)), up.read_text().split()[-1])
        cluster.await_that(lambda b=before: lines() >= b + 2 or not front.is_there(), PATIENCE)
        assert front.is_there(), (done, front.err + front.out)
    assert set(done) == set(FAULTS)
    front.process.send_signal(signal.SIGINT)
    assert front.wait() == 130
    assert left() == []
    cluster.await_that(lambda: cluster.pods.lab.hosts == [], PATIENCE)
