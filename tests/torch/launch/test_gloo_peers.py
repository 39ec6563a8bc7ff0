"""Each gloo group of a job on one node is checked before anything comes through it."""

import ast

import pytest
from support import script

pytestmark = [pytest.mark.process, pytest.mark.torch]

# Makes groups in all ways, and prints how many peers were looked at for each.
GROUPS = """
    import sys
    looked = []
    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_check":
            looked.append(frame.f_locals["peers"])
    sys.setprofile(note)
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.new_group([0, 1])
    dist.new_group([rank], use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    dist.barrier()
    sys.setprofile(None)
    print([looked, total.item()], flush=True)
    dist.destroy_process_group()
"""
# Rank 1 ends as soon as it has its group; rank 0 looks no sooner, if a rank ends that soon.
SHORT = """
    import os, sys, time
    import torch.distributed as dist
    def hold(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_check":
            until = time.monotonic() + 1
            while not os.path.exists("ended") and time.monotonic() < until:
                time.sleep(0.01)
    if os.environ["RANK"] == "0":
        sys.setprofile(hold)
    dist.init_process_group("gloo")
    {more}
    dist.destroy_process_group()
    if os.environ["RANK"] == "1":
        open("ended", "w").close()
"""
LAZY = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_groups_of_all_kinds_are_looked_at(finished, tmp_path, start):
    words = ["--workers-per-node", 3, "--start-method", start, script(tmp_path, GROUPS)]
    job = finished(tmp_path, *words)

    assert job.process.returncode == 0
    found = [ast.literal_eval(job.log(rank).splitlines()[-1]) for rank in range(3)]
    assert found == [[[2, 1, 0, 2], 3.0], [[2, 1, 0, 2], 3.0], [[2, 0, 2], 3.0]]


@pytest.mark.parametrize("more", ["pass", "dist.new_group()"])
def test_a_rank_that_ends_at_once_is_no_stranger_to_another(finished, tmp_path, more):
    words = ["--workers-per-node", 2, script(tmp_path, SHORT.format(more=more))]
    job = finished(tmp_path, *words)

    assert job.process.returncode == 0, job.err


def test_a_group_that_connects_later_is_refused(finished, tmp_path):
    env = {"TORCH_GLOO_LAZY_INIT": "1"}
    job = finished(tmp_path, "--workers-per-node", 2, script(tmp_path, LAZY), env=env)

    assert job.process.returncode == 1
    assert "gloo has yet to connect the 2 ranks of a new process group" in job.err
    assert "unset TORCH_GLOO_LAZY_INIT" in job.err
