"""`rt.load_pretrained`: weights of files into a model of `rt.shard`, each rank its own parts.

The files are those of `from_pretrained`, or any safetensors or `torch.save` file of a state dict.
All names, shapes and types are checked on all ranks before the first tensor is filled.  A rank
reads from safetensors files the bytes of its own parts, one tensor after the other, so beside the
model it needs memory for one part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.peers import HostGroup
from msrun.parallel.checkpoint.state import TensorNames
from msrun.parallel.local import is_equal, local_part
from msrun.parallel.uneven_rows.rows import whole_shape
from msrun.parallel.weights.files import Piece, WeightFiles, compatible, is_adapter
from msrun.parallel.weights.names import Matched, match, match_adapter, shown
from msrun.parallel.weights.origin import Origin
from msrun.worker.beat import beat


class PretrainedKeys(NamedTuple):
    """What did not match in `rt.load_pretrained`, as `load_state_dict` of torch returns it.

    Attributes:
        missing_keys: Names of the model that the files lack; those keep their values.
        unexpected_keys: Names of the files that the model lacks.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    peers: HostGroup, model: nn.Module, origin: Origin, path: Path, *, strict: bool
) -> PretrainedKeys:
    """Fill `model` with the weights of a file or directory; all ranks call it.

    Args:
        peers: All ranks.
        model: A result of `rt.shard`, or a model before it.
        origin: The model as it was before.
        path: File, index, or directory.
        strict: Refuse names that do not match.

    Raises:
        CheckpointError: The files cannot be read or do not fit; then nothing was changed, unless a
            file turned out damaged in the middle, or has two values of one tensor.
    """
    with peers.together():
        files = WeightFiles(path)
        found = match_adapter(origin, files) if is_adapter(path) else match(origin, files)
        if strict:
            _check_names(origin, files, found)
        # `state_dict` inside also frees what is gathered of a model of `fully_shard`.
        own = TensorNames((), 0, model)
        wanted = _wanted(origin, own.tensors, found.pieces)
        for name, (tensor, pieces) in wanted.items():
            _check(files, name, tensor, pieces)
    with peers.together():
        files.read(wanted)
        beat()
        _compare(files, _wanted(origin, own.tensors, found.others))
    return PretrainedKeys(found.missing, found.unexpected)


def _wanted(
    origin: Origin, tensors: Mapping[str, Tensor], pieces: Mapping[str, Sequence[Piece]]
) -> dict[str, tuple[Tensor, Sequence[Piece]]]:
    """Return this rank's tensors that have pieces, under their own names."""
    first = origin.first
    return {
        name: (tensor, pieces[first[name]])
        for name, tensor in tensors.items()
        if first.get(name) in pieces
    }


def _check_names(origin: Origin, files: WeightFiles, found: Matched) -> None:
    where = files.path
    if found.missing:
        rest = f", and has {shown(found.unexpected)} instead" if found.unexpected else ""
        raise CheckpointError(
            f"{where} lacks {shown(found.missing)} of {origin.kind}{rest}",
            hint="strict=False keeps the values that the model has",
        )
    if found.unexpected:
        raise CheckpointError(
            f"{where} has {shown(found.unexpected)}, for which {origin.kind} has no place",
            hint="strict=False leaves out what has no place",
        )


def _check(files: WeightFiles, name: str, tensor: Tensor, pieces: Sequence[Piece]) -> None:
    """Refuse a tensor that has another shape than its pieces, or values of another kind."""
    shape = [*whole_shape(tensor)]
    stored = files.shape(pieces[0].name)
    if pieces[0].at:
        ends = [[a + n for a, n in zip(p.at, p.shape, strict=True)] for p in pieces]
        stored = [max(sizes) for sizes in zip(*ends, strict=True)]
        if sum(math.prod(piece.shape) for piece in pieces) != math.prod(stored):
            raise CheckpointError(f"{files.path} has not all tensors that make {name}")
    if stored != shape:
        raise CheckpointError(f"{name} is {shape} in the model and {stored} in {files.path}")
    for dtype in {files.dtype(piece.name) for piece in pieces}:
        if not compatible(dtype, tensor):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} is {kind} in the model and {dtype} in {files.path}")
    if tensor.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the device meta, which holds no values",
            hint="rt.shard(model) gives each rank memory for its part: load after it",
        )


@torch.no_grad()
def _compare(files: WeightFiles, others: Mapping[str, tuple[Tensor, Sequence[Piece]]]) -> None:
    """Refuse files with other values under two names that are one tensor of the model."""
    for name, (tensor, pieces) in others.items():
        for piece in pieces if not pieces[0].at else ():
            again = torch.zeros_like(tensor.detach())
            files.read({name: (again, [piece])})
            if not is_equal(local_part(again), local_part(tensor.detach())):
                raise CheckpointError(
                    f"{files.path} has other values for {piece.name} than for {name}, "
                    "which are one tensor of the model",
                    hint="make two parameters of them: tie_word_embeddings=False in transformers",
                )
