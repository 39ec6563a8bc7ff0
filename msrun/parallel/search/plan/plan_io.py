"""From a plan to its saved form, and back to the strategies that an execution needs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import msgspec

from msrun.errors import ConfigError
from msrun.parallel.search.graph.axis_placement import placement_text
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.graph.rules import ShardingRule
from msrun.parallel.search.plan.plan import SavedPlan
from msrun.parallel.search.solve.problem import Problem, StrategyNode, is_layout_node, named_by

Row = tuple[int, ...]
_DIGITS = 12


def identity(program: Program) -> str:
    """Return a text that identifies a model, by its parameters and steps, for any batch."""
    params = [(full, program.values[value].shape) for value, full in program.params.items()]
    steps = [(s.name, s.target, tuple(s.inputs.items()), s.outputs) for s in program.steps]
    content = msgspec.json.encode([params, steps])
    digest = hashlib.sha256(content).hexdigest()[:_DIGITS]
    return f"{len(params)} parameters and {len(steps)} steps ({digest})"


def shared(rules: Mapping[str, ShardingRule], chosen: Mapping[str, Row]) -> dict[str, list[str]]:
    """Return the layout of each tensor with several consumers: the choices of layout nodes."""
    return {
        named_by(name): [rules[name].choices[at].name for at in row]
        for name, row in chosen.items()
        if is_layout_node(name)
    }


def check_fit(
    plan: SavedPlan,
    where: str,
    *,
    world: int,
    mesh: Mapping[str, int],
    batch: int,
    ranks: Sequence[int] = (),
) -> None:
    """Refuse a plan that was made for something else.

    Args:
        plan: The plan.
        where: How messages name it.
        world: Ranks of the job.
        mesh: Its axes, stages of the pipeline included.
        batch: Samples of a step.
        ranks: The rank at each position of the mesh; empty if they are in their own order.

    Raises:
        ConfigError: World, mesh, batch or the order of the ranks differ.
    """
    if plan.world != world:
        raise ConfigError(f"{where} is for {plan.world} ranks, and world_size is {world}")
    if plan.axes() != dict(mesh):
        raise ConfigError(f"{where} is for the mesh {_shown(plan.axes())}, not {_shown(mesh)}")
    if plan.rank_list != [*ranks]:
        orders = [f"{given}" if given else "their own order" for given in (plan.rank_list, ranks)]
        raise ConfigError(
            f"{where} is for ranks in {orders[0]}, not in {orders[1]}",
            hint="search again with `msrun search --rank-list`",
        )
    if plan.batch != batch:
        raise ConfigError(
            f"{where} is for {plan.batch} samples a step, and the sample of rt.shard makes {batch}",
            hint="search again with `msrun search --batch`",
        )


def check_model(plan: SavedPlan, where: str, program: Program) -> None:
    """Refuse a plan of another model.

    Raises:
        ConfigError: Its parameters or steps are others.
    """
    given = identity(program)
    if plan.program != given:
        raise ConfigError(f"{where} is for a model of {plan.program}, and this one has {given}")


def choices_of(plan: SavedPlan, where: str, problem: Problem, program: Program) -> dict[str, Row]:
    """Return what every node of `problem` chooses under `plan`.

    Args:
        plan: Of a program with the same steps.
        where: How messages name it.
        problem: Built with a layout node for every tensor that the plan has one for.
        program: Of the problem.

    Raises:
        ConfigError: The plan says nothing of a node, or what the node cannot do.
    """
    return {node.name: _row(plan, where, node, program) for node in problem.nodes}


def _row(plan: SavedPlan, where: str, node: StrategyNode, program: Program) -> Row:
    name = program.params.get(node.name, named_by(node.name))
    rows = [tuple(row) for row in node.rows.tolist()]
    if node.kind == "out":
        return rows[0]  # the layout that the caller of the model expects: there is no other
    words = [choice.name for choice in node.rule.choices]
    if node.kind == "param":
        words = [placement_text(choice.outs[0]) for choice in node.rule.choices]
        said = plan.params.get(name, [])
    elif node.kind == "layout":
        said = plan.shared.get(name, [])
    else:
        said = plan.operators[name].divided if name in plan.operators else []
    row = tuple(words.index(word) if word in words else -1 for word in said)
    if row not in rows:
        shown = " x ".join(said) or "nothing"
        raise ConfigError(f"{where} has {shown} for {name}, which has no such placement")
    return row


def _shown(mesh: Mapping[str, int]) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{sizes} = {math.prod(mesh.values())}" if len(mesh) > 1 else sizes
