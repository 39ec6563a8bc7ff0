"""Seconds of a step under techniques that divide whole modules.

- Computation is that of the operators on the samples of one rank (`search` on a mesh of one rank).
  Ranks that share a sequence share it evenly, a causal ring included; they start as many operators
  as one rank would.
- Gradients are reduced over all ranks, those of experts over the ranks that have the same.  With
  ZeRO they are scattered, and parameters gathered, unit by unit.
- Tokens travel to experts and back by one all-to-all each, forward and backward, after one that
  says how many there are.  Many tokens travel in two pieces, one beside the work on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Topology, Wire
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.modules.attention import AttentionCall
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import Setting

# Tokens to the experts and back, forward and backward.
_EXPERT_CALLS = 4
_BUCKET = 25 * 2**20


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Trained parameters of a rank.

    Args:
        nbytes: Of all, as they compute: of experts those of this rank.
        stored: Of those that it updates, which ZeRO shards.
        count: Elements for each of these bytes.
        sent: Bytes of parameters and gradients that a rank sends in a step.
        units: Of ZeRO; 0 without it.
    """

    nbytes: float
    stored: float
    count: float
    sent: float
    units: int


def computation(
    program: Program, topology: Topology, batch: int, *, recompute: bool, shared: float
) -> float:
    """Return the seconds that a rank computes in a step, updates of parameters left out.

    Args:
        program: Of the samples that the rank has, of whole sequences.
        topology: What it runs on.
        batch: These samples.
        recompute: Whether repeated blocks compute their forward twice.
        shared: Into how many equal parts ranks share this computation.
    """
    setting = Setting(sizes=(1,), topology=topology, batch=batch, recompute=recompute)
    result = search(program, setting)
    trained = (program.values[name] for name in program.params if name not in program.frozen)
    whole = result.seconds - sum(_update(topology, value.count, value.nbytes) for value in trained)
    names = {step.name for step in program.steps}
    starts = topology.launch * (2 + recompute) * len(names & set(result.chosen))
    return starts + max(0.0, whole - starts) / shared


def _update(topology: Topology, count: float, nbytes: float) -> float:
    """Return the seconds in which the optimizer reads and writes parameters and their state."""
    state = Setting(sizes=(), topology=topology).state_bytes
    return 2 * (nbytes + count * state) / topology.memory_bandwidth


def of_parameters(
    own: Parameters, topology: Topology, world: int, inside: int = 1
) -> tuple[float, float]:
    """Return the seconds of the update, and those of gradients and gathered parameters.

    Args:
        own: Of a rank.
        topology: What it runs on.
        world: Ranks that reduce gradients.
        inside: Ranks that share operators, next to each other.
    """
    update = _update(topology, own.stored * own.count, own.stored)
    if world == 1:
        return update, 0.0
    wire, *_ = topology.wires((world, inside))
    times = own.units or max(1, math.ceil(own.nbytes / _BUCKET))
    start, _ = collective(MoveKind.REDUCE, wire)
    sent = times * start + _seconds_a_byte(wire) * own.sent
    return update, sent * (1 - topology.overlap)


class RoutedCall(NamedTuple):
    """A call of experts on the tokens of one rank.

    Args:
        nbytes: Of the tokens, each as often as it has experts.
        flops: Of the products of its forward on as many tokens.
        is_in_pieces: Whether they travel in two pieces.
    """

    nbytes: float
    flops: float = 0.0
    is_in_pieces: bool = False


class ExpertExchange(NamedTuple):
    """What tokens on their way to experts and back take in a pass.

    Args:
        seconds: Of which nothing computes beside them.
        hidden: Seconds in which experts compute beside them.
    """

    seconds: float
    hidden: float


def of_experts(
    calls: Sequence[RoutedCall], modules: int, wire: Wire, topology: Topology
) -> ExpertExchange:
    """Return the seconds of tokens on their way.

    With two equal pieces, each of which takes t / 2 on its way and c / 2 to compute, the second
    travels beside the work on the first, and the results of the first beside the work on the
    second: t + max(t, c) until all results are back, and not 2 t + c.  So min(t, c) is hidden.
    Backward experts compute twice as long.

    Args:
        calls: Of a pass.
        modules: Of experts.
        wire: Of the axis `ep`.
        topology: What it runs on.
    """
    start, rate = collective(MoveKind.MOVE, wire)
    seconds, hidden = modules * start, 0.0
    for call in calls:
        way = call.nbytes * wire.size * rate
        seconds += _EXPERT_CALLS * way
        if call.is_in_pieces:
            computed = call.flops / (topology.flops * topology.efficiency)
            hidden += min(way, computed) + min(way, 2 * computed)
    # A recomputation calls experts again, with exchanges that the bytes of its calls count.
    pieces = 2 if any(call.is_in_pieces for call in calls) else 1
    seconds += _EXPERT_CALLS * modules * start * pieces
    return ExpertExchange(seconds - hidden, hidden)


def of_attention(calls: Iterable[AttentionCall], kind: str, wire: Wire) -> float:
    """Return the seconds in which ranks of the axis `cp` exchange what attention needs."""
    return sum(call.seconds(kind, wire) for call in calls)


def _seconds_a_byte(wire: Wire) -> float:
    """Return the seconds for each byte that a rank sends in gathers and scatters."""
    _, rate = collective(MoveKind.GATHER, wire)
    return rate * wire.size / (wire.size - 1)
