"""The path to HCCL, with a stand-in for what is not here: a device kind and a backend.

The stand-in is torch's own way to write a backend in Python.  It has one device a process on which
autograd works, and memory that does not shrink; so bytes on the device, streams and the device's
random numbers are left to a machine that has one.  Autograd counts the devices once, so it has to
be there before a process computes any gradient: the ranks are workers of a job.
"""

import json
from pathlib import Path

import pytest
from ranks import assert_equal_curves, oracle
from test_grid import DP, DP_TP, MLP, TP, zero
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch takes no device kind that is written in Python",
    ),
]

PROGRAM = Path(__file__).with_name("stand_in_steps.py")
REDUCE, GATHER, SCATTER = "allreduce_", "_allgather_base_", "_reduce_scatter_base_"


@pytest.fixture
def answers(finished, tmp_path):
    """Run the program on so many workers and return what each of them printed."""

    def run(ranks, what):
        job = finished(tmp_path, "--workers-per-node", ranks, PROGRAM, what)
        return [json.loads(job.log(rank).splitlines()[-1]) for rank in range(ranks)]

    return run


def test_hccl_is_joined_on_the_devices_own_number(answers):
    assert answers(2, "joined") == [
        ["npu:0", 0, "cpu:gloo,npu:hccl", [2.0] * 3],
        ["npu:1", 1, "cpu:gloo,npu:hccl", [2.0] * 3],
    ]


@pytest.mark.parametrize(
    ("ranks", "config", "collectives"),
    [
        (2, DP, {REDUCE}),
        (2, DP | {"accumulate": 2, "reduce": {"fuse": "module"}}, {REDUCE}),
        (2, zero(1), {REDUCE, GATHER, SCATTER}),
        (2, zero(3), {REDUCE, GATHER, SCATTER}),
        (2, TP | {"plan": MLP}, {REDUCE}),
        (4, DP_TP | {"plan": MLP} | zero(1), {REDUCE, GATHER, SCATTER}),
    ],
)
def test_steps_on_the_device_learn_what_one_process_does(answers, ranks, config, collectives):
    found = answers(ranks, json.dumps(config))

    assert_equal_curves([losses for losses, *_ in found], oracle())
    for _, places, calls in found:
        assert places == ["npu:0"]
        assert set(calls) - {"operators", "broadcast_"} == collectives
