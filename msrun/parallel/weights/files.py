"""Files of pretrained weights: safetensors in one file or many, or what `torch.save` wrote.

A directory of transformers has `model.safetensors`, or several files and
`model.safetensors.index.json`, which says what is where; diffusers and peft use other names, and
old directories `pytorch_model.bin`.  Only headers are read at once, and those of a file when one of
its tensors is asked for; then each rank reads the bytes of its own parts (`read`).  Files of
`torch.save` are mapped into memory, and loaded with `weights_only`: no code of theirs runs.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint import plan, schema
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.schema import StoredTensor
from msrun.parallel.checkpoint.targets import Target
from msrun.parallel.checkpoint.tensors import CODES, check_storable, read_header
from msrun.parallel.deferred.fill import part_of
from msrun.parallel.local import local_part
from msrun.parallel.uneven_rows.rows import rows_of, whole_shape
from msrun.units import quoted

SAFETENSORS = ".safetensors"
INDEX = ".index.json"
PICKLED = (".bin", ".pt", ".pth")
ADAPTER = "adapter_model"
# In the order in which a directory is searched.
_STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", ADAPTER)
# Entries under which training scripts put the state dict of the model.
_NESTED = ("model", "state_dict", "model_state_dict")
_INDEX_BYTES_MAX = 1 << 28


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the files, as a part of a tensor of the model.

    Args:
        name: Name in the files.
        at: Index of its first element in the tensor of the model; empty if it is all of it.
        shape: Its sizes there; empty if they are its own.
    """

    name: str
    at: Sequence[int] = ()
    shape: Sequence[int] = ()


class _WeightMap(msgspec.Struct):
    weight_map: dict[str, str]


class WeightFiles:
    """The tensors of one file, or of a directory of files.

    Args:
        path: Of a file, an index, or a directory that has one of them.

    Attributes:
        path: The file that names all tensors.
        names: Names of all tensors.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = _find(path)
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        if self.path.name.endswith(INDEX):
            self._file_of = _read_map(self.path)
        else:
            file = self.path.name
            self._file_of = dict.fromkeys(self._in_file(file), file)
        self.names = list(self._file_of)

    def dtype(self, name: str) -> str:
        """Return the type of a tensor, as safetensors calls it."""
        file = self._file_of[name]
        if _is_pickled(file):
            return check_storable(name, self._tensor(name))
        return self._stored(name).dtype

    def shape(self, name: str) -> list[int]:
        """Return the sizes of a tensor."""
        if _is_pickled(self._file_of[name]):
            return [*self._tensor(name).shape]
        return self._stored(name).shape

    @torch.no_grad()
    def read(self, wanted: Mapping[str, tuple[Tensor, Sequence[Piece]]]) -> None:
        """Fill tensors of the model; each rank reads its parts alone.

        Args:
            wanted: Name in the model -> tensor, plain or sharded, and what it is made of.

        Raises:
            CheckpointError: A file cannot be read.
        """
        targets = {}
        for name, (tensor, pieces) in wanted.items():
            if any(_is_pickled(self._file_of[piece.name]) for piece in pieces):
                self._copy(tensor, pieces)
            else:
                stored, rows = self._joined(tensor, pieces), rows_of(tensor)
                targets[name] = Target(tensor=tensor.detach(), stored=stored, rows=rows)
        with DataFiles(self.path.parent, {}) as files:
            plan.read(files, targets)

    def _joined(self, tensor: Tensor, pieces: Sequence[Piece]) -> StoredTensor:
        """Return the tensor of the model as if the files had it in one."""
        first = self._stored(pieces[0].name)
        if not pieces[0].at:
            return first
        chunks = []
        for piece in pieces:
            for chunk in self._stored(piece.name).chunks:
                moved = msgspec.structs.replace(chunk, at=[*piece.at], shape=[*piece.shape])
                chunks.append(moved)
        return StoredTensor(dtype=first.dtype, shape=[*whole_shape(tensor)], chunks=chunks)

    def _copy(self, tensor: Tensor, pieces: Sequence[Piece]) -> None:
        values = self._tensor(pieces[0].name)
        if pieces[0].at:
            values = torch.empty(whole_shape(tensor), dtype=values.dtype)
            for piece in pieces:
                place = tuple(
                    slice(first, first + size)
                    for first, size in zip(piece.at, piece.shape, strict=True)
                )
                values[place] = self._tensor(piece.name).reshape(torch.Size(piece.shape))
        local_part(tensor.detach()).copy_(part_of(values, tensor))

    def _stored(self, name: str) -> StoredTensor:
        file = self._file_of[name]
        stored = self._in_file(file).get(name)
        if not isinstance(stored, StoredTensor):
            raise CheckpointError(
                f"{self.path} says that {name} is in {file}, and {file} has no such tensor"
            )
        return stored

    def _tensor(self, name: str) -> Tensor:
        file = self._file_of[name]
        if file not in self._loaded:
            self._in_file(file)
        tensor = self._loaded[file].get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.path} says that {name} is in {file}, and {file} has no such tensor"
            )
        return tensor

    def _in_file(self, file: str) -> Mapping[str, StoredTensor | Tensor]:
        if _is_pickled(file):
            if file not in self._loaded:
                self._loaded[file] = _load(self.path.parent / file)
            return self._loaded[file]
        if file not in self._headers:
            self._headers[file] = read_header(self.path.parent / file).tensors
        return self._headers[file]


def is_adapter(path: Path) -> bool:
    """Return whether `path` is a directory with adapters of peft alone."""
    return (path / "adapter_config.json").is_file() and not any(
        (path / f"model{SAFETENSORS}{suffix}").is_file() for suffix in ("", INDEX)
    )


def compatible(stored: str, tensor: Tensor) -> bool:
    """Return whether values of a file can be those of `tensor`, but for rounding.

    Numbers of eight bits come with scales of their own, so they are taken as they are alone.
    """
    own = CODES.get(tensor.dtype, "")
    return stored == own or (
        tensor.is_floating_point() and stored in ("F16", "BF16", "F32", "F64")
        and not own.startswith("F8")
    )  # fmt: skip


def _is_pickled(file: str) -> bool:
    return file.endswith(PICKLED)


def _find(path: Path) -> Path:
    """Return the file that names all tensors."""
    if path.is_file():
        if path.name.endswith((SAFETENSORS, SAFETENSORS + INDEX, *PICKLED, ".bin" + INDEX)):
            return path
        raise CheckpointError(
            f"{path} is no file of weights: its name ends in none of {SAFETENSORS}, "
            f"{SAFETENSORS}{INDEX}, {', '.join(PICKLED)}"
        )
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: there is no such file or directory",
            hint="weights are read from files of this machine: "
            "huggingface_hub.snapshot_download(NAME) fetches them and returns their directory",
        )
    for candidate in _candidates(path):
        if candidate.is_file():
            return candidate
    if (path / schema.MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of msrun", hint=f"rt.load(model, path={str(path)!r}) loads it"
        )
    raise CheckpointError(
        f"{path} has no file of weights, such as model{SAFETENSORS} or model{SAFETENSORS}{INDEX}"
    )


def _candidates(folder: Path) -> Iterator[Path]:
    for suffix in (SAFETENSORS, SAFETENSORS + INDEX, ".bin", ".bin" + INDEX):
        for stem in _STEMS:
            yield folder / f"{stem}{suffix}"
    for suffix in (SAFETENSORS + INDEX, SAFETENSORS, *PICKLED):
        alone = sorted(folder.glob(f"*{suffix}"))
        if len(alone) == 1:
            yield alone[0]


def _read_map(path: Path) -> dict[str, str]:
    """Return name -> file of all tensors, as the index `path` says."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_INDEX_BYTES_MAX), type=_WeightMap).weight_map
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(f"{path} is no index of files of weights") from None
    for name in set(found.values()):
        # An index from elsewhere must not make a reader open files outside of the directory.
        if name != Path(name).name or name.startswith("."):
            raise CheckpointError(f"{path}: {quoted(name)} is no name of a file beside it")
        if not name.endswith((SAFETENSORS, *PICKLED)):
            raise CheckpointError(f"{path}: {quoted(name)} is no file of weights")
    return found


def _load(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `torch.save`, mapped into memory where it can be."""
    try:
        is_mappable = zipfile.is_zipfile(path)  # files of old versions are not
        tree: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except Exception:  # noqa: BLE001 - the bytes may be anything, and torch raises as many things
        hint = "in a process that trusts it: torch.save(model.state_dict(), FILE)"
        raise CheckpointError(f"{path} is more than a dict of plain tensors", hint=hint) from None
    for key in _NESTED:
        with contextlib.suppress(TypeError, KeyError):
            if isinstance(tree[key], dict):
                tree = tree[key]
                break
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(f"{path} holds no dict of tensors by name")
    found = {}
    for name, value in tree.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif not name.endswith("_extra_state"):
            raise CheckpointError(f"{path}: {name} is no tensor, but a {type(value).__name__}")
    return found
