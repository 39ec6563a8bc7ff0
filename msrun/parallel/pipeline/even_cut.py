"""Chunks of equal work, where no stages are named."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch import fx, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.pipeline.balance import balance
from msrun.parallel.pipeline.chunks import STAGES, Chunks
from msrun.parallel.pipeline.trace import Trace

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def leaves(model: nn.Module, parts: int) -> Callable[[str], bool]:
    """Return which modules are one step: those with no more than a fair share of parameters."""
    total = _bytes(model)

    def is_leaf(name: str) -> bool:
        module = model.get_submodule(name)
        return _bytes(module) * parts <= total or next(module.children(), None) is None

    return is_leaf


def place_evenly(model: nn.Module, trace: Trace, chunks: Chunks) -> tuple[dict[fx.Node, int], str]:
    """Return the chunk of each call of a module, and what was balanced.

    Work is the floating-point operations of a recorded forward; without them the number of
    parameters stands for it, without those of embedding tables.

    Raises:
        ModelError: There are fewer modules than chunks.
    """
    flops, measure = _flops(model, trace)
    units: list[list[fx.Node]] = []
    for node in trace.graph.nodes:
        if node.op == "call_module":
            units.append([])
        if units:
            units[-1].append(node)
    if len(units) < chunks.count:
        raise ModelError(
            f"{STAGES}: auto finds {len(units)} module(s) to cut between, "
            f"and {chunks.count} chunks are needed"
        )
    sizes = _sizes(model, units)
    costs = [sum(flops.get(node, 0) for node in unit) for unit in units]
    starts = balance(costs, sizes, chunks.count)
    places = {unit[0]: bisect_right(starts, index) - 1 for index, unit in enumerate(units)}
    return places, measure


def _flops(model: nn.Module, trace: Trace) -> tuple[dict[fx.Node, int], str]:
    if trace.flops:
        return trace.flops, "flops"
    calls = [node for node in trace.graph.nodes if node.op == "call_module"]
    return {node: _weights(model.get_submodule(str(node.target))) for node in calls}, "parameters"


def _weights(module: nn.Module) -> int:
    own = [part for part in module.modules() if not isinstance(part, _LOOKUPS)]
    return sum(param.numel() for part in own for param in part.parameters(recurse=False))


def _sizes(model: nn.Module, units: Sequence[Sequence[fx.Node]]) -> list[int]:
    """Return the bytes of the parameters of each unit; a shared one counts where it is first."""
    seen: set[Parameter] = set()
    sizes = []
    for unit in units:
        params: set[Parameter] = set()
        for node in unit:
            if node.op == "call_module":
                params |= set(model.get_submodule(str(node.target)).parameters())
        sizes.append(sum(param.nbytes for param in params - seen))
        seen |= params
    return sizes


def _bytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())
