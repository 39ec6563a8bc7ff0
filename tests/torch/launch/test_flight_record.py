"""torch's flight recorder, which is on by default, tells the latest collective of each group."""

import torch
import torch.distributed as dist
from ranks import run_ranks

from msrun.parallel.torch_compat import collectives_entered


def _collectives():
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    pair = dist.new_group([0, 1])
    dist.barrier(group=pair)
    dist.all_reduce(torch.ones(2))
    return collectives_entered(), pair.group_name


def test_the_latest_collective_of_each_group_is_recorded():
    found = run_ranks(_collectives, 2)

    for entered, pair in found:
        latest = {group: (number, name) for group, number, name in entered}
        assert latest["0"][1] == "all_reduce"
        assert latest[pair] == (1, "barrier")
    assert found[0][0] == found[1][0]
