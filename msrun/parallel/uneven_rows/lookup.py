"""Lookups in a table whose rows ranks divide unevenly (MindSpore's `manual_split`).

The ids of a sample are fields, in the last dim, and the ids of one run of fields are of one run of
rows.  All ranks of the axis have the same ids, so each looks its own fields up in its own rows,
without a word to the others.  What it has then is sharded by field.  One all-to-all makes shards of
the batch of it, on which the model goes on; the gradient travels back by another one and is
complete: every rank has seen the whole batch of its fields.

The result equals that of one process: each row is computed by the same function of the same
numbers.  A bag is summed up after the exchange, over all fields of a sample in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_to_all
from msrun.parallel.foreach.lists import refuse_norms_of
from msrun.parallel.local import replace_parameter
from msrun.parallel.tensor.guard import Guard
from msrun.parallel.tensor.hooks import placing
from msrun.parallel.tensor.outputs import plain
from msrun.parallel.tensor.placements import on_mesh
from msrun.parallel.tensor.plan import ModulePlan
from msrun.parallel.uneven_rows.rows import RowRange, TablePart

_FORWARDS = (nn.Embedding.forward, nn.EmbeddingBag.forward)
_BAG_DIMS = 2

# Puts a tensor where the plan's `out` wants it; None leaves it.
Put = Callable[[Tensor], DTensor] | None


def apply(
    model: nn.Module, plans: Mapping[str, ModulePlan], mesh: DeviceMesh, guard: Guard
) -> None:
    """Give each rank its rows of the planned tables of `model`, in place.

    Every rank must have the same tables.
    """
    for name, plan in plans.items():
        if plan.rows:
            _divide(name, model.get_submodule(name), plan, mesh, guard)


def _divide(name: str, module: nn.Module, plan: ModulePlan, mesh: DeviceMesh, guard: Guard) -> None:
    """Give each rank its rows of the table of `module`.

    Raises:
        ModelError: It looks rows up in another way than torch's modules.
    """
    if type(module).forward not in _FORWARDS or "forward" in vars(module):
        raise ModelError(
            f"{plan.key}.rows: {name} ({type(module).__name__}) has a forward of its own, and rows "
            "are for those of nn.Embedding and nn.EmbeddingBag"
        )
    if isinstance(module, nn.EmbeddingBag) and module.scale_grad_by_freq:
        raise ModelError(
            f"{plan.key}.rows: {name} scales gradients of bags by how often a row is read, for "
            "which torch has other counts than ranks with rows",
            hint="use nn.Embedding, and sum or average what it returns",
        )
    table: Any = module.weight
    if any(torch_compat.gradient_hooks(table)):
        raise ModelError(
            f"{plan.key}.rows: {name}.weight has a hook on its gradient, which would see the rows "
            "of one rank",
            hint="leave the hook or the rule out",
        )
    rows = RowRange(
        name=f"{name}.weight",
        counts=plan.rows,
        index=mesh.get_local_rank(plan.axis),
        group=mesh.get_group(plan.axis),
        axis=plan.axis,
        is_guarded=lambda: guard.shared is not None,
    )
    part = TablePart(rows.cut(table.data).clone(), requires_grad=table.requires_grad)
    part.rows = rows
    replace_parameter(table, part)
    module.weight = part
    refuse_norms_of(part, rows.name)
    put = None if plan.out is None else placing(plan.out, mesh, f"{plan.key}.out of {name}")
    module.forward = _Lookup(name, module, rows, mesh, guard=guard, put=put)


class _Lookup:
    """The forward of a table whose rows ranks divide."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        rows: RowRange,
        mesh: DeviceMesh,
        *,
        guard: Guard,
        put: Put,
    ) -> None:
        self._name, self._rows = name, rows
        self._module: Any = module  # one of two classes, with the same attributes
        self._mesh, self._guard, self._put = mesh, guard, put
        self._axis = (mesh.mesh_dim_names or ()).index(rows.axis)
        # One object, by which what is known of its layout is found.
        self._by_samples = self._placements(Shard(0))
        self._bounds: tuple[Tensor, Tensor] | None = None
        self.__wrapped__ = module.forward  # `inspect.signature` follows it

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        self._guard.resume()
        with torch_compat.unseen_by(self._guard):
            found = self._found(plain(input, may_be_sharded=False), *args, **kwargs)
        if not torch_compat.is_active(self._guard):  # the script calls a submodule directly
            return plain(found, may_be_sharded=False)
        is_whole = all(placement.is_replicate() for placement in found.placements)
        return found.to_local() if is_whole else found

    def _found(self, ids: Tensor, *args: Any, **kwargs: Any) -> DTensor:
        """Return what the module returns of all ids, where the plan wants it."""
        rows = self._look_up(ids)
        if isinstance(self._module, nn.EmbeddingBag):
            bags = self._bags(ids, self._by_sample(rows), *args, **kwargs)
            return bags if self._put is None else self._put(bags)
        return self._by_sample(rows) if self._put is None else self._put(self._by_field(rows))

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return the rows of the ids of this rank's fields."""
        parts, module = len(self._rows.counts), self._module
        self._check(ids, parts)
        own = ids.tensor_split(parts, -1)[self._rows.index] - self._rows.first
        padding: int | None = module.padding_idx
        if padding is not None:
            padding -= self._rows.first
            padding = padding if 0 <= padding < self._rows.count else None
        self._rows.is_read = True
        try:
            return functional.embedding(
                own,
                module.weight,
                padding,
                scale_grad_by_freq=module.scale_grad_by_freq,
                sparse=module.sparse,
            )
        finally:
            self._rows.is_read = False

    def _by_field(self, rows: Tensor) -> DTensor:
        """Return the rows of all ids, of which each rank has those of its fields."""
        return on_mesh(rows, self._mesh, self._placements(Shard(rows.dim() - 2)))

    def _by_sample(self, rows: Tensor) -> DTensor:
        """Return the rows of all ids by samples, or all of them where there are too few samples."""
        parts = len(self._rows.counts)
        is_even = rows.dim() > _BAG_DIMS and rows.shape[0] % parts == 0
        if not is_even:
            return self._by_field(rows).redistribute(self._mesh, self._placements(Replicate()))
        moved = all_to_all(rows, self._rows.group, 0, rows.dim() - 2)
        return on_mesh(moved, self._mesh, self._by_samples)

    def _bags(
        self,
        ids: Tensor,
        rows: DTensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> DTensor:
        """Return the bag of each sample, of rows that are here for each of its fields."""
        if offsets is not None or ids.dim() != _BAG_DIMS:
            raise ModelError(
                f"{self._name}: bags of a table with rows are (samples, fields), without offsets"
            )
        placed = rows.placements
        given = [ids] if per_sample_weights is None else [ids, per_sample_weights]
        # As sharded tensors, so that gradients of weights come back from all ranks.
        whole = [value if isinstance(value, DTensor) else self._whole(value) for value in given]
        mine = [value.redistribute(self._mesh, placed).to_local() for value in whole]
        local, module = rows.to_local(), self._module
        width = local.shape[-1]
        # Each row stands once, at its own number; one more stands for the padding.
        place = torch.arange(local[..., 0].numel(), device=ids.device).view(local.shape[:-1])
        padding = None
        if module.padding_idx is not None:
            padding = place.numel()
            place = place.masked_fill(mine[0] == module.padding_idx, padding)
            local = torch.cat([local.reshape(-1, width), local.new_zeros(1, width)])
        bags = functional.embedding_bag(
            place,
            local.reshape(-1, width),
            mode=module.mode,
            per_sample_weights=mine[1] if len(mine) > 1 else None,
            padding_idx=padding,
        )
        return on_mesh(bags, self._mesh, placed)

    def _check(self, ids: Tensor, parts: int) -> None:
        """Refuse ids that are not one for each field, or not of the rows of their field.

        Raises:
            ModelError: All ranks have the same ids, so all raise.
        """
        if not ids.dim() or ids.shape[-1] % parts:
            raise ModelError(
                f"{self._name}: ids of shape {tuple(ids.shape)} have no number of fields, in their "
                f"last dim, that {parts} ranks divide"
            )
        if ids.device.type != "cpu":
            return  # the lookup of the device refuses them, without a wait of the host
        fields = ids.shape[-1]
        if self._bounds is None or len(self._bounds[0]) != fields:
            counts = torch.tensor(self._rows.counts)
            last = counts.cumsum(0).repeat_interleave(fields // parts)
            self._bounds = last - counts.repeat_interleave(fields // parts), last
        low, end = self._bounds
        if not ids.numel():
            return
        # One read of all ids, and not three.
        least, most = torch.aminmax(ids.reshape(-1, fields), dim=0)
        if ((least < low) | (most >= end)).any():
            is_other = (ids < low) | (ids >= end)
            field = int(is_other.nonzero()[0, -1])
            number = int(ids[is_other][0])
            raise ModelError(
                f"{self._name}: id {number} of field {field} is not of its rows, {int(low[field])} "
                f"to {int(end[field]) - 1}",
                hint="number the rows of each field's table after those of the fields before it",
            )

    def _placements(self, placement: Placement) -> tuple[Placement, ...]:
        placed: list[Placement] = [Replicate()] * self._mesh.ndim
        placed[self._axis] = placement
        return tuple(placed)

    def _whole(self, value: Tensor) -> DTensor:
        return on_mesh(value, self._mesh, self._placements(Replicate()))
