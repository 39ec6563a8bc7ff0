"""`clip_grad_norm_`, `AveragedModel` and `GradScaler` of torch on models of `rt.shard`.

The problem.  A plan, or a threshold of ZeRO, leaves some parameters plain and makes DTensors of
others.  All three pass all of them in one list to one operator, which DTensor refuses.  And the
norm of a DTensor is a DTensor, whose value a script prints as that of its rank alone.

The idea.  The first two group their tensors by device and type, with one function of torch, in a
place of their own.  With sharded tensors in the lists it groups by mesh too.  The norm is computed
here over all ranks, as a plain number.  A scaler unscales the parts of this rank, and all ranks
that have parts skip a step together.  Lists without a sharded tensor go to torch as they came.

A stage of a pipeline has plain gradients and part of the model, so a norm over them is refused.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.foreach.averages import follow_models
from msrun.parallel.foreach.values import watch_values
from msrun.parallel.local import is_sharded

Groups = tuple[dist.ProcessGroup, ...]

_stages: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_parts: list[tuple[weakref.ref[Parameter], str]] = []
# Of parameters with a gradient on some ranks alone.
_uneven: list[tuple[weakref.ref[Parameter], str]] = []


def support_lists() -> None:
    """Have torch's functions take plain and sharded tensors from now on; a second call is none."""
    torch_compat.replace_list_functions(_mesh_of, _norm, _unscale)
    follow_models()
    watch_values()


def refuse_norms(stage: nn.Module) -> None:
    """Have torch's clipping refuse gradients of `stage`, which are not all of the model."""
    _stages.add(stage)
    support_lists()


def refuse_norms_of(param: Parameter, name: str) -> None:
    """Have torch's clipping refuse the gradient of `param`, of which this rank has a part."""
    _parts[:] = [each for each in _parts if each[0]() is not None]
    _parts.append((weakref.ref(param), name))
    support_lists()


def refuse_scaling_of(param: Parameter, name: str) -> None:
    """Have torch's scalers refuse the gradient of `param`, which other ranks may not have."""
    _uneven[:] = [each for each in _uneven if each[0]() is not None]
    _uneven.append((weakref.ref(param), name))
    support_lists()


def _mesh_of(tensor: Tensor) -> object | None:
    """Return what may be in one list with `tensor`; None if torch may decide."""
    return tensor.device_mesh if is_sharded(tensor) else None


def _norm(tensors: Sequence[Tensor], order: float) -> Tensor | None:
    """Return the norm of sharded and plain `tensors` over all ranks; None if all are plain.

    Raises:
        ModelError: They are gradients of a stage.
    """
    if _stages:
        _check_stages(tensors)
    for reference, name in _parts:
        gradient = None if (param := reference()) is None else param.grad
        if gradient is not None and any(tensor is gradient for tensor in tensors):
            raise ModelError(
                f"{name}: torch.nn.utils.clip_grad_norm_ would take the norm of the rows of one "
                "rank",
                hint="pass max_norm to rt.step, or call rt.clip_grad_norm_(model, max_norm)",
            )
    if not any(map(is_sharded, tensors)):
        return None
    of_groups: dict[Groups, list[Tensor]] = {}
    for tensor in tensors:
        groups, part = _local(tensor)
        of_groups.setdefault(groups, []).append(_norm_of(part, order))
    norms = []
    for groups, parts in of_groups.items():
        norm = torch.stack(parts)
        for group in groups:
            norm = _over(group, norm, order)
        norms.append(norm.to(tensors[0].device))
    total: Tensor = torch.linalg.vector_norm(torch.cat(norms), order)
    return total


def _unscale(
    unscale: Callable[..., None], tensors: list[Tensor], found: Tensor, inverse: Tensor
) -> None:
    """Unscale gradients; `found` becomes 1 on all ranks if one of some rank is not finite."""
    if _uneven:
        _check_uneven(tensors)
    if not any(map(is_sharded, tensors)):
        unscale(tensors, found, inverse)
        return
    unscale([x.to_local() if is_sharded(x) else x for x in tensors], found, inverse)
    for group in dict.fromkeys(group for tensor in tensors for group in _local(tensor)[0]):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


def _check_uneven(tensors: Sequence[Tensor]) -> None:
    ids = {id(tensor) for tensor in tensors}
    for reference, name in _uneven:
        if (param := reference()) is not None and id(param.grad) in ids:
            raise ModelError(
                f"{name}: one rank has its gradient, so a scaler would skip a step on that rank "
                "alone",
                hint="train in bfloat16, which needs no scaler",
            )


def _check_stages(tensors: Sequence[Tensor]) -> None:
    own = {
        id(param.grad)
        for stage in _stages
        for param in stage.parameters()
        if param.grad is not None
    }
    if any(id(tensor) in own for tensor in tensors):
        raise ModelError(
            f"{ROOT}.pipeline: torch.nn.utils.clip_grad_norm_ would take the norm of the gradients "
            "of this stage alone",
            hint="pass max_norm to rt.step, or call rt.clip_grad_norm_(model, max_norm)",
        )


def _local(tensor: Tensor) -> tuple[Groups, Tensor]:
    """Return the groups that shard `tensor`, and this rank's part on their device."""
    if not is_sharded(tensor):
        return (), tensor
    mesh = tensor.device_mesh
    if any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate

        placed = [Replicate() if each.is_partial() else each for each in tensor.placements]
        tensor = tensor.redistribute(mesh, placed)
    groups = tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
    return groups, tensor.to_local().to(mesh.device_type)


def _norm_of(part: Tensor, order: float) -> Tensor:
    """Return the norm of one part, in at least float32; of no elements that which changes none."""
    dtype = torch.promote_types(part.dtype, torch.float32)
    if not part.numel():
        least = math.inf if order == -math.inf else 0.0
        return torch.full((), least, dtype=dtype, device=part.device)
    norm: Tensor = torch.linalg.vector_norm(part.detach(), order, dtype=dtype)
    return norm


def _over(group: dist.ProcessGroup, norms: Tensor, order: float) -> Tensor:
    """Return the norms of tensors of which the ranks of `group` have parts."""
    if math.isinf(order):
        dist.all_reduce(norms, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, group=group)
        return norms
    powers: Any = norms.pow(order) if order else norms
    dist.all_reduce(powers, group=group)
    result: Tensor = powers.pow(1.0 / order) if order else powers
    return result
