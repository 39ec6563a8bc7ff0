"""Products on a grid of ranks: high-dimension tensor parallelism (styles 2d, 2.5d and 3d).

`notation.grids` has the layouts.  A hook gathers the input once for all modules that read it, such
as query, key and value.  Then each rank multiplies its block, on plain tensors; one reduce-scatter
adds the results up and leaves the layout of the output, in which the bias is added.  Backward is
the mirror image: an all-gather of the gradient of the output, and a reduce-scatter of that of the
input.  The gathered input is kept for backward; `recompute` gathers it again.

All of it is one function of autograd: as a chain of those of DTensors, collectives and products, it
took longer than a small product.  Its backward calls functions that autograd knows, so that
gradients of gradients are right, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.collectives import all_gather, reduce_scatter
from msrun.parallel.losses.notes import hand_on
from msrun.parallel.notation.grids import Product
from msrun.parallel.tensor.interleaved import Placing
from msrun.parallel.tensor.placements import (
    Like,
    gradient_of,
    part_in,
    part_of,
    placed_on,
)

Placements = tuple[Placement, ...]


class GridProduct:
    """The forward of a `Linear` on a grid of ranks; it takes the place of the module's own.

    Args:
        name: Name of the module.
        module: The module, with its parameters on `mesh`.
        product: How it is computed.
        mesh: Mesh of the plan.
        out: Placement that the plan wants for the output.
        guard: Of the model.
    """

    # A program may have any number of shapes.
    _COUNT_MAX = 100

    def __init__(
        self,
        name: str,
        module: nn.Module,
        product: Product,
        mesh: DeviceMesh,
        *,
        out: Placing,
        guard: TorchFunctionMode,
    ) -> None:
        self._guard = guard
        self._name, self._module, self._mesh, self._out = name, module, mesh, out
        self._columns = (mesh.mesh_dim_names or ()).index(product.columns)
        self._product = product
        self._known: dict[tuple[Placements, torch.Size], _GridBlock] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}  # process groups cannot be pickled

    def __call__(self, x: Tensor) -> DTensor:
        """Return the output, in the layout of the plan."""
        with torch_compat.unseen_by(self._guard):
            if not isinstance(x, DTensor):
                raise ModelError(
                    f"{self._name} was called without its hooks, which gather the input"
                )
            module: Any = self._module
            block = self._block(x, module.weight, module.bias)
            result: DTensor = _Multiply.apply(block, x, module.weight, module.bias)  # type: ignore[no-untyped-call]
        if torch_compat.is_watched():
            hand_on(x, result)
        return result

    def _block(self, x: DTensor, weight: DTensor, bias: DTensor | None) -> _GridBlock:
        """Return how `x` is multiplied, worked out once for each layout."""
        key = x.placements, x.shape
        found = self._known.get(key)
        if found is None:
            if len(self._known) == self._COUNT_MAX:
                self._known.clear()
            found = self._known[key] = self._find(x, weight, bias)
        return found

    def _find(self, x: DTensor, weight: DTensor, bias: DTensor | None) -> _GridBlock:
        product, mesh = self._product, self._mesh
        shape = torch.Size([*x.shape[:-1], weight.shape[1 if product.is_transposed else 0]])
        out = self._out.of(shape)
        # Each rank of `columns` has the gradient by its own columns of the output.
        of_x = tuple(Partial() if i == self._columns else p for i, p in enumerate(x.placements))
        is_gathered = product.gathered is not None
        of_weight = weight.placements if is_gathered else _of_rows(weight, x.placements)
        return _GridBlock(
            mesh=mesh,
            summed=mesh.get_group(product.summed),
            gathered=mesh.get_group(product.gathered) if is_gathered else None,
            scattered_dim=product.scattered_dim,
            is_transposed=product.is_transposed,
            out=out,
            of_x=of_x,
            of_weight=of_weight,
            of_bias=() if bias is None else _of_rows(bias, out),
        )


class _GridBlock(NamedTuple):
    """How a rank multiplies its block of a weight.

    Args:
        mesh: Of all tensors.
        summed: Ranks that add their results up.
        gathered: Ranks that gather the weight; None if the block of a rank does.
        scattered_dim: Dim of the output that the sums are scattered to.
        is_transposed: Whether the weight is (in, out).
        out: Placements of the output.
        of_x: Placements of the gradient of the input.
        of_weight: Of that of the weight, whose gathered parts are added up before.
        of_bias: Of that of the bias.
    """

    mesh: DeviceMesh
    summed: dist.ProcessGroup
    gathered: dist.ProcessGroup | None
    scattered_dim: int
    is_transposed: bool
    out: Placements
    of_x: Placements
    of_weight: Placements
    of_bias: Placements

    def whole(self, part: Tensor) -> Tensor:
        """Return the block that this rank multiplies by, from its part of the weight."""
        if self.gathered is None:
            return part
        return all_gather(part, self.gathered, 0 if self.is_transposed else 1)

    def part(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's part of the weight from that of the block."""
        if self.gathered is None:
            return gradient
        return reduce_scatter(gradient, self.gathered, 0 if self.is_transposed else 1)


class _Multiply(Function):
    @staticmethod
    def forward(
        ctx: Any, block: _GridBlock, x: DTensor, weight: DTensor, bias: DTensor | None
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        matrix = block.whole(part_of(weight))
        ctx.block, ctx.bias = block, None if bias is None else (Like.of(bias), bias.dtype)
        # What was gathered is kept, and not gathered again.
        ctx.save_for_backward(x, weight, None if block.gathered is None else matrix)
        sums = functional.linear(part_of(x), matrix.t() if block.is_transposed else matrix)
        result = reduce_scatter(sums, block.summed, block.scattered_dim)
        if bias is not None:
            result = result + part_of(bias).to(result.dtype)
        return placed_on(result, block.mesh, block.out)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        block: _GridBlock = ctx.block
        x, weight, matrix = ctx.saved_tensors
        _, *is_wanted = ctx.needs_input_grad
        found: list[Tensor | None] = [None, None, None]
        part = part_in(gradient, block.out)
        if is_wanted[2]:
            like, dtype = ctx.bias
            sums = part.reshape(-1, part.shape[-1]).sum(0).to(dtype)
            found[2] = gradient_of(sums, block.of_bias, like)
        if not any(is_wanted[:2]):
            return None, *found
        sums = all_gather(part, block.summed, block.scattered_dim)
        if is_wanted[0]:
            if matrix is None or torch.is_grad_enabled():
                matrix = block.whole(part_of(weight, block.of_weight))
            matrix = matrix.to(sums.dtype)  # autocast may have computed in another type
            columns = functional.linear(sums, matrix if block.is_transposed else matrix.t())
            found[0] = gradient_of(columns.to(x.dtype), block.of_x, Like.of(x))
        if is_wanted[1]:
            pair = sums, part_of(x, block.of_x).to(sums.dtype)
            rows, others = (each.reshape(-1, each.shape[-1]) for each in pair)
            product = others.t() @ rows if block.is_transposed else rows.t() @ others
            product = block.part(product.to(weight.dtype))
            found[1] = gradient_of(product, block.of_weight, Like.of(weight))
        return None, *found


def _of_rows(param: DTensor, placed: Sequence[Placement]) -> Placements:
    """Return the placements of the gradient of `param`: summands over axes that shard rows.

    Args:
        param: The parameter.
        placed: Of what it meets.  Axes that shard no dim of `param` shard the rows of that, or
            nothing.
    """
    return tuple(
        Partial() if own.is_replicate() and not other.is_replicate() else own
        for own, other in zip(param.placements, placed, strict=True)
    )
