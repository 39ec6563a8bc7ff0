"""Options, program and machine become one JobSpec that remembers where each value came from."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from msrun.cli.job.console import choose_streams, choose_tail
from msrun.cli.job.cpu_binding import choose_binding
from msrun.cli.job.formation import Size, count, find_grace, find_timeout
from msrun.cli.job.parallel import Parallel, fit_parallel
from msrun.cli.job.program import ChosenProgram, job_id_stem
from msrun.cli.job.rendezvous import (
    Rendezvous,
    check_port,
    endpoint_before,
    find_rendezvous,
)
from msrun.cli.job.servers import check_servers
from msrun.cli.options import catalog as options
from msrun.cli.options.fleet import RANK_TABLE_FILE
from msrun.cli.options.log_name import with_rank
from msrun.cli.options.option import Option
from msrun.cli.options.parallel import is_inline
from msrun.cli.options.parsers import SIGNALS
from msrun.cli.options.peers import EVENT_LOG_HANDLER, FRAMEWORK, SIGNALS_TO_HANDLE
from msrun.cli.options.settings import DEFAULT, Given, Level, Settings, strongest
from msrun.cli.system import System
from msrun.environ import Pod
from msrun.errors import UsageError
from msrun.job import JOB_ID_PATTERN, Framework, JobSpec, ProgramKind, RestartLimits, StartMethod
from msrun.supervise.secret import read_secret
from msrun.topology import DeviceKind, Machine
from msrun.units import shown

# A node that is the whole job has no use for these.
_FOR_SEVERAL: tuple[Option[object], ...] = (
    options.LOCAL_ADDR,
    options.LEASE,
    options.EXCLUDE_AFTER,
)
# Nor does `plan` show these there: another setting says the same.
_HIDDEN_ALONE: frozenset[Option[object]] = frozenset(
    {
        *_FOR_SEVERAL,
        *(options.WORKER_NUM, options.NODE_RANK, options.LAST_CALL, options.LOCAL_RANKS_FILTER),
    }
)

_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.-]+")
_ID_STEM_MAX = 40
_ID_MAX = 56

# Option -> the value that takes the place of the one given, None for the default of `JobSpec`.
Decided = Mapping[Option[object], Given[object] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """One job, ready for a backend.

    Args:
        job: What was asked for.
        parallel: How the workers divide their work; None without a configuration.
        values: Name of each setting -> its value and source, in the order of the help.
        notes: What the user should know, one sentence each.
    """

    job: JobSpec
    parallel: Parallel | None
    values: Mapping[str, Given[object]]
    notes: tuple[str, ...]


def draft_job(
    settings: Settings, chosen: ChosenProgram, machine: Machine, system: System
) -> JobDraft:
    """Return the job that `settings` ask for on `machine`.

    An option that names a field of `JobSpec` fills it with the value from `_decide`, else with
    the value given; an option that was not given leaves the default of `JobSpec`.

    Raises:
        UsageError: The options contradict each other, or this machine cannot do it.
    """
    size = count(settings, machine, system)
    rendezvous = find_rendezvous(settings, size, machine, system)
    decided, notes = _decide(
        settings, chosen, size=size, rendezvous=rendezvous, machine=machine, system=system
    )
    emitted = _emitted(settings, rendezvous)
    parallel = fit_parallel(settings.get(options.PARALLEL), size.world_size)
    job = JobSpec(
        program=chosen.program,
        cwd=str(Path.cwd()),
        nnodes_min=size.nnodes.value[0],
        nnodes_max=size.nnodes.value[1],
        serves=rendezvous.serves,
        store_port=rendezvous.store_port,
        listen_host=rendezvous.listen_host,
        address=rendezvous.address,
        restarts=RestartLimits(**_fields("restarts", settings, decided)),
        parallel=parallel.render() if parallel else "",
        rank_table=_rank_table(settings, machine),
        emit_rank_table=emitted,
        detach=not settings.value(options.JOIN),
        is_replaced=bool(system.environment().get(Pod.NODES)),
        stop_signals=_stop_signals(settings),
        **_fields("", settings, decided),
    )
    check_port(rendezvous, job, system)
    check_servers(settings, job)
    notes = [*_without_effect(settings, job), *_insecure(settings), *notes, *_unfitted(parallel)]
    notes += _not_encrypted(settings, machine)
    values = dict(_values(settings, decided, job))
    return JobDraft(job=job, parallel=parallel, values=values, notes=tuple(notes))


def _decide(
    settings: Settings,
    chosen: ChosenProgram,
    *,
    size: Size,
    rendezvous: Rendezvous,
    machine: Machine,
    system: System,
) -> tuple[Decided, list[str]]:
    """Return the values of the options that depend on other options or on the machine, and notes.

    None keeps the default of `JobSpec`.
    """
    fewest, most = size.nnodes.value
    job_id = _job_id(settings, chosen, size, rendezvous, system)
    log_dir, log_notes = _log_dir(settings, job_id.value, system)
    tail, tail_local = choose_tail(settings, size)
    start_method, start_notes = _start_method(settings, chosen)
    bind_core, bind_numa, bind_notes = choose_binding(settings, machine, size.workers.value, system)
    decided: Decided = {
        options.NNODES: Given(most if fewest == most else f"{fewest}:{most}", size.nnodes.source),
        options.WORKER_NUM: size.total,
        options.WORKERS_PER_NODE: size.workers,
        options.MASTER_ADDR: rendezvous.host,
        options.MASTER_PORT: rendezvous.port,
        options.LOCAL_ADDR: settings.get(options.LOCAL_ADDR),
        options.JOIN_TIMEOUT: find_timeout(settings, options.JOIN_TIMEOUT),
        options.LAST_CALL: find_timeout(settings, options.LAST_CALL),
        options.GRACE: find_grace(settings),
        options.JOB_ID: job_id,
        options.SECRET_FILE: _secret_file(settings),
        options.START_METHOD: start_method,
        options.ENV: merge_env(settings),
        options.JOIN: Given(settings.value(options.JOIN), settings.source(options.JOIN)),
        options.NODE_RANK: _node_rank(settings, size),
        options.LOG_DIR: log_dir,
        options.EMIT_RANK_TABLE: settings.get(options.EMIT_RANK_TABLE),
        options.WORKER_LOG_NAME: _log_name(settings, size),
        options.TAIL: tail,
        options.TEE: choose_streams(settings),
        options.LOCAL_RANKS_FILTER: tail_local,
        options.BIND_CORE: bind_core,
        options.BIND_NUMA: bind_numa,
        options.PARALLEL: _named(settings.get(options.PARALLEL)),
    }
    return decided, [*log_notes, *start_notes, *bind_notes]


def _given(option: Option[object], settings: Settings, decided: Decided) -> Given[object] | None:
    return decided[option] if option in decided else settings.get(option)


def _fields(part: str, settings: Settings, decided: Decided) -> dict[str, Any]:
    """Return the given fields of `part` of `JobSpec`, or of `JobSpec` itself if `part` is empty."""
    fields = {}
    for option in settings.table:
        above, _, field = option.field.rpartition(".")
        if field and above == part and (given := _given(option, settings, decided)):
            fields[field] = given.value
    return fields


def _values(
    settings: Settings, decided: Decided, job: JobSpec
) -> Iterator[tuple[str, Given[object]]]:
    """Yield each setting that `plan` shows, the name of the job first.

    A job of one node has no settings that concern several nodes.
    """
    hidden = {
        *(_HIDDEN_ALONE if job.is_alone else ()),
        *(() if job.secret_file or not job.is_alone else (options.SECRET_FILE,)),
        *(() if job.emit_rank_table else (options.EMIT_RANK_TABLE,)),
        *(() if job.run_id else (options.RDZV_ID,)),
        *(() if job.event_log != "null" else (EVENT_LOG_HANDLER,)),
        *((FRAMEWORK,) if job.framework is Framework.AUTO else ()),
        *(() if job.servers else (options.SERVER_NUM,)),
        *(() if job.stdout_filters else (options.DUPLICATE_STDOUT_FILTERS,)),
        *(() if job.stderr_filters else (options.DUPLICATE_STDERR_FILTERS,)),
    }
    for option in dict.fromkeys((options.JOB_ID, *settings.table)):
        given = _given(option, settings, decided)
        if option in hidden:
            continue
        if option.field:
            source = given.source if given else DEFAULT
            yield option.name, Given(attrgetter(option.field)(job), source)
        elif option in decided:
            yield option.name, given or Given(None)


def _named(parallel: Given[object] | None) -> Given[str | None]:
    """Return the file of a parallel configuration, `inline` where it has none."""
    if parallel is None:
        return Given(None)
    name = "inline" if is_inline(parallel.text) else parallel.text
    return Given(name, parallel.source, parallel.text)


def _without_effect(settings: Settings, job: JobSpec) -> Iterator[str]:
    for option in _FOR_SEVERAL:
        if (given := settings.get(option)) and job.is_alone:
            yield f"{given.cite()} has no effect on one node"
    rank = settings.get(options.NODE_RANK)
    if rank and rank.value and job.is_alone:
        yield f"{rank.cite()} has no effect on one node (a job of several nodes needs --nnodes)"
    endpoint, alone = settings.get(options.RDZV_ENDPOINT), settings.get(options.STANDALONE)
    if endpoint and endpoint.source.level is Level.FLAG and alone and alone.value:
        yield f"{endpoint.cite()} has no effect: --standalone takes a free port of this node"
    for own in (settings.get(options.MASTER_ADDR), settings.get(options.MASTER_PORT)):
        if own and (stronger := endpoint_before(settings, own)):
            yield f"{own.cite()} has no effect: {stronger.cite()} goes before it"
    conf = settings.get(options.RDZV_CONF)
    if conf and conf.value.ignored:
        yield (
            f"{conf.cite()}: {', '.join(conf.value.ignored)} has no effect on msrun's rendezvous "
            "(--join-timeout is the time for all nodes to register)"
        )
    last_call = find_timeout(settings, options.LAST_CALL)
    if last_call and not job.is_elastic:
        yield f"{last_call.cite()} has no effect: the number of nodes is fixed"
    log_name = settings.get(options.WORKER_LOG_NAME)
    if log_name and log_name.value != job.worker_log_name:
        yield f"{log_name.cite()} is followed by the rank, since nodes may share --log-dir"


def _unfitted(parallel: Parallel | None) -> Iterator[str]:
    if parallel and parallel.layout is None and parallel.config.mesh != "auto":
        yield (
            "--parallel is checked when all nodes have registered, "
            "unless --worker-num gives their workers"
        )


def _insecure(settings: Settings) -> Iterator[str]:
    given = settings.get(options.INSECURE)
    if given and given.value:
        yield "--insecure: any process on this machine can stop this job or make it fail"


def _not_encrypted(settings: Settings, machine: Machine) -> Iterator[str]:
    """Yield what --data-tls leaves open; it is refused without a secret to make its keys of."""
    given, insecure = settings.get(options.DATA_TLS), settings.get(options.INSECURE)
    if not given or not given.value:
        return
    if insecure and insecure.value:
        hint = "its keys follow from the job's secret: leave one of them out"
        raise UsageError(f"{given.cite()} contradicts {insecure.cite()}", hint=hint)
    if machine.devices:
        yield f"{given.cite()} covers gloo alone: NCCL and HCCL encrypt nothing"


def _node_rank(settings: Settings, size: Size) -> Given[int] | None:
    """Return --node-rank; the only node has no other rank than 0."""
    given = settings.get(options.NODE_RANK)
    return None if given and given.value and size.is_alone else given


def _stop_signals(settings: Settings) -> tuple[str, ...]:
    """Return the signals that end this job and not any other."""
    given = settings.get(SIGNALS_TO_HANDLE)
    return tuple(sorted(given.value.difference(SIGNALS))) if given else ()


def _rank_table(settings: Settings, machine: Machine) -> str:
    """Return the file that workers get as RANK_TABLE_FILE: the given table, or the emitted one."""
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


def _secret_file(settings: Settings) -> Given[str] | None:
    """Return the file of --secret-file after reading it once; None without the option."""
    named, insecure = settings.get(options.SECRET_FILE), settings.get(options.INSECURE)
    if named is None:
        return None
    if insecure and insecure.value:
        if insecure.source.level <= named.source.level:
            raise UsageError(f"{named.cite()} contradicts {insecure.cite()}")
        return None
    path = str(Path(named.value).absolute())
    read_secret(path)
    return Given(path, named.source, named.text)


def _job_id(
    settings: Settings, chosen: ChosenProgram, size: Size, rendezvous: Rendezvous, system: System
) -> Given[str]:
    """Return the job's name; on several nodes it follows from the command, so that all agree."""
    named = strongest(settings.get(options.JOB_ID), _job_id_of(settings.get(options.RDZV_ID)))
    token = system.token()
    if named and size.is_alone and not settings.get(options.JOB_ID):
        # Runs may share torchrun's name, one after the other and side by side.
        return Given(f"{named.value[:_ID_MAX]}-{token}", named.source, named.text)
    if named:
        return named
    if rendezvous.host and not size.is_alone:
        program = chosen.program
        total = size.total.value if size.total else None
        words = (rendezvous.host.value, rendezvous.port.value, size.nnodes.value, total)
        same = repr((*words, program.kind.value, program.target, program.args))
        token = hashlib.sha256(same.encode(errors="surrogateescape")).hexdigest()[: len(token)]
    return Given(f"{job_id_stem(chosen.program)}-{token}")


def _job_id_of(run_id: Given[str] | None) -> Given[str] | None:
    """Return torchrun's name of a job as one that can stand in paths, different for each text."""
    if run_id is None or JOB_ID_PATTERN.fullmatch(run_id.value):
        return run_id
    stem = _NOT_IN_ID.sub("-", run_id.value).strip("_.-")[:_ID_STEM_MAX]
    digest = hashlib.sha256(run_id.value.encode()).hexdigest()[:6]
    return Given(f"{stem or 'job'}-{digest}", run_id.source, run_id.text)


def _log_name(settings: Settings, size: Size) -> Given[str] | None:
    """Return the pattern of a log's name: with the rank, where nodes may share a directory."""
    given = settings.get(options.WORKER_LOG_NAME)
    if given is None:
        return None
    name = given.value if size.is_alone else with_rank(given.value)
    return Given(name, given.source, given.text)


def _log_dir(settings: Settings, job_id: str, system: System) -> tuple[Given[str], list[str]]:
    """Return the log directory, absolute, with a note where it is not the usual one.

    It can be made or written.  Without --log-dir, logs of a job in a directory that its user may
    not write go to a temporary directory, whose name nobody can guess and make before us.

    Raises:
        UsageError: --log-dir cannot be written.
    """
    default = f"msrun_logs/{job_id}"
    named = settings.get(options.LOG_DIR)
    path = Path(named.value if named else default).absolute()
    problem = _unwritable(path)
    if problem is None:
        return (Given(str(path), named.source, named.text) if named else Given(str(path))), []
    if named:
        raise UsageError(f"{named.cite()}{problem}")
    temporary = Path(tempfile.gettempdir(), f"msrun_logs-{system.token()}{system.token()}", job_id)
    if _unwritable(temporary):
        raise UsageError(f"--log-dir {default}{problem}", hint="choose another with --log-dir")
    return Given(str(temporary)), [f"logs are in {temporary}: {default}{problem}"]


def _unwritable(path: Path) -> str | None:
    """Return why nothing can be written at `path`, as the end of a sentence about it."""
    nearest = path
    try:
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        problem = _directory_problem(nearest)
    except (OSError, ValueError) as error:
        problem = f"cannot be reached: {getattr(error, 'strerror', None) or error}"
    where = "" if nearest == path else f": {shown(str(nearest))}"
    return problem and f"{where} {problem}"


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
    """Return how workers start, with a note where that differs from the option."""
    given: Given[StartMethod] = settings.get(options.START_METHOD) or Given(StartMethod.FORK)
    reason = ""
    if chosen.program.kind is ProgramKind.COMMAND:
        reason = "a command is always exec'ed"
    elif chosen.program.interpreter_options:
        reason = f"python {' '.join(chosen.program.interpreter_options)} needs its own interpreter"
    elif (framework := settings.get(FRAMEWORK)) and framework.value is Framework.MINDSPORE:
        reason = f"{framework.cite()} loads no torch to fork with"
    notes = []
    if reason and given.value is StartMethod.FORK:
        if given.text or chosen.program.interpreter_options:
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
