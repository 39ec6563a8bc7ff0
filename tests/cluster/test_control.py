"""A job of several hosts, controlled from each of them, and a rank that hangs on one."""

import json
import sys

import pytest
from nodes import Node
from support import environment, shell, stalls, until

pytestmark = pytest.mark.process

IDLE = "echo up; exec sleep 600"


@pytest.fixture
def ask(lab):
    """Run a verb on a host, whose launchers' private directories are its own."""

    def call(host, *words):
        done = host.run(
            [sys.executable, "-m", "msrun", *map(str, words)],
            env=environment(lab.folder / f"run-{host.name}"),
            cwd=lab.folder,
        )
        print(f"== {host.name}: {words}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    return call


def until_running(nodes: list[Node]) -> None:
    for node in nodes:
        node.until_said("msrun: running ")


def ranks(done):
    return json.loads(done.stdout)["ranks"]


def test_every_host_tells_the_same(lab, form, ask):
    nodes = form(lab.hosts, "--workers-per-node", 2, *shell(IDLE))
    until_running(nodes)
    first = lab.hosts[0]
    until(lambda: all(row["pid"] for row in ranks(ask(first, "status", "--json"))), "for pids")

    found = [json.loads(ask(host, "status", "--json").stdout) for host in lab.hosts]

    for told in found:
        assert (told["phase"], told["world_size"]) == ("running", 6)
        assert [(row["host"], row["ranks"]) for row in told["nodes"]] == [
            ("a", [0, 2]),
            ("b", [2, 2]),
            ("c", [4, 2]),
        ]
        assert [row["scheduler"] for row in told["nodes"]] == [True, False, False]
        assert all(row["silent"] < 5 for row in told["nodes"])
        assert [row["host"] for row in told["ranks"]] == list("aabbcc")
    assert ask(lab.hosts[2], "logs", "--rank", "3").stdout == "up\n"
    assert ask(lab.hosts[1], "stop").returncode == 0
    assert [node.wait() for node in nodes] == [143, 143, 143]


def test_a_node_is_drained_from_another(lab, form, ask):
    nodes = form(lab.hosts, "--nnodes", "2:3", "--workers-per-node", 1, *shell(IDLE))
    until_running(nodes)

    refused = ask(lab.hosts[1], "drain", "a")
    done = ask(lab.hosts[0], "drain", "c")

    assert refused.returncode == 2
    assert "node a has the scheduler of the job, which cannot do without it" in refused.stderr
    assert done.returncode == 0
    assert nodes[2].wait() == 143
    told = json.loads(ask(lab.hosts[1], "status", "--json").stdout)
    assert [row["host"] for row in told["nodes"]] == ["a", "b"]
    assert (told["generation"], told["failures"], told["losses"]) == (1, 0, 0)
    needed = ask(lab.hosts[0], "drain", "b")
    assert "cannot do without node b: it takes at least 2 node(s)" in needed.stderr
    ask(lab.hosts[0], "stop")
    assert [node.wait() for node in nodes[:2]] == [143, 143]


def test_a_hang_on_one_host_is_told_on_all(lab, form):
    program = stalls(lab.folder, 4)
    words = ["--workers-per-node", 2, "--max-restarts", 1, "--hang-timeout", "3s"]
    nodes = form(lab.hosts, *words, program)

    assert [node.wait(90) for node in nodes] == [0, 0, 0]

    summary = "5 ranks (0-3,5) in all_reduce at stall.py:11; rank 4 in next_batch at stall.py:7\n"
    for node in nodes:
        assert summary in node.err
        assert "warning: rank 4 (node c, local_rank 0, pid " in node.err
        assert summary in (node.logs / "hang_0.txt").read_text()
