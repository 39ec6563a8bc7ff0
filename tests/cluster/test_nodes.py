"""A launcher on a host behaves to the tests as one on this machine."""

import signal

import psutil
import pytest
from nodes import Identity, identities, tell_who
from support import shell

pytestmark = pytest.mark.process


def test_a_job_of_one_node_runs_on_a_host(lab, launch):
    node = launch(lab.host("b"), "--workers-per-node", 2, *tell_who())

    assert node.wait() == 0
    assert identities([node.logs]) == [Identity(0, 0, 0, 2, 2, "b"), Identity(1, 1, 0, 2, 2, "b")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_launcher_itself(lab, launch, signum):
    b = lab.host("b")
    node = launch(b, *shell("echo up; sleep 1000"))
    node.until_logged("up")
    launcher = psutil.Process(node.pid)
    processes = b.processes()
    node.send(signum)

    assert launcher in processes
    assert node.wait() == 128 + signum
    assert psutil.wait_procs(processes, timeout=10)[1] == []
