"""Axis names of each dim as placements: torch cuts where the arithmetic says."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from ranks import run_warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from msrun.errors import UsageError
from msrun.parallel.notation.mesh_layout import MeshLayout, local_slices
from msrun.parallel.tensor.placements import dims_of, placements
from msrun.parallel.torch_compat import strided_shard

pytestmark = pytest.mark.torch

CUBE = {"dp": 2, "sp": 2, "mp": 2}


def _mesh(axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _cuts(axes):
    """Return every way to give some axes, in some order, to two dims."""
    found = []
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            found += [[list(order[:at]), list(order[at:])] for at in range(count + 1)]
    return found


def _compare(axes, shape):
    """Return the cuts after which something differs from the arithmetic."""
    # DTensor warns of every gather over several axes.
    logging.disable(logging.WARNING)
    mesh, layout = _mesh(axes), MeshLayout(axes)
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    wrong = []
    for dims in _cuts(axes):
        placed = placements(dims, mesh, 2)
        tensor = distribute_tensor(whole, mesh, placed, src_data_rank=None)
        own = whole[local_slices(shape, dims, layout, dist.get_rank())]
        if not torch.equal(tensor.to_local(), own):
            wrong.append(("part", dims, placed))
        if not torch.equal(tensor.full_tensor(), whole):
            wrong.append(("whole", dims, placed))
        if placements(dims_of(placed, mesh, 2), mesh, 2) != placed:
            wrong.append(("back", dims, placed))
    logging.disable(logging.NOTSET)
    return wrong


@pytest.mark.parametrize(
    ("axes", "shape"), [(CUBE, (8, 16)), ({"a": 3, "one": 1, "b": 2}, (6, 12))]
)
def test_every_order_of_axes_over_two_dims(axes, shape):
    world_size = MeshLayout(axes).world_size

    assert run_warm(_compare, world_size, axes, shape) == [[]] * world_size


def _refusal(call, *args):
    with pytest.raises(UsageError) as caught:
        call(*args)
    return caught.value.message


def _one_rank():
    mesh = _mesh({"dp": 1, "tp": 1})
    assert placements([None, "...", "tp"], mesh, 4) == (Replicate(), Shard(3))
    assert placements(["dp", ["tp"]], mesh, 2) == (Shard(0), Shard(1))
    assert placements(["..."], mesh, 3) == (Replicate(), Replicate())
    assert dims_of((Shard(-1), Replicate()), mesh, 2) == [None, "dp"]
    assert dims_of((Shard(0), Shard(0)), mesh, 1) == [["dp", "tp"]]
    return [
        _refusal(placements, ["tp"], mesh, 2),
        _refusal(placements, ["mp", None], mesh, 2),
        _refusal(dims_of, (Replicate(), Partial()), mesh, 2),
        _refusal(dims_of, (strided_shard(0, 4), Shard(0)), mesh, 2),
    ]


def test_one_entry_per_dim():
    assert run_warm(_one_rank, 1) == [
        [
            "[tp] does not fit a 2-dim tensor",
            "[mp, null]: axis 'mp' is not in mesh (dp, tp)",
            "P(sum) over axis tp has no axis names",
            "_S(0, 4): no order of the axes after it makes 4 parts",
        ]
    ]
