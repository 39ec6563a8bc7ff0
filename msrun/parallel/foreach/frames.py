"""Variables of functions that run."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of `frame`, whose values it may drop from then on.

    Before Python 3.13 a frame keeps the dict that `f_locals` makes: what it has would live as long
    as the function runs, such as a model that the script has deleted since.
    """
    found = frame.f_locals
    values = dict(found)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return values
