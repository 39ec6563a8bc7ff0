"""Memory that processes of one node share, so that a message between them names a tensor only.

Each process has one region (`SharedRegion`), an anonymous file of the kernel (`memfd`): it has no
name that could outlive a kill, and its pages go with the last process that has it.  Its owner alone
writes it.  Others map it privately (`PeerRegion`), so that whatever they do, the owner's bytes
stay.  Its size is sealed: no reader can be shown a page that is not there.

A process offers its region by pid and descriptor over the authenticated sockets.  Whoever can open
`/proc/PID/fd/N`, and finds there the random token of the offer, is a process of the same user in
the same kernel and container; any other goes on with frames.

When memory is used again:

- A block lives as long as a tensor in it does.  A rank keeps the gradients of a step until all
  servers have them on disk, so no server still reads what is used again (`OutgoingPush`).
- What a server lends to a rank, it gives up when it answers the rank's next pull: a rank has copied
  all of an answer before it asks for more.
- A sync server lends parameters themselves: it steps when all ranks have voted, and a rank votes
  after its push, which is after its copy.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import math
import mmap
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

# Below, a frame costs no more than the bookkeeping.
SHARED_BYTES_MIN = 16 << 10
_TOKEN_BYTES = 32
_PAGE = 4096
_HUGE = 2 << 20
_PART_OF_MEMORY = 2
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the region of a process is.

    Args:
        pid: The process.
        descriptor: Of the region in that process.
        size: Bytes of it.
        token: Its first bytes, in hexadecimal digits.
    """

    pid: int
    descriptor: int
    size: int
    token: str


class SharedRegion:
    """The region of this process.

    Args:
        size: Bytes, of which only those in use take memory.

    Raises:
        OSError: The kernel gives none.
    """

    def __init__(self, size: int) -> None:
        self._size = -(-size // _HUGE) * _HUGE
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._descriptor = os.memfd_create("msrun-servers", flags)
        try:
            os.fchmod(self._descriptor, stat.S_IRUSR | stat.S_IWUSR)
            os.ftruncate(self._descriptor, self._size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._token = os.urandom(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = self._token
        self._begin = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._free = [(_PAGE, self._size - _PAGE)]
        # Filled by whichever thread drops a tensor.
        self._given_back: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def offer(self) -> Offer:
        """What others need to know of it."""
        return Offer(
            pid=os.getpid(),
            descriptor=self._descriptor,
            size=self._size,
            token=self._token.hex(),
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor in the region; elsewhere where it is small, or there is no room."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SHARED_BYTES_MIN:
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            begin = self._take(nbytes)
        if begin is None:
            return torch.empty(tuple(shape), dtype=dtype)
        block = memoryview(self._map)[begin : begin + nbytes]
        # The tensor has the only reference to the block, and so have all views of the tensor.
        give_back = weakref.finalize(block, self._given_back.append, (begin, _whole_pages(nbytes)))
        give_back.atexit = False
        return torch.frombuffer(block, dtype=dtype).view(tuple(shape))

    def place(self, tensor: Tensor) -> int | None:
        """Return where in the region a tensor is; None of one that is not, or has gaps."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        begin = tensor.data_ptr() - self._begin
        return begin if 0 <= begin <= self._size - tensor.nbytes else None

    def _take(self, nbytes: int) -> int | None:
        """Return the begin of a free block; the first one, whose memory is there already."""
        while self._given_back:
            self._put(*self._given_back.popleft())
        wanted = _whole_pages(nbytes)
        align = _HUGE if wanted >= _HUGE else _PAGE
        for index, (begin, size) in enumerate(self._free):
            at = -(-begin // align) * align
            if at + wanted <= begin + size:
                rest = [(begin, at - begin), (at + wanted, begin + size - at - wanted)]
                self._free[index : index + 1] = [each for each in rest if each[1]]
                return at
        return None

    def _put(self, begin: int, size: int) -> None:
        """Have a block free, as one with its free neighbours."""
        index = bisect.bisect(self._free, (begin, size))
        if index < len(self._free) and self._free[index][0] == begin + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == begin:
            before = self._free.pop(index - 1)
            begin, size = before[0], before[1] + size
            index -= 1
        self._free.insert(index, (begin, size))


class PeerRegion:
    """The region of another process.

    Args:
        offer: Where it is.

    Raises:
        OSError: This process cannot have it, as one of another node cannot.
    """

    def __init__(self, offer: Offer) -> None:
        descriptor = _opened(f"/proc/{offer.pid}/fd/{offer.descriptor}", offer.size)
        try:
            # Private: the bytes of the owner, which nothing here can change.
            self._map = mmap.mmap(descriptor, offer.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        if self._map[:_TOKEN_BYTES].hex() != offer.token:
            raise OSError("another file than was offered")
        self.token = offer.token
        self._size = offer.size

    def tensor(self, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of the region, without a copy.

        Raises:
            ValueError: It is none.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if min(begin, *shape) < 0 or begin + nbytes > self._size or begin % dtype.itemsize:
            raise ValueError(f"{nbytes} bytes at {begin} of a region of {self._size}")
        block = memoryview(self._map)[begin : begin + nbytes]
        return torch.frombuffer(block, dtype=dtype).view(tuple(shape))


def new_region() -> SharedRegion | None:
    """Return a region of at most a part of this machine's memory; None where there can be none."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, AttributeError, ValueError):
        return SharedRegion(pages // _PART_OF_MEMORY)
    return None


def peer_region(offer: Offer) -> PeerRegion | None:
    """Return the region of an offer; None where this process cannot have it."""
    with contextlib.suppress(OSError, ValueError):
        return PeerRegion(offer)
    return None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _opened(path: str, size: int) -> int:
    """Open a sealed anonymous file of this user.

    Raises:
        OSError: It is none.
    """
    _check(Path(path).stat(), size)  # before it is opened: a device could do something then
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        _check(os.fstat(descriptor), size)
        _check_seals(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, size: int) -> None:
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_size != size:
        raise OSError("no region of this user")


def _check_seals(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("a file that may shrink")
