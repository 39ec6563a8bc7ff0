"""Products on a grid of ranks: high-dimension tensor parallelism (styles 2d, 2.5d and 3d).

`notation.grids` has the layouts.  A hook gathers the input once for all modules that read it, such
as query, key and value.  Then each rank multiplies its block, on plain tensors; one reduce-scatter
adds the results up and leaves the layout of the output, in which the bias is added.  Backward is
the mirror image: an all-gather of the gradient of the output, and a reduce-scatter of that of the
input.  The gathered input is kept for backward; `recompute` gathers it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
from msrun.parallel.tensor.placements import on_mesh, part_of


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
        self._product = product
        names = mesh.mesh_dim_names or ()
        self._summed, self._columns = names.index(product.summed), names.index(product.columns)
        self._gathered = None if product.gathered is None else names.index(product.gathered)

    def __call__(self, x: Tensor) -> DTensor:
        """Return the output, in the layout of the plan."""
        with torch_compat.unseen_by(self._guard):
            result = self._multiply(x)
        if torch_compat.is_watched():
            hand_on(x, result)
        return result

    def _multiply(self, x: Tensor) -> DTensor:
        product, mesh = self._product, self._mesh
        if not isinstance(x, DTensor):
            raise ModelError(f"{self._name} was called without its hooks, which gather the input")
        weight: Any = self._module.weight
        shape = torch.Size([*x.shape[:-1], weight.shape[1 if product.is_transposed else 0]])
        placed = self._out.of(shape)
        # Each rank of `columns` has the gradient by its own columns of the output.
        summands = [
            Partial() if axis == self._columns else placement
            for axis, placement in enumerate(x.placements)
        ]
        local = part_of(x, summands)
        sums = functional.linear(local, self._block(weight, x.placements))
        result = reduce_scatter(sums, mesh.get_group(self._summed), product.scattered_dim)
        bias: Any = self._module.bias
        if bias is not None:
            part = _of_rows(bias, placed)
            result = result + part.to(result.dtype)
        return on_mesh(result, mesh, placed)

    def _block(self, weight: DTensor, placed: Sequence[Placement]) -> Tensor:
        """Return this rank's block of `weight`, as (out, in)."""
        is_transposed = self._product.is_transposed
        if self._gathered is None:
            block = _of_rows(weight, placed)
        else:
            group = self._mesh.get_group(self._gathered)
            block = all_gather(part_of(weight), group, 0 if is_transposed else 1)
        return block.t() if is_transposed else block


def _of_rows(param: DTensor, placed: Sequence[Placement]) -> Tensor:
    """Return this rank's part of `param`, whose gradient is a summand over axes that shard rows.

    Args:
        param: The parameter.
        placed: Of what it meets.  Axes that shard no dim of `param` shard the rows of that, or
            nothing.
    """
    summands = [
        Partial() if own.is_replicate() and not other.is_replicate() else own
        for own, other in zip(param.placements, placed, strict=True)
    ]
    return part_of(param, summands)
