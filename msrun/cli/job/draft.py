"""Options, program and machine become one JobSpec that remembers where each value came from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun.cli.job.console import choose_tail
from msrun.cli.job.cpu_binding import choose_binding
from msrun.cli.job.formation import Size, count, find_timeout
from msrun.cli.job.program import ChosenProgram, job_id_stem
from msrun.cli.job.rendezvous import Rendezvous, find_rendezvous
from msrun.cli.options import catalog as options
from msrun.cli.options.fleet import RANK_TABLE_FILE
from msrun.cli.options.log_name import with_rank
from msrun.cli.options.option import Option
from msrun.cli.options.parallel import Parallel, fit_parallel, is_inline
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.cli.system import System
from msrun.errors import UsageError
from msrun.job import Binding, JobSpec, ProgramKind, RestartLimits, StartMethod
from msrun.supervise.secret import read_secret
from msrun.topology import DeviceKind, Machine
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
    options.HANG_TIMEOUT,
    options.DETECT_IDLE,
    options.WORKER_LOG_NAME,
    options.INSECURE,
    options.LAUNCHER,
)


_OF_SEVERAL: tuple[Option[object], ...] = (
    options.LOCAL_ADDR,
    options.LEASE,
    options.EXCLUDE_AFTER,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResolvedFields:
    """What the job's fields are, where more than one option or the machine decides."""

    size: Size
    rendezvous: Rendezvous
    job_id: Given[str]
    log_dir: Given[str]
    join_timeout: Given[float]
    last_call: Given[float]
    secret_file: Given[str | None]
    log_name: Given[str]
    tail: Given[frozenset[int] | None]
    tail_local: Given[frozenset[int] | None]
    start_method: Given[StartMethod]
    bind_core: Given[Binding]
    bind_numa: Given[Binding]
    env: Given[dict[str, str]]
    rank_table: str
    emit_rank_table: str


def draft_job(
    settings: Settings, chosen: ChosenProgram, machine: Machine, system: System
) -> JobDraft:
    """Return the job that `settings` ask for on `machine`.

    Raises:
        UsageError: The options contradict each other, or this machine cannot do it.
    """
    found, notes = _find(settings, chosen, machine, system)
    parallel = fit_parallel(settings.get(options.PARALLEL), found.size.world_size)
    job = _job(settings, chosen, found, parallel)
    notes = [*_without_effect(settings, found), *_insecure(settings), *notes, *_unfitted(parallel)]
    return JobDraft(
        job=job,
        machine=machine,
        parallel=parallel,
        values=_values(settings, found),
        notes=tuple(notes),
    )


def _find(
    settings: Settings, chosen: ChosenProgram, machine: Machine, system: System
) -> tuple[_ResolvedFields, list[str]]:
    """Return what is found out, and notes."""
    size = count(settings, machine, system.environment())
    rendezvous = find_rendezvous(settings, size, machine, system)
    join_timeout = find_timeout(settings, options.JOIN_TIMEOUT)
    last_call = find_timeout(settings, options.LAST_CALL)
    job_id = _job_id(settings, chosen, size, rendezvous, system)
    log_dir = _log_dir(settings, job_id.value)
    tail, tail_local = choose_tail(settings, size)
    start_method, start_notes = _start_method(settings, chosen)
    bind_core, bind_numa, bind_notes = choose_binding(settings, machine)
    found = _ResolvedFields(
        size=size,
        rendezvous=rendezvous,
        job_id=job_id,
        log_dir=log_dir,
        join_timeout=join_timeout,
        last_call=last_call,
        secret_file=_secret_file(settings),
        log_name=_log_name(settings, size),
        tail=tail,
        tail_local=tail_local,
        start_method=start_method,
        bind_core=bind_core,
        bind_numa=bind_numa,
        env=merge_env(settings),
        rank_table=_rank_table(settings, machine),
        emit_rank_table=_emitted(settings, rendezvous),
    )
    return found, [*start_notes, *bind_notes]


def _job(
    settings: Settings, chosen: ChosenProgram, found: _ResolvedFields, parallel: Parallel | None
) -> JobSpec:
    size, rendezvous, node_rank = found.size, found.rendezvous, settings.get(options.NODE_RANK)
    return JobSpec(
        job_id=found.job_id.value,
        program=chosen.program,
        nnodes_min=size.nnodes.value[0],
        nnodes_max=size.nnodes.value[1],
        world_size=size.total.value if size.total else None,
        workers_per_node=size.workers.value,
        cwd=str(Path.cwd()),
        log_dir=found.log_dir.value,
        node_rank=node_rank.value if node_rank else None,
        master_addr=rendezvous.host.value if rendezvous.host else None,
        master_port=rendezvous.port.value,
        serves=rendezvous.serves,
        listen_host=rendezvous.listen_host,
        address=rendezvous.address,
        secret_file=found.secret_file.value,
        join_timeout=found.join_timeout.value,
        last_call=found.last_call.value,
        lease=settings.value(options.LEASE),
        grace=settings.value(options.GRACE),
        hang_timeout=settings.value(options.HANG_TIMEOUT),
        detect_idle=settings.value(options.DETECT_IDLE),
        restarts=_restarts(settings),
        start_method=found.start_method.value,
        preload=settings.value(options.PRELOAD),
        worker_log_name=found.log_name.value,
        tail=found.tail.value,
        tail_local=found.tail_local.value,
        bind_core=found.bind_core.value,
        bind_numa=found.bind_numa.value,
        role=settings.value(options.ROLE),
        virtual_local_rank=settings.value(options.VIRTUAL_LOCAL_RANK),
        env=found.env.value,
        parallel=parallel.render() if parallel else "",
        rank_table=found.rank_table,
        emit_rank_table=found.emit_rank_table,
        insecure=settings.value(options.INSECURE),
        detach=not settings.value(options.JOIN),
        launcher=settings.value(options.LAUNCHER),
    )


def _values(settings: Settings, found: _ResolvedFields) -> dict[str, Given[object]]:
    """Return what `plan` shows of each setting, what one node has no use for left out."""
    size = found.size
    fewest, most = size.nnodes.value
    nnodes = most if fewest == most else f"{fewest}:{most}"
    is_alone = size.is_alone
    nobody: Given[object] = Given(None)
    emitted = settings.get(options.EMIT_RANK_TABLE)
    several: dict[str, Given[object]] = {
        "worker-num": size.total or nobody,
        "node-rank": settings.get(options.NODE_RANK) or nobody,
        "local-addr": settings.get(options.LOCAL_ADDR) or nobody,
        "last-call": found.last_call,
        "lease": Given(settings.value(options.LEASE), settings.source(options.LEASE)),
        "exclude-after": Given(
            settings.value(options.EXCLUDE_AFTER), settings.source(options.EXCLUDE_AFTER)
        ),
        "local-ranks-filter": found.tail_local,
    }
    return {
        "job-id": found.job_id,
        "nnodes": Given(nnodes, size.nnodes.source),
        "workers-per-node": size.workers,
        "master-addr": found.rendezvous.host or nobody,
        "master-port": found.rendezvous.port,
        "join-timeout": found.join_timeout,
        **({} if is_alone else several),
        **({} if is_alone and not found.secret_file.text else {"secret-file": found.secret_file}),
        "start-method": found.start_method,
        "env": found.env,
        "log-dir": found.log_dir,
        **({"emit-rank-table": emitted} if emitted else {}),
        "tail": found.tail,
        "bind-core": found.bind_core,
        "bind-numa": found.bind_numa,
        "parallel": _named(settings.get(options.PARALLEL)),
        **{o.name: Given(settings.value(o), settings.source(o)) for o in _DIRECT},
        "worker-log-name": found.log_name,
    }


def _named(parallel: Given[object] | None) -> Given[str | None]:
    """Return the file of a parallel configuration, `inline` where it has none."""
    if parallel is None:
        return Given(None)
    name = "inline" if is_inline(parallel.text) else parallel.text
    return Given(name, parallel.source, parallel.text)


def _without_effect(settings: Settings, found: _ResolvedFields) -> Iterator[str]:
    for option in _OF_SEVERAL:
        if (given := settings.get(option)) and found.size.is_alone:
            yield f"{given.cite()} has no effect on one node"
    if found.last_call.text and not found.size.is_elastic:
        yield f"{found.last_call.cite()} has no effect: the job's nodes are as many as they are"
    if settings.value(options.WORKER_LOG_NAME) != found.log_name.value:
        yield f"{found.log_name.cite()} is followed by the rank, since nodes may share --log-dir"


def _unfitted(parallel: Parallel | None) -> Iterator[str]:
    if parallel and parallel.layout is None and parallel.config.mesh != "auto":
        yield "--parallel is checked when the nodes are there, unless --worker-num says how many"


def _insecure(settings: Settings) -> Iterator[str]:
    given = settings.get(options.INSECURE)
    if given and given.value:
        yield "--insecure: any process on this machine can stop this job or make it fail"


def _restarts(settings: Settings) -> RestartLimits:
    return RestartLimits(
        max_restarts=settings.value(options.MAX_RESTARTS),
        window=settings.value(options.RESTART_WINDOW),
        no_progress_limit=settings.value(options.NO_PROGRESS_LIMIT),
        exclude_after=settings.value(options.EXCLUDE_AFTER),
    )


def _rank_table(settings: Settings, machine: Machine) -> str:
    """Return the table that workers are told of: a given one, or that of the job for HCCL."""
    given, emitted = settings.get(RANK_TABLE_FILE), settings.get(options.EMIT_RANK_TABLE)
    is_npu = any(device.kind is DeviceKind.NPU for device in machine.devices)
    named = given or (emitted if is_npu else None)
    return str(Path(named.value).absolute()) if named else ""


def _emitted(settings: Settings, rendezvous: Rendezvous) -> str:
    """Return where the job's own table is written; that can be done."""
    given, table = settings.get(options.EMIT_RANK_TABLE), settings.get(RANK_TABLE_FILE)
    if given is None:
        return ""
    path = Path(given.value).absolute()
    if table and Path(table.value).absolute() == path:
        raise UsageError(f"{given.cite()} would replace {table.cite()}")
    problem = None
    if rendezvous.serves:
        try:
            problem = "is a directory" if path.is_dir() else _directory_problem(path.parent)
        except (OSError, ValueError) as error:
            problem = f"cannot be reached: {getattr(error, 'strerror', None) or error}"
    if problem:
        where = "" if path.is_dir() else f": {shown(str(path.parent))}"
        raise UsageError(f"{given.cite()}{where} {problem}")
    return str(path)


def _secret_file(settings: Settings) -> Given[str | None]:
    """Return the file of the job's secret that is named; it holds one."""
    named, insecure = settings.get(options.SECRET_FILE), settings.get(options.INSECURE)
    if named is None:
        return Given(None)
    if insecure and insecure.value:
        if insecure.source.level <= named.source.level:
            raise UsageError(f"{named.cite()} contradicts {insecure.cite()}")
        return Given(None)
    path = str(Path(named.value).absolute())
    read_secret(path)
    return Given(path, named.source, named.text)


def _job_id(
    settings: Settings, chosen: ChosenProgram, size: Size, rendezvous: Rendezvous, system: System
) -> Given[str]:
    """Return the job's name: on several nodes, what the same words on all of them make of it."""
    named = strongest(settings.get(options.JOB_ID), settings.get(options.RDZV_ID))
    if named:
        return named
    token = system.token()
    if rendezvous.host and not size.is_alone:
        program = chosen.program
        total = size.total.value if size.total else None
        words = (rendezvous.host.value, rendezvous.port.value, size.nnodes.value, total)
        same = repr((*words, program.kind.value, program.target, program.args))
        token = hashlib.sha256(same.encode(errors="surrogateescape")).hexdigest()[: len(token)]
    return Given(f"{job_id_stem(chosen.program)}-{token}")


def _log_name(settings: Settings, size: Size) -> Given[str]:
    """Return the pattern of a log's name: with the rank, where nodes may share a directory."""
    given = settings.get(options.WORKER_LOG_NAME)
    if given is None:
        return Given(settings.value(options.WORKER_LOG_NAME))
    name = given.value if size.is_alone else with_rank(given.value)
    return Given(name, given.source, given.text)


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
        raise UsageError(f"{cite}{where} {problem}")
    return Given(str(path), named.source, named.text)


def _directory_problem(path: Path) -> str | None:
    """Return why nothing can be made in `path`."""
    if path.is_symlink() and not path.exists():
        return "is a link to nothing"
    if not path.exists():
        return "is not there"
    if not path.is_dir():
        return "is a file, not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return "may not be written by this user"
    return None


def _start_method(
    settings: Settings, chosen: ChosenProgram
) -> tuple[Given[StartMethod], list[str]]:
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
