"""A job of several hosts, controlled from each of them, and a rank that hangs on one."""

import json
import sys

import pytest
from nodes import Node
from support import environment, script, shell, stalls, until

pytestmark = pytest.mark.process

IDLE = "echo up; exec sleep 600"


@pytest.fixture
def ask(new_lab):  # noqa: ARG001 - hosts outlive what is asked on them
    """Run a verb on a host, whose launchers' private directories are its own."""

    def call(host, *words):
        done = host.run(
            [sys.executable, "-m", "msrun", *map(str, words)],
            env=environment(host.lab.folder / f"run-{host.name}"),
            cwd=host.lab.folder,
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
    nodes[1].until_logged("up", 3)
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
    nodes[1].until_said("msrun: running 1/1", times=2)
    told = json.loads(ask(lab.hosts[1], "status", "--json").stdout)
    assert [row["host"] for row in told["nodes"]] == ["a", "b"]
    assert (told["generation"], told["failures"], told["losses"]) == (1, 0, 0)
    needed = ask(lab.hosts[0], "drain", "b")
    assert "cannot do without node b: it takes at least 2 node(s)" in needed.stderr
    ask(lab.hosts[0], "stop")
    assert [node.wait() for node in nodes[:2]] == [143, 143]


def test_a_signal_reaches_a_rank_of_another_host_and_no_other(lab, form, ask):
    program = "trap 'echo got it' USR1; echo up; while :; do sleep 0.01; done"
    nodes = form(lab.hosts, "--workers-per-node", 2, *shell(program))
    until_running(nodes)
    for number, node in enumerate(nodes):
        node.until_logged("up", 2 * number, 2 * number + 1)

    done = ask(lab.host("a"), "signal", "USR1", "--rank", "3-4")

    assert (done.returncode, done.stderr) == (
        0,
        "msrun: SIGUSR1 goes to 2 rank(s) on 2 node(s)\n",
    )
    nodes[1].until_logged("got it", 3)
    nodes[2].until_logged("got it", 4)
    told = [(number // 2, number) for number in range(6) if number not in (3, 4)]
    assert [nodes[node].log(rank) for node, rank in told] == ["up\n"] * 4
    ask(lab.host("c"), "stop", "--now")
    assert [node.wait() for node in nodes] == [143, 143, 143]


PLACES = """
    import os, time
    def at_home():
        print("up"); time.sleep(600)  # in one line, so that all ranks are seen in one place
    def elsewhere():
        print("up"); time.sleep(600)
    at_home() if os.environ["RANK"] != "1" else elsewhere()
"""


def test_stacks_of_all_hosts_are_seen_from_each(lab, form, ask):
    program = script(lab.folder, PLACES, "places.py")
    nodes = form(lab.hosts, "--workers-per-node", 1, program)
    until_running(nodes)
    for rank, node in enumerate(nodes):
        node.until_logged("up", rank)

    for name in "ac":
        found = json.loads(ask(lab.host(name), "stacks", "--json").stdout)["groups"]
        assert [(g["ranks"]["runs"], g["frames"][0]["function"]) for g in found] == [
            ([[0, 0], [2, 2]], "at_home"),
            ([[1, 1]], "elsewhere"),
        ]
    ask(lab.host("a"), "stop", "--now")
    assert [node.wait() for node in nodes] == [143, 143, 143]


def test_a_host_without_a_launcher_controls_the_job_with_the_secret(lab, form, ask):
    a, b, c = lab.hosts
    nodes = form([a, b], "--nnodes", 2, *shell(IDLE))
    until_running(nodes)
    nodes[1].until_logged("up", 1)

    nowhere = ask(c, "status")
    told = ask(c, "status", "--master-addr", "a", "--json")
    log = ask(c, "logs", "--rank", "1", "--master-addr", "a")
    done = ask(c, "stop", nodes[0].name, "--master-addr", "a")

    assert nowhere.returncode == 2
    assert "no job of yours runs on this machine" in nowhere.stderr
    assert [row["host"] for row in ranks(told)] == ["a", "b"]
    assert log.stdout == "up\n"
    assert done.returncode == 0
    assert [node.wait() for node in nodes] == [143, 143]


def test_a_host_with_another_secret_or_none_learns_nothing(new_lab, form, ask):
    lab = new_lab("a", "b", shared_home=False)
    a, b = lab.hosts
    (node,) = form([a], "--nnodes", "1:2", "--last-call", "0.1s", *shell(IDLE))
    until_running([node])
    other = lab.folder / "secret"
    other.write_bytes(bytes(32))
    other.chmod(0o600)

    without = ask(b, "status", "--master-addr", "a")
    wrong = ask(b, "stop", "--master-addr", "a", "--secret-file", other)

    assert (without.returncode, without.stdout) == (2, "")
    assert "secret file" in without.stderr
    assert (wrong.returncode, wrong.stdout) == (122, "")
    assert "refuses the key" in wrong.stderr
    ask(a, "stop")
    assert node.wait() == 143


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
