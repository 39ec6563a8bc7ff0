"""Verbs about a job in the lab's cluster, from outside of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def verb(cluster, tmp_path):
    """Call a verb with `--launcher kubernetes`."""

    def call(*words):
        return subprocess.run(
            [sys.executable, "-m", "msrun", *words, "--launcher", "kubernetes"],
            cwd=tmp_path,
            env={**cluster.environ(), "XDG_RUNTIME_DIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )

    return call


def test_a_job_is_asked_and_steered_through_the_api_server(submit, verb, left):
    words = "trap 'echo got it' USR1; echo up $RANK; while :; do sleep 0.1; done"
    front = submit("--job-id", "Job_1", "--nnodes", "2", *shell(words))
    front.until_said("up 0")

    status = json.loads(verb("status", "--json").stdout)
    assert "Job_1" in str(status)
    assert len(status["nodes"]) == 2
    logs = verb("logs", "job-1", "--rank", "0-1")
    assert "up 0" in logs.stdout
    assert "up 1" in logs.stdout
    assert verb("signal", "USR1", "--rank", "0").returncode == 0
    front.until_said("got it")
    assert verb("stacks").returncode == 0
    refused = verb("drain", "j-9")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no one node of the job is 'j-9'" in refused.stderr

    stopped = verb("stop", "--json")
    assert json.loads(stopped.stdout)["done"] == "Job job-1 in namespace default is deleted"
    assert front.wait() == 143
    assert left() == []


def test_a_drained_node_is_replaced(cluster, submit, verb):
    words = 'echo up $MSRUN_GENERATION; [ "$MSRUN_GENERATION" = 0 ] || exit 0; sleep 1000'
    front = submit("--job-id", "j", "--nnodes", "2", "--max-restarts", "1", *shell(words))
    front.until_said("up 0")
    drained = verb("drain", "j-1")

    assert (drained.returncode, front.wait()) == (0, 0), drained.stderr
    pods = [pod["metadata"]["name"] for pod in cluster.store.list("pods")]
    assert len(pods) == 3, pods


def test_jobs_that_are_not_meant(submit, verb):
    assert "no job of msrun runs in namespace default" in verb("status").stderr
    fronts = [submit("--job-id", name, *shell("echo up; sleep 1000")) for name in ("aa", "ab")]
    for front in fronts:
        front.until_said("up")

    assert "2 jobs of msrun run in namespace default (choose aa, ab)" in verb("status").stderr
    assert "a is more than one job in namespace default" in verb("status", "a").stderr
    assert "job aa" in verb("status", "aa").stdout
    for name in ("aa", "ab"):
        assert verb("stop", name).returncode == 0
    assert [front.wait() for front in fronts] == [143, 143]
