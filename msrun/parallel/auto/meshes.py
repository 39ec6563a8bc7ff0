"""The best mesh for a job that `rt.shard` runs: all that it can run, each with its best plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from msrun.parallel.auto.account import axis_names, expanded
from msrun.parallel.auto.batches import Batches
from msrun.parallel.auto.layouts import Job, data_shapes, divisors, explore
from msrun.parallel.auto.memory import OutOfMemoryError
from msrun.parallel.auto.problem import Setting
from msrun.parallel.auto.repeat import find_blocks, shortened
from msrun.parallel.auto.search import Mode, Names, search
from msrun.parallel.auto.topology import Topology
from msrun.parallel.config import PIPELINE_AXIS

# Ranks up to which meshes of three axes are looked at: each takes most of a second.
_THIRD_AXIS_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A mesh, and the best plan on it.

    Args:
        mesh: Axis -> size; stages of the pipeline first, where there are some.
        microbatches: Of a step.
        recompute: Whether repeated blocks keep only what they are given.
        chosen: What every node of the program of a micro-batch chooses.
        seconds: Of a step.
        memory: Bytes on a rank.
    """

    mesh: dict[str, int]
    microbatches: int
    recompute: bool
    chosen: dict[str, tuple[int, ...]]
    seconds: float
    memory: float


def candidates(world: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the meshes over `world` ranks whose data axis divides `batch` samples evenly.

    Ranks of the first axis, `dp`, are handed different samples; it may have one rank.
    """
    most = 3 if world <= _THIRD_AXIS_RANKS else 2
    for sizes in data_shapes(world):
        if len(sizes) <= most and batch % sizes[0] == 0:
            yield dict(zip(axis_names(len(sizes)), sizes, strict=True))


def choose(
    programs: Batches,
    topology: Topology,
    *,
    world: int,
    batch: int,
    mode: Mode = "exact",
    limit: float | None = None,
) -> Chosen:
    """Return the fastest mesh and plan.

    A micro-batch never takes less time for a sample than the whole batch at once, so there are
    more of them only where fewer fit no mesh, unless their blocks are recomputed.

    Args:
        programs: The model, for any batch.
        topology: What it runs on.
        world: Ranks.
        batch: Samples of a step.
        mode: As of `search`.
        limit: Bytes that a rank has; None is any.

    Raises:
        OutOfMemoryError: No plan fits; it says what the smallest takes.
    """
    least: list[float] = []
    fitting: list[Chosen] = []
    for number in divisors(batch):
        part = batch // number
        program = programs.at(part)
        again = (False, True) if find_blocks(program) else (False,)
        for mesh, recompute in product(candidates(world, part), again):
            setting = Setting(
                sizes=tuple(mesh.values()),
                topology=topology,
                data_axes=frozenset({0}),
                batch=part,
                rounds=number,
                recompute=recompute,
            )
            try:
                found = search(program, setting, mode=mode, limit=limit)
            except OutOfMemoryError as error:
                least.append(error.least)
                continue
            fitting.append(
                Chosen(
                    mesh=mesh,
                    microbatches=number,
                    recompute=recompute,
                    chosen=found.chosen,
                    seconds=found.seconds,
                    memory=found.memory,
                )
            )
        if not all(one.recompute for one in fitting):
            break
    stages = _with_stages(programs, topology, world=world, batch=batch, limit=limit)
    if isinstance(stages, Chosen):
        fitting.append(stages)
    elif stages is not None:
        least.append(stages)
    if not fitting:
        raise OutOfMemoryError(min(least))
    return min(fitting, key=lambda one: one.seconds)


def _with_stages(
    programs: Batches, topology: Topology, *, world: int, batch: int, limit: float | None
) -> Chosen | float | None:
    """Return the fastest layout with pipeline stages of equally many blocks.

    Returns:
        It, or the bytes on a rank of the smallest if none fits; None if there is none.
    """
    small, large, sizes = programs.ends
    blocks = find_blocks(small)
    if blocks is None:
        return None
    short, two = shortened(small, blocks)
    job = Job(
        programs=Batches(short, shortened(large, blocks)[0], sizes),
        blocks=two,
        count=blocks.count,
        topology=topology,
        world=world,
        batch=batch,
        limit=math.inf if limit is None else limit,
        is_training=True,
    )
    *_, progress = explore(job)
    best = progress.best
    if best is None:
        return progress.least
    names = axis_names(len(best.layout.sizes))
    return Chosen(
        mesh={PIPELINE_AXIS: best.layout.stages} | dict(zip(names, best.layout.sizes, strict=True)),
        microbatches=best.layout.microbatches,
        recompute=best.layout.recompute,
        chosen=expanded(best, Names(small, short, blocks)),
        seconds=best.seconds,
        memory=best.memory,
    )
