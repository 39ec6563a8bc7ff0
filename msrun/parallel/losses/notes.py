"""What watches note at tensors: attributes of plain numbers, text and tuples.

A table of tensors would keep them all in memory.  Attributes go with a tensor into a file, such as
one of outputs that a script keeps, and `torch.load` reads no classes of ours.  A tensor may come
back from a file to another job, whose watches have other numbers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_BITS = 62
_SOURCE = "msrun_source"
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


def hand_on(source: Tensor, result: Tensor) -> None:
    """Note that `result`, which a layer computed from `source` in parts, keeps its samples."""
    if result.grad_fn is not None:
        metadata: Any = result.grad_fn.metadata
        metadata[_SOURCE] = source


def source_of(node: Any) -> Tensor | None:
    """Return the tensor that was handed on as the result of `node`."""
    found: Tensor | None = node.metadata.get(_SOURCE) if node else None
    return found


def is_passed(node: Any) -> bool:
    """Return whether the function of `node` handed a tensor on that is no parameter."""
    is_passing = False
    while node and node.name() in PASSING:
        node, is_passing = node.next_functions[0][0], True
    return is_passing and not isinstance(getattr(node, "variable", None), Parameter)
