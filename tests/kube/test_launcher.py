"""`msrun --launcher kubernetes` against the lab's cluster: submitted, followed, cancelled."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys

import pytest
from support import until

pytest.importorskip("kubernetes")

pytestmark = pytest.mark.process
PATIENCE = 60.0
WAIT = "echo up; until [ -e /tmp/go ]; do sleep 0.1; done; echo done"


class Front:
    """A submitting msrun, started at once, and what it says."""

    def __init__(self, cluster, folder, *words):
        self._files = [folder / "out", folder / "err"]
        streams = [path.open("wb") for path in self._files]
        own = {k: v for k, v in cluster.environ().items() if not k.startswith(("MSRUN_P", "PET_"))}
        python = [sys.executable, "-m", "msrun", "--launcher", "kubernetes", "--image", "train:1"]
        self.process = subprocess.Popen(
            [*python, *words],
            cwd=folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
        )
        for stream in streams:
            stream.close()

    @property
    def out(self):
        return self._files[0].read_text()

    @property
    def err(self):
        return self._files[1].read_text()

    def until_said(self, text):
        until(
            lambda: text in self.err + self.out or self.process.poll() is not None, f"for {text!r}"
        )
        assert text in self.err + self.out, self.err + self.out

    def wait(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return pytest.fail(f"still there:\n{self.err}{self.out}")


@pytest.fixture
def submit(cluster, tmp_path):
    """Start a front; at the end it is killed if it is still there."""
    fronts = []

    def start(*words):
        folder = tmp_path / f"front{len(fronts)}"
        folder.mkdir()
        fronts.append(Front(cluster, folder, *words))
        return fronts[-1]

    yield start
    for front in fronts:
        if front.process.poll() is None:
            front.process.kill()
        front.process.wait()
        print(front.err, front.out)


def shell(text):
    return ["--no-python", "sh", "-c", text]


def left(cluster):
    """Return what is in the namespace that a job brings."""
    plurals = ("jobs", "pods", "services", "secrets", "configmaps")
    return [
        f"{plural}/{each['metadata']['name']}"
        for plural in plurals
        for each in cluster.store.list(plural)
        if each["metadata"]["namespace"] == "default"
        and each["metadata"]["name"] not in ("kubernetes", "kube-root-ca.crt")
    ]


def test_a_job_runs_to_its_end_and_its_log_is_shown(cluster, submit):
    words = ["--job-id", "j", "--nnodes", "2", "--workers-per-node", "1"]
    front = submit(*words, *shell("echo rank $RANK of $WORLD_SIZE on $(hostname); sleep 0.5"))

    assert front.wait() == 0, front.err
    assert "rank 0 of 2 on j-0" in front.out
    assert "Job j in namespace default" in front.err
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not left(cluster))


def test_the_exit_code_is_that_of_the_rank_that_failed_first(submit):
    front = submit("--nnodes", "2", *shell('[ "$RANK" = 1 ] && exit 7; sleep 1000'))

    assert front.wait() == 7, front.err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_job_and_nothing_is_left(cluster, submit, signum):
    front = submit("--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    front.process.send_signal(signum)

    assert front.wait() == 128 + signum
    assert left(cluster) == []


@pytest.mark.slow
def test_a_detached_job_goes_on(cluster, submit):
    front = submit("--detach", "--job-id", "j", "--nnodes", "2", *shell("sleep 0.2"))

    assert front.wait() == 0
    assert left(cluster)[0] == "jobs/j"
    cluster.kubectl("wait", "--for=condition=complete", "job/j", "--timeout=20s")


@pytest.mark.slow
def test_two_jobs_of_one_name(cluster, submit):
    first = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    first.until_said("up")
    second = submit("--job-id", "j", "--nnodes", "2", *shell("true"))

    assert second.wait() == 2
    assert "there is a Job j in namespace default already" in second.err
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert left(cluster) == []


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
def test_a_deleted_job(cluster, submit):
    front = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    cluster.kubectl("delete", "job", "j")

    assert front.wait() == 143
    assert "Job j was deleted" in front.err
    cluster.await_that(lambda: not left(cluster))


@pytest.mark.slow
def test_a_job_of_one_node_needs_no_secret(cluster, submit):
    front = submit("--job-id", "j", *shell("echo alone $WORLD_SIZE"))

    assert front.wait() == 0
    assert "alone 1" in front.out
    assert [each.partition("-")[0] for each in left(cluster)] == ["jobs/j", "pods/j"]


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
