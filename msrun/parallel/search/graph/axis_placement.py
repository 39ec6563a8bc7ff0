"""Placement codes: how a tensor is placed on one mesh axis, its values and its gradient.

The forward graph is enough to plan forward and backward, since an operator's strategy fixes both:
where work is divided by a loop that an input does not have, that input is whole on every rank and
its gradient a sum over them.

A code below `SHARD_CODES` cuts that tensor dim, values and gradient alike.  The others:

- `RR`: values and gradient whole on every rank.
- `RP`: values whole, the gradient a pending sum.
- `PR`: values a pending sum, the gradient whole.
- `RZ`: values whole, the gradient and the optimizer's state cut flat.  Parameters only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SHARD_CODES = 8
RR, RP, PR, RZ = range(SHARD_CODES, SHARD_CODES + 4)

# Placements: a dim that is cut, or one of these.
REPLICATED, PARTIAL = -1, -2
FLAT_SHARDED = SHARD_CODES

_FORWARD = np.array([*range(SHARD_CODES), REPLICATED, REPLICATED, PARTIAL, REPLICATED])
_GRADIENT = np.array([*range(SHARD_CODES), REPLICATED, PARTIAL, REPLICATED, FLAT_SHARDED])
_TEXTS = {RR: "R", RP: "R", PR: "P", RZ: "R, state cut"}


def value_placement(codes: IntArray) -> IntArray:
    """Return the placement of the values."""
    found: IntArray = _FORWARD[codes]
    return found


def gradient_placement(codes: IntArray) -> IntArray:
    """Return the placement of the gradient."""
    found: IntArray = _GRADIENT[codes]
    return found


def is_sharded(codes: IntArray) -> BoolArray:
    """Return where the values are cut."""
    found: BoolArray = codes < SHARD_CODES
    return found


def placement_text(code: int) -> str:
    """Return `code` as plans show it: `S(0)`, `R`, `P`."""
    return f"S({code})" if code < SHARD_CODES else _TEXTS[code]
