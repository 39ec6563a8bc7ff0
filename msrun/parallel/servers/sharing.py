"""Who shares memory with whom: both ends of the agreement on `shared_memory.py`.

A rank offers its region to each server as soon as they are connected.  A server that can map it
says so and offers its own, and the rank says in turn whether it can map that one.  Until then, and
after every new connection, tensors travel in frames.  A message whose tensors are in memory that
its receiver does not have is answered by another offer, and comes again in frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from msrun.parallel.servers.shared_memory import PeerRegion, SharedRegion, new_region, peer_region
from msrun.parallel.servers.wire import RANK, SERVER, Actor, CanRead, Share, Shared


class NearRanks:
    """The ranks that share memory with this server.

    Attributes:
        regions: Theirs.
    """

    def __init__(self) -> None:
        self.regions: dict[Actor, PeerRegion] = {}
        self._own: SharedRegion | None = None
        # Rank -> its connection when it said that it has our region.
        self._readers: dict[Actor, bytes] = {}
        # Rank -> what answers to its pulls lent it: part and tensors.
        self._lent: dict[int, deque[tuple[int, list[Tensor]]]] = {}

    def hear(self, sender: Actor, route: bytes, word: Share | CanRead) -> Shared | None:
        """Return the answer to a rank that came along `route`."""
        if isinstance(word, CanRead):
            if self._own and word.token == self._own.offer.token:
                self._readers[sender] = route
            return None
        self._readers.pop(sender, None)
        known = self.regions.get(sender)
        if known is None or known.token != word.offer.token:
            region = peer_region(word.offer)
            if region is None:
                self.regions.pop(sender, None)
                return None
            self.regions[sender] = region
        self._own = self._own or new_region()
        return Shared(token=word.offer.token, offer=self._own.offer if self._own else None)

    def region_for(self, to: Actor, route: bytes) -> SharedRegion | None:
        """Return our region if its receiver along `route` has it."""
        return self._own if self._readers.get(to) == route else None

    def memory_for(self, rank: int) -> SharedRegion | None:
        """Return where to put what is for a rank; None where it is to travel in frames."""
        return self._own if (RANK, rank) in self._readers else None

    def lend(self, rank: int, part: int, tensors: list[Tensor]) -> None:
        """Keep what an answer lends until the rank asks for a later part: it has copied it then."""
        lent = self._lent.setdefault(rank, deque())
        while lent and lent[0][0] < part:
            lent.popleft()
        if tensors:
            lent.append((part, tensors))

    def end_session(self) -> None:
        """Lend nothing any more."""
        self._lent.clear()


class NearServers:
    """The servers that share memory with this rank.

    Args:
        is_wanted: Whether this rank is to share any.

    Attributes:
        regions: Theirs.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.regions: dict[Actor, PeerRegion] = {}
        self._own = new_region() if is_wanted else None
        self._readers: set[int] = set()

    def offer(self, server: int) -> Share | None:
        """Return what to tell a server on a new connection."""
        self._readers.discard(server)
        return Share(offer=self._own.offer) if self._own else None

    def hear(self, server: int, word: Shared) -> CanRead | None:
        """Return the answer to a server."""
        if self._own is None or word.token != self._own.offer.token:
            return None
        self._readers.add(server)
        if word.offer is None:
            return None
        known = self.regions.get((SERVER, server))
        if known is None or known.token != word.offer.token:
            region = peer_region(word.offer)
            if region is None:
                return None
            self.regions[SERVER, server] = region
        return CanRead(token=word.offer.token)

    def region_for(self, server: int) -> SharedRegion | None:
        """Return our region if a server has it."""
        return self._own if server in self._readers else None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor on the host, which servers of this node can read in place."""
        if self._own is None or not self._readers:
            return torch.empty(tuple(shape), dtype=dtype)
        return self._own.empty(shape, dtype)
