"""What a server finds when it starts again: its session, its snapshots, and how often it started.

Every file is written beside its name, synced and renamed, so that a kill at any moment leaves the
file before or the new one.  A snapshot is a head and then each tensor as it is, at multiples of 64
bytes; it is mapped and not read where slices are lent to another server.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from msrun.cluster.servers.events import DivisionRecord
from msrun.cluster.servers.messages import Snapshot
from msrun.cluster.servers.ownership import Slice
from msrun.errors import UsageError
from msrun.parallel.servers.rows import SliceState
from msrun.parallel.servers.wire import SessionPlan, lengths, pack, unpack
from msrun.transport.data_sockets import Buffer

_ALIGNED = 64
_HEAD = 8
_Record = TypeVar("_Record", SessionPlan, DivisionRecord)
# Table -> number of the slice -> rows, and the optimizer's state of them.
Contents = dict[str, dict[int, list[Any]]]


def contents_of(slices: Mapping[Slice, SliceState]) -> Contents:
    """Return slices as a payload."""
    found: Contents = {}
    for piece, at_rest in slices.items():
        found.setdefault(piece.table, {})[piece.index] = [at_rest.rows, at_rest.state]
    return found


def slices_of(contents: Contents) -> dict[Slice, SliceState]:
    """Return what a payload of `contents_of` holds."""
    return {
        Slice(table, index): SliceState(rows, state)
        for table, pieces in contents.items()
        for index, (rows, state) in pieces.items()
    }


class ServerDisk:
    """The directories of one server, or of the coordinator.

    Args:
        folder: Its private one, which is made where it is missing.  A session may name another
            place for snapshots.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._snapshots = folder / "snapshots"
        if plan := self.plan():
            self._choose(plan)

    def _choose(self, plan: SessionPlan) -> None:
        place = Path(plan.directory) if plan.directory else self._folder.parent
        self._snapshots = place / self._folder.name / "snapshots"
        try:
            self._snapshots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"servers cannot write snapshots in {place}: {error.strerror}"
            hint = "name a directory that exists on their nodes: parallel.servers.snapshot.dir"
            raise UsageError(text, hint=hint) from None

    def count_start(self) -> int:
        """Return how many times this was called before."""
        path = self._folder / "starts"
        life = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            life = int(path.read_text())
        # A session ends with its machine, so only kills of processes count, and nothing is synced:
        # on a busy disk that takes longer than all else at the start of a server.
        _write(path, [str(life + 1).encode()], is_synced=False)
        return life

    def plan(self) -> SessionPlan | None:
        """Return the session that was written last."""
        return self._read("plan", SessionPlan)

    def write_plan(self, plan: SessionPlan) -> None:
        """Begin a session: whatever is left of another goes.

        One that is here goes on: a server that was killed may hear of it from the coordinator
        before it has read the store.
        """
        here = self.plan()
        if here is not None and here.session == plan.session:
            return
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "plan").unlink()
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "decision").unlink()
        self._choose(plan)
        shutil.rmtree(self._snapshots)
        self._snapshots.mkdir()
        _write(self._folder / "plan", [msgspec.msgpack.encode(plan)])

    def decision(self) -> DivisionRecord | None:
        """Return the last decision of the coordinator in this session."""
        return self._read("decision", DivisionRecord)

    def write_decision(self, decision: DivisionRecord) -> None:
        """Write a decision to the log."""
        _write(self._folder / "decision", [msgspec.msgpack.encode(decision)])

    def _read(self, name: str, kind: type[_Record]) -> _Record | None:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.msgpack.decode((self._folder / name).read_bytes(), type=kind)
        return None

    def snapshots(self) -> list[Snapshot]:
        """Return what is on disk, of this session."""
        found = []
        for path in sorted(self._snapshots.iterdir()):
            if path.suffix:  # one that a kill left unfinished
                path.unlink()
                continue
            with path.open("rb") as file:
                head = file.read(int.from_bytes(file.read(_HEAD), "little"))
            found.append(msgspec.convert(msgspec.msgpack.decode(head)["snapshot"], Snapshot))
        return found

    def save(self, snapshot: Snapshot, slices: Mapping[Slice, SliceState]) -> None:
        """Write a snapshot; when this returns it is there after any crash."""
        tree = {"snapshot": msgspec.to_builtins(snapshot), "slices": contents_of(slices)}
        head, buffers = pack(tree)
        path = self._path(snapshot.epoch, snapshot.version)
        _write(path, _chunks(head, buffers))

    def load(self, epoch: int, version: int) -> dict[Slice, SliceState]:
        """Return the slices of a snapshot, mapped from its file."""
        with self._path(epoch, version).open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        end = _HEAD + int.from_bytes(mapped[:_HEAD], "little")
        head = bytes(mapped[_HEAD:end])
        frames = []
        for length in lengths(head):
            end += -end % _ALIGNED
            frames.append(mapped[end : end + length])
            end += length
        return slices_of(unpack(head, frames)["slices"])

    def drop(self, which: Iterable[tuple[int, int]]) -> None:
        """Remove snapshots."""
        for epoch, version in which:
            self._path(epoch, version).unlink(missing_ok=True)

    def _path(self, epoch: int, version: int) -> Path:
        return self._snapshots / f"{epoch}-{version}"


def _chunks(head: bytes, buffers: Iterable[Buffer]) -> Iterable[Buffer]:
    yield len(head).to_bytes(_HEAD, "little")
    yield head
    end = _HEAD + len(head)
    for buffer in buffers:
        yield bytes(-end % _ALIGNED)
        yield buffer
        end += -end % _ALIGNED + len(buffer)


def _write(path: Path, chunks: Iterable[Buffer], *, is_synced: bool = True) -> None:
    """Replace a file, or nothing."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())
    new.replace(path)
    if not is_synced:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
