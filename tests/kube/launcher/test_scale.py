"""`msrun scale`: an elastic job in the lab's cluster gets fewer pods and more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import shell

pytest.importorskip("kubernetes")

pytestmark = [pytest.mark.process, pytest.mark.slow]
# Says how many there are whenever that changes; ends when it is told so.
COUNTS = "echo $WORLD_SIZE ranks; until [ -e /tmp/go ]; do sleep 0.1; done"


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
            timeout=60,
            check=False,
        )

    return call


def let_go(cluster):
    for pod in cluster.store.list("pods"):
        if pod["status"]["phase"] == "Running":
            cluster.kubectl("exec", pod["metadata"]["name"], "--", "touch", "/tmp/go", check=False)


def test_an_elastic_job_shrinks_and_grows(cluster, submit, verb, left):
    words = ["--job-id", "j", "--nnodes", "1:3", "--workers-per-node", "1", "--last-call", "1s"]
    front = submit(*words, *shell(COUNTS))
    front.until_said("3 ranks")

    for nodes in ("0", "4"):
        refused = verb("scale", "j", "--nodes", nodes)
        assert refused.returncode == 2, refused.stderr
    assert "--nodes 4 is not among the numbers of nodes of job j (--nnodes 1:3)" in refused.stderr

    smaller = verb("scale", "--nodes", "2", "--json")
    assert smaller.returncode == 0, smaller.stderr
    sentence = "job j in namespace default has 2 nodes, 1 fewer"
    assert json.loads(smaller.stdout)["done"] == sentence
    front.until_said("2 ranks")
    pods = [p["metadata"]["name"] for p in cluster.store.list("pods")]
    assert sorted(name[:3] for name in pods) == ["j-0", "j-1"]

    said = front.out.count("3 ranks")
    bigger = verb("scale", "j", "--nodes=3")
    assert "job j in namespace default has 3 nodes, 1 more" in bigger.stderr
    cluster.await_that(lambda: front.out.count("3 ranks") > said, 40)
    assert "3 nodes already" in verb("scale", "j", "--nodes", "3").stderr

    let_go(cluster)
    assert front.wait() == 0, front.err + front.out
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not left())


def test_a_job_of_fixed_size_is_not_scaled(submit, verb):
    front = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    refused = verb("scale", "j", "--nodes", "1")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "job j has a fixed size of 2 nodes" in refused.stderr
    assert "msrun scale needs the number of nodes: --nodes N" in verb("scale", "j").stderr
    assert verb("stop", "j").returncode == 0
    assert front.wait() == 143
