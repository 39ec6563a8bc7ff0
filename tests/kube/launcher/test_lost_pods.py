"""Pods of a job that are killed, deleted, evicted or run out of memory."""

from __future__ import annotations

import signal

import pytest
from support import shell, until

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
JOB = ("--job-id", "j", "--nnodes", "2")
# Ends well where a generation has gone before.
AGAIN = 'echo up $MSRUN_GENERATION; [ "$MSRUN_GENERATION" = 0 ] || exit 0; sleep 1000'


def pods(cluster):
    """Return name -> pod of index 0 and 1 of the latest pods, by their indexes."""
    found = sorted(cluster.store.list("pods"), key=lambda pod: pod["metadata"]["creationTimestamp"])
    alive = [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]
    return {pod["metadata"]["name"].split("-")[1]: pod["metadata"] for pod in alive}


def running(cluster, front):
    """Wait until both ranks run, and return the pods."""
    front.until_said("up 0")
    names = [pods(cluster)[index]["name"] for index in "01"]
    until(lambda: all("up 0" in cluster.kubectl("logs", n).stdout or n == names[0] for n in names),
          "both to be up", pause=0.2)  # fmt: skip
    return pods(cluster)


def test_a_killed_pod_is_replaced_and_the_others_stay(cluster, submit):
    front = submit(*JOB, "--max-restarts", "1", "--lease", "3s", *shell(AGAIN))
    before = running(cluster, front)
    cluster.kill_pod(before["1"]["name"])

    assert front.wait() == 0
    after = pods(cluster)
    assert after["0"]["uid"] == before["0"]["uid"]
    assert after["1"]["uid"] != before["1"]["uid"]
    assert "up 1" in front.out


def test_an_evicted_pod_leaves_and_is_replaced_for_nothing(cluster, submit):
    front = submit(*JOB, *shell(AGAIN))
    before = running(cluster, front)
    cluster.preempt(before["1"]["name"])

    assert front.wait() == 0
    after = pods(cluster)
    assert after["0"]["uid"] == before["0"]["uid"]
    assert "node j-1 leaves on SIGTERM" in front.out


def test_a_deleted_pod_leaves_and_is_replaced(cluster, submit):
    front = submit(*JOB, "--max-restarts", "1", *shell(AGAIN))
    before = running(cluster, front)
    cluster.kubectl("delete", "pod", before["1"]["name"], "--wait=false")

    assert front.wait() == 0
    assert pods(cluster)["0"]["uid"] == before["0"]["uid"]


@pytest.mark.parametrize("fault", ["kill", "delete"])
def test_a_job_begins_again_without_its_first_pod(cluster, submit, tmp_path, fault):
    mark = tmp_path / "mark"
    words = f"echo up $MSRUN_GENERATION; [ -e {mark} ] && exit 0; sleep 1000"
    front = submit(*JOB, "--max-restarts", "1", *shell(words))
    before = running(cluster, front)
    mark.touch()
    name = before["0"]["name"]
    cluster.kill_pod(name) if fault == "kill" else cluster.kubectl("delete", "pod", name)

    assert front.wait() == 0
    after = pods(cluster)
    assert {after[index]["uid"] for index in "01"}.isdisjoint(
        before[index]["uid"] for index in "01"
    )
    assert front.out.count("up 0") == 2


def test_a_lost_pod_ends_a_job_without_restarts(cluster, submit):
    front = submit(*JOB, "--lease", "3s", *shell(AGAIN))
    before = running(cluster, front)
    cluster.kill_pod(before["1"]["name"])

    assert front.wait() == 120
    assert "was lost (exit code 137)" in front.err


def test_a_pod_without_memory_is_named(cluster, submit):
    front = submit(*JOB, "--lease", "3s", *shell(AGAIN))
    before = running(cluster, front)
    cluster.kill_pod(before["1"]["name"], cause="OOMKilled")

    assert front.wait() == 137
    assert f"the container of pod {before['1']['name']} was killed: out of memory" in front.err


def test_the_front_may_be_killed(cluster, submit, left):
    front = submit(*JOB, *shell("echo up 0; sleep 1000"))
    running(cluster, front)
    front.process.send_signal(signal.SIGKILL)
    front.wait()
    cluster.kubectl("delete", "job", "j")

    cluster.await_that(lambda: not left())
