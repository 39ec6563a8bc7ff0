"""Jobs that go on: workers that fail, nodes that are lost, come or leave.

Every worker keeps an account of its life, so that each test can also tell that no two
generations were alive at a time.
"""

import random
import signal
import statistics
import time
from pathlib import Path

import pytest
from audit import AT_ONCE, LEASE, LIVING, codes, wait
from support import script, shell, until

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


def test_a_failure_is_known_on_every_node_at_once(lab, living, audit):
    nodes = living(lab.hosts)
    delays = []
    for generation, rank in enumerate((1, 0, 2)):
        audit.until_running(generation, "a", "b", "c")
        audit.fail(generation, rank)
        audit.until_running(generation + 1, "a", "b", "c")
        ends = {life.rank: life for life in audit.lives(generation)}
        failed = ends.pop(rank)
        assert failed.how == "fail"
        assert [life.how for life in ends.values()] == ["stop", "stop"]
        delays.append(max(life.ended for life in ends.values()) - failed.ended)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert statistics.median(delays) <= 0.2


def test_a_node_that_is_killed_is_noticed_at_once_and_a_spare_takes_over(lab, living, audit):
    nodes = living(lab.hosts[:2], "--nnodes", 2)
    audit.until_running(0, "a", "b")
    (spare,) = living(lab.hosts[2:], "--nnodes", 2)
    spare.until_said("stands by as a spare")
    killed_at = time.monotonic()
    nodes[1].kill_host()
    began = audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([nodes[0], spare]) == [0, 0]
    assert audit.stops(0)["a"] - killed_at <= 1.0
    assert began - killed_at <= 2.0


def test_the_job_goes_on_without_a_node_that_is_killed(lab, living, audit):
    a, b, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    killed_at = time.monotonic()
    b.kill_host()
    began = audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert began - killed_at <= 2.0
    assert "node b was lost: its launcher has ended" in a.err


@pytest.mark.slow
def test_a_node_without_power_is_lost_with_its_lease(lab, living, audit):
    a, _, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    off_at = time.monotonic()
    lab.host("b").power_off()
    began = audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert audit.stops(0)["a"] - off_at <= LEASE + 1
    assert began - off_at <= LEASE + 2
    assert f"node b was lost: no sign of life for {LEASE:g}s" in a.err


def test_an_agent_that_is_killed_takes_its_node_along(lab, living, audit):
    a, b, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    killed_at = time.monotonic()
    b.send(signal.SIGKILL)
    began = audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert began - killed_at <= 2.0


def test_a_frozen_agent_cannot_keep_its_workers_alive(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    b = lab.host("b")
    frozen_at = time.monotonic()
    b.freeze(nodes[1].pid)
    until(lambda: len(audit.stops(0)) == 2, "for the others to stop")
    ended = {life.host: life.ended for life in audit.lives(0)}
    b.thaw(nodes[1].pid)
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert ended["b"] - frozen_at <= LEASE
    assert ended["b"] < min(ended["a"], ended["c"])
    assert "exited" not in nodes[0].err


@pytest.mark.slow
def test_a_frozen_agent_that_is_back_in_time_changes_nothing(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    lab.host("b").freeze(nodes[1].pid)
    wait(LEASE * 0.3)
    lab.host("b").thaw(nodes[1].pid)
    wait(LEASE)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}


STUBBORN = """
    trap '' TERM
    setsid sleep 1000 & sleep 1000 &
    echo up
    [ $RANK = 1 ] || wait
    until [ -e fail ]; do sleep 0.05; done
    exit 7
"""


def test_nothing_is_left_on_any_node_of_workers_that_will_not_end(lab, form):
    nodes = form(lab.hosts, "--grace", "1s", *shell(STUBBORN))
    for rank, node in enumerate(nodes):
        node.until_logged("up", rank)
    lab.host("c").freeze(*[p.pid for p in lab.host("c").processes() if p.name() == "sh"])
    (lab.folder / "fail").touch()

    assert codes(nodes) == [7, 7, 7]
    assert [host.processes() for host in lab.hosts] == [[], [], []]
    for node in nodes:
        assert "rank 1 (node b, local_rank 0" in node.block()


# Nodes that come and go.


def test_a_node_that_its_user_stops_leaves_at_once(lab, living, audit):
    a, b, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    told_at = time.monotonic()
    b.send(signal.SIGTERM)
    began = audit.until_running(1, "a", "c")
    left = b.wait()
    audit.finish()

    assert (codes([a, c]), left) == ([0, 0], 143)
    assert began - told_at <= 3.0
    assert a.verdict()["restarts"] == 0
    assert "node b left the job, which goes on, on SIGTERM" in b.err


def test_a_node_that_comes_is_taken_in(lab, living, audit):
    words = ["--nnodes", "2:3", *AT_ONCE]
    nodes = living(lab.hosts[:2], *words)
    audit.until_running(0, "a", "b")
    nodes += living(lab.hosts[2:], *words)
    started_at = nodes[2].until_begun()
    began = audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert began - started_at <= 5.0
    assert nodes[0].verdict()["restarts"] == 0


IMPORTS = """
    import os, sys, time

    while os.uname().nodename == "c" and not os.path.exists("imports-done"):
        time.sleep(0.01)
"""


def test_a_job_goes_on_while_a_newcomer_does_its_imports(lab, form, audit):
    script(lab.folder, IMPORTS, "imports.py")
    env = {"PYTHONPATH": f"{lab.folder}:{ROOT}"}
    words = [*LIVING, *AT_ONCE, "--nnodes", "2:3", "--preload", "imports"]
    nodes = form(lab.hosts[:2], *words, *audit.python_words, env=env)
    audit.until_running(0, "a", "b")
    nodes += form(lab.hosts[2:], *words, *audit.python_words, env=env)
    nodes[2].until_said("joins them when its imports are done")
    wait(2.0)
    assert {life.generation for life in audit.lives()} == {0}
    assert audit.stops(0) == {}
    (lab.folder / "imports-done").touch()
    began = audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert began - min(audit.stops(0).values()) <= 2.0


def test_another_node_takes_the_place_of_one_that_was_killed(lab, living, audit):
    a, b = living(lab.hosts[:2], "--nnodes", 2)
    audit.until_running(0, "a", "b")
    started_at = time.monotonic()
    b.kill_host()
    a.until_said("node b was lost")
    (c,) = living(lab.hosts[2:], "--nnodes", 2)
    began = audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert began - started_at <= 15.0


def test_a_node_that_is_started_again_takes_its_own_place(lab, living, audit):
    a, _ = living(lab.hosts[:2], "--nnodes", 2)
    audit.until_running(0, "a", "b")
    lab.host("b").power_off()
    lab.host("b").boot()
    (again,) = living(lab.hosts[1:2], "--nnodes", 2)
    audit.until_running(1, "a", "b")
    audit.finish()

    assert codes([a, again]) == [0, 0]
    assert "started anew" in a.err


# Who is to blame.


def test_a_node_on_which_workers_fail_again_and_again_is_left_out(lab, living, audit):
    words = ["--nnodes", 2, "--exclude-after", 2, "--no-progress-limit", 0]
    nodes = living(lab.hosts[:2], *words)
    audit.until_running(0, "a", "b")
    nodes += living(lab.hosts[2:], *words)
    nodes[2].until_said("stands by as a spare")
    audit.fail_on("b")
    last = audit.until_running(2, "a", "c")
    audit.finish()

    assert codes([nodes[0], nodes[2]]) == [0, 0]
    assert nodes[1].wait() == 120
    sentence = "node b is excluded after 2 failures of its workers"
    assert sentence in nodes[0].err
    assert sentence in nodes[1].block()
    assert last > max(life.ended for life in audit.lives(1))


def test_nodes_that_are_wanted_back_use_no_restart(lab, form, audit):
    words = ["--lease", "5s", "--nnodes", "1:3", *audit.words]
    a, *others = form(lab.hosts, *words)
    audit.until_running(0, "a", "b", "c")
    for generation, node in enumerate(others, 1):
        node.send(signal.SIGTERM)
        audit.until_running(generation, *"ac"[: 3 - generation])
    audit.finish()

    assert codes([a, *others]) == [0, 143, 143]
    assert a.verdict()["restarts"] == 0


def churn(lab, living, audit, cycles, seed=4):
    """Add, kill and replace nodes beside that of the scheduler; the job never ends."""
    rng = random.Random(seed)
    words = ["--nnodes", "1:3", "--max-restarts", 2 * cycles]
    hosts = dict(zip("abc", lab.hosts, strict=True))
    nodes = {name: living([host], *words)[0] for name, host in hosts.items()}
    generation = 0
    audit.until_running(generation, "a", "b", "c")
    for _ in range(cycles):
        name = rng.choice("bc")
        node = nodes.pop(name)
        if rng.choice(["kill", "leave"]) == "kill":
            node.send(signal.SIGKILL)
        else:
            node.send(signal.SIGTERM)
        node.wait()
        generation = audit.until_later(generation, *nodes)
        nodes[name] = living([hosts[name]], *words)[0]
        generation = audit.until_later(generation, "a", "b", "c")
    audit.finish()

    assert codes(nodes.values()) == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_that_come_and_go_twenty_times(lab, living, audit):
    churn(lab, living, audit, 20)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_nodes_that_come_and_go_two_hundred_times(lab, living, audit):
    churn(lab, living, audit, 200)
