"""Whether a job can have the parameter servers that it asks for."""

from __future__ import annotations

from msrun.cli.options import catalog as options
from msrun.cli.options.settings import Settings
from msrun.errors import UsageError
from msrun.job import Framework, JobSpec, ProgramKind


def check_servers(settings: Settings, job: JobSpec) -> None:
    """Refuse servers that no worker of `job` could use, or that would have to move.

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
    if job.nnodes_min < job.nnodes_max:
        raise UsageError(
            f"{given.cite()} needs a fixed number of nodes, not {job.nnodes_min} to "
            f"{job.nnodes_max}: servers do not move",
            hint="give --nnodes one number",
        )
