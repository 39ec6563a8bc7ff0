"""Options, program and machine become one JobSpec that remembers where each value came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun.cli import options
from msrun.cli.console import choose_tail
from msrun.cli.formation import check_one_node, count_workers, find_endpoint, find_join_timeout
from msrun.cli.option import Option
from msrun.cli.parallel import Parallel, fit_parallel, is_inline
from msrun.cli.placement import choose_binding
from msrun.cli.program import Chosen, job_id_stem
from msrun.cli.settings import Given, Settings, strongest
from msrun.cli.world import World
from msrun.errors import UsageError
from msrun.job import JobSpec, ProgramKind, RestartLimits, StartMethod
from msrun.topology import Machine
from msrun.units import shown

_DIRECT: tuple[Option[object], ...] = (
    options.ROLE,
    options.VIRTUAL_LOCAL_RANK,
    options.PRELOAD,
    options.JOIN,
    options.MAX_RESTARTS,
    options.RESTART_WINDOW,
    options.NO_PROGRESS_LIMIT,
    options.GRACE,
    options.WORKER_LOG_NAME,
    options.INSECURE,
    options.LAUNCHER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """One job, ready for a backend.

    Args:
        job: What was asked for.
        machine: What this node offers.
        parallel: How the workers divide their work; None without a configuration.
        values: Name of each setting -> its value and source, in the order of the help.
        notes: What the user should know, one sentence each.
    """

    job: JobSpec
    machine: Machine
    parallel: Parallel | None
    values: Mapping[str, Given[object]]
    notes: tuple[str, ...]


def draft_job(settings: Settings, chosen: Chosen, machine: Machine, world: World) -> JobDraft:
    """Return the job that `settings` ask for on `machine`.

    Raises:
        UsageError: The options contradict each other, or this machine cannot do it.
    """
    check_one_node(settings, world.environment())
    workers = count_workers(settings, machine)
    host, port = find_endpoint(settings, world)
    join_timeout = find_join_timeout(settings)
    job_id = _job_id(settings, chosen, world)
    log_dir = _log_dir(settings, job_id.value)
    tail = choose_tail(settings, workers.value)
    start_method, start_notes = _start_method(settings, chosen)
    bind_core, bind_numa, bind_notes = choose_binding(settings, machine)
    env, parallel = merge_env(settings), fit_parallel(settings.get(options.PARALLEL), workers.value)
    job = JobSpec(
        job_id=job_id.value,
        program=chosen.program,
        workers_per_node=workers.value,
        cwd=str(Path.cwd()),
        log_dir=log_dir.value,
        node_rank=0 if settings.get(options.NODE_RANK) else None,
        master_addr=host.value if host else None,
        master_port=port.value,
        join_timeout=join_timeout.value,
        grace=settings.value(options.GRACE),
        restarts=_restarts(settings),
        start_method=start_method.value,
        preload=settings.value(options.PRELOAD),
        worker_log_name=settings.value(options.WORKER_LOG_NAME),
        tail=tail.value,
        bind_core=bind_core.value,
        bind_numa=bind_numa.value,
        role=settings.value(options.ROLE),
        virtual_local_rank=settings.value(options.VIRTUAL_LOCAL_RANK),
        env=env.value,
        parallel=parallel.render() if parallel else "",
        insecure=settings.value(options.INSECURE),
        detach=not settings.value(options.JOIN),
        launcher=settings.value(options.LAUNCHER),
    )
    values: dict[str, Given[object]] = {
        "job-id": job_id,
        "nnodes": Given(1, settings.source(options.NNODES)),
        "workers-per-node": workers,
        "master-addr": host or Given(None),
        "master-port": port,
        "join-timeout": join_timeout,
        "start-method": start_method,
        "env": env,
        "log-dir": log_dir,
        "tail": tail,
        "bind-core": bind_core,
        "bind-numa": bind_numa,
        "parallel": _named(settings.get(options.PARALLEL)),
    }
    values |= {o.name: Given(settings.value(o), settings.source(o)) for o in _DIRECT}
    notes = (*_insecure(settings), *start_notes, *bind_notes)
    return JobDraft(job=job, machine=machine, parallel=parallel, values=values, notes=notes)


def _named(parallel: Given[object] | None) -> Given[str | None]:
    """Return the file of a parallel configuration, `inline` where it has none."""
    if parallel is None:
        return Given(None)
    name = "inline" if is_inline(parallel.text) else parallel.text
    return Given(name, parallel.source, parallel.text)


def _insecure(settings: Settings) -> Iterator[str]:
    given = settings.get(options.INSECURE)
    if given and given.value:
        yield "--insecure: any process on this machine can stop this job or make it fail"


def _restarts(settings: Settings) -> RestartLimits:
    return RestartLimits(
        max_restarts=settings.value(options.MAX_RESTARTS),
        window=settings.value(options.RESTART_WINDOW),
        no_progress_limit=settings.value(options.NO_PROGRESS_LIMIT),
    )


def _job_id(settings: Settings, chosen: Chosen, world: World) -> Given[str]:
    named = strongest(settings.get(options.JOB_ID), settings.get(options.RDZV_ID))
    return named or Given(f"{job_id_stem(chosen.program)}-{world.token()}")


def _log_dir(settings: Settings, job_id: str) -> Given[str]:
    """Return the log directory, absolute; it can be made or written."""
    default = f"msrun_logs/{job_id}"
    named = settings.get(options.LOG_DIR) or Given(default)
    path = Path(named.value).absolute()
    nearest = path
    try:
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        problem = _directory_problem(nearest)
    except (OSError, ValueError) as error:
        problem = f"cannot be reached: {getattr(error, 'strerror', None) or error}"
    if problem:
        where = "" if nearest == path else f": {shown(str(nearest))}"
        cite = named.cite() if named.text else f"--log-dir {default}"
        msg = f"{cite}{where} {problem}"
        raise UsageError(msg)
    return Given(str(path), named.source, named.text)


def _directory_problem(path: Path) -> str | None:
    """Return why nothing can be made in the existing `path`."""
    if path.is_symlink() and not path.exists():
        return "is a link to nothing"
    if not path.is_dir():
        return "is a file, not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return "may not be written by this user"
    return None


def _start_method(settings: Settings, chosen: Chosen) -> tuple[Given[StartMethod], list[str]]:
    """Return how workers start, and why it is not what was asked for."""
    given: Given[StartMethod] = settings.get(options.START_METHOD) or Given(StartMethod.FORK)
    reason = ""
    if chosen.program.kind is ProgramKind.COMMAND:
        reason = "a command is always exec'ed"
    elif chosen.program.interpreter_options:
        reason = f"python {' '.join(chosen.program.interpreter_options)} needs its own interpreter"
    notes = []
    if reason and given.value is StartMethod.FORK:
        if given.text or chosen.program.kind is not ProgramKind.COMMAND:
            notes.append(f"--start-method exec is used: {reason}")
        given = Given(StartMethod.EXEC, given.source, given.text)
    preload = settings.get(options.PRELOAD)
    if preload and preload.value and given.value is StartMethod.EXEC:
        notes.append(f"{preload.cite()} has no effect with --start-method exec")
    return given, notes


def merge_env(settings: Settings) -> Given[dict[str, str]]:
    """Return all variables given; a stronger source wins where two name the same."""
    every = settings.every(options.ENV)
    merged: dict[str, str] = {}
    for given in reversed(every):
        merged |= given.value
    return Given(merged, every[0].source, every[0].text) if every else Given(merged)
