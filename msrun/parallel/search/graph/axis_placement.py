"""Placement codes: how a tensor is placed on one mesh axis, its values and its gradient.

The forward graph is enough to plan forward and backward, since an operator's strategy fixes both:
where its work is split by a loop that an input does not have, every rank needs all of that input,
and the input's gradient is the sum of what the ranks compute.  So one code stands for the
placement of the values and that of the gradient, in torch's terms:

| code | values | gradient |
|---|---|---|
| 0 to `SHARD_CODES` - 1 | `Shard(code)` | `Shard(code)` |
| `RR` | `Replicate()` | `Replicate()` |
| `RP` | `Replicate()` | `Partial()` |
| `PR` | `Partial()` | `Replicate()` |
| `RZ`, parameters only | `Replicate()` | sharded flat, with the optimizer's state (ZeRO) |

A layout of a tensor is one code for each mesh axis, the slowest-varying axis first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SHARD_CODES = 8
RR, RP, PR, RZ = range(SHARD_CODES, SHARD_CODES + 4)

# A placement is the dim that is sharded, or one of these.
REPLICATED, PARTIAL = -1, -2
FLAT_SHARDED = SHARD_CODES

_VALUES = np.array([*range(SHARD_CODES), REPLICATED, REPLICATED, PARTIAL, REPLICATED])
_GRADIENTS = np.array([*range(SHARD_CODES), REPLICATED, PARTIAL, REPLICATED, FLAT_SHARDED])
_TEXTS = {RR: "R", RP: "R", PR: "P", RZ: "R, state cut"}


def value_placement(codes: IntArray) -> IntArray:
    """Return the placement of the values."""
    placements: IntArray = _VALUES[codes]
    return placements


def gradient_placement(codes: IntArray) -> IntArray:
    """Return the placement of the gradient."""
    placements: IntArray = _GRADIENTS[codes]
    return placements


def is_sharded(codes: IntArray) -> BoolArray:
    """Return where the values are sharded."""
    mask: BoolArray = codes < SHARD_CODES
    return mask


def placement_text(code: int) -> str:
    """Return `code` as plans show it: `S(0)`, `R`, `P`."""
    return f"S({code})" if code < SHARD_CODES else _TEXTS[code]
