"""Nodes and slots that Slurm's environment tells."""

import pytest

from msrun.errors import UsageError
from msrun.hosts.allocation import slurm_hosts
from msrun.hosts.hostlist import Host

NODES = {"SLURM_JOB_NODELIST": "gpu[08-10]"}


@pytest.mark.parametrize(
    ("env", "slots", "expected"),
    [
        ({"SLURM_GPUS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x3)"}, None, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "a100:8"}, None, [8, 8, 8]),
        ({"SLURM_GPUS_ON_NODE": "2"}, None, [2, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, None, [2, 2, 1]),
        ({"SLURM_GPUS_PER_NODE": "4"}, 2, [2, 2, 2]),
        ({}, 3, [3, 3, 3]),
    ],
)
def test_slots_of_the_nodes(env, slots, expected):
    found = slurm_hosts({**NODES, **env}, slots)

    names = ["gpu08", "gpu09", "gpu10"]
    assert found == tuple(Host(name=name, slots=n) for name, n in zip(names, expected, strict=True))


def test_a_step_has_fewer_nodes_than_its_job():
    env = {**NODES, "SLURM_STEP_NODELIST": "gpu10", "SLURM_STEP_TASKS_PER_NODE": "2"}

    assert slurm_hosts(env) == (Host(name="gpu10", slots=2),)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({}, "environment SLURM_JOB_NODELIST is not set: this is no allocation of Slurm"),
        (
            {"SLURM_JOB_NODELIST": "a["},
            "environment SLURM_JOB_NODELIST: host list 'a[' has a bracket that is not closed",
        ),
        (NODES, "Slurm does not say how many GPUs or tasks a node has"),
        (
            {**NODES, "SLURM_GPUS_PER_NODE": "a100:0"},
            "environment SLURM_GPUS_PER_NODE=a100:0 does not give each node 1 to 1024 slots",
        ),
        (
            {**NODES, "SLURM_TASKS_PER_NODE": "2,x"},
            "environment SLURM_TASKS_PER_NODE=2,x does not give each node 1 to 1024 slots",
        ),
        (
            {**NODES, "SLURM_TASKS_PER_NODE": "2(x2)"},
            "environment SLURM_TASKS_PER_NODE=2(x2) is about 2 nodes of 3",
        ),
    ],
)
def test_what_is_not_understood_is_refused(env, sentence):
    with pytest.raises(UsageError) as refusal:
        slurm_hosts(env)

    assert refusal.value.message == sentence


def test_a_count_beyond_the_nodes_costs_nothing():
    assert len(slurm_hosts({**NODES, "SLURM_TASKS_PER_NODE": "2(x999999999)"})) == 3
