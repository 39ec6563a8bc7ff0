"""Whether a job can have the parameter servers that it asks for."""

from __future__ import annotations

from msrun.cli.options import catalog as options
from msrun.cli.options.settings import Settings
from msrun.errors import UsageError
from msrun.job import Framework, JobSpec, ProgramKind


def check_servers(settings: Settings, job: JobSpec) -> None:
    """Refuse servers that no worker of `job` could use, or that nobody could place.

    Raises:
        UsageError: There are such servers.
    """
    given = settings.get(options.SERVER_NUM)
    if given is None or not job.servers:
        return
    if job.program.kind is ProgramKind.COMMAND:
        raise UsageError(
            f"{given.cite()}: {job.program.target} is no Python program of torch",
            hint="give a script, or -m and a module",
        )
    if job.framework is Framework.MINDSPORE:
        raise UsageError(
            f"{given.cite()} serves workers of torch, and --framework mindspore has none",
            hint="leave one of them out",
        )
    if job.nnodes_min < job.nnodes_max and not job.is_elastic:
        raise UsageError(
            f"{given.cite()} with --worker-num needs a fixed number of nodes, not "
            f"{job.nnodes_min} to {job.nnodes_max}",
            hint="give --nnodes one number, or the workers of each node: --nproc-per-node",
        )
