"""What watches note at tensors: attributes of plain numbers, text and tuples.

A table of tensors would keep them all in memory.  Attributes go with a tensor into a file, such as
one of outputs that a script keeps, and `torch.load` reads no classes of ours.  A tensor may come
back from a file to another job, whose watches have other numbers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator

_BITS = 62
# Nodes of functions that return what they get in new tensors, without notes: of `fully_shard`,
# torch's reducer, DTensor, `tensor.placements` in place of it, and `tensor.hooks`.
PASSING = frozenset(
    [
        "RegisterPostBackwardFunctionBackward",
        "_DDPSinkBackward",
        "_FromTorchTensorBackward",
        "_ToTorchTensorBackward",
        "RedistributeBackward",
        "_OnMeshBackward",
        "_PartOfBackward",
        "_GatheredBackward",
        "_OwnedBackward",
    ]
)


def watch_numbers() -> Iterator[int]:
    """Return numbers for watches, which no other job has."""
    return itertools.count(secrets.randbits(_BITS))
