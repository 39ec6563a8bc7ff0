"""Cables that are cut, slow or come and go, and clocks that are wrong or stand still."""

import signal
import time

import pytest
from audit import LEASE, LIVING, codes, wait

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.slow
def test_a_cut_that_heals_in_time_changes_nothing(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    lab.host("b").cut()
    wait(LEASE * 0.4)
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


@pytest.mark.slow
def test_a_node_behind_a_cut_obeys_its_user(lab, living, audit):
    a, b, c = living(lab.hosts, "--nnodes", "2:3")
    audit.until_running(0, "a", "b", "c")
    lab.host("b").cut()
    b.send(signal.SIGTERM)

    assert b.wait() == 143
    audit.until_running(1, "a", "c")
    audit.finish()
    assert codes([a, c]) == [0, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize(("sender", "receiver"), ["ab", "ba"])
def test_half_a_cable_is_a_cut(lab, living, audit, sender, receiver):
    """N-05: the lease, its second of slack, and two seconds of grace and start."""
    nodes = living(lab.hosts, "--nnodes", "2:3")
    audit.until_running(0, "a", "b", "c")
    cut_at = time.monotonic()
    lab.cut(lab.host(sender), lab.host(receiver), one_way=True)
    began = audit.until_running(1, "a", "c")
    lab.heal()
    audit.until_running(2, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    stops = audit.stops(0)
    assert stops["b"] < min(stops["a"], stops["c"])
    assert began - cut_at <= LEASE + 3


@pytest.mark.slow
def test_a_cable_that_comes_and_goes_is_no_lost_node(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    b = lab.host("b")
    for _ in range(5):
        b.cut()
        wait(0.5)
        b.heal()
        wait(1.5)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}


@pytest.mark.slow
def test_a_slow_cable_is_no_lost_node(lab, living, audit):
    for host in lab.hosts:
        host.rate_limit("1mbit")
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    wait(2 * LEASE)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}


@pytest.mark.slow
def test_cables_that_lose_double_and_reorder_frames_break_no_promise(lab, living, audit):
    for host in lab.hosts[1:]:
        host.spoil(0.2)
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c", seconds=60)
    audit.fail(0, 1)
    audit.until_later(0, "a", "b", "c", seconds=60)
    wait(2 * LEASE)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]


def test_a_cluster_may_have_ipv6_alone(new_lab, living, audit):
    lab = new_lab("a", "b", "c", families=(6,))
    a, b, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    b.kill_host()
    audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert "node b was lost: its launcher has ended" in a.err


@pytest.mark.slow
def test_an_address_that_nobody_reaches_is_named(lab, living):
    a, b, _ = lab.hosts
    b.run(["ip", "addr", "add", "10.99.0.2/32", "dev", "lo"])
    # Long enough for the other to start, however busy the machine is.
    (first,) = living([a], "--join-timeout", "20s")
    (wrong,) = living([b], "--local-addr", "10.99.0.2")
    wrong.until_begun()

    assert wrong.wait(5) == 2
    assert "node b gave its address as 10.99.0.2:" in wrong.block()
    assert "which the scheduler cannot reach" in wrong.block()
    assert first.wait() == 121


# Clocks.

YEAR = 366 * 86400


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [-20, -60, 3600, 10 * YEAR])
def test_a_node_whose_wall_clock_is_wrong_lives_on(lab, form, audit, clock, wrong):
    clock.set_wrong(wrong)
    a, *others = lab.hosts
    nodes = form([a], *LIVING, *audit.words)
    nodes += form(others, *LIVING, *audit.words, env=clock.env)
    audit.until_running(0, "a", "b", "c")
    clock.set_wrong(-wrong)
    wait(LEASE * 1.5)
    audit.fail(0, 1)
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0, 1}


def freeze_all(lab, seconds):
    """Stop every process of every host for so long; return the seconds in which none ran."""
    for host in lab.hosts:
        host.freeze()
    began = time.monotonic()
    wait(seconds)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_cluster_that_was_suspended_as_a_whole_notices_nothing(lab, form, audit, clock):
    """C-04: monotonic clocks stand still meanwhile, as they do in a machine that sleeps."""
    nodes = form(lab.hosts, *LIVING, *audit.words, env=clock.env)
    audit.until_running(0, "a", "b", "c")
    clock.stood_still(freeze_all(lab, LEASE * 1.2))
    for host in reversed(lab.hosts):
        host.thaw()
    wait(LEASE * 0.8)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}
    assert "silent" not in "".join(node.err for node in nodes)


@pytest.mark.slow
def test_a_cluster_that_was_frozen_while_clocks_went_on_costs_one_generation(lab, living, audit):
    """None can know that the others were frozen too, so each fences itself."""
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    freeze_all(lab, LEASE * 1.5)
    for host in reversed(lab.hosts):
        host.thaw()
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0, 1}
    assert nodes[0].verdict()["restarts"] == 1
