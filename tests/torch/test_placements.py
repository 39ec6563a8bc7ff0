"""Axis names of each dim as placements: torch cuts where the arithmetic says."""

import itertools

import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from msrun.parallel.layout import MeshLayout
from msrun.parallel.notation import local_slices
from msrun.parallel.placements import dims_of, placements

pytestmark = pytest.mark.torch

AXES = {"dp": 2, "sp": 2, "mp": 2}


def _mesh(axes):
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _cuts():
    """Return every way to give some axes, in some order, to one or two dims."""
    found = []
    for count in range(4):
        for axes in itertools.permutations(AXES, count):
            for split in range(count + 1):
                found.append([list(axes[:split]), list(axes[split:])])
    return found


def _compare(axes, shape, cuts):
    """Return the cuts after which something differs from the arithmetic."""
    mesh, layout = _mesh(axes), MeshLayout(axes)
    rank = torch.distributed.get_rank()
    full = torch.arange(shape[0] * shape[1]).reshape(shape)
    wrong = []
    for dims in cuts:
        placed = placements(dims, mesh, 2)
        tensor = distribute_tensor(full, mesh, placed, src_data_rank=None)
        same = torch.equal(tensor.to_local(), full[local_slices(shape, dims, layout, rank)])
        back = [[d] if isinstance(d, str) else d or [] for d in dims_of(placed, mesh, 2)]
        if not (same and back == dims and torch.equal(tensor.full_tensor(), full)):
            wrong.append((dims, placed, back))
    return wrong


def test_every_order_of_three_axes_over_two_dims():
    assert run_ranks(_compare, 8, AXES, (8, 16), _cuts()) == [[]] * 8


def test_sizes_that_differ():
    axes = {"a": 3, "b": 1, "c": 2}
    cuts = [[list(order), []] for order in itertools.permutations(axes)]
    # An axis of size 1 cuts nothing, so where it stands is not kept.
