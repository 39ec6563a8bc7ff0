"""The search as a graph: nodes that choose a strategy, edges that pay for redistribution.

A strategy is one choice of the node's rule on every mesh axis.  Nodes are parameters, operators,
and hubs: tensors that several operators read, which move once for all of them.  What no parameter
has a part in, such as masks and tables of positions, has one layout, so it costs but does not
choose; this is what keeps the graph of a transformer as simple as a ladder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from msrun.parallel.search.cost.cost import RedistributionCosts
from msrun.parallel.search.cost.topology import Topology
from msrun.parallel.search.graph.axis_placement import RZ, FloatArray, IntArray, is_sharded
from msrun.parallel.search.graph.rules import Choice, ShardingRule
from msrun.parallel.search.graph.views import DimMap

# Nodes that choose the layout of a value have the value's name behind this.
_LAYOUT_NODE = "layout:"


def layout_node(value: str) -> str:
    """Return the name of the node that chooses the layout of `value` for all its consumers."""
    return f"{_LAYOUT_NODE}{value}"


def is_layout_node(name: str) -> bool:
    """Return whether a node of this name chooses a layout for all consumers of a value."""
    return name.startswith(_LAYOUT_NODE)


def named_by(node: str) -> str:
    """Return the value or the step that the node called `node` is for."""
    return node.removeprefix(_LAYOUT_NODE)


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor on its way from who makes it to who reads it.

    Args:
        value: Its name.
        made: Number of the output that it is.
        port: Number of the input that it becomes.
        view: How the reader names its dims; None as it does itself.
        nbytes: Of the whole tensor.
        ahead: How often a step moves it.
        back: How often a step moves its gradient.
    """

    value: str
    made: int
    port: int
    view: DimMap | None
    nbytes: int
    ahead: float
    back: float


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made for.

    Args:
        sizes: Of the mesh axes, the slowest-varying first.
        topology: What the mesh runs on.
        data_axes: Axes whose ranks are handed different samples; others are handed the same.
            Empty when the batch can come in any layout.
        batch: Samples of the whole batch, where it comes divided.
        rounds: Micro-batches that one step takes the time of, idle ones of a pipeline included.
        recompute: Whether repeated blocks keep only what they are given.
        state_bytes: Of the optimizer, for each element of a parameter.
        training: Whether there is a backward pass.
    """

    sizes: tuple[int, ...]
    topology: Topology
    data_axes: frozenset[int] = frozenset()
    batch: int = 0
    rounds: float = 1
    recompute: bool = False
    state_bytes: int = 12
    training: bool = True

    def redistribution_costs(self) -> RedistributionCosts:
        """Return the costs of redistribution."""
        return RedistributionCosts(self.topology.wires(self.sizes))


@dataclass(slots=True, kw_only=True)
class StrategyNode:
    """What chooses one strategy.

    Args:
        name: Of the parameter's value, of the step, or of the hub's value after `hub:`.
        kind: `param`, `op`, `hub`, or `out` for what the model returns.
        rule: What it can choose of, on one axis.
        rows: Strategies: index of the choice on each axis, (strategies, axes).
        seconds: Of each strategy, for one step of training.
        memory: Bytes of each strategy on one rank.
        held: Of these, what is kept of one micro-batch.
    """

    name: str
    kind: str
    rule: ShardingRule
    rows: IntArray
    seconds: FloatArray
    memory: FloatArray
    held: FloatArray

    def outs(self, port: int = 0) -> IntArray:
        """Return the codes of an output, (strategies, axes)."""
        codes: IntArray = np.array([choice.outs[port] for choice in self.rule.choices])[self.rows]
        return codes

    def ins(self, port: int) -> IntArray:
        """Return the codes of an input, (strategies, axes)."""
        codes: IntArray = np.array([choice.ins[port] for choice in self.rule.choices])[self.rows]
        return codes


@dataclass(slots=True, frozen=True)
class Edge:
    """What redistribution between two nodes costs.

    Args:
        source: Index of the node that makes a tensor.
        target: Index of the node that reads it.
        seconds: (strategies of the source, strategies of the target).
        exchange: What is moved; None for a condition that moves nothing.
        memory: Bytes on one rank of a copy that the reader keeps, of the same shape; None for none.
        is_per_microbatch: Whether one is kept of each micro-batch.
    """

    source: int
    target: int
    seconds: FloatArray
    exchange: Exchange | None = None
    memory: FloatArray | None = None
    is_per_microbatch: bool = False


@dataclass(slots=True, kw_only=True)
class Problem:
    """Choose a strategy for every node so that all costs together are least.

    Args:
        nodes: What chooses.
        edges: What pairs of choices cost.
        fixed: Seconds that no choice changes.
        unknown: Operators without a rule, which run whole on every rank.
    """

    nodes: list[StrategyNode]
    edges: list[Edge]
    fixed: float = 0.0
    unknown: tuple[str, ...] = ()

    def seconds(self, chosen: Sequence[int]) -> float:
        """Return what the strategies `chosen`, one for each node, cost."""
        own = sum(float(node.seconds[at]) for node, at in zip(self.nodes, chosen, strict=True))
        between = sum(float(e.seconds[chosen[e.source], chosen[e.target]]) for e in self.edges)
        return self.fixed + own + between

    def memory(self, chosen: Sequence[int]) -> float:
        """Return the bytes on one rank with the strategies `chosen`."""
        own = sum(float(node.memory[at]) for node, at in zip(self.nodes, chosen, strict=True))
        return own + sum(
            float(edge.memory[chosen[edge.source], chosen[edge.target]])
            for edge in self.edges
            if edge.memory is not None
        )

    def restricted(self, allowed: Mapping[int, IntArray]) -> Problem:
        """Return the problem in which some nodes have fewer strategies.

        Args:
            allowed: Index of a node -> indices of the strategies that it keeps.
        """
        nodes = [
            replace(
                node,
                rows=node.rows[allowed[at]],
                seconds=node.seconds[allowed[at]],
                memory=node.memory[allowed[at]],
                held=node.held[allowed[at]],
            )
            if at in allowed
            else node
            for at, node in enumerate(self.nodes)
        ]
        edges = []
        for e in self.edges:
            ends = allowed.get(e.source), allowed.get(e.target)
            memory = None if e.memory is None else _part(e.memory, *ends)
            edges.append(replace(e, seconds=_part(e.seconds, *ends), memory=memory))
        return Problem(nodes=nodes, edges=edges, fixed=self.fixed, unknown=self.unknown)

    def in_flight(self, batches: int) -> Problem:
        """Return the problem with so many micro-batches kept instead of one."""
        nodes = [
            replace(node, memory=node.memory + (batches - 1) * node.held) for node in self.nodes
        ]
        many: dict[int, FloatArray] = {}
        edges = []
        for edge in self.edges:
            if edge.is_per_microbatch and edge.memory is not None:
                if id(edge.memory) not in many:
                    many[id(edge.memory)] = batches * edge.memory
                edges.append(replace(edge, memory=many[id(edge.memory)]))
            else:
                edges.append(edge)
        return replace(self, nodes=nodes, edges=edges)


def _part(table: FloatArray, rows: IntArray | None, columns: IntArray | None) -> FloatArray:
    table = table if rows is None else table[rows]
    return table if columns is None else table[:, columns]


def strategies(choices: Sequence[Choice], sizes: Sequence[int]) -> IntArray:
    """Return every combination of choices that divides cut_evenly, (strategies, axes)."""
    return combinations([range(len(choices))] * len(sizes), choices, sizes)


def combinations(
    per_axis: Sequence[Iterable[int]], choices: Sequence[Choice], sizes: Sequence[int]
) -> IntArray:
    """Return every combination of the given choices of each axis that divides evenly."""
    options = [
        list(found) if size > 1 else [0] for found, size in zip(per_axis, sizes, strict=True)
    ]
    grid = np.array(np.meshgrid(*options, indexing="ij"), dtype=np.int64)
    rows: IntArray = grid.reshape(len(sizes), -1).T
    fits = np.ones(len(rows), bool)
    for index, choice in enumerate(choices):
        if choice.size:
            fits &= choice.size % parts(rows == index, sizes) == 0
    return rows[fits]


def parts(where: np.ndarray[tuple[int, int], np.dtype[np.bool_]], sizes: Sequence[int]) -> IntArray:
    """Return the product of the sizes of the axes for which `where` holds, for each row."""
    found: IntArray = np.where(where, np.array(sizes, dtype=np.int64), 1).prod(axis=1)
    return found


def stored_parts(shape: Sequence[int], codes: IntArray, sizes: Sequence[int]) -> IntArray:
    """Return in how many parts parameters lie between steps, for each row of `codes`.

    Where its state is cut, a parameter is too: by the first dim that no other axis cuts and that
    divides evenly.  Where there is none, both are whole on that axis.
    """
    found = parts(is_sharded(codes), sizes)
    taken = [(codes == dim).any(axis=1) for dim in range(len(shape))]
    for axis, size in enumerate(sizes):
        wanted = codes[:, axis] == RZ
        for dim, length in enumerate(shape):
            if size > 1 and length % size == 0:
                cut = wanted & ~taken[dim]
                found = np.where(cut, found * size, found)
                taken[dim] = taken[dim] | cut
                wanted = wanted & ~cut
    return found


def work(rule: ShardingRule, rows: IntArray, setting: Setting, *, again: bool) -> FloatArray:
    """Return the seconds of computation of each strategy, for one step of training.

    The roofline: the larger of operations over the device's rate and bytes over its memory's
    (Williams, Waterman and Patterson, CACM 52(4), 2009), divided among the ranks that share it.

    Args:
        rule: Of the operator.
        rows: Its strategies.
        setting: What the plan is for.
        again: Whether the backward pass runs the forward pass again.
    """
    topology = setting.topology
    whole = max(rule.flops / (topology.flops * topology.efficiency), _traffic(rule, topology))
    divides = np.array([choice.divides for choice in rule.choices])
    shared = parts(divides[rows], setting.sizes)
    passes = 1 + (rule.backward if setting.training else 0) + (1 if again else 0)
    starts = topology.launch * (1 + setting.training + again) if whole else 0.0
    seconds: FloatArray = (whole / shared * passes + starts) * setting.rounds
    return seconds


def _traffic(rule: ShardingRule, topology: Topology) -> float:
    return rule.nbytes / topology.memory_bandwidth
