"""Real ranks that hang at collectives of gloo: who stays away is blamed, not who waits."""

import re

import pytest
from support import script

pytestmark = [pytest.mark.process, pytest.mark.torch]

PROGRAM = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    import msrun

    def next_batch():
        while True:
            time.sleep(0.05)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    model = torch.nn.Linear(4, 4)
    if sys.argv[1] == "backward":
        model = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(4):
        if step == 3 and rank == 1:
            msrun.beat()
            next_batch()
        msrun.beat()
        if sys.argv[1] == "all_reduce":
            dist.all_reduce(torch.ones(2))
        elif sys.argv[1] == "backward":
            model(torch.ones(2, 4)).sum().backward()
        elif sys.argv[1] == "group":
            if rank < 2:
                dist.all_reduce(torch.ones(2), group=pair)
            dist.barrier()
        elif sys.argv[1] == "barrier":
            dist.monitored_barrier() if step == 3 else dist.barrier()
"""
EXPECTED = {
    "all_reduce": r"\nrank 1 never entered all_reduce #\d+, which ranks 0,2 did\n",
    "backward": r"\nrank 1 never entered all_reduce #\d+, which ranks 0,2 did\n",
    "group": r"\nrank 1 never entered all_reduce #4 of group 1, which rank 0 did\n",
    # By the store, without a collective.
    "barrier": r"monitored_barrier at distributed_c10d.py:",
}


@pytest.mark.parametrize("where", EXPECTED)
@pytest.mark.few(1)
def test_the_rank_that_stays_away_is_blamed(msrun, tmp_path, where):
    words = ["--workers-per-node", 3, "--hang-timeout", "3s"]
    job = msrun(*words, script(tmp_path, PROGRAM), where)

    assert job.wait(60) == 124
    root = job.verdict()["root"]
    assert root["rank"] == 1
    report = (job.logs / "hang_0.txt").read_text()
    assert "rank 1 in next_batch at program.py:" in report
    assert re.search(EXPECTED[where], report)
    if where != "barrier":
        assert root["error"].startswith("rank 1 never entered all_reduce #")
        assert root["error"] in job.block()
