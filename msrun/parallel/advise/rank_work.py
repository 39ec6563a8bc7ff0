"""What a rank computes and sends in one pass, seen operator by operator.

Where ranks share operators as well as experts or sequences, no formula says which operators run on
shards: the rules of a plan, and what the guard makes of them, do.  So the pass of one rank counts:
an operator takes as long as its arithmetic or its bytes, and a collective what its formula says.
The quotient of two passes then is the share of the computation that a rank is left with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from msrun.parallel.advise.simulate import Division, is_plain
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Topology, Wire
from msrun.parallel.sharded_model import Context, entered
from msrun.parallel.torch_compat import dispatching

_COLLECTIVES = {
    "all_reduce": MoveKind.REDUCE,
    "all_gather_into_tensor": MoveKind.GATHER,
    "reduce_scatter_tensor": MoveKind.SCATTER,
    "all_to_all_single": MoveKind.MOVE,
}
# Attention whose arithmetic torch does not count: forward, and backward.
_ATTENTION, _BACKWARD = "_scaled_dot_product_", "_backward"
_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_GROUPED = "_grouped_mm"


class RankWork:
    """Counts operators and collectives.

    Args:
        group: Name of the process group whose collectives count; empty counts none.
    """

    def __init__(self, group: str = "") -> None:
        self._group = group
        self._operators: list[tuple[float, float]] = []
        self._sent: list[tuple[MoveKind, float]] = []

    def counted(self) -> AbstractContextManager[object]:
        """Inside, count what runs."""
        return dispatching(self._handle)

    def computed(self, topology: Topology) -> float:
        """Return the seconds of the operators, the time to start them left out."""
        rate = topology.flops * topology.efficiency
        return sum(
            max(flops / rate, nbytes / topology.memory_bandwidth)
            for flops, nbytes in self._operators
        )

    def sent(self, wire: Wire) -> float:
        """Return the seconds of the collectives over `wire`."""
        seconds = 0.0
        for kind, nbytes in self._sent:
            start, rate = collective(kind, wire)
            # Formulas count the bytes of the full tensor, of which a rank may give a part.
            whole = nbytes * wire.size if kind in (MoveKind.GATHER, MoveKind.MOVE) else nbytes
            seconds += start + rate * whole
        return seconds

    def _handle(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not is_plain(types):
            return NotImplemented
        output = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            kind = _COLLECTIVES.get(func.__name__.partition(".")[0])
            if kind is not None and self._group in args:
                self._sent.append((kind, _nbytes([args[0]])))
        elif not func.is_view:
            nbytes = _nbytes([*args, *kwargs.values(), output])
            self._operators.append((_flops(func, args, kwargs, output), nbytes))
        return output


class CountedDivision:
    """A division whose pass is counted; a `Division`."""

    def __init__(self, division: Division, work: RankWork) -> None:
        self._division, self._work = division, work
        self.ranks, self.divides_tokens = division.ranks, division.divides_tokens

    def apply(self, net: nn.Module) -> tuple[Context, Context]:
        """Have `net` compute as on one rank, in place."""
        computing, again = self._division.apply(net)
        return partial(entered, [computing, self._work.counted]), again

    def part(self, net: nn.Module, inputs: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return what a rank calls `net` with."""
        return self._division.part(net, inputs)


def _nbytes(values: Sequence[Any]) -> float:
    return sum(tensor.nbytes for tensor in leaf_tensors(list(values)))


def _flops(func: Any, args: Sequence[Any], kwargs: Any, output: Any) -> float:
    """Return the arithmetic of matrix products, of which the time of others is no part."""
    packet = func.overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=output))
    tensors = [x for x in args if isinstance(x, Tensor)]
    if name.startswith(_ATTENTION):
        is_backward = _BACKWARD in name
        query, key = tensors[is_backward : is_backward + 2]
        products = _BACKWARD_PRODUCTS if is_backward else _PRODUCTS
        return 2.0 * products * query.numel() * key.shape[-2]
    if name == _GROUPED:
        one, other = tensors[:2]
        is_by_groups = one.dim() == other.dim()
        return (
            2.0
            * math.prod(one.shape)
            * (1 if is_by_groups else other.shape[-1])
            * (other.shape[-1] if is_by_groups else 1)
        )
    return 0.0
