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


# Trains until it is told to end, and says so after each hundred steps.
TRAIN_WITH_SERVERS = """
import pathlib
import msrun
rt = msrun.init({"servers": {"params": ["0.weight"]}})
import torch
from torch import nn
torch.manual_seed(0)
model = rt.shard(nn.Sequential(nn.EmbeddingBag(1200, 4), nn.Linear(4, 1)))
optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
ids, values = torch.arange(12).view(4, 3), torch.ones(4, 1)
ends, steps = False, 0
while not ends:
    loss = rt.step(model, optimizer, nn.functional.mse_loss, ids, values)
    steps += 1
    told = torch.tensor(float(pathlib.Path("/tmp/go").exists()))
    torch.distributed.all_reduce(told)
    ends = bool(told)
    if steps == 1:
        print("rank", rt.rank, "trains", flush=True)
print("rank", rt.rank, "learned:", loss.item() < 0.5, flush=True)
"""


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
    assert "msrun scale needs a number: --nodes N or --servers N" in verb("scale", "j").stderr
    assert verb("stop", "j").returncode == 0
    assert front.wait() == 143


def servers_of(verb):
    """Return the numbers of the servers that run."""
    status = json.loads(verb("status", "j", "--json").stdout)
    return sorted(each["server"] for each in status["servers"] if each["pid"])


def test_a_job_goes_on_with_other_parameter_servers(cluster, submit, verb, left, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN_WITH_SERVERS)
    words = ["--job-id", "j", "--nnodes", "2", "--workers-per-node", "1", "--server-num", "2"]
    front = submit(*words, "--remote-python", sys.executable, "--ship", "true", "../train.py")
    front.until_said("rank 0 trains")
    assert servers_of(verb) == [0, 1]

    for number in ("3", "1"):
        done = verb("scale", "j", "--servers", number, "--json")
        assert done.returncode == 0, done.stderr
        assert f"to {number} parameter server(s)" in json.loads(done.stdout)["done"]
        cluster.await_that(lambda n=number: servers_of(verb) == list(range(int(n))), 40)
    two = verb("scale", "j", "--servers", "2", "--nodes", "1")
    assert (two.returncode, "two changes: give one at a time" in two.stderr) == (2, True)
    wrong = verb("scale", "j", "--servers", "none")
    assert (wrong.returncode, "--servers 'none' is no" in wrong.stderr) == (2, True), wrong.stderr

    let_go(cluster)
    assert front.wait() == 0, front.err + front.out
    assert "rank 0 learned: True" in front.out
    cluster.kubectl("delete", "job", "j")
    cluster.await_that(lambda: not left())


def test_a_job_without_servers_gets_none(submit, verb):
    front = submit("--job-id", "j", "--nnodes", "2", *shell("echo up; sleep 1000"))
    front.until_said("up")
    refused = verb("scale", "--servers", "2")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "was started without parameter servers (--server-num)" in refused.stderr
    assert verb("stop", "j").returncode == 0
    assert front.wait() == 143
