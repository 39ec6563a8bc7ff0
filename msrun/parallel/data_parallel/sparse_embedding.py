"""Embedding tables under data parallelism: checks of their options, and sparse gradients.

With `sparse=True` the gradient of a table has only the rows that the batch used.  Ranks use
different rows, so they send row numbers and rows, filled up to the largest count, and every rank
adds them up.  That is three all-gathers a table instead of an all-reduce of all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.tensor.plan import ModulePlan

Table = nn.Embedding | nn.EmbeddingBag

_NOTHING, _ROWS, _DENSE = range(3)


def check(
    config: ParallelConfig, layout: MeshLayout, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> None:
    """Refuse options of tables that would give another result than in one process.

    Raises:
        ModelError: A table has such an option.
    """
    ranks = layout.size(DATA_AXIS)
    parts = ranks * config.parts
    for name, table in _tables(model):
        plan = plans.get(name)
        if table.max_norm is not None and (ranks > 1 or plan):
            raise ModelError(
                f"{name}: max_norm writes the rows that a rank reads, and other ranks keep them",
                hint="scale rows where the model uses them, with functional.normalize",
            )
        if table.scale_grad_by_freq and parts > 1:
            raise ModelError(
                f"{name}: scale_grad_by_freq counts words of a whole batch, and {parts} parts of "
                "it are looked up apart"
            )
        if table.sparse and plan and not plan.rows:
            raise ModelError(
                f"{plan.key}: {name} has sparse gradients, and only a replicated table can",
                hint="make it with sparse=False, or leave it out of the plan",
            )


def check_replicated(model: nn.Module, replicated: Collection[Tensor]) -> None:
    """Refuse sparse gradients of tables that optimizer parallel would shard.

    Args:
        model: The model.
        replicated: Parameters that it leaves replicated.

    Raises:
        ModelError: A table with sparse gradients is not among them.
    """
    for name, table in _tables(model):
        if table.sparse and table.weight not in replicated:
            raise ModelError(
                f"{ROOT}.optimizer.zero: {name} has sparse gradients, and only a replicated "
                "table can",
                hint=f"make it with sparse=False, or set threshold above {table.weight.nbytes}",
            )


def sparse(model: nn.Module) -> set[Tensor]:
    """Return the tables that have sparse gradients."""
    return {table.weight for _, table in _tables(model) if table.sparse}


def _tables(model: nn.Module) -> Iterator[tuple[str, Table]]:
    for name, module in model.named_modules():
        if isinstance(module, Table):
            yield name or type(module).__name__, module


class RowBucket:
    """The bucket of one table with sparse gradients; see `reducer.Bucket`.

    A table that another layer shares, such as an output layer, has a dense gradient on the ranks
    that ran this layer.  If any rank has a dense gradient, all ranks reduce all rows.
    """

    def __init__(self, table: Parameter, dtype: torch.dtype | None) -> None:
        self.params = (table,)
        self.pending = 1
        self._dtype = dtype or table.dtype
        self._sent: tuple[dist.ProcessGroup, float] | None = None

    def launch(self, group: dist.ProcessGroup, scale: float) -> None:
        """Remember group and scale.  The rows are sent in `finish`: ranks first exchange counts."""
        self._sent = group, scale

    def forget_room(self) -> None:
        """Do nothing: each step has other rows, so no buffer is kept."""

    def drop(self) -> None:
        """Forget a backward pass that raised: nothing was sent."""
        self.pending, self._sent = 1, None

    def finish(self) -> None:
        """Reduce the gradient over the ranks."""
        if self._sent is None:
            raise RuntimeError("the bucket was not launched")
        group, scale = self._sent
        self.pending, self._sent = 1, None
        (table,) = self.params
        own, table.grad = table.grad, None
        table.grad = _sum(own, table, group, scale, self._dtype)


def _sum(
    own: Tensor | None,
    table: Tensor,
    group: dist.ProcessGroup,
    scale: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the sum over `group` of the gradients `own` times `scale`, sent as `dtype`.

    None means that no rank has a gradient.
    """
    ids = torch.zeros(0, dtype=torch.long, device=table.device)
    rows = table.detach()[:0]
    kind = _NOTHING if own is None else _ROWS if own.is_sparse else _DENSE
    if own is not None and own.is_sparse:
        own = own.coalesce()
        ids, rows = own.indices()[0], own.values()
    sizes = _gather(torch.tensor([kind, len(ids)], device=table.device), group)
    kind, most = sizes.amax(0).tolist()
    if kind == _NOTHING:
        return None
    if kind == _DENSE:
        dense = (torch.zeros_like(table) if own is None else own.to_dense()).to(dtype) * scale
        dist.all_reduce(dense, group=group)
        return dense.to(table.dtype)
    # An all-gather needs equal sizes: every rank sends as many rows as the largest has, and the
    # filling is dropped on arrival.
    is_real = torch.arange(most, device=table.device) < sizes[:, 1:]
    ids, rows = (_padded(part, most) for part in (ids, rows.to(dtype) * scale))
    ids, rows = _gather(ids, group)[is_real], _gather(rows, group)[is_real]
    return torch.sparse_coo_tensor(
        ids.unsqueeze(0), rows.to(table.dtype), table.shape, check_invariants=False
    )


def _padded(part: Tensor, count: int) -> Tensor:
    padded = part.new_zeros(count, *part.shape[1:])
    padded[: len(part)] = part
    return padded


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the `part` of each rank, stacked."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.stack(parts)
