"""States of random generators as tensors, and back.

If a job has the mesh of the saved one, each rank continues exactly the generators of the rank that
had its position.  On another mesh the saved ranks have no counterparts.  Ranks of stream 0 then
continue the generators of the first.  So do other ranks for a generator that was equal on all saved
ranks; for one that was not, they derive a stream of their own from the state of the first and the
number of their stream.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from msrun.parallel.auto.random_steps.step_rng import StepRng
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.schema import Index, Manifest
from msrun.parallel.checkpoint.tensors import read_tensor
from msrun.parallel.exchange.generators import (
    numpy_state,
    python_state,
    set_numpy_state,
    set_python_state,
)
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.rank_context import RankContext

# Names of tensors in a checkpoint: this, the rank, a point, and the kind.
RANDOM = "random."
# Generators of models that a plan of mode auto runs: equal on all ranks.
DRAWS = "draws"
TORCH = "torch"
PYTHON = "python"
NUMPY = "numpy"

_SEED_BITS = 63


def capture(device: torch.device) -> dict[str, Tensor]:
    """Return kind of generator -> its state: torch, that of `device`, Python, numpy if loaded."""
    states = {TORCH: torch.get_rng_state(), PYTHON: python_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    of_numpy = numpy_state()
    return states if of_numpy is None else {**states, NUMPY: of_numpy}


def continue_streams(
    states_of: Callable[[int], dict[str, Tensor]],
    saved: MeshLayout,
    here: tuple[MeshLayout, int],
    device: torch.device,
    stream: int,
) -> None:
    """Set the generators of this rank to continue those of a saved job.

    Args:
        states_of: Rank of the saved job -> its states.
        saved: Layout of the saved job.
        here: Layout of this job, and this rank.
        device: Device of this rank.
        stream: Number of this rank's stream.
    """
    layout, rank = here
    if list(saved.axes.items()) == list(layout.axes.items()):
        restore(states_of(saved.rank_at(layout.position(rank))), device)
        return
    # One rank of another stream is enough to tell whether a generator was common to all: Python's
    # and numpy's usually were, torch's was not.
    first = states_of(saved.rank_at(0))
    other = next((rank for rank in range(saved.world_size) if saved.stream(rank)), None)
    second = {} if other is None else states_of(other)
    common = {
        kind: state
        for kind, state in first.items()
        if stream == 0 or (kind in second and torch.equal(state, second[kind]))
    }
    restore(common, device)
    derive({kind: first[kind] for kind in first if kind not in common}, stream, device)


def restore_saved(
    manifest: Manifest,
    index: Index,
    files: DataFiles,
    context: RankContext,
    step_rngs: Sequence[Sequence[StepRng]],
) -> None:
    """Set the generators of this rank, and those of models, to continue those of a checkpoint.

    Args:
        manifest: Of a checkpoint.
        index: Its index.
        files: Its data files.
        context: This rank.
        step_rngs: Generators of each model.
    """

    def states(rank: int) -> dict[str, Tensor]:
        prefix = f"{RANDOM}{rank}."
        return {
            name.removeprefix(prefix): read_tensor(files, stored)
            for name, stored in index.tensors.items()
            if name.startswith(prefix)
        }

    here = (context.layout, context.rank)
    saved = MeshLayout(manifest.mesh, ranks=tuple(manifest.ranks))
    continue_streams(states, saved, here, context.device, context.stream)
    common = states(0)
    for number, model in enumerate(step_rngs):
        for step_rng in model:
            step_rng.state = common.get(f"{DRAWS}{number}", step_rng.state)


def restore(states: dict[str, Tensor], device: torch.device) -> None:
    """Set generators to `states` as of `capture`; states of absent generators are skipped."""
    for kind, state in states.items():
        if kind == TORCH:
            torch.set_rng_state(state)
        elif kind == PYTHON:
            set_python_state(state)
        elif kind == NUMPY:
            set_numpy_state(state)
        elif kind == device.type:
            getattr(torch, device.type).set_rng_state(state, device)


def derive(states: dict[str, Tensor], index: int, device: torch.device) -> None:
    """Seed generators from `states` and `index` alone, so that each index gets its own stream."""
    for kind, state in states.items():
        data = bytes(state.contiguous().view(torch.uint8).tolist())
        digest = hashlib.blake2b(data, digest_size=8, person=index.to_bytes(8, "little")).digest()
        seed = int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
        if kind == TORCH:
            torch.default_generator.manual_seed(seed)
        elif kind == PYTHON:
            random.seed(seed)
        elif kind == NUMPY and (numpy_random := sys.modules.get("numpy.random")):
            numpy_random.seed(seed % 2**32)
        elif kind == device.type:
            getattr(torch, device.type).manual_seed(seed)
