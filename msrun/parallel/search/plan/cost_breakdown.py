"""What the seconds of a plan are made up of, and its placements as a saved plan has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.search.cost.cost import RedistributionCosts
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.graph.axis_placement import placement_text
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.mesh.layout_solver import Outcome, Stage
from msrun.parallel.search.plan.plan import Operator
from msrun.parallel.search.solve.chain import ChainPlan
from msrun.parallel.search.solve.edges import CollectiveCost, itemize
from msrun.parallel.search.solve.modes import BlockNodes
from msrun.parallel.search.solve.problem import Exchange, Problem, StrategyNode

_COLLECTIVES = {
    MoveKind.GATHER: "all-gather",
    MoveKind.SCATTER: "reduce-scatter",
    MoveKind.MOVE: "all-to-all",
    MoveKind.REDUCE: "all-reduce",
}
_AXES = ("xp", "mp", "tp")


def axis_names(sizes: Sequence[int], batch: int) -> tuple[str, ...]:
    """Return names for the axes of a mesh, the slowest-varying first.

    The first is `dp`, whose ranks get different samples, where it divides the samples of a
    micro-batch.
    """
    if batch % sizes[0]:
        return _AXES[-len(sizes) :]
    return (DATA_AXIS, *_AXES[len(_AXES) + 1 - len(sizes) :])


class CostBreakdown:
    """Adds up the seconds of a plan, by what they are spent on.

    Args:
        redistribution: Costs on the mesh.
        names: Of the mesh axes.
    """

    def __init__(self, redistribution: RedistributionCosts, names: Sequence[str]) -> None:
        self._redistribution, self._names = redistribution, names
        self._items: dict[object, list[tuple[str, float]]] = {}
        self.costs: dict[str, float] = defaultdict(float)

    def add(
        self, problem: Problem, chosen: Mapping[int, int], own: Iterable[int] | None = None
    ) -> None:
        """Add nodes, and the edges that lead to them.

        Args:
            problem: Of the nodes.
            chosen: Node -> strategy, of all that edges come from too.
            own: Nodes to add; None adds all that are chosen.
        """
        wanted = set(chosen if own is None else own)
        for at in wanted:
            node = problem.nodes[at]
            word = "computation" if node.kind == "op" else "update of parameters"
            self.costs[word] += float(node.seconds[chosen[at]])
        for edge in problem.edges:
            if edge.target in wanted and edge.exchange and edge.source in chosen:
                self._add_edge(problem, edge.source, edge.target, edge.exchange, chosen)

    def _add_edge(
        self,
        problem: Problem,
        source: int,
        target: int,
        exchange: Exchange,
        chosen: Mapping[int, int],
    ) -> None:
        producer, consumer = problem.nodes[source], problem.nodes[target]
        made = producer.outs(exchange.out_port)[[chosen[source]]]
        wanted = consumer.ins(exchange.port)[[chosen[target]]]
        view = tuple(exchange.view.dims.items()) if exchange.view else None
        traffic = exchange.nbytes, exchange.forward_times, exchange.backward_times
        key = made.tobytes(), wanted.tobytes(), view, traffic, producer.kind
        if key not in self._items:  # equal blocks exchange the same
            what = "parameters" if producer.kind == "param" else "activations"
            self._items[key] = [
                (self._name(item, what), item.seconds)
                for item in itemize(self._redistribution, made, wanted, exchange)
            ]
        for name, seconds in self._items[key]:
            self.costs[name] += seconds

    def _name(self, item: CollectiveCost, what: str) -> str:
        side = "gradients of " if item.is_gradient else ""
        return f"{_COLLECTIVES[item.kind]} over {self._names[item.axis]}, {side}{what}"


def stage_costs(
    outcome: Outcome, redistribution: RedistributionCosts, names: Sequence[str]
) -> dict[str, float]:
    """Return what the slowest stage of `outcome` spends its time on."""
    stage = max(outcome.stages, key=lambda one: one.seconds)
    breakdown = CostBreakdown(redistribution, names)
    for chosen, own in stage.plan.pieces(stage.chain, stage.entry):
        breakdown.add(stage.chain.problem, chosen, own)
    if stage.name not in ("all", "last"):
        sent = stage.seconds - sum(breakdown.costs.values())
        breakdown.costs["sending between stages"] = max(0.0, sent)
    return sorted_costs(breakdown.costs)


def sorted_costs(costs: Mapping[str, float]) -> dict[str, float]:
    """Return `costs` without zeros, the largest first."""
    return dict(sorted(((k, v) for k, v in costs.items() if v > 0), key=lambda kv: -kv[1]))


def joined(stages: Sequence[Stage], count: int) -> tuple[dict[int, int], list[dict[int, int]]]:
    """Return head and tail of a plan in one, and its blocks after the first.

    Args:
        stages: All kinds of stages.
        count: Stages there are.
    """
    by_name = {stage.name: stage.plan for stage in stages}
    if "all" in by_name:
        plan = by_name["all"]
        return {**plan.head, **plan.tail}, plan.blocks
    first, last = by_name["first"], by_name["last"]
    middle = by_name["middle"].blocks * (count - 2) if "middle" in by_name else []
    return {**last.head, **last.tail, **first.head}, [*first.blocks, *middle, *last.blocks]


def expanded(outcome: Outcome, names: BlockNodes) -> dict[str, tuple[int, ...]]:
    """Return what every node of the whole program chooses."""
    ends, inside = joined(outcome.stages, outcome.layout.stages)
    plan = ChainPlan(head=ends, blocks=inside, tail={})
    return names.expand(outcome.stages[0].chain.problem, plan)


def operators(
    program: Program, rules: Mapping[str, ShardingRule], chosen: Mapping[str, tuple[int, ...]]
) -> dict[str, Operator]:
    """Return how the work of every operator of `program` is split."""
    placements = {}
    for step in program.steps:
        row = chosen.get(step.name)
        if row is None:
            continue
        choices = [rules[step.name].choices[at] for at in row]
        placements[step.name] = Operator(
            module=step.module,
            op=step.packet,
            divided=[choice.name for choice in choices],
            ins=[
                [placement_text(c.ins[port]) for c in choices] for port in range(len(step.inputs))
            ],
            outs=[
                [placement_text(c.outs[port]) for c in choices] for port in range(len(step.outputs))
            ],
        )
    return placements


def parameters(
    program: Program, rules: Mapping[str, ShardingRule], chosen: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Return how every parameter of `program` is stored."""
    return {
        full: [placement_text(rules[name].choices[at].outs[0]) for at in chosen[name]]
        for name, full in program.params.items()
        if name in chosen
    }


def rules_of(nodes: Iterable[StrategyNode]) -> dict[str, ShardingRule]:
    """Return node -> its rule."""
    return {node.name: node.rule for node in nodes}
