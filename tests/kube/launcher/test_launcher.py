"""`msrun --launcher kubernetes` against the lab's cluster: submitted, followed, cancelled."""

from __future__ import annotations

import base64
import signal

import pytest
from support import shell

pytest.importorskip("kubernetes")

pytestmark = pytest.mark.process
WAIT = "echo up; until [ -e /tmp/go ]; do sleep 0.1; done; echo done"


def test_a_job_runs_to_its_end_and_its_log_is_shown(cluster, submit, left):
    words = ["--job-id", "j", "--nnodes", "2", "--workers-per-node", "1"]
    front = submit(*words, *shell("echo rank $RANK of $WORLD_SIZE on $(hostname); sleep 0.5"))

    assert front.wait() == 0, front.err
    assert "rank 0 of 2 on j-0" in front.out
    assert "Job j in namespace default" in front.err
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not left())


def test_the_exit_code_is_that_of_the_rank_that_failed_first(submit):
    front = submit("--nnodes", "2", *shell('[ "$RANK" = 1 ] && exit 7; sleep 1000'))

    assert front.wait() == 7, front.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_job_and_nothing_is_left(submit, signum, left):
    front = submit("--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    front.process.send_signal(signum)

    assert front.wait() == 128 + signum
    assert left() == []


@pytest.mark.slow
def test_a_detached_job_goes_on(cluster, submit, left):
    front = submit("--detach", "--job-id", "j", "--nnodes", "2", *shell("sleep 0.2"))

    assert front.wait() == 0
    assert left()[0] == "jobs/j"
    cluster.kubectl("wait", "--for=condition=complete", "job/j", "--timeout=20s")


@pytest.mark.slow
def test_two_jobs_of_one_name(submit, left):
    first = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    first.until_said("up")
    second = submit("--job-id", "j", "--nnodes", "2", *shell("true"))

    assert second.wait() == 2
    assert "there is a Job j in namespace default already" in second.err
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert left() == []


@pytest.mark.slow
def test_why_pods_wait_is_said_once(cluster, submit):
    front = submit("--resources", "nvidia.com/gpu=8", "--nnodes", "2", *shell("true"))
    front.until_said("nodes are available")
    cluster.add_node("big", {"nvidia.com/gpu": 16})

    assert front.wait() == 0
    assert front.err.count("nodes are available") == 1


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled(cluster, submit):
    cluster.pods.broken_images.add("train:1")
    front = submit("--nnodes", "2", *shell("true"))
    front.until_said("ImagePullBackOff: Back-off pulling image")
    cluster.pods.broken_images.clear()

    assert front.wait() == 0


@pytest.mark.slow
def test_the_api_server_is_away_for_a_while(cluster, submit):
    front = submit("--nnodes", "2", *shell(WAIT))
    front.until_said("up")
    with cluster.server_down():
        front.until_said("does not answer")
    front.until_said("the API server answers again")
    for pod in cluster.store.list("pods"):
        cluster.kubectl("exec", pod["metadata"]["name"], "--", "touch", "/tmp/go")

    assert front.wait() == 0
    assert front.out.count("up") == 1


@pytest.mark.slow
def test_a_deleted_job(cluster, submit, left):
    front = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    cluster.kubectl("delete", "job", "j")

    assert front.wait() == 143
    assert "Job j was deleted" in front.err
    cluster.await_that(lambda: not left())


@pytest.mark.slow
def test_a_job_of_one_node_needs_no_secret(submit, left):
    front = submit("--job-id", "j", *shell("echo alone $WORLD_SIZE"))

    assert front.wait() == 0
    assert "alone 1" in front.out
    assert [each.partition("-")[0] for each in left()] == ["jobs/j", "pods/j"]


@pytest.mark.slow
def test_no_process_and_no_object_but_the_secret_has_the_key(cluster, submit):
    front = submit("--job-id", "j", "--nnodes", "2", *shell("env; echo up; sleep 1000"))
    front.until_said("up")
    (secret,) = [s for s in cluster.store.list("secrets") if s["metadata"]["name"] == "j-key"]
    key = base64.b64decode(secret["data"]["key"]).decode()
    others = [o for p in ("jobs", "pods", "services", "events") for o in cluster.store.list(p)]
    front.process.send_signal(signal.SIGINT)

    assert (len(key), secret["metadata"]["ownerReferences"][0]["name"]) == (64, "j")
    assert key not in str(others) + front.out + front.err
    assert front.wait() == 130


@pytest.mark.slow
def test_a_cluster_that_does_not_answer(submit, cluster):
    with cluster.server_down():
        front = submit("--nnodes", "2", *shell("true"))
        code = front.wait()

    assert code == 120
    assert "does not answer" in front.err
