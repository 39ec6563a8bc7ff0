"""The path to HCCL, with a stand-in for what is not here: a device kind and a backend.

The stand-in is torch's own way to write a backend in Python.  It has one device a process on which
autograd works, and memory that does not shrink; so bytes on the device, streams and the device's
random numbers are left to a machine that has one.  Autograd counts the devices once, so it has to
be there before a process computes any gradient: the ranks are workers of a job.
"""

import json
from pathlib import Path

import pytest
from ranks import OPTIMIZERS, assert_equal_curves, oracle
from stand_in_steps import table_batches, table_model
from test_grid import DP, DP_TP, MLP, TP, zero
from torch import nn
from torch.nn import functional
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
MESSAGES = "broadcast_", "allgather_"  # of plain values
REDUCE, GATHER, SCATTER = "allreduce_", "_allgather_base_", "_reduce_scatter_base_"


# A table on the host; gradients are clipped then, too.
PLACE = {"place": {"0": "cpu"}}
# Ranks, configuration, and the collectives of the device that it takes.
CASES = [
    (2, DP, {REDUCE}),
    (2, DP | {"accumulate": 2, "reduce": {"fuse": "module"}}, {REDUCE}),
    (2, zero(1), {REDUCE, GATHER, SCATTER}),
    (2, zero(3), {REDUCE, GATHER, SCATTER}),
    (2, TP | {"plan": MLP}, {REDUCE}),
    (4, DP_TP | {"plan": MLP} | zero(1), {REDUCE, GATHER, SCATTER}),
    (2, PLACE | {"accumulate": 2}, {REDUCE}),
    (2, PLACE | zero(3), {REDUCE, GATHER, SCATTER}),
    (
        2,
        PLACE | {"mesh": {"pp": 2}, "pipeline": {"stages": {"[01]": 0, "2": 1}, "microbatches": 2}},
        {REDUCE, "send", "recv_"},
    ),
]
# What every worker would import by itself: torch's part of it takes longer than all steps.
IMPORTED = "ranks,msrun.parallel.preload"


@pytest.fixture(scope="module")
def answers(finished, tmp_path_factory):
    """Run the program on so many workers and return the lines of each of them."""

    def run(ranks, *words):
        options = ["--workers-per-node", ranks, "--preload", IMPORTED]
        job = finished(tmp_path_factory.mktemp("job"), *options, PROGRAM, *words)
        assert "warning" not in job.err
        logs = [job.log(rank).splitlines() for rank in range(ranks)]
        # Beside what torch warns of.
        return [[json.loads(line) for line in log if line.startswith("[[")] for log in logs]

    return run


@pytest.fixture(scope="module")
def learned(answers):
    """Return what each rank learned in each case, several of them one after the other in a job.

    Each that divides operators has its own: torch remembers groups by name beyond their end.
    """
    jobs = {}
    for number, (ranks, config, _) in enumerate(CASES):
        jobs.setdefault((ranks, number if "plan" in config else None), []).append(number)
    found = {}
    for (ranks, _), numbers in jobs.items():
        lines = answers(ranks, *(json.dumps(CASES[index][1]) for index in numbers))
        found |= dict(zip(numbers, zip(*lines, strict=True), strict=True))
    return found


def with_table():
    """Return what one process learns with the table."""
    network = table_model()
    update, losses = OPTIMIZERS["sgd"](network.parameters()), []
    for ids, target in table_batches():
        update.zero_grad()
        loss = functional.cross_entropy(network(ids), target)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        update.step()
        losses.append(loss.item())
    return losses


def test_rows_of_a_table_travel_and_change_and_not_the_table(answers):
    """Down come samples and the rows that they read, up go their ids and the rows' gradients."""
    few = 512  # losses, and digests of steps that compare replicas
    for ((steps, needed, table, is_alike),) in answers(2, "large", json.dumps({"table": "cpu"})):
        assert is_alike
        # The first sends what stays, such as constants of those digests.
        for copied in steps[1:]:
            for nbytes, least in zip(copied, needed, strict=True):
                assert least <= nbytes < least + few < table / 100


def test_hccl_is_joined_on_the_devices_own_number(answers):
    assert answers(2, "joined") == [
        [[[2.0] * 3, "npu:0", 0, "cpu:gloo,npu:hccl"]],
        [[[2.0] * 3, "npu:1", 1, "cpu:gloo,npu:hccl"]],
    ]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.few(3)
def test_steps_on_the_device_learn_what_one_process_does(learned, case):
    found, collectives = learned[case], CASES[case][2]

    is_placed = "place" in CASES[case][1]
    expected = with_table() if is_placed else oracle()
    assert_equal_curves([losses for losses, *_ in found], expected)
    has_stages = "pipeline" in CASES[case][1]
    for rank, (_, places, calls) in enumerate(found):
        has_table = is_placed and not (has_stages and rank)
        has_layers = rank or not has_stages
        assert places == ["cpu"] * has_table + ["npu:0"] * bool(has_layers)
        assert set(calls) - {"operators", *MESSAGES} == collectives
