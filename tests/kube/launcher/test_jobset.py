"""A JobSet, by the lab's own controller of JobSets, whose Jobs are the cluster's."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kube.jobsets import DEFINITION
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
JOB = ("--k8s-kind", "jobset", "--job-id", "j", "--nnodes", "2", "--workers-per-node", "1")


@pytest.fixture
def jobsets(cluster, left):
    """Have the cluster know JobSets; return what a job leaves."""
    cluster.apply(DEFINITION)

    def names():
        sets = [f"jobsets/{each['metadata']['name']}" for each in cluster.store.list("jobsets")]
        return [*sets, *left()]

    return names


def test_a_jobset_runs_to_its_end(cluster, submit, jobsets):
    front = submit(*JOB, *shell("echo rank $RANK of $WORLD_SIZE on $(hostname)"))

    assert front.wait() == 0, front.err + front.out
    assert "rank 0 of 2 on j-nodes-0-0" in front.out
    assert jobsets()[:2] == ["jobsets/j", "jobs/j-nodes-0"]
    cluster.kubectl("delete", "jobset", "j")
    cluster.await_that(lambda: not jobsets())


def test_a_jobset_ends_with_the_code_of_the_rank_that_failed(submit, jobsets):
    front = submit(*JOB, *shell('[ "$RANK" = 1 ] && exit 7; sleep 1000'))

    assert front.wait() == 7, front.err + front.out
    assert "jobsets/j" in jobsets()


def test_a_lost_pod_of_a_jobset_is_replaced(cluster, submit, jobsets):
    again = 'echo up $MSRUN_GENERATION; [ "$MSRUN_GENERATION" = 0 ] || exit 0; sleep 1000'
    front = submit(*JOB, "--max-restarts", "1", "--lease", "3s", *shell(again))
    front.until_said("up 0")
    (name,) = [
        pod["metadata"]["name"]
        for pod in cluster.store.list("pods")
        if pod["metadata"]["name"].startswith("j-nodes-0-1")
    ]
    cluster.await_that(lambda: "up 0" in cluster.kubectl("logs", name).stdout)
    cluster.kill_pod(name)

    assert front.wait() == 0, front.err + front.out
    assert jobsets()


def test_verbs_about_a_jobset(cluster, submit, jobsets, tmp_path):
    front = submit(*JOB, *shell("echo up; sleep 1000"))
    front.until_said("up")

    def verb(*words):
        return subprocess.run(
            [sys.executable, "-m", "msrun", *words, "--launcher", "kubernetes"],
            cwd=tmp_path,
            env=cluster.environ(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert len(json.loads(verb("status", "j", "--json").stdout)["nodes"]) == 2
    assert "job j is a JobSet, whose size is fixed" in verb("scale", "j", "--nodes", "1").stderr
    assert "JobSet j in namespace default is deleted" in verb("stop", "j").stderr
    assert front.wait() == 143
    assert jobsets() == []


def test_a_cluster_without_jobsets(submit, left):
    front = submit(*JOB, *shell("true"))

    assert front.wait() == 2
    assert "the cluster has no kind JobSet of jobset.x-k8s.io/v1alpha2" in front.err
    assert left() == []
