"""The agent's first order: what the reaper and the forkserver need to know of a job."""

from __future__ import annotations

import json

from msrun.job import JobSpec, ProgramKind, StartMethod
from msrun.supervise.orders import SERVER, SERVER_PRELOAD, Configure

# DDP imports the second after `init_process_group`: then its default arguments hold the
# group, which cannot end its threads any more, and the exit may abort.
BUILT_IN_PRELOAD = ("torch", "torch.distributed.nn")


def configure(job: JobSpec, directory: str, cgroup: str | None, threads: str) -> Configure:
    """Return the first order to the reaper.

    Args:
        job: The job.
        directory: Its private directory on this node.
        cgroup: As of `Configure`, like the one that follows.
        threads: Thread count of most workers.
    """
    is_python = job.program.kind is not ProgramKind.COMMAND
    return Configure(
        job_id=job.job_id,
        kind=job.program.kind.value,
        argv=[job.program.target, *job.program.args],
        interpreter_options=list(job.program.interpreter_options),
        cwd=job.cwd,
        preload=[*BUILT_IN_PRELOAD, *_preloads(job)] if is_python else [],
        preload_of_user=list(job.preload) if is_python else [],
        fork=job.start_method is StartMethod.FORK and not job.program.interpreter_options,
        run_dir=directory,
        cgroup=cgroup,
        threads=threads,
        framework=job.framework.value,
    )


def _preloads(job: JobSpec) -> tuple[str, ...]:
    """Return the modules that servers and the parallel runtime of the workers import."""
    servers = (SERVER, SERVER_PRELOAD) if job.servers else ()
    if not job.parallel:
        return servers
    from msrun.parallel.config import preloads  # 5 ms that other jobs need not.
    from msrun.parallel.config_file import parse_config

    return *servers, *preloads(parse_config(json.loads(job.parallel)))
