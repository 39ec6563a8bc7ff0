"""Jobs that go on: workers that fail, nodes that are lost, come, leave or fall silent.

Every worker keeps an account of its life, so that each test can also tell that no two
generations were alive at a time.
"""

import signal
import time

import pytest
from audit import Audit
from support import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

LEASE = 5.0
LIVING = ["--lease", f"{LEASE:g}s", "--max-restarts", 5, "--last-call", "1s", "--grace", "2s"]


@pytest.fixture
def audit(lab_folder):
    """Workers that keep an account; at the end it must be in order."""
    account = Audit(lab_folder)
    yield account
    account.check()


@pytest.fixture
def living(form, audit):
    """Start one job of such workers on hosts, one worker on each."""

    def start(hosts, *arguments):
        return form(hosts, *LIVING, *arguments, *audit.words)

    return start


def codes(nodes):
    return [node.wait(40) for node in nodes]


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
    assert min(delays) <= 0.2


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


def wait(seconds):
    """Let time pass in which nothing may happen."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() >= end, "for time to pass", seconds=seconds + 1)


# Cables.


def test_a_cut_that_heals_in_time_changes_nothing(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    lab.host("b").cut()
    wait(LEASE * 0.3)
    lab.host("b").heal()
    wait(LEASE)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}
    assert "silent" not in nodes[1].err


def test_a_node_behind_a_cut_stops_its_workers_before_it_is_lost(lab, living, audit):
    nodes = living(lab.hosts, "--nnodes", "2:3")
    audit.until_running(0, "a", "b", "c")
    lab.host("b").cut()
    audit.until_running(1, "a", "c")
    wait(LEASE)
    lab.host("b").heal()
    audit.until_running(2, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert "this node's workers are stopped" in nodes[1].err
    assert "the scheduler answers again" in nodes[1].err
    stops = audit.stops(0)
    assert stops["b"] < min(stops["a"], stops["c"])


def test_a_node_that_was_cut_off_comes_back_as_a_spare(lab, living, audit):
    nodes = living(lab.hosts[:2], "--nnodes", 2)
    audit.until_running(0, "a", "b")
    nodes += living(lab.hosts[2:], "--nnodes", 2)
    nodes[2].until_said("stands by as a spare")
    lab.host("b").cut()
    audit.until_running(1, "a", "c")
    lab.host("b").heal()
    nodes[1].until_said("stands by as a spare")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0, 1}


@pytest.mark.parametrize(("sender", "receiver"), ["ab", "ba"])
def test_half_a_cable_is_a_cut(lab, living, audit, sender, receiver):
    nodes = living(lab.hosts, "--nnodes", "2:3")
    audit.until_running(0, "a", "b", "c")
    lab.cut(lab.host(sender), lab.host(receiver), one_way=True)
    audit.until_running(1, "a", "c")
    lab.heal()
    audit.until_running(2, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    stops = audit.stops(0)
    assert stops["b"] < min(stops["a"], stops["c"])


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
    nodes = living(lab.hosts[:2], "--nnodes", "1:3")
    audit.until_running(0, "a", "b")
    started_at = time.monotonic()
    nodes += living(lab.hosts[2:], "--nnodes", "1:3")
    began = audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert began - started_at <= 5.0
    assert nodes[0].verdict()["restarts"] == 0


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
    assert "node b was started anew" in a.err


# The scheduler.


def test_workers_do_not_notice_a_scheduler_that_is_killed(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    for _ in range(3):
        nodes[0].find("msrun scheduler").kill()
        wait(1.0)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert nodes[0].err.count("it is started again") == 3
    assert {life.generation for life in audit.lives()} == {0}


def test_a_job_forms_although_its_scheduler_is_killed(lab, living, audit):
    nodes = living(lab.hosts[:2])
    nodes[0].until_said("2 of 3 nodes registered")
    nodes[0].find("msrun scheduler").kill()
    nodes += living(lab.hosts[2:])
    audit.until_running(0, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]


def test_a_failure_is_dealt_with_although_the_scheduler_is_killed(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    scheduler = nodes[0].find("msrun scheduler")
    scheduler.suspend()
    audit.fail(0, 1)
    until(lambda: "fail" in [life.how for life in audit.lives(0)], "for the failure")
    scheduler.kill()
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert "rank 1 (node b" in nodes[0].err


def test_all_nodes_end_when_that_of_the_scheduler_is_killed(lab, living, audit):
    a, b, c = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    killed_at = time.monotonic()
    a.kill_host()

    assert codes([b, c]) == [120, 120]
    assert time.monotonic() - killed_at <= LEASE
    for node in (b, c):
        assert "the launcher on the scheduler's node, a (10.77.0.1), port 29500, has ended" in (
            node.block()
        )
