"""A process of a cluster that is started by hand: variables take the place of options.

`msrun.worker.by_hand` makes it of a script.  With `MS_ROLE=MS_WORKER` it is the agent of
a node with one worker, which runs that script; with `MS_ROLE=MS_PSERVER` that of a node with one
parameter server and no worker; with `MS_ROLE=MS_SCHED` it keeps the scheduler, which belongs to no
node.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from msrun import environ
from msrun.cli.job.prepare import Prepared, prepare, read_request
from msrun.cli.main import guarded
from msrun.cli.options import catalog as options
from msrun.cli.options.command_line import CommandLine
from msrun.cli.options.option import Option
from msrun.cli.options.parsers import span
from msrun.cli.options.table import TABLE
from msrun.cli.output import say_notes
from msrun.cli.system import RealSystem, System
from msrun.environ import Pod
from msrun.errors import UsageError
from msrun.identity import Hand
from msrun.job import SERVERS_MAX, Framework, JobSpec
from msrun.units import PORT_MAX, shown

_SCHEDULER, _WORKER, _SERVER = _ROLES = ("MS_SCHED", "MS_WORKER", "MS_PSERVER")
_ALIASES = {"MS_SERVER": _SERVER}  # MindSpore reads both
# The program is always a Python command, even if the environment has one of these options.
_OF_PROGRAMS = (options.MODULE, options.NO_PYTHON, options.RUN_PATH)
_WORKERS_MAX = 999_999
_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ALIKE = (
    f"{Hand.HOST}, {Hand.PORT}, {Hand.WORKERS} and {Hand.SERVERS} are the same in every process of "
    "a cluster"
)


def main(words: list[str]) -> NoReturn:
    """Do what the environment says for `python WORDS`, and end with the job's exit code."""
    # The backends lie beside this package, which a script's own directory may have been.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(guarded(take_place, words, RealSystem()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """What the variables say.

    Args:
        role: What it is.
        host: Host of the scheduler.
        port: Port of the scheduler.
        workers: Workers of the cluster.
        servers: Parameter servers of the cluster.
        rank: This worker's rank, or the number of this server behind all ranks; None when the
            scheduler decides.
        name: What tells this process from others on its machine; empty leaves it to us.
    """

    role: str
    host: str
    port: int
    workers: int
    servers: int
    rank: int | None
    name: str


class _System(RealSystem):
    """The system of a process that is one of many, and listens only if it has the scheduler."""

    def __init__(self, *, listens: bool) -> None:
        self._listens = listens

    def environment(self) -> Mapping[str, str]:
        """Return the variables that may hold options, and where an operator put the scheduler."""
        env = environ.options_environment()
        where = env.get(Pod.SCHEDULER)
        kept = environ.without_copies(env)
        return {**kept, Pod.SCHEDULER: where} if where else kept

    def port_problem(self, host: str, port: int) -> str | None:
        """Look at the port, if it is to be ours."""
        return super().port_problem(host, port) if self._listens else None


def take_place(words: Sequence[str], system: System) -> int:
    """Run this process's part of the cluster, for `python WORDS`; return the job's exit code."""
    env = environ.current()
    membership = _read(env)
    prepared = _prepare(membership, words, env)
    job, machine = prepared.plan.job, prepared.plan.machine
    if membership.role == _SCHEDULER:
        if not job.serves:
            raise UsageError(
                f"environment {Hand.HOST}={membership.host} is no address of this machine",
                hint=f"start the process with {Hand.ROLE}={_SCHEDULER} there",
            )
        from msrun.processes.scheduler_host import (
            serve,  # Only one process of the cluster needs it.
        )

        return serve(job, machine)
    say_notes(prepared.notes)
    device = _device(env, len(machine.devices))
    name = membership.name or f"{os.getpid():07}-{system.token()}"
    job = _as_node(job, membership, name, device)
    return prepared.launcher.submit(prepared.launcher.plan(job, machine))


def _read(env: Mapping[str, str]) -> _Membership:
    role = env.get(Hand.ROLE, "")
    role = _ALIASES.get(role, role)
    if role not in _ROLES:
        raise UsageError(
            f"environment {Hand.ROLE}={shown(role)} is no role (choose {', '.join(_ROLES)})"
        )
    for needed in (Hand.HOST, Hand.PORT, Hand.WORKERS):
        if not env.get(needed):
            raise UsageError(
                f"environment {Hand.ROLE}={role} is set and {needed} is not", hint=_ALIKE
            )
    workers = _number(env, Hand.WORKERS, 1, _WORKERS_MAX)
    servers = _number(env, Hand.SERVERS, 0, SERVERS_MAX) if env.get(Hand.SERVERS) else 0
    if role == _SERVER and not servers:
        given = f"{Hand.SERVERS}=0" if env.get(Hand.SERVERS) else f"no {Hand.SERVERS}"
        raise UsageError(f"environment {Hand.ROLE}={role} is set, and {given}", hint=_ALIKE)
    rank, name = None, ""
    if role == _WORKER:
        rank, name = _node_id(env, "rank", Hand.WORKERS, workers)
    elif role == _SERVER:
        number, name = _node_id(env, "number of a server", Hand.SERVERS, servers)
        rank = None if number is None else workers + number
    return _Membership(
        role=role,
        host=env[Hand.HOST],
        port=_number(env, Hand.PORT, 1, PORT_MAX),
        workers=workers,
        servers=servers,
        rank=rank,
        name=name,
    )


def _number(env: Mapping[str, str], name: Hand, least: int, most: int) -> int:
    text = env[name]
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise UsageError(
            f"environment {name}={shown(text)} is no whole number from {least} to {most}"
        )
    return int(text)


def _node_id(env: Mapping[str, str], what: str, total: Hand, count: int) -> tuple[int | None, str]:
    """Return the number or the name that a worker or server was given."""
    text = env.get(Hand.NODE_ID, "")
    if not _NUMBER.fullmatch(text):
        if text and not _NAME.fullmatch(text):
            raise UsageError(
                f"environment {Hand.NODE_ID}={shown(text)} must be a {what}, or 1 to 64 letters, "
                "digits, '_', '.' or '-'"
            )
        return None, text
    if int(text) >= count:
        raise UsageError(
            f"environment {Hand.NODE_ID}={text} is no {what} of {total}={count} "
            f"(choose {span(count)})"
        )
    return int(text), ""


def _device(env: Mapping[str, str], devices: int) -> int | None:
    """Return the device that a worker was given, None without one and where there is none."""
    text = env.get(Hand.DEVICE, "")
    if not devices or not text:
        return None
    if not _NUMBER.fullmatch(text) or int(text) >= devices:
        raise UsageError(
            f"environment {Hand.DEVICE}={shown(text)} is no device of this machine "
            f"(choose {span(devices)})"
        )
    return int(text)


def _prepare(who: _Membership, words: Sequence[str], env: Mapping[str, str]) -> Prepared:
    """Return the job as on a node of several with one worker."""
    words_of_all = (who.host, who.port, who.workers, *([who.servers] if who.servers else ()))
    chosen = hashlib.sha256(repr(words_of_all).encode()).hexdigest()[:6]
    given: list[tuple[Option[object], str, str]] = [
        (options.MASTER_ADDR, Hand.HOST, who.host),
        (options.MASTER_PORT, Hand.PORT, str(who.port)),
        (options.WORKER_NUM, Hand.WORKERS, str(who.workers)),
        # One worker meets its scheduler as many do, and not as a job that is alone.
        (options.NNODES, "--nnodes", f"1:{max(who.workers + who.servers, 2)}"),
        # Each is a node, and not beside workers.
        (options.SERVER_NUM, Hand.SERVERS, "0"),
        (options.WORKERS_PER_NODE, "--workers-per-node", "1"),
        (options.LAUNCHER, "--launcher", "dynamic"),
        *((option, option.flag, "false") for option in _OF_PROGRAMS),
        *(
            (option, spelling, text)
            for option, spelling, text in (
                (options.LOCAL_ADDR, Hand.ADDRESS, env.get(Hand.ADDRESS, "")),
                (options.JOIN_TIMEOUT, Hand.TIMEOUT, env.get(Hand.TIMEOUT, "")),
                (options.LEASE, Hand.SILENCE, env.get(Hand.SILENCE, "")),
                (options.JOB_ID, "--job-id", f"by-hand-{chosen}"),
            )
            if text and not any(map(env.get, option.variables))
        ),
    ]
    line = CommandLine(
        texts={option: (text,) for option, _, text in given},
        spellings={option: spelling for option, spelling, _ in given},
        program=("python", *words),
    )
    system = _System(listens=who.role == _SCHEDULER)
    request = read_request(line, TABLE, system)
    stays = request.settings.get(options.JOIN)
    if stays and not stays.value:
        raise UsageError(
            f"{stays.cite()}: a process that is started by hand waits for the end of the job",
            hint="end its command with & instead",
        )
    prepared = prepare(request, system)
    job = structs.replace(prepared.plan.job, servers=who.servers)
    if who.servers and job.framework is Framework.MINDSPORE:
        raise UsageError(
            f"environment {Hand.SERVERS}={who.servers}: servers are for workers of torch, and "
            "--framework mindspore has none",
            hint="leave one of them out",
        )
    return replace(prepared, plan=structs.replace(prepared.plan, job=job))


def _as_node(job: JobSpec, who: _Membership, name: str, device: int | None) -> JobSpec:
    """Return `job` for a process that runs one worker or server and no scheduler."""
    return structs.replace(
        job,
        serves=False,
        is_server=who.role == _SERVER,
        store_port=0,  # each process of a machine is a node
        node_rank=who.rank,
        node_name=name,
        device=device,
        tail_local=None,
    )
