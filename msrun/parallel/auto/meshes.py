"""The best mesh for a job that `rt.shard` runs: all that it can run, each with its best plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from msrun.parallel.auto.account import axis_names
from msrun.parallel.auto.batches import Batches
from msrun.parallel.auto.layouts import divisors, shapes
from msrun.parallel.auto.memory import OutOfMemoryError
from msrun.parallel.auto.problem import Setting
from msrun.parallel.auto.repeat import find_blocks
from msrun.parallel.auto.search import Found, Mode, search
from msrun.parallel.auto.topology import Topology

# What the layouts of `msrun search` have, and the executor does not run.
LEFT_OUT = "pipeline stages"
# Ranks up to which meshes of three axes are looked at: each takes most of a second.
_THIRD_AXIS_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A mesh, and the best plan on it.

    Args:
        mesh: Axis -> size.
        microbatches: Of a step.
        recompute: Whether repeated blocks keep only what they are given.
        found: The plan of a micro-batch.
    """

    mesh: dict[str, int]
    microbatches: int
    recompute: bool
    found: Found


def candidates(world: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the meshes over `world` ranks whose data axis divides `batch` samples evenly.

    Ranks of the first axis, `dp`, are handed different samples; it may have one rank.
    """
    most = 3 if world <= _THIRD_AXIS_RANKS else 2
    found = [sizes for sizes in shapes(world) if len(sizes) <= most]
    if world > 1:
        found.append((1, world))
    for sizes in found:
        if batch % sizes[0] == 0:
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
            fitting.append(Chosen(mesh=mesh, microbatches=number, recompute=recompute, found=found))
        if not all(one.recompute for one in fitting):
            break
    if not fitting:
        raise OutOfMemoryError(min(least))
    return min(fitting, key=lambda one: one.found.seconds)
