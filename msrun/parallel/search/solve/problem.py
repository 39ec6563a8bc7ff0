"""The search as a graph: nodes that choose a strategy, edges that pay for redistribution.

A strategy is one choice of the node's rule on every mesh axis.  There are four kinds of nodes:

- `param`: how a parameter is stored between steps.
- `op`: how an operator's work is split.
- `layout`: in which layout a tensor with several consumers is handed to all of them.  The tensor
  is redistributed once, on the edge to this node, and each consumer may still redistribute again.
- `out`: in which layout the caller of the model expects an output.

A cost is either one node's (computation, update, memory) or one pair's (redistribution, a saved
copy); nothing costs more than two strategies decide.  This is what elimination needs.  Values that
depend on no parameter, such as masks and position tables, are no nodes: they have one layout that
costs but does not choose (`uses`), which keeps the graph of a transformer as simple as a ladder.
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

# The level of ZeRO that releases parameters after each pass.
_RELEASES = 3
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


def layout_nodes(chosen: Mapping[str, object]) -> list[str]:
    """Return the tensors that a plan redistributes once for all their consumers."""
    return [named_by(name) for name in chosen if is_layout_node(name)]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor between its producer and a consumer.

    Args:
        value: Its name.
        out_port: Number of the producer's output.
        port: Number of the consumer's input.
        view: How the consumer names its dims; None as the tensor itself does.
        nbytes: Of the full tensor.
        forward_times: How often a step redistributes it.
        backward_times: How often a step redistributes its gradient.
    """

    value: str
    out_port: int
    port: int
    view: DimMap | None
    nbytes: int
    forward_times: float
    backward_times: float


class DataParallelKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller has decided for parameters and gradients over `data_axes`.

    Args:
        sharded_from: Parameters of at least so many bytes have their state sharded, the others are
            replicated; None is for the search to decide.
        level: Of ZeRO (see `data_parallel.zero`), which says how often a parameter whose state is
            sharded is gathered, and its gradient reduced; 0 is for the search to decide.
        reduce_itemsize: Bytes of an element of a gradient that is reduced; None is its own.
    """

    sharded_from: float | None = None
    level: int = 0
    reduce_itemsize: int | None = None

    @property
    def has_whole_gradients(self) -> bool:
        """Whether gradients of several micro-batches accumulate before they are sharded."""
        return self.level == 1

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered parameters stay until the last backward pass of a step."""
        return 0 < self.level < _RELEASES

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of every micro-batch are reduced."""
        return self.level > 1

    @property
    def gathers_each(self) -> bool:
        """Whether parameters are gathered for every forward and every backward pass."""
        return self.level == _RELEASES


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made for.

    Args:
        sizes: Of the mesh axes, the slowest-varying first.
        topology: What the mesh runs on.
        data_axes: Axes whose ranks get different samples; along others all get the same.  Empty
            when the batch can come in any layout.
        batch: Samples of the global batch, where it comes sharded.
        rounds: Micro-batches that one step takes the time of, idle ones of a pipeline included.
        recompute: Whether repeated blocks save only their input.
        state_bytes: Of the optimizer, for each element of a parameter.
        training: Whether there is a backward pass.
        decided: By the caller.
    """

    sizes: tuple[int, ...]
    topology: Topology
    data_axes: frozenset[int] = frozenset()
    batch: int = 0
    rounds: float = 1
    recompute: bool = False
    state_bytes: int = 12
    training: bool = True
    decided: DataParallelKeys = DataParallelKeys()

    def redistribution_costs(self) -> RedistributionCosts:
        """Return the costs of redistribution."""
        return RedistributionCosts(self.topology.wires(self.sizes))


@dataclass(slots=True, kw_only=True)
class StrategyNode:
    """A node of the search: it chooses one strategy.

    Args:
        name: Of the parameter's value or of the step; see `layout_node` for the others.
        kind: `param`, `op`, `layout` or `out`.
        rule: What it can choose of, on one axis.
        rows: Strategies: index of the choice on each axis, (strategies, axes).
        seconds: Of each strategy, for one step of training.
        memory: Bytes of each strategy on one rank.
        microbatch_memory: Of these, what every micro-batch in flight takes again.
    """

    name: str
    kind: str
    rule: ShardingRule
    rows: IntArray
    seconds: FloatArray
    memory: FloatArray
    microbatch_memory: FloatArray

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
        source: Index of the producer's node.
        target: Index of the consumer's node.
        seconds: (strategies of the source, strategies of the target).
        exchange: What is redistributed; None for a condition that moves nothing.
        memory: Bytes on one rank of a copy that the consumer saves, of the same shape; None if it
            saves none.
        is_per_microbatch: Whether each micro-batch in flight has a copy of its own.
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
        edges: What pairs of strategies cost.
        fixed: Seconds that no strategy changes.
        unknown: Operators without a rule, which run replicated.
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
            allowed: Index of a node -> indices of the strategies that are left.
        """
        nodes = [
            replace(
                node,
                rows=node.rows[allowed[at]],
                seconds=node.seconds[allowed[at]],
                memory=node.memory[allowed[at]],
                microbatch_memory=node.microbatch_memory[allowed[at]],
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
        """Return the problem with so many micro-batches in flight instead of one."""
        nodes = [
            replace(node, memory=node.memory + (batches - 1) * node.microbatch_memory)
            for node in self.nodes
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
        list(allowed) if size > 1 else [0] for allowed, size in zip(per_axis, sizes, strict=True)
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
    product: IntArray = np.where(where, np.array(sizes, dtype=np.int64), 1).prod(axis=1)
    return product


def stored_parts(shape: Sequence[int], codes: IntArray, sizes: Sequence[int]) -> IntArray:
    """Return in how many shards parameters are stored between steps, for each row of `codes`.

    Where its state is sharded, a parameter is too: by the first dim that no other axis shards and
    that divides evenly.  Where there is none, both are replicated on that axis.
    """
    shards = parts(is_sharded(codes), sizes)
    taken = [(codes == dim).any(axis=1) for dim in range(len(shape))]
    for axis, size in enumerate(sizes):
        wanted = codes[:, axis] == RZ
        for dim, length in enumerate(shape):
            if size > 1 and length % size == 0:
                cut = wanted & ~taken[dim]
                shards = np.where(cut, shards * size, shards)
                taken[dim] = taken[dim] | cut
                wanted = wanted & ~cut
    return shards


def work(rule: ShardingRule, rows: IntArray, setting: Setting, *, recomputes: bool) -> FloatArray:
    """Return the seconds of computation of each strategy, for one step of training.

    The roofline: the larger of operations over the device's rate and bytes over its memory's
    (Williams, Waterman and Patterson, CACM 52(4), 2009), divided among the ranks that share it.

    Args:
        rule: Of the operator.
        rows: Its strategies.
        setting: What the plan is for.
        recomputes: Whether the backward pass runs the forward pass again.
    """
    topology = setting.topology
    alone = max(rule.flops / (topology.flops * topology.efficiency), _traffic(rule, topology))
    divides = np.array([choice.divides for choice in rule.choices])
    shared = parts(divides[rows], setting.sizes)
    passes = 1 + (rule.backward if setting.training else 0) + (1 if recomputes else 0)
    starts = topology.launch * (1 + setting.training + recomputes) if alone else 0.0
    seconds: FloatArray = (alone / shared * passes + starts) * setting.rounds
    return seconds


def _traffic(rule: ShardingRule, topology: Topology) -> float:
    return rule.nbytes / topology.memory_bandwidth
