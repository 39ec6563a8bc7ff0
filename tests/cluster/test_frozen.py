"""Processes of ours that somebody stops on hosts of a cluster, and that nobody else continues."""

import signal

import pytest
from audit import codes
from support import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", ["msrun reaper", "msrun forksrv"])
def test_a_failure_is_dealt_with_although_they_are_stopped_on_all_nodes(lab, living, audit, name):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    for node in nodes:
        node.find(name).suspend()
    audit.fail(0, 1)
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert [host.processes() for host in lab.hosts] == [[], [], []]


def test_a_scheduler_that_is_stopped_costs_one_restart_at_most(lab, living, audit):
    nodes = living(lab.hosts)
    audit.until_running(0, "a", "b", "c")
    nodes[0].find("msrun scheduler").suspend()
    audit.until_running(1, "a", "b", "c")
    audit.finish()

    assert codes(nodes) == [0, 0, 0]
    assert "was stopped by a signal; it is continued" in nodes[0].err
    assert nodes[0].verdict()["restarts"] == 1


@pytest.mark.parametrize("name", ["msrun reaper", "msrun forksrv"])
def test_a_node_is_left_empty_whose_launcher_is_killed_then(lab, living, audit, name):
    a, b, c = living(lab.hosts, "--nnodes", "1:3")
    audit.until_running(0, "a", "b", "c")
    b.find(name).suspend()
    b.send(signal.SIGKILL)
    audit.until_running(1, "a", "c")
    until(lambda: not lab.host("b").processes(), "for the end of all on the node")
    audit.finish()

    assert codes([a, c]) == [0, 0]
