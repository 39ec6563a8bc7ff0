"""What a model costs on one rank, by node, and a configuration that divides it.

A plan of the search chooses for every operator.  An alternative divides the whole model in one way,
which the runtime does by a configuration.  It is costed from what the nodes of the search cost in
one process, each divided by the ranks that share it, and from collectives that `cost.collective`
prices, so that it can be compared with a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from msrun.parallel.search.cost.cost import collective, estimate
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Wire
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.solve.modes import whole_problem
from msrun.parallel.search.solve.problem import Setting


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration of the runtime that divides a whole model.

    Args:
        name: How reports name it.
        config: Its keys `mesh`, and `plan` or `data`.
        microbatches: Of a step.
        seconds: Of a step, predicted.
        memory: Bytes of a rank, predicted.
        sent: Bytes that a rank sends in a step.
        costs: What the seconds are made up of.
        params: Parameter -> its placement on each axis, where it is not replicated.
    """

    name: str
    config: dict[str, Any]
    microbatches: int = 1
    seconds: float
    memory: float
    sent: float = 0.0
    costs: dict[str, float] = {}
    params: dict[str, list[str]] = {}

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size."""
        mesh: dict[str, int] = self.config["mesh"]
        return mesh


class Findings(NamedTuple):
    """What a look at alternatives found.

    Args:
        fastest: Of those that fit; None if none does.
        notes: Sentences for the report: why there are no others.
        least: Bytes of the smallest; None without any.
    """

    fastest: Alternative | None
    notes: list[str]
    least: float | None = None


class Transfer(NamedTuple):
    """One collective.

    Args:
        kind: Which.
        axis: Over which axis.
        nbytes: Of the full tensor of its ranks.
        times: How often a step runs it.
        visible: Share of its time that no computation hides.
    """

    kind: MoveKind
    axis: str
    nbytes: float
    times: float = 1.0
    visible: float = 1.0


class OneRank:
    """The costs of a program in one process.

    Args:
        program: For the samples that one data-parallel rank has at once.
        setting: How a step is run; its mesh does not count.
    """

    def __init__(self, program: Program, setting: Setting) -> None:
        alone = msgspec.structs.replace(setting, sizes=(1,), data_axes=frozenset())
        free = msgspec.structs.replace(setting.topology, launch=0.0)
        self.program, self.setting = program, setting
        whole = whole_problem(program, alone, ())
        problem = whole_problem(program, msgspec.structs.replace(alone, topology=free), ())
        self.seconds = {node.name: float(node.seconds[0]) for node in problem.nodes}
        self.memory = {node.name: float(node.memory[0]) for node in problem.nodes}
        self.kinds = {node.name: node.kind for node in problem.nodes}
        self.rules = {node.name: node.rule for node in problem.nodes}
        # What no division makes less.
        choice = [0] * len(problem.nodes)
        self.starts = whole.seconds(choice) - problem.seconds(choice)

    def moved(self, moves: Iterable[Transfer], wires: Mapping[str, Wire]) -> dict[str, float]:
        """Return the seconds of collectives, by what they are."""
        found: dict[str, float] = {}
        for move in moves:
            wire = wires[move.axis]
            if wire.size == 1 or not move.nbytes:
                continue
            start, rate = collective(move.kind, wire)
            name = f"{_NAMES[move.kind]} over {move.axis}"
            seconds = move.times * move.visible * (start + rate * move.nbytes)
            found[name] = found.get(name, 0.0) + seconds
        return found

    def sent(self, moves: Iterable[Transfer], wires: Mapping[str, Wire]) -> float:
        """Return the bytes that a rank sends in collectives."""
        total = 0.0
        for move in moves:
            # Over one byte a second, without latency.
            wire = Wire(size=wires[move.axis].size, bandwidth=1.0, start=0.0, hop=0.0)
            total += move.times * estimate(move.kind, wire)[1] * move.nbytes
        return total

    def averaged(self, shares: Mapping[str, float], axis: str) -> list[Transfer]:
        """Return the all-reduces of the gradients of all parameters over `axis`.

        Args:
            shares: Parameter value -> the share of it that a rank has; those left out are whole.
            axis: Its ranks have other samples each.
        """
        program, visible = self.program, 1 - self.setting.topology.overlap
        sizes = {
            name: program.values[name].nbytes * shares.get(name, 1.0)
            for name in program.params
            if name not in program.frozen
        }
        return [Transfer(MoveKind.REDUCE, axis, size, visible=visible) for size in sizes.values()]


_NAMES = {
    MoveKind.GATHER: "all-gather",
    MoveKind.SCATTER: "reduce-scatter",
    MoveKind.MOVE: "all-to-all",
    MoveKind.REDUCE: "all-reduce",
}


def wires_of(mesh: Mapping[str, int], setting: Setting) -> dict[str, Wire]:
    """Return what each axis runs over; under `joined(names)` what several together run over."""
    wires = dict(zip(mesh, setting.topology.wires([*mesh.values()]), strict=True))
    names = [*mesh]
    for first in range(len(names)):
        for end in range(first + 2, len(names) + 1):
            inside = names[first:end]
            size = math.prod(mesh[name] for name in inside)
            merged = [*(mesh[n] for n in names[:first]), size, *(mesh[n] for n in names[end:])]
            wires[joined(inside)] = setting.topology.wires(merged)[first]
    return wires


def joined(axes: Iterable[str]) -> str:
    """Return how `wires_of` names the axes `axes` together."""
    return " x ".join(axes)


def fitting(found: Iterable[Alternative], limit: float | None, notes: list[str]) -> Findings:
    """Return the fastest that fits into `limit` bytes."""
    every = [*found]
    least = min((one.memory for one in every), default=None)
    small = [one for one in every if limit is None or one.memory <= limit]
    return Findings(min(small, key=lambda one: one.seconds, default=None), notes, least)
