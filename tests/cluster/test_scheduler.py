"""The scheduler may be killed at any time; its node may not."""

import contextlib
import signal
import time

import psutil
import pytest
from audit import LEASE, codes, wait
from support import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

# Of the worker on the scheduler's node, and of one on another.
ATTEMPTS = [0, 1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.slow
def test_a_scheduler_may_be_killed_while_workers_stop(lab, living, audit):
    nodes = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    scheduler = nodes[0].find("msrun scheduler")
    (audit.folder / "slow").touch()
    nodes[1].send(signal.SIGTERM)
    until(lambda: audit.stops(0), "for a worker to be asked to stop")
    scheduler.kill()
    wait(1.0)
    (audit.folder / "slow").unlink()
    audit.until_running(1, "a", "c")
    audit.finish()

    assert codes(nodes) == [0, 143, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_verdict_outlives_its_scheduler(lab, living, audit, attempt):
    nodes = living(lab.hosts, "--max-restarts", 0)
    audit.until_running(0, "a", "b", "c")
    scheduler = nodes[0].find("msrun scheduler")
    log = nodes[0].run_dir / "scheduler.wal"
    audit.fail(0, attempt)
    # It may be faster than this: then it has told all.
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
        until(lambda: b"Decided" in log.read_bytes(), "for the verdict", pause=0)
        scheduler.kill()

    assert codes(nodes) == [3, 3, 3]


@pytest.mark.few(1)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_spare_learns_a_verdict_that_outlives_its_scheduler(lab, living, audit, attempt):
    nodes = living(lab.hosts[:2], "--nnodes", 2, "--max-restarts", 0)
    audit.until_running(0, "a", "b")
    nodes += living(lab.hosts[2:], "--nnodes", 2, "--max-restarts", 0)
    nodes[2].until_said("stands by as a spare")
    scheduler = nodes[0].find("msrun scheduler")
    log = nodes[0].run_dir / "scheduler.wal"
    lab.host("c").freeze(nodes[2].pid)  # so that it is told by the next one, if by any
    audit.fail(0, attempt % 2)
    # It may be faster than this: then it has told all.
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
        until(lambda: b"Decided" in log.read_bytes(), "for the verdict", pause=0)
        scheduler.kill()
    wait(0.5)
    lab.host("c").thaw(nodes[2].pid)

    assert codes(nodes) == [3, 3, 3]


@pytest.mark.slow
def test_a_spare_that_has_yet_to_find_the_next_scheduler_learns_its_verdict(lab, living, audit):
    nodes = living(lab.hosts[:2], "--nnodes", 2, "--max-restarts", 0)
    audit.until_running(0, "a", "b")
    nodes += living(lab.hosts[2:], "--nnodes", 2, "--max-restarts", 0)
    nodes[2].until_said("stands by as a spare")
    lab.host("c").freeze(nodes[2].pid)
    nodes[0].find("msrun scheduler").kill()
    audit.fail(0, 1)
    assert nodes[1].wait() == 3
    lab.host("c").thaw(nodes[2].pid)

    assert codes(nodes) == [3, 3, 3]


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


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_do_not_notice_a_scheduler_that_is_killed_every_five_seconds(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    for _ in range(15):
        wait(5.0)
        nodes[0].find("msrun scheduler").kill()
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert nodes[0].err.count("it is started again") == 15
    assert {life.generation for life in audit.lives()} == {0}


@pytest.mark.slow
def test_a_log_that_is_lost_costs_one_generation(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    audit.fail(0, 1)
    audit.until_running(1, "a", "b", "c")
    (nodes[0].run_dir / "scheduler.wal").write_bytes(b"")
    nodes[0].find("msrun scheduler").kill()
    audit.until_running(2, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert (
        "was lost or damaged: the job begins again" in (nodes[0].logs / "scheduler.log").read_text()
    )


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


@pytest.mark.slow
def test_a_scheduler_that_was_frozen_for_long_costs_one_restart_at_most(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    scheduler = nodes[0].find("msrun scheduler")
    scheduler.suspend()
    for node in nodes:
        node.until_said("this node's workers are stopped")
    wait(LEASE)
    scheduler.resume()
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert nodes[0].verdict()["restarts"] == 1
    assert "no sign of life" not in nodes[0].err


@pytest.mark.slow
def test_a_scheduler_that_was_frozen_for_a_moment_is_not_noticed(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    scheduler = nodes[0].find("msrun scheduler")
    scheduler.suspend()
    wait(LEASE * 0.4)
    scheduler.resume()
    wait(LEASE)
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert {life.generation for life in audit.lives()} == {0}


@pytest.mark.slow
def test_who_comes_while_the_scheduler_is_frozen_does_not_come_too_late(lab, living, audit):
    words = ["--nnodes", 2, "--join-timeout", "8s"]
    a, b = living(lab.hosts[:2], *words)
    audit.until_running(0, "a", "b")
    b.kill_host()
    a.until_said("node b was lost")
    scheduler = a.find("msrun scheduler")
    scheduler.suspend()
    wait(5.0)
    (c,) = living(lab.hosts[2:], *words)
    wait(4.5)
    scheduler.resume()
    audit.until_running(1, "a", "c")
    audit.finish()

    assert codes([a, c]) == [0, 0]
    assert "frozen until now" in (a.logs / "scheduler.log").read_text()
