"""Directories of checkpoints: complete or absent, whatever kills the writer.

A checkpoint `step_00000004` is one directory:

    checkpoint.json         manifest: step, mesh, versions, loader, extra; all files, their sizes
                            and checksums
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
that it lists (`problem_of`).  `find_newest` skips broken ones with a warning, and refuses a
directory in which every checkpoint is broken: training must not begin anew over them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from msrun.errors import CheckpointError, UsageError
from msrun.parallel.checkpoint.checksums import checksums_of
from msrun.parallel.checkpoint.schema import (
    INDEX,
    MANIFEST,
    Index,
    Manifest,
    read_manifest,
    render_index,
    render_manifest,
)

_STEP = re.compile(r"step_([0-9]{8,18})")
_DATA_FILE = re.compile(r"rank_[0-9]+\.safetensors")
_HIDDEN = re.compile(r"\.(.+)\.(partial|old)")
# Errors of file systems that cannot sync a directory, and need not.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)

_log = logging.getLogger(__name__)


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


def check_step(step: int, first: int) -> None:
    """Refuse a checkpoint that would hold the tensors of different steps.

    Raises:
        CheckpointError: Rank 0 saves after another step.
    """
    if step != first:
        hint = "have all ranks save after the same step"
        msg = f"rt.save has step {step} here and step {first} on rank 0"
        raise CheckpointError(msg, hint=hint)


def check_target(target: Path) -> None:
    """Refuse a `target` that exists and is neither a checkpoint nor an empty directory."""
    if target.is_dir():
        is_ours = _STEP.fullmatch(target.name) and all(map(_is_ours, target.iterdir()))
        if any(target.iterdir()) and not is_ours and not _has_manifest(target):
            raise CheckpointError(f"{target} exists and is no checkpoint")
    elif target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists and is no directory")


def commit(partial: Path, target: Path, manifest: Manifest, index: Index) -> None:
    """Make `partial`, which holds all data files, the checkpoint `target`.

    A kill at any moment leaves the previous checkpoint or the new one.

    Args:
        partial: The directory that `begin` returned.
        target: The target of `begin`; a checkpoint there is replaced.
        manifest: Manifest whose `files` are the data files, with their checksums.
        index: Index of the data files.

    Raises:
        CheckpointError: A data file is missing or has another size.
    """
    data = render_index(index)
    _write(partial / INDEX, data)
    files = {**manifest.files, INDEX: len(data)}
    checksums = {**manifest.checksums, INDEX: checksums_of(data)}
    for name, expected in files.items():
        if (problem := _file_problem(partial / name, expected)) is not None:
            hint = "every node must see the same directory, on a file system that all share"
            raise CheckpointError(problem, hint=hint)
    manifest = msgspec.structs.replace(manifest, files=files, checksums=checksums)
    _write(partial / MANIFEST, render_manifest(manifest))
    sync_directory(partial)
    old = _hidden(target, "old")
    if target.exists():
        target.rename(old)
    partial.rename(target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def finish(
    partial: Path,
    target: Path,
    contents: tuple[Manifest, Index],
    checksums: dict[str, str],
    *,
    keep: int,
) -> None:
    """Do `commit` with the checksums of the data files; keep so many checkpoints, 0 for all."""
    manifest, index = contents
    commit(partial, target, msgspec.structs.replace(manifest, checksums=checksums), index)
    if keep:
        remove_oldest(target.parent, keep, target)


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


def find_newest(folder: Path, passed_over: dict[Path, str] | None = None) -> Path | None:
    """Return the complete checkpoint of the highest step in `folder`; None if there is none.

    Args:
        folder: Directory of checkpoints.
        passed_over: Checkpoint -> why it cannot be used.  Those found broken are added.

    Raises:
        CheckpointError: There are checkpoints, and none can be used.
    """
    passed_over = {} if passed_over is None else passed_over
    steps = _steps(folder)
    for _, path in steps:
        if path in passed_over:
            continue
        problem = problem_of(path)
        if problem is None:
            return path
        pass_over(path, problem, passed_over)
    if not steps:
        return None
    each = "; ".join(f"{path.name}: {passed_over[path]}" for _, path in steps)
    raise CheckpointError(
        f"{folder}: none of {len(steps)} checkpoints can be used: {each}",
        hint="repair one, or move them elsewhere to begin at step 0",
    )


def pass_over(path: Path, problem: str, passed_over: dict[Path, str]) -> None:
    """Note, and say, that the checkpoint `path` cannot be used."""
    passed_over[path] = problem
    _log.warning("%s is passed over: %s", path, problem)


def find(path: Path, passed_over: dict[Path, str] | None = None) -> Path:
    """Return the checkpoint `path`, or the newest in the directory `path`.

    Args:
        path: Path of either.
        passed_over: As in `find_newest`.

    Raises:
        CheckpointError: There is none, or it is broken.
    """
    for candidate in (path, _hidden(path, "old")):
        if _has_manifest(candidate):
            if passed_over and candidate in passed_over:
                raise CheckpointError(passed_over[candidate])
            if problem := problem_of(candidate):
                raise CheckpointError(f"{candidate} is broken: {problem}")
            return candidate
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint")
    newest = find_newest(path, passed_over)
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


def _has_manifest(path: Path) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except PermissionError:
        return True  # reading it says why it cannot be used


def _is_ours(entry: Path) -> bool:
    """Return whether a checkpoint has a file of this name."""
    return entry.name in (MANIFEST, INDEX) or _DATA_FILE.fullmatch(entry.name) is not None


def _write(path: Path, data: bytes) -> None:
    """Write a file durably."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
