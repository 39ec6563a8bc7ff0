"""`msrun convert`: merges a checkpoint into one file of whole tensors, and the other way round.

It runs in one process without a process group.  A `.pt` file holds a dict of tensors for
`model.load_state_dict`.  With the optimizer it holds `{"model": ..., "optimizer": ..., "step":
...}`, whose optimizer dict has parameters by name, like `torch.distributed.checkpoint.state_dict`.
It is read with `weights_only`, which runs no code from the file.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint import schema, store
from msrun.parallel.checkpoint.checksums import DataFiles
from msrun.parallel.checkpoint.plan import file_name
from msrun.parallel.checkpoint.state import MODEL, OPTIMIZER, plain
from msrun.parallel.checkpoint.tensors import (
    FileTensor,
    plan_file,
    read_header,
    read_tensor,
    slot,
    write_file,
)
from msrun.parallel.config import DATA_AXIS
from msrun.version import __version__

PICKLED = (".pt", ".pth", ".bin")
SAFETENSORS = ".safetensors"

_MODEL_KEY, _OPTIMIZER_KEY, _STEP_KEY = "model", "optimizer", "step"
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class Content(msgspec.Struct, kw_only=True):
    """Contents of a checkpoint or file, under the names of a checkpoint; tensors are read lazily.

    Args:
        slots: Name of a tensor -> its type and shape.
        read: Name of a tensor -> function that reads it.
        aliases: Further name of a tensor -> its name.
        values: Name -> state that is not a tensor.
        step: Number of steps that were done.
    """

    slots: dict[str, FileTensor] = {}
    read: dict[str, Callable[[], Tensor]] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    step: int = 0

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that is in memory."""
        self.slots[name] = slot(name, tensor)
        self.read[name] = lambda: tensor

    def names(self, kind: str) -> Iterator[str]:
        """Yield the tensors whose names begin with `kind`, aliases included."""
        names = dict.fromkeys((*self.slots, *self.aliases))  # earlier releases wrote some as both
        yield from (name for name in names if name.startswith(kind))


def convert(source: str | Path, target: str | Path, *, optimizer: bool = False) -> str:
    """Turn a checkpoint into one file, or one file into a checkpoint that any layout loads.

    Of parameters that each data-parallel rank has for itself, those of rank 0 are taken.

    Args:
        source: A `.safetensors` or `.pt` file, a checkpoint, or a directory of checkpoints, whose
            newest is taken.
        target: A `.safetensors` or `.pt` file, or if the source is a file also a directory; it
            must not exist.
        optimizer: Take optimizer state too; `.safetensors` cannot hold it.

    Returns:
        One line that describes the target.

    Raises:
        CheckpointError: The source is not a checkpoint or file of tensors, or the target cannot
            be written.
    """
    source, target = Path(source), Path(target)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists")
    if source.is_dir():
        _check_suffix(target)
    if optimizer and target.suffix == SAFETENSORS:
        raise CheckpointError(f"{target}: safetensors has no place for an optimizer (choose .pt)")
    try:
        with contextlib.ExitStack() as open_files:
            content = _read(source, open_files)
            if optimizer and not any(name.startswith(OPTIMIZER) for name in content.values):
                raise CheckpointError(f"{source} has no state of an optimizer")
            if not optimizer:
                content = _model_alone(content)
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(target, content)
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror or error}") from None
    count = sum(1 for _ in content.names(MODEL))
    after = f" after {content.step} steps" if content.step else ""
    return f"{target}: {count} tensors of the model{after}"


def _read(source: Path, open_files: contextlib.ExitStack) -> Content:
    if source.suffix == SAFETENSORS and source.is_file():
        index = read_header(source)
        renamed = {MODEL + name: stored for name, stored in index.tensors.items()}
        files = open_files.enter_context(DataFiles(source.parent, {}))
        return _content(files, schema.Index(tensors=renamed))
    if source.suffix in PICKLED and source.is_file():
        return _read_pickled(source)
    if source.is_file():
        _check_suffix(source)
    folder = store.find(source)
    manifest = schema.read_manifest(folder)
    files = open_files.enter_context(DataFiles(folder, manifest.checksums))
    content = _content(files, schema.read_index(folder, manifest))
    content.step = manifest.step
    return content


def _check_suffix(path: Path) -> None:
    known = (SAFETENSORS, *PICKLED)
    if path.suffix not in known:
        raise CheckpointError(
            f"{path} is no file of tensors: its name ends in none of {', '.join(known)}"
        )


def _content(files: DataFiles, index: schema.Index) -> Content:
    content = Content(aliases=index.aliases, values=index.values)
    for name, stored in index.tensors.items():
        if name.startswith((MODEL, OPTIMIZER)) and f"@{DATA_AXIS}" not in name:
            shape = tuple(stored.shape)
            content.slots[name] = FileTensor(name=name, dtype=stored.dtype, shape=shape)
            content.read[name] = partial(_read_checked, files, stored)
    return content


def _read_checked(files: DataFiles, stored: schema.StoredTensor) -> Tensor:
    tensor = read_tensor(files, stored)
    files.settle()  # before anything is made of it
    return tensor


def _model_alone(content: Content) -> Content:
    return Content(
        slots={name: slot for name, slot in content.slots.items() if name.startswith(MODEL)},
        read=content.read,
        aliases=content.aliases,
        values={key: value for key, value in content.values.items() if key.startswith(MODEL)},
        step=content.step,
    )


def _write(target: Path, content: Content) -> None:
    if target.suffix == SAFETENSORS:
        values = [key for key in content.values if key.startswith(MODEL)]
        if values:
            raise CheckpointError(
                f"{target}: safetensors has no place for {values[0].removeprefix(MODEL)}, which is "
                "no tensor (choose .pt)"
            )
        _replace(target, partial(_write_safetensors, content))
    elif target.suffix in PICKLED:
        tree = _tree(content)
        _replace(target, partial(_write_pickled, tree))
    else:
        _write_checkpoint(target, content)


def _replace(target: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make the file `target`, which appears only when it is complete."""
    partial_file = target.with_name(f".{target.name}.partial")
    try:
        write(partial_file)
        os.replace(partial_file, target)  # noqa: PTH105 - known to be atomic by this name
    finally:
        partial_file.unlink(missing_ok=True)
    store.sync_directory(target.parent)


def _write_safetensors(content: Content, path: Path) -> None:
    """Write every name with its own copy: the format has no second name for one tensor."""
    read: dict[str, Callable[[], Tensor]] = {}
    slots = []
    for name in content.names(MODEL):
        origin = content.aliases.get(name, name)
        own = name.removeprefix(MODEL)
        slots.append(msgspec.structs.replace(content.slots[origin], name=own))
        read[own] = content.read[origin]
    write_file(path, plan_file(slots), lambda name: read[name]())


def _write_pickled(tree: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


def _write_checkpoint(target: Path, content: Content) -> None:
    building = store.begin(target)
    try:
        file = plan_file(content.slots.values())
        checksums = write_file(building / file_name(0), file, lambda name: content.read[name]())
        tensors = {}
        for slot, start in zip(file.slots, file.starts, strict=True):
            shape = [*slot.shape]
            chunk = schema.Chunk(at=[0] * len(shape), shape=shape, file=file_name(0), start=start)
            chunks = [chunk] if slot.nbytes else []
            tensors[slot.name] = schema.StoredTensor(dtype=slot.dtype, shape=shape, chunks=chunks)
        manifest = schema.Manifest(
            format=schema.FORMAT,
            step=content.step,
            world_size=1,
            mesh={},
            msrun=__version__,
            torch=str(torch.__version__),
            files={file_name(0): file.nbytes},
            checksums={file_name(0): checksums},
        )
        index = schema.Index(tensors=tensors, aliases=content.aliases, values=content.values)
        store.commit(building, target, manifest, index)
    except BaseException:
        store.discard(building)
        raise


def _tree(content: Content) -> dict[str, Any]:
    """Return the contents of a `.pt` file."""
    tensors = {name: content.read[name]() for name in content.slots}
    model: dict[str, Any] = {
        name.removeprefix(MODEL): tensors[content.aliases.get(name, name)]
        for name in content.names(MODEL)
    }
    for name, value in content.values.items():
        if name.startswith(MODEL):
            model[name.removeprefix(MODEL)] = value
    if not any(name.startswith(OPTIMIZER) for name in content.values):
        return model
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for name, value in content.values.items():
        own = name.removeprefix(OPTIMIZER)
        if name.startswith(OPTIMIZER) and own.endswith("."):
            state.setdefault(own[:-1], {}).update(value)
        elif name.startswith(OPTIMIZER):
            _add_to_group(groups, own, value)
    for name in content.names(OPTIMIZER):
        own, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        state.setdefault(own, {})[key] = tensors[name]
    kept = {_STATE: state, _GROUPS: groups}
    return {_MODEL_KEY: model, _OPTIMIZER_KEY: kept, _STEP_KEY: content.step}


def _add_to_group(groups: list[dict[str, Any]], param: str, settings: dict[str, Any]) -> None:
    for group in groups:
        if {key: value for key, value in group.items() if key != _PARAMS} == settings:
            group[_PARAMS].append(param)
            return
    groups.append({**settings, _PARAMS: [param]})


def _read_pickled(path: Path) -> Content:
    try:
        is_mappable = zipfile.is_zipfile(path)  # files of old versions are not
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - the bytes may be anything, and torch raises as many things
        hint = "in a process that trusts it: torch.save(model.state_dict(), FILE)"
        raise CheckpointError(f"{path} is more than a dict of plain tensors", hint=hint) from None
    content = Content()
    model = tree
    if isinstance(tree, dict) and isinstance(tree.get(_MODEL_KEY), dict):
        model = tree[_MODEL_KEY]
        step = tree.get(_STEP_KEY, 0)
        content.step = step if isinstance(step, int) else 0
        if _OPTIMIZER_KEY in tree:
            try:
                _take_optimizer(content, tree[_OPTIMIZER_KEY])
            except (AttributeError, KeyError, TypeError, ValueError):
                raise CheckpointError(
                    f"{path}: its optimizer is no dict with parameters by name"
                ) from None
    _take_model(content, model, path)
    return content


def _take_model(content: Content, model: object, path: Path) -> None:
    if not isinstance(model, dict) or not all(isinstance(name, str) for name in model):
        raise CheckpointError(f"{path} holds no dict of tensors by name")
    first: dict[tuple[object, ...], str] = {}
    for name, value in model.items():
        if not isinstance(value, Tensor):
            if not name.endswith("_extra_state"):
                raise CheckpointError(f"{path}: {name} is no tensor, but a {type(value).__name__}")
            content.values[MODEL + name] = plain(value, name)
            continue
        # Tied weights in a state dict share their address; a checkpoint has one and an alias.
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and place in first:
            content.aliases[MODEL + name] = first[place]
        else:
            first[place] = MODEL + name
            content.put(MODEL + name, value)


def _take_optimizer(content: Content, optimizer: Mapping[str, Any]) -> None:
    for group in optimizer[_GROUPS]:
        settings = {key: value for key, value in group.items() if key != _PARAMS}
        for param in group[_PARAMS]:
            if not isinstance(param, str):
                raise TypeError(param)
            content.values[OPTIMIZER + param] = plain(settings, param)
    for param, kept in optimizer[_STATE].items():
        scalars = {}
        for key, value in kept.items():
            if isinstance(value, Tensor):
                content.put(f"{OPTIMIZER}{param}.{key}", value)
            else:
                scalars[key] = plain(value, f"{param}.{key}")
        if scalars:
            content.values[f"{OPTIMIZER}{param}."] = scalars
