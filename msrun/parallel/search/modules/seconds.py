"""Seconds of a step under techniques that divide whole modules.

- Computation is that of the operators on the samples of one rank (`search` on a mesh of one rank).
  Ranks that share a sequence share it evenly, a causal ring included; they start as many operators
  as one rank would.
- Gradients are reduced over all ranks, those of experts over the ranks that have the same.  With
  ZeRO they are scattered, and parameters gathered, unit by unit.
- Tokens travel to experts and back by one all-to-all each, forward and backward, after one that
  says how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Topology, Wire
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.modules.attention import AttentionCall
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import Setting

# Tokens to the experts and back, forward and backward, and their numbers.
_EXPERT_CALLS = 5
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


def of_experts(routed: float, calls: int, wire: Wire) -> float:
    """Return the seconds of tokens on their way.

    Args:
        routed: Bytes of the tokens of a rank, each as often as it has experts, in all modules.
        calls: Modules of experts.
        wire: Of the axis `ep`.
    """
    start, rate = collective(MoveKind.MOVE, wire)
    return _EXPERT_CALLS * calls * start + 4 * routed * wire.size * rate


def of_attention(calls: Iterable[AttentionCall], kind: str, wire: Wire) -> float:
    """Return the seconds in which ranks of the axis `cp` exchange what attention needs."""
    return sum(call.seconds(kind, wire) for call in calls)


def _seconds_a_byte(wire: Wire) -> float:
    """Return the seconds for each byte that a rank sends in gathers and scatters."""
    _, rate = collective(MoveKind.GATHER, wire)
    return rate * wire.size / (wire.size - 1)
