"""msrun: start, supervise and configure distributed PyTorch jobs.

Importing this package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

from msrun.version import __version__ as __version__

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime
    from msrun.worker.beat import beat as beat


def __getattr__(name: str) -> Any:
    """Import `beat` when it is first asked for."""
    if name != "beat":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = importlib.import_module("msrun.worker.beat").beat
    return found


def join() -> None:
    """Take this process's place in a cluster that is started by hand with MS_ROLE.

    Under any launcher and without MS_ROLE it does nothing.  Else it does not return: the
    script begins again, in a worker that has a rank.  Call it first, before torch is used.

    Raises:
        UsageError: The script cannot begin again, such as in a notebook.
    """
    importlib.import_module("msrun.worker.by_hand").join()


def init(
    config: Any = None,
    backend: str | None = None,
    device: Any = None,
    timeout: float | None = None,
) -> Runtime:
    """Return this process's parallel runtime; see `join` and `msrun.parallel.runtime.init`."""
    join()
    runtime = importlib.import_module("msrun.parallel.runtime")
    return cast("Runtime", runtime.init(config, backend, device, timeout))
