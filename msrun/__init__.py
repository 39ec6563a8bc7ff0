"""msrun: start, supervise and configure distributed PyTorch jobs.

    import msrun

    rt = msrun.init()
    model = rt.shard(Net())

Importing this package imports no torch: `Runtime` and `collectives` are loaded when they are first
used, `init` when it is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from msrun.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from msrun.api.job import Job, JobStatus, launch
    from msrun.cluster.verdict import Verdict
    from msrun.errors import (
        CheckpointError,
        ConfigError,
        ExitCode,
        JobFailed,
        ModelError,
        MsrunError,
        RanksDisagreeError,
        UsageError,
    )
    from msrun.parallel import collectives
    from msrun.parallel.config import ParallelConfig
    from msrun.parallel.runtime import Runtime
    from msrun.worker.beat import beat

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ExitCode",
    "Job",
    "JobFailed",
    "JobStatus",
    "ModelError",
    "MsrunError",
    "RanksDisagreeError",
    "Runtime",
    "UsageError",
    "Verdict",
    "__version__",
    "beat",
    "collectives",
    "init",
    "join",
    "launch",
    "shard",
]

# Public name -> module that has it; each costs an import that not every program needs.
_LOADED_ON_USE = {
    "CheckpointError": "msrun.errors",
    "ConfigError": "msrun.errors",
    "ExitCode": "msrun.errors",
    "Job": "msrun.api.job",
    "JobFailed": "msrun.errors",
    "JobStatus": "msrun.api.job",
    "ModelError": "msrun.errors",
    "MsrunError": "msrun.errors",
    "RanksDisagreeError": "msrun.errors",
    "Runtime": "msrun.parallel.runtime",
    "UsageError": "msrun.errors",
    "Verdict": "msrun.cluster.verdict",
    "beat": "msrun.worker.beat",
    "launch": "msrun.api.job",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name == "collectives":
        return importlib.import_module("msrun.parallel.collectives")
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_LOADED_ON_USE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def join() -> None:
    """Take this process's place in a cluster that is started by hand with MS_ROLE.

    Under any launcher and without MS_ROLE it does nothing.  Else it does not return: the
    script begins again, in a worker that has a rank.  Call it first, before torch is used.

    Raises:
        UsageError: The script cannot begin again, such as in a notebook.
    """
    from msrun.worker import by_hand

    by_hand.join()


def shard(
    function: Callable[..., Any],
    in_: Sequence[Any] | None = None,
    out: Any = None,
    params: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return `function` on shards of its tensors: each rank computes a part of the result.

    All ranks call the result together, with equal tensors.  Dims are as in a rule of `plan`: a list
    with the mesh axis that shards each dim, several as a list, or None.  With one rank, or axes of
    one rank alone, it is `function` itself.

    Args:
        function: A function of tensors, or a module, whose parameters are sharded in place.
        in_: Dims of each positional argument; None leaves one as it comes.
        out: Dims of the output, which is then a `DTensor`; a tuple has those of several.  None
            returns whole, plain tensors.
        params: Name of an argument or, of a module, of a parameter -> dims.  A warning names those
            that are neither.

    Raises:
        UsageError: The mesh has no such axis.
    """
    from msrun.parallel.functions import sharded

    return sharded.shard(init().context, function, in_, out, params)


def init(
    config: str | Path | Mapping[str, Any] | ParallelConfig | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: float | None = None,
) -> Runtime:
    """Return this process's parallel runtime; the first call joins the job.

    All ranks of the job call it, and each waits for the others.  Under no launcher the job is this
    process alone.  A process that MS_ROLE makes part of a cluster takes its place there first; see
    `join`.

    Args:
        config: Parallel configuration: path of a YAML file or a mapping; None takes the file
            that the launcher handed over, or plain data parallel over all ranks.
        backend: Process-group backend, such as nccl; None takes that of the device.
        device: Device of this rank; None takes its own accelerator, or the CPU.
        timeout: Seconds that a collective may take; None is torch's default.

    Raises:
        UsageError: The configuration, environment or device does not allow it; nothing was made.
    """
    join()
    from msrun.parallel import runtime

    return runtime.init(config, backend, device, timeout)
