"""A copy of a model that has shapes and no values.

Nothing of the real model runs: no hook is called, no statistics move, nobody communicates.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

from msrun.parallel.losses.batch import map_leaves
from msrun.parallel.pipeline.trace import Trace

META = torch.device("meta")


class Skeleton:
    """A copy of `model` without values.

    Raises:
        Exception: Something in the model cannot be copied.
    """

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        memo: dict[int, Any] = {id(p): _empty_parameter(p) for p in model.parameters()}
        memo |= {id(b): torch.empty_like(b, device=META) for b in model.buffers()}
        self._copy = copy.deepcopy(model, memo)
        for name, constant in trace.constants.items():
            setattr(self._copy, name, constant)
        self._graph = trace.graph

    def values(
        self, inputs: Sequence[Any], wanted: Collection[fx.Node], *, training: bool
    ) -> dict[fx.Node, Any]:
        """Return the outputs of the `wanted` steps for `inputs`; tensors have no values.

        Raises:
            Exception: The model needs values to run.
        """
        self._copy.train(training)
        walk = _Walk(self._copy, self._graph, wanted)
        walk.run(*map_leaves(_without_values, list(inputs)))
        return walk.values

    def flops(self, inputs: Sequence[Any]) -> dict[fx.Node, int]:
        """Return the floating-point operations of each step for `inputs`.

        Raises:
            Exception: As of `values`.
        """
        walk = _CountingWalk(self._copy, self._graph, ())
        walk.run(*map_leaves(_without_values, list(inputs)))
        return walk.flops

    def saved_bytes(self, graph: fx.Graph, inputs: Sequence[Any], *, training: bool) -> int:
        """Return the bytes that a run of the chunk `graph` saves for its backward.

        Parameters and buffers do not count.

        Raises:
            Exception: As of `values`.
        """
        self._copy.train(training)
        # Storages are kept alive: an id must not be used again.
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[id(storage)] = storage
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            _Walk(self._copy, graph, ()).run(*map_leaves(_without_values, list(inputs)))
        for tensor in (*self._copy.parameters(), *self._copy.buffers()):
            saved.pop(id(tensor.untyped_storage()), None)
        return sum(storage.nbytes() for storage in saved.values())


class _Walk(fx.Interpreter):
    """Runs steps one by one and keeps the outputs of the `wanted` ones."""

    def __init__(self, module: nn.Module, graph: fx.Graph, wanted: Collection[fx.Node]) -> None:
        super().__init__(module, graph=graph)
        self._wanted = wanted
        self.values: dict[fx.Node, Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all steps; tensors that they create have no values either."""
        with torch.enable_grad(), META:
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one step."""
        value = map_leaves(_without_values, super().run_node(n))
        if n in self._wanted:
            self.values[n] = value
        return value


class _CountingWalk(_Walk):
    """Also counts the operations of each step."""

    def __init__(self, module: nn.Module, graph: fx.Graph, wanted: Collection[fx.Node]) -> None:
        super().__init__(module, graph, wanted)
        self.flops: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one step."""
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.flops[n] = counter.get_total_flops()
        return value


def _empty_parameter(param: Parameter) -> Parameter:
    return Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)


def _without_values(tensor: Tensor) -> Tensor:
    """Return `tensor` with its gradient function and without its values."""
    return tensor if tensor.device == META else tensor.to(META)
