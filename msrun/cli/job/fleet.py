"""A job whose backend starts the agents: the orders of its nodes, and the run or its plan."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from msrun import environ
from msrun.bounded_file import read_bounded
from msrun.cli.job.draft import merge_env
from msrun.cli.job.formation import find_grace
from msrun.cli.job.program import job_id_stem
from msrun.cli.options import catalog as options
from msrun.cli.options import fleet as fleet_options
from msrun.cli.options.settings import Given, Settings, strongest
from msrun.cli.options.table import ALL, ENV_OF, JSON, OUTPUT_DIR
from msrun.cli.output import answer, say_notes
from msrun.errors import UsageError
from msrun.fleet import Fleet, FleetLauncher, FleetPlan
from msrun.hosts.hostlist import Host, parse_hostfile, select
from msrun.identity import port_of
from msrun.job import LOOPBACK, ProgramKind, WorkerProgram
from msrun.rank_table.file import read_table
from msrun.rank_table.nodes import hosts_of
from msrun.version import __version__

if TYPE_CHECKING:
    from msrun.cli.job.prepare import JobRequest
    from msrun.cli.options.option import Option
    from msrun.cli.system import System

# The launcher passes these on in its own way, or they concern this command alone.
_NOT_FOR_AGENTS: frozenset[Option[object]] = frozenset(
    {
        *fleet_options.FLEET_TABLE,
        *(options.LAUNCHER, options.CONFIG, options.JOB_ID, options.RDZV_ID),
        *(options.MASTER_ADDR, options.MASTER_PORT, options.SECRET_FILE, options.JOIN),
        *(ALL, ENV_OF, JSON, OUTPUT_DIR),
    }
)
# The options that still mean something where the launcher starts the ranks itself.
_OF_RANKS: frozenset[Option[object]] = frozenset(
    {
        *fleet_options.FLEET_TABLE,
        *(options.LAUNCHER, options.CONFIG, options.JOB_ID, options.RDZV_ID, options.ENV),
        *(options.NNODES, options.WORKER_NUM, options.WORKERS_PER_NODE),
        *(options.MASTER_ADDR, options.MASTER_PORT, options.MODULE, options.NO_PYTHON),
        *(ALL, ENV_OF, JSON, OUTPUT_DIR),
    }
)
_REFUSED = (options.NODE_RANK, options.STANDALONE, options.RDZV_ENDPOINT, options.LOCAL_ADDR)


def run_fleet(request: JobRequest, system: System) -> int:
    """Start the job of `request` on its nodes and return its exit code."""
    launcher, plan = _prepare(request, system)
    say_notes((*request.notes, *plan.notes))
    return launcher.submit(plan, _secret(request.settings))


def plan_fleet(request: JobRequest, system: System) -> None:
    """Print what `run_fleet` would do."""
    _, plan = _prepare(request, system)
    if given := request.settings.get(OUTPUT_DIR):
        _write_files(plan, given)
        return
    if request.settings.value(JSON):
        answer(json.dumps(msgspec.to_builtins(plan), indent=2))
        return
    answer("\n".join(_text(plan)))


def _write_files(plan: FleetPlan, given: Given[str]) -> None:
    """Write the files of the plan into a directory, which is made if it is not there."""
    if not plan.files:
        raise UsageError(f"{given.cite()}: this backend has no files to write")
    directory = Path(given.value)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in plan.files.items():
            (directory / name).write_text(content)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{given.cite()} cannot be written: {reason}") from None
    say_notes((f"{', '.join(plan.files)} are in {directory}", *plan.notes))


def _text(plan: FleetPlan) -> Iterator[str]:
    if not plan.commands:  # The files are all there is to do, and programs may read them from here.
        yield "---\n".join(plan.files.values()).rstrip("\n")
        return
    for name, content in plan.files.items():
        yield f"{name}:"
        yield from (f"  {line}" for line in content.splitlines())
    for command in plan.commands:
        yield f"{command.node or 'all nodes'}:"
        yield f"  {shlex.join(command.argv)}"
        yield from (f"  with {name}={value}" for name, value in command.env.items())
        if command.has_secret:
            yield "  with the secret in a variable"
        if command.order and not plan.files:
            yield f"  reads the secret, then {command.order}"


def _prepare(request: JobRequest, system: System) -> tuple[FleetLauncher, FleetPlan]:
    settings = request.settings
    for option in _REFUSED:
        if given := settings.get(option):
            name = settings.value(options.LAUNCHER)
            raise UsageError(f"{given.cite()} is for one node, and {name} starts them all")
    own = {option.name: settings.get(option) for option in fleet_options.OWN}
    texts = {name: given.value for name, given in own.items() if given}
    join = settings.get(options.JOIN)
    if join and not join.value:
        texts["detach"] = "true"
    launcher = system.open_fleet(settings.value(options.LAUNCHER), texts)
    by_mpi = settings.value(fleet_options.RANKS_BY) == "mpi"
    return launcher, launcher.plan((_ranks if by_mpi else _fleet)(request, system))


def _fleet(request: JobRequest, system: System) -> Fleet:
    settings = request.settings
    hosts, program = _hosts(settings), _program(request)
    host, port = settings.get(options.MASTER_ADDR), settings.get(options.MASTER_PORT)
    job_id = _job_id(settings, program, system)
    # A port of its own, so that jobs may share nodes; passed on always, because srun or mpirun
    # may put another one into the environment of the agents.
    own_port = port_of(job_id) if hosts else 0
    return Fleet(
        job_id=job_id,
        words=(*_words(settings), *program),
        nnodes=len(hosts) or settings.value(options.NNODES)[1],
        python=_python(settings),
        cwd=str(Path.cwd()),
        hosts=hosts,
        master_addr=host.value if host else "",
        master_port=port.value if port else own_port,
        env=_table_env(settings, hosts),
        versions={"msrun": __version__},
    )


def _ranks(request: JobRequest, system: System) -> Fleet:
    """Return a fleet without agents, whose ranks are the launcher's."""
    settings = request.settings
    by = settings.get(fleet_options.RANKS_BY)
    cite = by.cite() if by else "--ranks-by mpi"
    if settings.value(options.LAUNCHER) != "mpirun":
        raise UsageError(f"{cite} needs --launcher mpirun")
    for option in settings.table:
        if (given := settings.get(option)) and option not in _OF_RANKS:
            raise UsageError(f"{given.cite()} is msrun's to do, and with {cite} it starts no ranks")
    each, total = settings.get(options.WORKERS_PER_NODE), settings.get(options.WORKER_NUM)
    if each and not isinstance(each.value, int):
        raise UsageError(f"{each.cite()} is no number, as {cite} needs")
    slots = each.value if each and isinstance(each.value, int) else 1
    hosts = tuple(replace(host, slots=host.slots or slots) for host in _hosts(settings))
    room = sum(host.slots or 1 for host in hosts) or settings.value(options.NNODES)[1] * slots
    if total and hosts and total.value > room:
        raise UsageError(f"{total.cite()} is more than the {room} slots of the hosts")
    job_id = _job_id(settings, _program(request), system)
    host, port = settings.get(options.MASTER_ADDR), settings.get(options.MASTER_PORT)
    is_alone = len(hosts) == 1 or (not hosts and settings.value(options.NNODES)[1] == 1)
    first = LOOPBACK if is_alone else hosts[0].name if hosts else ""
    address = host.value if host else first
    if port and not address:
        raise UsageError(f"{port.cite()} needs --master-addr, since no host is named")
    number = port.value if port and port.value else port_of(job_id)
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(number)} if address else {}
    return Fleet(
        job_id=job_id,
        words=_command(request),
        nnodes=len(hosts) or settings.value(options.NNODES)[1],
        python=_python(settings),
        cwd=str(Path.cwd()),
        hosts=hosts,
        env={**_table_env(settings, hosts), **merge_env(settings).value, **rendezvous},
        ranks=total.value if total else room,
    )


def _command(request: JobRequest) -> tuple[str, ...]:
    """Return the command of each rank."""
    settings, file = request.settings, request.file
    *_, target = ("", *filter(None, (file.script, file.module)))
    words = request.words or (target, *(file.args or ()))
    if not words[0]:
        raise UsageError("no SCRIPT is given", hint="msrun --help lists options and verbs")
    if settings.value(options.NO_PYTHON):
        return words
    is_module = settings.value(options.MODULE) or (file.module and not request.words)
    return (_python(settings), *(("-m",) if is_module else ()), *words)


def _python(settings: Settings) -> str:
    named = settings.get(fleet_options.REMOTE_PYTHON)
    if named is None and settings.value(options.LAUNCHER) == "kubernetes":
        return ""  # An image has its own.
    return named.value if named else sys.executable


def _job_id(settings: Settings, program: tuple[str, ...], system: System) -> str:
    named = strongest(settings.get(options.JOB_ID), settings.get(options.RDZV_ID))
    if named:
        return named.value
    target = next((word for word in program if not word.startswith("-")), "")
    stem = job_id_stem(WorkerProgram(kind=ProgramKind.SCRIPT, target=target))
    return f"{stem}-{system.token()}"


def _hosts(settings: Settings) -> tuple[Host, ...]:
    """Return the nodes that options name, none where the batch system knows them."""
    hostfile, table = (
        settings.get(fleet_options.HOSTFILE),
        settings.get(fleet_options.RANK_TABLE_FILE),
    )
    if hostfile and table:
        raise UsageError(f"{hostfile.cite()} contradicts {table.cite()} (choose one)")
    hosts: tuple[Host, ...] = ()
    if hostfile:
        hosts = read_hostfile(hostfile.value)
    elif table:
        hosts = hosts_of(read_table(table.value))
    filters = [settings.get(fleet_options.INCLUDE), settings.get(fleet_options.EXCLUDE)]
    include, exclude = (given.value if given else "" for given in filters)
    if (include or exclude) and not hosts:
        raise UsageError("--include and --exclude need --hostfile, whose hosts they choose")
    hosts = select(hosts, include=include, exclude=exclude) if hosts else hosts
    nnodes = settings.get(options.NNODES)
    if nnodes and hosts:
        if nnodes.value[1] > len(hosts):
            raise UsageError(f"{nnodes.cite()} is more than the {len(hosts)} hosts that are named")
        hosts = hosts[: nnodes.value[1]]
    if table:
        _check_workers(settings, table, hosts)
    return hosts


def _check_workers(settings: Settings, table: Given[str], hosts: tuple[Host, ...]) -> None:
    """Refuse numbers of workers that differ from the rank table, which has one for each device."""
    each, total = settings.get(options.WORKERS_PER_NODE), settings.get(options.WORKER_NUM)
    other = next((host for host in hosts if each and each.value != host.slots), None)
    if each and other:
        has = f"gives node {other.name} {other.slots}"
        raise UsageError(f"{each.cite()} contradicts {table.cite()}, which {has}")
    ranks = sum(host.slots or 0 for host in hosts)
    if total and total.value != ranks:
        raise UsageError(f"{total.cite()} contradicts {table.cite()}, whose nodes have {ranks}")


def _table_env(settings: Settings, hosts: tuple[Host, ...]) -> dict[str, str]:
    """Return the variable that names the rank table, if the job runs on all of its nodes."""
    given, nnodes = settings.get(fleet_options.RANK_TABLE_FILE), settings.get(options.NNODES)
    is_range = nnodes is not None and len(set(nnodes.value)) > 1
    if given is None or is_range or hosts != hosts_of(read_table(given.value)):
        return {}
    return {environ.RANK_TABLE_FILE: str(Path(given.value).absolute())}


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile.

    Raises:
        UsageError: It cannot be read, or a line is wrong.
    """
    content = read_bounded(path, f"hostfile {path}", mebibytes=16)
    return parse_hostfile(content.decode(errors="replace"), path)


def _words(settings: Settings) -> Iterator[str]:
    """Yield the options that agents need, from wherever they were given."""
    for option in settings.table:
        is_range = option is options.NNODES and len(set(settings.value(options.NNODES))) > 1
        if option in _NOT_FOR_AGENTS or (option is options.NNODES and not is_range):
            continue
        every: Iterable[Given[object]] = reversed(settings.every(option))
        if option is options.GRACE and (grace := find_grace(settings)):
            every = (grace,)  # agents do not see with which word of torchrun it came
        yield from (f"{option.flag}={given.text}" for given in every)


def _program(request: JobRequest) -> tuple[str, ...]:
    file = request.file
    if request.words:
        return request.words
    if not file.script and not file.module:
        raise UsageError("no SCRIPT is given", hint="msrun --help lists options and verbs")
    module = (f"{options.MODULE.flag}=true",) if file.module else ()
    return (*module, file.module or file.script or "", *(file.args or ()))


def _secret(settings: Settings) -> bytes:
    from msrun.supervise.secret import SECRET_BYTES, read_secret

    given = settings.get(options.SECRET_FILE)
    return read_secret(given.value) if given else os.urandom(SECRET_BYTES)
