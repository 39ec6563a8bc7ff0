"""Axis names of each dim as placements: torch cuts where the arithmetic says."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_warm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from msrun.errors import UsageError
from msrun.parallel.notation.mesh_layout import MeshLayout, local_slices
from msrun.parallel.tensor.placements import (
    dims_of,
    gathered,
    gathered_axis,
    part_of,
    placements,
)
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


MOVES = {  # dims before, and with parts of one axis joined
    "last of two": ([None, ["x", "y"]], [None, "x"]),
    "last of two, later axis first": ([None, ["y", "x"]], [None, "y"]),
    "only": (["y", None], [None, None]),
    "beside another": (["x", "y"], ["x", None]),
}
OTHERS = {
    "first of two": ([None, ["x", "y"]], [None, "y"]),
    "both": ([None, ["x", "y"]], [None, None]),
    "moved": (["x", None], [None, "x"]),
    "cut": (["x", None], ["x", "y"]),
}


def _gradients(x, take):
    """Return the part that `take` gives, its gradient, that of that, and the first again."""
    factor = dist.get_rank() + 1
    part = take(x)
    (first,) = torch.autograd.grad((part**3 * factor).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((first.to_local() ** 2).sum(), x)
    (plain,) = torch.autograd.grad((take(x) ** 3 * factor).sum(), x)
    return [part, first.full_tensor(), again.full_tensor(), plain.full_tensor()]


def _compare_move(mesh, before, after):
    """Return the axis of a move, and whether values, gradients and second ones are torch's."""
    placed, wanted = (placements(dims, mesh, 2) for dims in (before, after))
    axis = gathered_axis(placed, wanted, mesh, torch.Size((4, 8)))
    if axis is None:
        return None
    summands = [*wanted]
    summands[axis] = Partial()
    x = distribute_tensor(torch.arange(32.0).view(4, 8), mesh, placed).requires_grad_()
    ours = _gradients(x, lambda x: part_of(gathered(x, wanted, axis), summands))
    theirs = _gradients(
        x, lambda x: x.redistribute(placements=wanted).to_local(grad_placements=summands)
    )
    return mesh.mesh_dim_names[axis], all(map(torch.equal, ours, theirs))


def _compared():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    return {name: _compare_move(mesh, *dims) for name, dims in {**MOVES, **OTHERS}.items()}


def test_parts_are_joined_as_torch_joins_them():
    assert run_ranks(_compared, 4) == 4 * [
        {
            "last of two": ("y", True),
            "last of two, later axis first": ("x", True),
            "only": ("y", True),
            "beside another": ("y", True),
            **dict.fromkeys(OTHERS),
        }
    ]


def _parts():
    """Return what a part, on 2 ranks, of 3 rows gives beside that of `to_local`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]).requires_grad_()
    takes = part_of, lambda x: x.to_local()
    results = [[found.tolist() for found in _gradients(x, take)] for take in takes]
    with torch.no_grad():
        assert part_of(x).data_ptr() == x.to_local().data_ptr()
    return results


def test_a_part_is_that_of_torch_also_of_uneven_shards():
    for one, other in run_ranks(_parts, 2):
        assert one == other
