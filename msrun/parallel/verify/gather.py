"""What ranks hold in parts, whole on rank 0: tensors of a model, and the batch of a step.

Everything here is collective: all ranks call it alike.  One tensor is gathered at a time, so a rank
needs memory for one whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS
from msrun.parallel.exchange.messages import SentTensor, broadcast, gather_all
from msrun.parallel.local import full_tensor, is_sharded
from msrun.parallel.losses.batch import batch_size, map_leaves, sample_dim, tensors_in
from msrun.parallel.rank_context import RankContext

Receive = Callable[[str, Tensor], None]


class NotOneBatchError(Exception):
    """The batches of the ranks do not make the batch of one process."""


class _SentBatch(msgspec.Struct, frozen=True):
    """The batch of one rank: its samples, its tensors, and its other values in words."""

    size: int
    tensors: list[SentTensor]
    values: str


def to_first_rank(
    context: RankContext, named: Sequence[tuple[str, Tensor]], receive: Receive
) -> None:
    """Give rank 0 the whole tensors of `named`, of all pipeline stages.

    Args:
        context: This rank.
        named: Tensors of this rank's stage by name, in the same order on all ranks of the stage.
        receive: Called on rank 0 alone, with one whole tensor after the other.
    """
    stages = context.layout.size(PIPELINE_AXIS)
    own = context.coordinate.get(PIPELINE_AXIS, 0)
    for stage in range(stages):
        root = first_rank(context, stage)
        names = [name for name, _ in named] if own == stage else []
        if root:
            names = broadcast(names, list[str], root, None, context.device)
        tensors = dict(named) if own == stage else {}
        for name in names:
            value = whole(context, tensors[name]) if name in tensors else None
            if root:
                sent = None if value is None else SentTensor.of(value)
                value = broadcast(sent, SentTensor, root, None, context.device).tensor()
            if context.rank == 0 and value is not None:
                receive(name, value)


def first_rank(context: RankContext, stage: int) -> int:
    """Return the first rank of a pipeline stage."""
    for position in range(context.world_size):
        rank = context.layout.rank_at(position)
        if context.layout.coordinate(rank).get(PIPELINE_AXIS, 0) == stage:
            return rank
    raise ValueError(stage)


def whole(context: RankContext, tensor: Tensor) -> Tensor:
    """Return all of `tensor`, on the device; ranks that have parts of it call it together."""
    tensor = tensor.detach()
    if tensor.is_sparse:  # the gradient of a table of which few rows were read
        tensor = tensor.to_dense()
    if is_sharded(tensor):  # shards that ZeRO keeps on the host travel by the device
        tensor = tensor.to(context.device)
    return full_tensor(tensor)


def complete_flags(context: RankContext, flags: Sequence[bool]) -> list[bool]:
    """Return which of `flags` some rank of this stage has set."""
    found = torch.tensor(flags, dtype=torch.int32, device=context.device)
    for axis, size in context.layout.axes.items():
        if axis != PIPELINE_AXIS and size > 1 and flags:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=context.group(axis))
    return [bool(flag) for flag in found.tolist()]


def any_rank(context: RankContext, *, flag: bool) -> bool:
    """Return whether some rank of the job has set its `flag`."""
    found = torch.tensor(int(flag), device=context.device)
    if context.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def whole_batch(context: RankContext, batch: Any) -> Any:
    """Return the batch of all data-parallel ranks, in tensors of its own.

    Rank 0 gets it; other ranks get None.

    Raises:
        NotOneBatchError: Tensors cannot be joined, or ranks have other plain values.  On rank 0.
    """
    if context.layout.size(DATA_AXIS) == 1:
        return map_leaves(lambda tensor: tensor.detach().clone(), batch)
    group = context.group(DATA_AXIS)
    members = dist.get_process_group_ranks(group)
    if members[0] != 0:  # ranks of other groups have copies of these batches
        return None
    tensors = [SentTensor.of(tensor) for tensor in tensors_in(batch)]
    dim = sample_dim(batch, context.batch.current.samples)
    samples = context.batch.current.samples if dim else batch_size(batch)
    sent = _SentBatch(samples, tensors, repr(_plain_values(batch)))
    of_ranks = gather_all(sent, _SentBatch, group, context.device)
    if context.rank != 0:
        return None
    if any(each.values != sent.values for each in of_ranks):
        raise NotOneBatchError("ranks have other numbers or strings in their batches")
    sizes = [each.size for each in of_ranks]
    if len({len(each.tensors) for each in of_ranks}) > 1:
        raise NotOneBatchError("the batches of ranks hold other numbers of tensors")
    joined = zip(*([one.tensor() for one in each.tensors] for each in of_ranks), strict=True)
    return map_leaves(lambda _: _join(next(joined), sizes, dim).to(context.device), batch)


def _plain_values(batch: Any) -> list[Any]:
    """Return the numbers and strings in `batch`."""
    found: list[Any] = []

    def add(value: Any) -> Any:
        found.append(value)
        return value

    for kind in (int, float, str):
        map_leaves(add, batch, kind)
    return found


def _join(parts: Sequence[Tensor], sizes: Sequence[int], dim: int) -> Tensor:
    """Return the tensor of the whole batch of which ranks have `parts`.

    Args:
        parts: Of each rank.
        sizes: Samples of each rank.
        dim: That of samples; a tensor with fewer dims has them in its first.
    """
    shapes = [tuple(part.shape) for part in parts]
    dim = min(dim, len(shapes[0]) - 1)
    at = slice(dim, dim + 1)
    is_cut = all(shape[at] == (size,) for shape, size in zip(shapes, sizes, strict=True))
    if is_cut and len({(shape[:dim], shape[dim + 1 :]) for shape in shapes}) == 1:
        return torch.cat(list(parts), dim)
    if len(set(shapes)) > 1:
        raise NotOneBatchError(
            f"a tensor of shape {shapes[0]} on one rank and "
            f"{next(shape for shape in shapes if shape != shapes[0])} on another make no batch of "
            "one process, which pads all samples to one length"
        )
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise NotOneBatchError(
            f"ranks have other values of a tensor of shape {shapes[0]}, which has no dim of samples"
        )
    return parts[0]
