"""What `msrun plan` shows of HCCL: derived for machines with NPUs, never against the user."""

import os

import pytest

from launchers.dynamic import DynamicLauncher
from msrun.topology import DeviceKind


class RealPlans:
    """Plans as a node does, and starts nothing."""

    jobs = ()

    def plan(self, job, machine):
        return DynamicLauncher().plan(job, machine)


@pytest.fixture
def npus(system, gpus, monkeypatch):
    """Give the machine two NPUs and the launcher of a node; the environment has nothing of HCCL."""
    gpus(2, DeviceKind.NPU)
    system.launcher = RealPlans()
    for name in [name for name in os.environ if name.startswith("HCCL_")]:
        monkeypatch.delenv(name)


TWO_NODES = "--nnodes 2 --master-addr node1 --node-rank 1"


def hccl_lines(outcome):
    """Return the rows of the section on HCCL."""
    _, _, rest = outcome.out.partition("\nHCCL:\n")
    rows = rest.partition("\n\n")[0].splitlines()
    return dict(row.split() for row in rows)


def test_what_hccl_needs_is_derived_for_npus_and_shown(npus, msrun):
    del npus
    address = {"HCCL_IF_IP": "10.0.0.1", "HCCL_SOCKET_FAMILY": "AF_INET"}

    assert hccl_lines(msrun("plan train.py")) == {}
    assert hccl_lines(msrun(f"plan {TWO_NODES} train.py")) == {
        **address,
        "HCCL_CONNECT_TIMEOUT": "600",
    }
    slow = msrun(f"plan {TWO_NODES} --join-timeout 10s --hang-timeout 1h train.py")
    assert hccl_lines(slow) == {
        **address,
        "HCCL_CONNECT_TIMEOUT": "300",
        "HCCL_EXEC_TIMEOUT": "3660",
    }


@pytest.mark.parametrize("given", ["--env", "environment"])
def test_what_the_user_says_of_hccl_stays(npus, msrun, monkeypatch, given):
    del npus
    own = {"HCCL_SOCKET_IFNAME": "eth7", "HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "9"}
    words = ""
    for name, value in own.items():
        if given == "--env":
            words += f"--env {name}={value} "
        else:
            monkeypatch.setenv(name, value)

    shown = hccl_lines(msrun(f"plan {TWO_NODES} --hang-timeout 1h {words} train.py"))

    # Of addresses msrun says nothing beside an interface of the user's.
    assert shown == (own if given == "--env" else {})
