"""Plans of a given kind, in the form in which they are saved."""

from __future__ import annotations

import math

import numpy as np

from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.plan.cost_breakdown import operators, parameters, rules_of
from msrun.parallel.search.plan.plan import VERSION, SavedPlan, write_plan
from msrun.parallel.search.plan.plan_io import identity, shared
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.problem import Edge, Problem, Setting, named_by

SAMPLES = {"b0", "d0", "b"}


def drawn(problem, rng):
    """Return a plan at random: the best when costs are."""
    nodes = list(problem.nodes)
    edges = []
    for edge in problem.edges:
        noise = rng.random(edge.seconds.shape) * rng.choice([0.1, 1.0, 4.0])
        edges.append(
            Edge(edge.source, edge.target, np.where(np.isinf(edge.seconds), np.inf, noise))
        )
    chosen = solve(Problem(nodes=nodes, edges=edges))[1]
    return {
        node.name: tuple(node.rows[at].tolist())
        for node, at in zip(problem.nodes, chosen, strict=True)
    }


def nothing(module, packet, choices):
    """Have an axis divide nothing."""
    del module, packet, choices
    return "R"


def samples(module, packet, choices):
    """Have an axis divide samples, though its ranks are given the same ones."""
    del module, packet
    return next(iter(SAMPLES.intersection(choices)), "R")


def megatron(module, packet, choices):
    """Have an axis divide columns, then rows, and what is between."""
    last = module.rpartition(".")[2]
    if last in ("up", "q", "k", "v"):
        return "n"
    if last in ("down", "o"):
        return "k"
    found = {"gelu": choices[-1:], "scaled_dot_product_attention": ["b1"]}
    return found.get(packet, ["R"])[0]


def vocabulary(module, packet, choices):
    """Have it divide the vocabulary besides, in embedding and head."""
    return {"tokens": "v", "head": "n"}.get(module) or megatron(module, packet, choices)


def save_plan(path, model, sample, mesh, *, stored="R", divides=nothing, microbatches=1):
    """Write the best plan whose axis `dp` divides samples.

    Args:
        path: Takes it.
        model: Of the plan.
        sample: Of the whole batch.
        mesh: Axis -> size.
        stored: How parameters lie on `dp`: `R`, or `Z` for their state in parts.
        divides: Returns what the other axis divides, of a module's name, an operator, and what can
            be divided.
        microbatches: Of a step.
    """
    batch = len(sample[0]) // microbatches
    program = trace(model, [x[:batch] for x in sample]).program
    names = list(mesh)
    setting = Setting(
        sizes=tuple(mesh.values()),
        topology=PRESETS["cpu"],
        data_axes=frozenset(at for at, name in enumerate(names) if name == "dp"),
        batch=batch,
    )
    problem = build(program, setting)
    steps = {step.name: step for step in program.steps}
    allowed = {}
    for at, node in enumerate(problem.nodes):
        keeps = np.ones(len(node.rows), bool)
        choices = [choice.name for choice in node.rule.choices]
        for axis in range(len(names)):
            if axis in setting.data_axes:
                wanted = _on_data(node, choices, program, stored)
            else:
                wanted = _beside(node, choices, program, steps.get(node.name), divides)
            keeps &= np.isin(np.array(choices)[node.rows[:, axis]], sorted(wanted))
        allowed[at] = np.flatnonzero(keeps)
    restricted = problem.restricted(allowed)
    chosen = {
        node.name: tuple(node.rows[at].tolist())
        for node, at in zip(restricted.nodes, solve(restricted)[1], strict=True)
    }
    rules = rules_of(problem.nodes)
    plan = SavedPlan(
        version=VERSION,
        model="a test",
        program=identity(program),
        topology="cpu",
        world=math.prod(setting.sizes),
        mesh=mesh,
        stages=1,
        microbatches=microbatches,
        batch=len(sample[0]),
        recompute=False,
        seconds=1.0,
        costs={},
        memory=1.0,
        gap=None,
        params=parameters(program, rules, chosen),
        operators=operators(program, rules, chosen),
        shared=shared(rules, chosen),
    )
    write_plan(plan, path)


def _on_data(node, choices, program, stored):
    """Return what a node may do on the axis `dp`."""
    match node.kind:
        case "out":
            return set(choices)
        case "param":
            return {stored if stored in choices else "R"}
        case "layout" if named_by(node.name) in program.params:
            return {"R", "RP"}
        case _:
            return SAMPLES.intersection(choices) or {"R"}


def _beside(node, choices, program, step, divides):
    """Return what a node may do on another axis."""
    if node.kind in ("layout", "out"):
        return set(choices)
    if node.kind == "param":
        word = divides(program.params[node.name].rpartition(".")[0], "", [])
        return {"R"} if word == "R" else set(choices) - {"Z"}
    return {divides(step.module, step.packet, choices)}
