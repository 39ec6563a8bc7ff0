"""msrun: start, supervise and configure distributed PyTorch jobs.

Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime
    from msrun.worker.beat import beat as beat

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `beat` when it is first asked for."""
    if name != "beat":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = importlib.import_module("msrun.worker.beat").beat
    return found


def init(
    config: Any = None,
    backend: str | None = None,
    device: Any = None,
    timeout: float | None = None,
) -> Runtime:
    """Return this process's parallel runtime; see `msrun.parallel.runtime.init`."""
    runtime = importlib.import_module("msrun.parallel.runtime")
    return cast("Runtime", runtime.init(config, backend, device, timeout))
