"""Modules that compute on plain shards, for functions that torch has no sharded form of.

Experts of a mixture are one module with the weights of all in 3-D parameters, and its forward
sorts tokens and calls grouped products.  Each rank runs that forward on its columns of the first
weight and its rows of the second, which gives a summand of the output; the ranks add them up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.local import is_sharded
from msrun.parallel.tensor.placements import on_mesh


def make_local(module: nn.Module, name: str, mesh: DeviceMesh, axis: str) -> None:
    """Have `module` compute on plain shards and return the sum over the ranks of `axis`."""
    module.forward = partial(_run, module, module.forward, name, mesh, axis)


def _run(
    module: nn.Module,
    forward: Callable[..., Any],
    name: str,
    mesh: DeviceMesh,
    axis: str,
    /,  # names of arguments are the module's
    *args: Any,
    **kwargs: Any,
) -> DTensor:
    index = (mesh.mesh_dim_names or ()).index(axis)
    replicated: list[Placement] = [Replicate()] * mesh.ndim
    summands: list[Placement] = list(replicated)
    summands[index] = Partial()  # each rank has the gradient by its own columns alone

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole = value if isinstance(value, DTensor) else on_mesh(value, mesh, replicated)
        placed = whole.redistribute(mesh, replicated)
        return placed.to_local(grad_placements=summands)

    shards: dict[str, Tensor] = {
        param: tensor.to_local()
        for param, tensor in module.named_parameters(recurse=False)
        if is_sharded(tensor)
    }
    with torch_compat.parameters_replaced(module, shards):
        output = forward(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if not isinstance(output, Tensor):
        raise ModelError(f"{name} of style experts returns a {type(output).__name__}, not a tensor")
    stacked: list[Placement] = list(replicated)
    stacked[index] = Shard(0)
    total: DTensor = on_mesh(output.unsqueeze(0), mesh, stacked).sum(0)  # type: ignore[assignment]
    return total
