"""Codes of how a tensor lies on one mesh axis: a placement of its values and one of its gradient.

The forward graph is enough to plan forward and backward, since an operator's strategy fixes both:
where work is divided by a loop that an input does not have, that input is whole on every rank and
its gradient a sum over them.

A code below `SHARDS` cuts that tensor dim, values and gradient alike.  The others:

- `RR`: values and gradient whole on every rank.
- `RP`: values whole, the gradient a pending sum.
- `PR`: values a pending sum, the gradient whole.
- `RZ`: values whole, the gradient and the optimizer's state cut flat.  Parameters only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

SHARDS = 8
RR, RP, PR, RZ = range(SHARDS, SHARDS + 4)

# Placements: a dim that is cut, or one of these.
WHOLE, SUM = -1, -2
FLAT = SHARDS

_FORWARD = np.array([*range(SHARDS), WHOLE, WHOLE, SUM, WHOLE])
_GRADIENT = np.array([*range(SHARDS), WHOLE, SUM, WHOLE, FLAT])
_TEXTS = {RR: "R", RP: "R", PR: "P", RZ: "R, state cut"}


def forward(codes: Codes) -> Codes:
    """Return the placement of the values."""
    found: Codes = _FORWARD[codes]
    return found


def gradient(codes: Codes) -> Codes:
    """Return the placement of the gradient."""
    found: Codes = _GRADIENT[codes]
    return found


def is_cut(codes: Codes) -> Mask:
    """Return where the values are cut."""
    found: Mask = codes < SHARDS
    return found


def text(code: int) -> str:
    """Return `code` as plans show it: `S(0)`, `R`, `P`."""
    return f"S({code})" if code < SHARDS else _TEXTS[code]
