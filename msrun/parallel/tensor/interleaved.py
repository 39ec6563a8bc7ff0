"""MindSpore's `interleaved_parallel`: a module computes its part of the batch in several pieces.

Each piece has collectives of its own.  That of one piece is begun before the next piece computes,
and waited for only when the pieces are joined, so that the two overlap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.tensor.guard import Guard
from msrun.parallel.tensor.outputs import plain
from msrun.parallel.tensor.placements import on_mesh
from msrun.parallel.tensor.plan import ModulePlan


class Placing(Protocol):
    """The placement that a plan wants for one tensor."""

    def put(self, x: Tensor, *, is_async: bool = False) -> DTensor:
        """Return `x` in this placement."""
        ...

    def of(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Return the placements of a tensor of `shape`."""
        ...


class Interleaved:
    """The forward of a planned module, piece by piece; it takes the place of hooks.

    Args:
        name: Name of the module.
        module: The module.
        plan: Its plan, with at least two `copies`.
        mesh: Mesh of the plan.
        guard: Guard of the model.
        inputs: Placement that the plan wants for the first input.
        out: The same for the output.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plan: ModulePlan,
        mesh: DeviceMesh,
        guard: Guard,
        *,
        inputs: Placing,
        out: Placing,
    ) -> None:
        self._where = f"{plan.key}.layout.in of {name}"
        self._missing = f"{plan.key}: {name} was called without a tensor"
        self._copies, self._dim = plan.copies, plan.copied_dim
        self._mesh, self._guard = mesh, guard
        self._inputs, self._out = inputs, out
        self._replicated = (Replicate(),) * mesh.ndim
        self.__wrapped__: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module, of all pieces."""
        self._guard.resume()
        is_guarded = torch_compat.is_active(self._guard)
        # A script may call a submodule directly.
        with contextlib.nullcontext() if is_guarded else self._guard.active():
            output = self._run(args, kwargs)
        return output if is_guarded else plain(output, may_be_sharded=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        key = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None and not key:
            raise ModelError(self._missing)
        outputs: list[DTensor] = []
        for piece in self._pieces(first if first is not None else kwargs[key]):
            placed = self._inputs.put(piece)
            if first is not None:
                output = self.__wrapped__(placed, *args[1:], **kwargs)
            else:
                output = self.__wrapped__(*args, **{**kwargs, key: placed})
            # Begun here and awaited below, when the parts are read.
            outputs.append(self._out.put(output, is_async=True))
        placements = outputs[0].placements
        if any(placement.is_partial() for placement in placements):
            placements = self._replicated
            outputs = [
                output.redistribute(placements=placements, async_op=True) for output in outputs
            ]
        parts = [output.to_local() for output in outputs]
        whole = torch.cat(parts, dim=self._dim)
        if all(placement.is_replicate() for placement in placements):
            return whole
        return on_mesh(whole, self._mesh, placements)

    def _pieces(self, x: Tensor) -> list[DTensor]:
        """Return equal pieces of this rank's part of `x`."""
        placed = x if isinstance(x, DTensor) else on_mesh(x, self._mesh, self._replicated)
        # Where ranks divide this dim too, only the part of a rank can be cut further.
        layouts = (*placed.placements, *self._inputs.of(x.shape))
        if any(p.is_partial() or p.is_shard(self._dim) for p in layouts):
            placed = self._inputs.put(placed)
        local = placed.to_local()
        size = local.shape[self._dim]
        if size % self._copies:
            raise ModelError(
                f"{self._where}: dim {self._dim} of {size} on a rank can not be split in "
                f"{self._copies} pieces"
            )
        pieces = local.split(size // self._copies, self._dim)
        return [on_mesh(piece, self._mesh, placed.placements) for piece in pieces]
