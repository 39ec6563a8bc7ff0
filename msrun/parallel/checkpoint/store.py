"""Directories of checkpoints: complete or absent, whatever kills the writer.

A checkpoint `step_00000004` is one directory:

    checkpoint.json         manifest: step, mesh, versions, loader, extra; all files and their sizes
    index.json              each tensor: type, shape, and its chunks by file and first byte
    rank_00000.safetensors  data, one file for each rank that writes

The order of writing makes it atomic, since a rename within one directory is:

1. `begin` makes `.step_00000004.partial`, where every rank writes its data file and syncs it.
2. `commit` checks that each data file is there with its size.  On a file system that nodes do not
   share, files of other nodes are missing here.
3. It writes the index, then the manifest, and syncs them and the directory.
4. If the target exists, it is renamed to `.step_00000004.old`; a directory cannot be replaced in
   one rename.  Then `.partial` is renamed to the target and the parent directory is synced.
5. `.old` is removed.

A kill before step 4 leaves a `.partial`, which the next `begin` removes.  A kill between the two
renames leaves the previous checkpoint as `.old`: `find` and `find_newest` accept it there, and the
next `begin` renames it back.  Removing an old checkpoint starts with a rename to `.partial`, so
that a half removed one is never taken for complete.

A directory counts as a checkpoint if its manifest is readable and all files of it have the sizes
that it lists (`problem_of`).  `find_newest` skips broken ones with a warning.

Readers trust no number in these files: chunks must lie inside their file and their tensor, and have
as many elements as it.  Nothing is pickled.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from msrun.errors import CheckpointError, UsageError
from msrun.units import quoted

FORMAT = 1
MANIFEST = "checkpoint.json"
INDEX = "index.json"

# Type of elements by its name in safetensors -> bytes of one element.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

_STEP = re.compile(r"step_([0-9]{8,18})")
_HIDDEN = re.compile(r"\.(.+)\.(partial|old)")
# Errors of file systems that cannot sync a directory, and need not.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor, contiguous in one file.

    Args:
        at: Index of its first element in the tensor.
        shape: Sizes of the part.
        file: Name of the data file.
        start: First byte in the file; elements are in row-major order, little-endian.
    """

    at: list[int]
    shape: list[int]
    file: str
    start: int


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Type, shape and position of a stored tensor.

    Args:
        dtype: A key of `ITEM_BYTES`.
        shape: Sizes of the whole tensor.
        chunks: Its parts, which do not overlap and fill it.
    """

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the data files.

    Args:
        tensors: Name -> type, shape and position.
        aliases: Further name of a tensor -> its name.
        values: Name -> state that is not a tensor, as JSON values.
    """

    tensors: dict[str, StoredTensor]
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}

    def find(self, name: str) -> StoredTensor | None:
        """Return the stored tensor that is called `name`; None if there is none."""
        return self.tensors.get(self.aliases.get(name, name))


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint.

    Args:
        format: Version of the format.
        step: Number of steps that were done.
        world_size: Ranks of the job that wrote it.
        mesh: Axis name -> size, in mesh order.
        msrun: Version of msrun that wrote it.
        torch: Version of torch that wrote it.
        files: Name of every other file -> its size in bytes.
        loader: State of the loader; None without a loader.
        extra: Values that the script added.
    """

    format: int
    step: int
    world_size: int
    mesh: dict[str, int]
    msrun: str
    torch: str
    files: dict[str, int]
    loader: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


def step_path(folder: Path, step: int) -> Path:
    """Return the directory in `folder` of the checkpoint after `step` steps."""
    return folder / f"step_{step:08}"


def begin(target: Path) -> Path:
    """Return a new empty directory in which to build the checkpoint `target`.

    Leftovers of killed writers are removed; a checkpoint that was just being replaced gets its
    name back.

    Raises:
        CheckpointError: The target exists and is not a checkpoint.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in list(target.parent.iterdir()):
        hidden = _HIDDEN.fullmatch(entry.name)
        if hidden and (hidden[1] == target.name or _STEP.fullmatch(hidden[1])):
            own = target.parent / hidden[1]
            if hidden[2] == "old" and not own.exists() and problem_of(entry) is None:
                entry.rename(own)
            else:
                shutil.rmtree(entry, ignore_errors=True)
    # After the cleaning, which may have given the target its name back.
    check_target(target)
    partial = _hidden(target, "partial")
    partial.mkdir()
    return partial


def check_target(target: Path) -> None:
    """Refuse a `target` that exists and is neither a checkpoint nor an empty directory."""
    if target.is_dir():
        if any(target.iterdir()) and not (target / MANIFEST).is_file():
            raise CheckpointError(f"{target} exists and is no checkpoint")
    elif target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists and is no directory")


def commit(partial: Path, target: Path, manifest: Manifest, index: Index) -> None:
    """Make `partial`, which holds all data files, the checkpoint `target`.

    A kill at any moment leaves the previous checkpoint or the new one.

    Args:
        partial: The directory that `begin` returned.
        target: The target of `begin`; a checkpoint there is replaced.
        manifest: Manifest whose `files` are the data files.
        index: Index of the data files.

    Raises:
        CheckpointError: A data file is missing or has another size.
    """
    size = write_json(partial / INDEX, msgspec.to_builtins(index))
    files = {**manifest.files, INDEX: size}
    for name, expected in files.items():
        if (problem := _file_problem(partial / name, expected)) is not None:
            hint = "every node must see the same directory, on a file system that all share"
            raise CheckpointError(problem, hint=hint)
    manifest = msgspec.structs.replace(manifest, files=files)
    write_json(partial / MANIFEST, msgspec.to_builtins(manifest))
    sync_directory(partial)
    old = _hidden(target, "old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(partial: Path) -> None:
    """Remove a directory of `begin` that will not become a checkpoint."""
    shutil.rmtree(partial, ignore_errors=True)


def remove_oldest(folder: Path, keep: int, newest: Path) -> None:
    """Remove the oldest checkpoints in `folder` so that `keep` are left; `newest` always stays.

    Raises:
        OSError: A checkpoint cannot be removed.
    """
    complete = [path for _, path in _steps(folder) if problem_of(path) is None]
    # Only complete ones count: a broken one must not push out the last that can be loaded.
    for path in [path for path in complete if path != newest][max(keep - 1, 0) :]:
        hidden = _hidden(path, "partial")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def find_newest(folder: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in `folder`; None if there is none."""
    for _, path in _steps(folder):
        problem = problem_of(path)
        if problem is None:
            return path
        _log.warning("%s is passed over: %s", path, problem)
    return None


def find(path: Path) -> Path:
    """Return the checkpoint `path`, or the newest in the directory `path`.

    Raises:
        CheckpointError: There is none, or it is broken.
    """
    for candidate in (path, _hidden(path, "old")):
        if (candidate / MANIFEST).is_file():
            if problem := problem_of(candidate):
                raise CheckpointError(f"{candidate} is broken: {problem}")
            return candidate
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint")
    newest = find_newest(path)
    if newest is None:
        raise CheckpointError(f"{path} is no checkpoint and holds none: it has no {MANIFEST}")
    return newest


def problem_of(path: Path) -> str | None:
    """Return what is wrong with the checkpoint `path`; None if it is complete."""
    try:
        manifest = read_manifest(path)
    except UsageError as error:
        return error.message
    problems = (_file_problem(path / name, size) for name, size in manifest.files.items())
    return next((problem for problem in problems if problem is not None), None)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`.

    Raises:
        CheckpointError: It has none that is readable, or its format is newer than this version.
    """
    content = _read_json(path / MANIFEST)
    if isinstance(content, dict):
        version = content.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{path}: format {version} is of a later msrun, this one knows up to {FORMAT}"
            )
    manifest = _convert(content, Manifest, path / MANIFEST)
    for name in manifest.files:
        # A manifest from elsewhere must not make a reader open files outside of the directory.
        if name != Path(name).name or name.startswith("."):
            raise CheckpointError(f"{path / MANIFEST}: {quoted(name)} is no name of a file in it")
    return manifest


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the index of the checkpoint `path`.

    Raises:
        CheckpointError: It cannot be read, or does not fit the data files.
    """
    index = _convert(_read_json(path / INDEX), Index, path / INDEX)
    for name, tensor in index.tensors.items():
        if not _fits(tensor, manifest):
            raise CheckpointError(f"{path / INDEX}: {quoted(name)} does not fit the data files")
    for alias, name in index.aliases.items():
        if name not in index.tensors:
            raise CheckpointError(f"{path / INDEX}: {quoted(alias)} is an alias of no tensor")
    return index


def write_json(path: Path, content: object) -> int:
    """Write `content` durably; return the size in bytes."""
    # Python's own dialect of JSON has infinity and nan, which state needs: a best loss starts as
    # infinity.
    data = json.dumps(content, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return len(data)


def sync_directory(path: Path) -> None:
    """Make the names in the directory `path` durable."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(number)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of everything named as the checkpoint of a step, highest first."""
    paths: dict[int, Path] = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted(folder.iterdir()):  # `.old` sorts first: the target, if it exists, wins
            hidden = _HIDDEN.fullmatch(entry.name)
            name = hidden[1] if hidden and hidden[2] == "old" else entry.name
            if step := _STEP.fullmatch(name):
                paths[int(step[1])] = entry
    return sorted(paths.items(), reverse=True)


def _hidden(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}"


def _file_problem(path: Path, size: int) -> str | None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None if actual == size else f"{path.name} has {actual} bytes instead of {size}"


def _fits(tensor: StoredTensor, manifest: Manifest) -> bool:
    """Return whether the chunks of `tensor` fill it and lie within their files."""
    if tensor.dtype not in ITEM_BYTES or any(size < 0 for size in tensor.shape):
        return False
    return sum(math.prod(chunk.shape) for chunk in tensor.chunks) == math.prod(
        tensor.shape
    ) and all(_chunk_fits(chunk, tensor, manifest) for chunk in tensor.chunks)


def _chunk_fits(chunk: Chunk, tensor: StoredTensor, manifest: Manifest) -> bool:
    if len(chunk.at) != len(tensor.shape) or len(chunk.shape) != len(tensor.shape):
        return False
    is_inside = all(_spans(chunk, tensor.shape))
    length = math.prod(chunk.shape) * ITEM_BYTES[tensor.dtype]
    return is_inside and 0 <= chunk.start <= manifest.files.get(chunk.file, -1) - length


def _spans(chunk: Chunk, shape: Sequence[int]) -> Iterator[bool]:
    for first, length, size in zip(chunk.at, chunk.shape, shape, strict=True):
        yield first >= 0 and 0 < length <= size - first


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is no JSON") from None


def _convert(content: object, kind: type[_T], path: Path) -> _T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise CheckpointError(f"{path}: {text[:1].lower()}{text[1:]}") from None
