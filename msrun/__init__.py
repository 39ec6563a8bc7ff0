"""msrun: start, supervise and configure distributed PyTorch jobs.

Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime

__version__ = "0.1.0"


def init(
    config: Any = None,
    backend: str | None = None,
    device: Any = None,
    timeout: float | None = None,
) -> Runtime:
    """Return this process's parallel runtime; see `msrun.parallel.runtime.init`."""
    runtime = importlib.import_module("msrun.parallel.runtime")
    return cast("Runtime", runtime.init(config, backend, device, timeout))
