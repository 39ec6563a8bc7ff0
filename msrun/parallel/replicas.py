"""Starts replicas of a model: weights of rank 0, and random streams by mesh position."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS
from msrun.parallel.exchange.generators import (
    numpy_state,
    python_state,
    set_numpy_state,
    set_python_state,
)
from msrun.parallel.exchange.messages import broadcast
from msrun.parallel.rank_context import RankContext

_BROADCAST_BYTES = 25 * 2**20
_GOLDEN = 0x9E3779B97F4A7C15


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy if it is loaded, and torch."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(seed % 2**32)


def check_materialized(model: nn.Module) -> None:
    """Refuse lazy modules, whose parameters have no shape yet.

    Raises:
        ModelError: There is one.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name} has no shape yet: its module is lazy",
                hint="run one batch through the model before rt.shard",
            )


def check_memory(model: nn.Module, *, is_divided: bool = True) -> None:
    """Refuse a parameter that has memory in common with another one, or with a buffer.

    Weights that were tied by `a.weight.data = b.weight.data` are such: an update of one is one of
    the other, until a part is made of either.

    Raises:
        ModelError: There are two, and the model is to be divided.
    """
    if not is_divided:
        return
    params = {name for name, _ in model.named_parameters()}
    # The tensor that reaches furthest into each memory: of parameters, and of all.
    of_params: dict[int, tuple[int, str]] = {}
    of_all: dict[int, tuple[int, str]] = {}
    for first, end, memory, name in sorted(_extents(model)):
        is_param = name in params
        reached, other = (of_all if is_param else of_params).get(memory, (0, ""))
        if reached > first:
            raise ModelError(
                f"{other} and {name} are not one tensor and have memory in common, which ends "
                "where parameters are divided",
                hint="tie weights as one parameter, a.weight = b.weight and not a.weight.data = "
                "b.weight.data, or clone one of them",
            )
        for furthest in (of_all, of_params) if is_param else (of_all,):
            furthest[memory] = max(furthest.get(memory, (0, "")), (end, name))


def _extents(model: nn.Module) -> Iterator[tuple[int, int, int, str]]:
    """Yield the first byte, the byte behind the last, the memory and the name of each tensor."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_plain = type(tensor.data) is Tensor and tensor.layout == torch.strided
        if tensor.is_meta or not tensor.numel() or not is_plain:
            continue
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        first = int(tensor.storage_offset()) * tensor.itemsize
        memory = tensor.untyped_storage().data_ptr()
        yield first, first + (int(last) + 1) * tensor.itemsize, memory, name


@torch.no_grad()
def broadcast_weights(model: nn.Module, excluded: Collection[str]) -> None:
    """Copy parameters and buffers of rank 0 to every rank, except the `excluded` parameters."""
    params = [param for name, param in model.named_parameters() if name not in excluded]
    tensors = [tensor for tensor in (*params, *model.buffers()) if not tensor.is_meta]
    for run in _runs(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in run])
        for tensor, part in zip(run, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _runs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in runs of one type, device and about 25 MiB, each one message."""
    run: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=_kind):
        is_other = bool(run) and _kind(tensor) != _kind(run[0])
        if is_other or (run and size + tensor.nbytes > _BROADCAST_BYTES):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    if run:
        yield run


def _kind(tensor: Tensor) -> tuple[str, str]:
    return tensor.device.type, str(tensor.dtype)


def split_random_streams(context: RankContext) -> None:
    """Set the generators so that ranks of one stream draw equal numbers, and others different ones.

    Ranks that see the same samples in the same layers share a stream: over `tp`, dropout must drop
    the same elements on all ranks.  Stream 0 continues the numbers of rank 0, as one process would.
    """
    _share_host_numbers(context)
    own = [torch.get_rng_state(), torch.tensor([torch.initial_seed()], dtype=torch.uint64)]
    states = own if context.device.type == "cpu" else [*own, _device_state(context)]
    for state in states:
        there = state.view(torch.uint8).to(context.device)
        dist.broadcast(there, src=0)
        state.view(torch.uint8).copy_(there)
    if context.stream:
        # Multiples of the golden ratio spread the seeds of streams over 2**63, away from
        # neighbours such as seed + 1.
        torch.manual_seed((int(states[1].item()) + context.stream * _GOLDEN) % 2**63)
    else:
        torch.set_rng_state(states[0])
        if context.device.type != "cpu":
            getattr(torch, context.device.type).set_rng_state(states[2])


def _share_host_numbers(context: RankContext) -> None:
    """Let ranks with the same samples and layers draw the same numbers of Python and numpy.

    A layer that is dropped by such a number must be dropped on all of them.  The first of these
    ranks keeps its generators, so data-parallel ranks draw as the script has seeded them.
    """
    place = context.configured
    for axis, size in place.layout.axes.items():
        if size == 1 or axis in (DATA_AXIS, PIPELINE_AXIS):
            continue
        first = place.layout.group(axis, place.rank)[0]
        numpys = numpy_state()
        own = [python_state().tolist(), [] if numpys is None else numpys.tolist()]
        found = broadcast(own, list[list[int]], first, place.group(axis), place.device)
        set_python_state(torch.tensor(found[0]))
        if found[1]:
            set_numpy_state(torch.tensor(found[1]))


def _device_state(context: RankContext) -> Tensor:
    state: Tensor = getattr(torch, context.device.type).get_rng_state()
    return state
