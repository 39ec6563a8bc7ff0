"""The private names of torch still mean what we use them for."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from msrun.parallel.torch_compat import functional_collective, parts_before, strided_shard

pytestmark = pytest.mark.torch


def _strided():
    mesh = init_device_mesh("cpu", (2, 2))
    placed = (strided_shard(0, 2), Shard(0))
    tensor = distribute_tensor(torch.arange(8), mesh, placed, src_data_rank=None)
    return tensor.to_local().tolist(), tensor.full_tensor().tolist()


def test_a_strided_shard_cuts_after_later_axes():
    whole = list(range(8))

    assert run_ranks(_strided, 4) == [
        ([0, 1], whole),
        ([4, 5], whole),
        ([2, 3], whole),
        ([6, 7], whole),
    ]


def test_parts_before():
    assert parts_before(strided_shard(1, 4)) == 4
    assert parts_before(Shard(1)) == 1
    assert parts_before(Replicate()) is None
    assert parts_before(Partial()) is None


def _functional():
    """Run every functional collective in a group that is not the first ranks."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    if dist.get_rank() == 0:
        return None
    group, rank = groups[1], groups[1].rank()
    x = torch.tensor([1.0 + rank, 10.0])
    other = [0, 2] if rank == 0 else [2, 0]
    found = {
        "sum": functional_collective("all_reduce", x, "sum", group=group),
        "max": functional_collective("all_reduce", x, "max", group=group),
        "gather": functional_collective("all_gather_into_tensor", x, 2, group=group),
        "scatter": functional_collective("reduce_scatter_tensor", x, "sum", 2, group=group),
        "broadcast": functional_collective("broadcast", x, 1, group=group),
        "exchange": functional_collective("all_to_all_single", x, [1, 1], [1, 1], group=group),
        "swap": functional_collective("all_to_all_single", x, other, other, group=group),
    }
    assert x.tolist() == [1.0 + rank, 10.0]
    return {name: value.tolist() for name, value in found.items()}


def test_functional_collectives():
    alike = {"sum": [3, 20], "max": [2, 10], "gather": [1, 10, 2, 10], "broadcast": [2, 10]}

    assert run_ranks(_functional, 3) == [
        None,
        alike | {"scatter": [3], "exchange": [1, 2], "swap": [2, 10]},
        alike | {"scatter": [20], "exchange": [10, 10], "swap": [1, 10]},
    ]
