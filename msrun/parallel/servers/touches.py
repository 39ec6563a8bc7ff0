"""Which rows of a table somebody else has used since: what a server knows for the ranks' caches.

Rows share buckets where the table is large, so that this is a small part of the table's memory.  A
rank is told then that a row was used which was not, and gets it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOBODY = -1
# Of a bucket: the last rank, its version, and the last version of any other rank.
_BUCKET_BYTES = 12
_PART_OF_TABLE = 0.05
_BUCKETS_MIN = 1024


class Touches:
    """Who used which row of one table last.

    Args:
        rows: Of the table.
        nbytes: Of its part on this server.
        version: Of the server now: what was before is not known.
    """

    def __init__(self, rows: int, nbytes: int, version: int) -> None:
        count = min(rows, max(_BUCKETS_MIN, int(nbytes * _PART_OF_TABLE / _BUCKET_BYTES)))
        self._rank = torch.full((count,), _NOBODY, dtype=torch.int32)
        self._last = torch.full((count,), version - 1, dtype=torch.int32)
        self._other = self._last.clone()

    def note(self, rank: int, ids: Tensor, version: int) -> None:
        """Note the gradients of a rank in the step from `version` on."""
        buckets = ids % len(self._rank)
        is_same = self._rank[buckets] == rank
        self._other[buckets] = torch.where(is_same, self._other[buckets], self._last[buckets])
        self._rank[buckets] = rank
        self._last[buckets] = version

    def are_fresh(self, rank: int, ids: Tensor, versions: Tensor) -> Tensor:
        """Return of which rows no other rank had a gradient since these versions."""
        buckets = ids % len(self._rank)
        is_own = self._rank[buckets] == rank
        touched = torch.where(is_own, self._other[buckets], self._last[buckets])
        return touched < versions
