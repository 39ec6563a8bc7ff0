"""Checksums of checkpoint files: CRC-32 of every MiB, made while writing and checked while reading.

One number a file would force a reader to read all of it.  With one a block, a rank checks what it
reads, however the new layout cuts the tensors: of a block that it needs in part, it reads the rest.
A block is checked once in a load.

Cost.  `zlib.crc32` runs at several GB/s and without the interpreter's lock.  Threads check
parts of `PART_BYTES` while the next ones are read, so a load waits only for the last parts.  A
part stays in memory until it is checked; at most `_PENDING_MAX` do.

The checksums of a file are one string, eight hex digits a block.  Source of the polynomial: RFC
1952, section 8.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from msrun.errors import DamagedCheckpointError

BLOCK_BYTES = 1 << 20
_DIGITS = 8
PART_BYTES = 16 * BLOCK_BYTES
# One thread checks slower than a page cache or a fast disk delivers.
_CHECKERS = 2
_PENDING_MAX = 2 * _CHECKERS


class RunningChecksums:
    """Checksums of a file that is being written from its first byte to its last."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = 0
        self._nbytes = 0

    def add(self, data: bytes | memoryview) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._nbytes]
            self._current = zlib.crc32(part, self._current)
            self._nbytes += len(part)
            view = view[len(part) :]
            if self._nbytes == BLOCK_BYTES:
                self._done.append(self._current)
                self._current = self._nbytes = 0

    def text(self) -> str:
        """Return the checksums of all bytes so far."""
        sums = [*self._done, self._current] if self._nbytes else self._done
        return "".join(f"{one:0{_DIGITS}x}" for one in sums)


def checksums_of(data: bytes | memoryview) -> str:
    """Return the checksums of a file with these bytes."""
    running = RunningChecksums()
    running.add(data)
    return running.text()


def are_sound(text: str, nbytes: int) -> bool:
    """Return whether `text` can be the checksums of a file of `nbytes` bytes."""
    count = -(-nbytes // BLOCK_BYTES)
    return len(text) == count * _DIGITS and set(text) <= set("0123456789abcdef")


class DataFiles:
    """The data files of one checkpoint, opened when first read; what is read is checked.

    A context manager.  Leaving it waits for the checks.

    Args:
        folder: Directory of the checkpoint.
        checksums: Name of a file -> its checksums; a file without any is not checked.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str]) -> None:
        self._folder = folder
        self._checksums = checksums
        self._files: dict[str, BinaryIO] = {}
        self._checked: dict[str, set[int]] = {}
        # With the owner of the memory that is being checked.
        self._pending: deque[tuple[Future[None], object]] = deque()
        self._checker = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="msrun-checksums")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self._checker.shutdown(cancel_futures=True)
            for file in self._files.values():
                file.close()

    def settle(self) -> None:
        """Wait until all that was read is checked.

        Raises:
            DamagedCheckpointError: A block has another checksum.
        """
        self._wait(0)

    def read_into(self, name: str, start: int, view: memoryview, owner: object) -> None:
        """Fill `view`, memory of `owner`, from byte `start` of a file on.

        The memory must not change before it is checked.

        Raises:
            DamagedCheckpointError: The file cannot be read or is shorter, or a block read by now
                has another checksum.
        """
        while view:
            part = view[: PART_BYTES - start % PART_BYTES]
            self._read_part(name, start, part, owner)
            start, view = start + len(part), view[len(part) :]

    def _read_part(self, name: str, start: int, view: memoryview, owner: object) -> None:
        try:
            file = self._open(name)
            file.seek(start)
            if file.readinto(view) != len(view):  # type: ignore[attr-defined]  # buffered has it
                raise DamagedCheckpointError(f"{name} has become shorter")
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self._folder / name} cannot be read: {error.strerror}"
            ) from None
        sums = self._checksums.get(name)
        if sums is None:
            return
        blocks = range(start // BLOCK_BYTES, (start + len(view) - 1) // BLOCK_BYTES + 1)
        checked = self._checked.setdefault(name, set())
        due = [block for block in blocks if block not in checked]
        if due:
            checked.update(due)
            check = self._checker.submit(self._check, (name, sums), (start, view), due)
            self._pending.append((check, owner))
        self._wait(_PENDING_MAX)

    def is_checked(self, name: str) -> bool:
        """Return whether what is read of a file is checked, in whole blocks."""
        return name in self._checksums

    def read_alone(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start` of a file on, and read no byte around it nor check any.

        Raises:
            DamagedCheckpointError: The file cannot be read or is shorter.
        """
        try:
            number = self._open(name).fileno()
            while view:
                count = os.preadv(number, [view], start)
                if not count:
                    raise DamagedCheckpointError(f"{name} has become shorter")
                start, view = start + count, view[count:]
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self._folder / name} cannot be read: {error.strerror}"
            ) from None

    def _wait(self, left: int) -> None:
        while len(self._pending) > left:
            check, _ = self._pending[0]
            check.result()
            self._pending.popleft()

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("rb")
        return self._files[name]

    def _check(
        self, named: tuple[str, str], read: tuple[int, memoryview], blocks: Sequence[int]
    ) -> None:
        """Check `blocks` of a file, of which `view` holds the bytes from `start` on."""
        (name, sums), (start, view) = named, read
        number = self._files[name].fileno()
        for block in blocks:
            first = block * BLOCK_BYTES
            inside = view[max(first - start, 0) : max(first + BLOCK_BYTES - start, 0)]
            try:
                before = _read_all(number, first, start - first)
                end = start + len(view)
                after = _read_all(number, end, first + BLOCK_BYTES - end)
            except OSError as error:
                raise DamagedCheckpointError(
                    f"{self._folder / name} cannot be read: {error.strerror}"
                ) from None
            found = zlib.crc32(after, zlib.crc32(inside, zlib.crc32(before)))
            if f"{found:0{_DIGITS}x}" != sums[block * _DIGITS : (block + 1) * _DIGITS]:
                raise DamagedCheckpointError(
                    f"{self._folder / name} is damaged: its bytes {first} to "
                    f"{first + len(before) + len(inside) + len(after)} have another checksum than "
                    "when they were written"
                )


def _read_all(number: int, start: int, count: int) -> bytes:
    """Return `count` bytes from `start` on, fewer at the end of the file, none if negative."""
    # `pread` leaves the position alone that the reading thread uses.
    parts = []
    while count > 0 and (part := os.pread(number, count, start)):
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return b"".join(parts)
