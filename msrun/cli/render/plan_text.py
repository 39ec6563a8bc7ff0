"""A plan as people and programs read it: sections of rows, or one JSON document."""

from __future__ import annotations

import enum
import shlex

from msrun.backend import LaunchPlan, WorkerPlan
from msrun.cli.job.parallel import Parallel
from msrun.cli.job.prepare import Prepared
from msrun.cli.options import catalog as options
from msrun.cli.options.settings import Level
from msrun.cli.render import mesh_text
from msrun.cli.render.section import TextSection
from msrun.environ import HCCL_PREFIX
from msrun.job import EVERY_RANK, Binding, BindMode, JobSpec
from msrun.supervise import node_plan, secret
from msrun.topology import render_number_list
from msrun.units import render_duration, render_size

SCHEMA = 1
_NOTHING = "-"


def document(prepared: Prepared) -> dict[str, object]:
    """Return the plan for programs; keys are only ever added to it.

    Durations are texts such as `10m`, because JSON has no infinity.
    """
    plan, machine = prepared.plan, prepared.plan.machine
    formation = {} if plan.job.is_alone else {"formation": _formation_document(plan)}
    return {
        "schema": SCHEMA,
        "job": {
            name: {"value": _plain(name, given.value), "source": str(given.source)}
            for name, given in prepared.draft.values.items()
        },
        "program": {
            "kind": plan.job.program.kind.value,
            "target": plan.job.program.target,
            "args": list(plan.job.program.args),
            "cwd": plan.job.cwd,
        },
        **formation,
        **_servers_document(plan),
        "command": list(plan.argv),
        "workers": [_worker(worker, has_rank=plan.has_ranks) for worker in plan.workers],
        "parallel": mesh_text.document(prepared.draft.parallel),
        "machine": {
            "host": machine.host,
            "cpus": list(machine.cpus.cpus),
            "devices": [f"{device.kind.value}:{device.physical}" for device in machine.devices],
        },
        "containment": plan.containment,
        "notes": list(prepared.notes),
    }


def sections(prepared: Prepared, *, is_all: bool, env_of: int | None) -> list[TextSection]:
    """Return the plan for people."""
    plan = prepared.plan
    values = {
        name: given
        for name, given in prepared.draft.values.items()
        if is_all or given.source.level > Level.DEFAULT or name in _ALWAYS
    }
    tables = [
        TextSection(
            heading="job",
            columns=("setting", "value", "source"),
            rows=tuple(
                (name, _cell(_plain(name, given.value)), str(given.source))
                for name, given in values.items()
            ),
        ),
        *_formation(plan),
        TextSection(heading="command", rows=((shlex.join(plan.argv),),)),
        TextSection(
            heading="workers",
            columns=("rank", "local_rank", "device", "cpus", "log"),
            rows=tuple(_row(worker, has_rank=plan.has_ranks) for worker in plan.workers),
        ),
        *_servers(plan),
        *_hccl(plan),
        *mesh_text.sections(prepared.draft.parallel, is_all=is_all),
        TextSection(heading="containment", rows=((plan.containment,),)),
    ]
    for worker in plan.workers:
        if worker.rank == env_of:
            rows = tuple((f"{k}={shlex.quote(v)}",) for k, v in sorted(worker.env.items()))
            tables.append(TextSection(heading=f"environment of rank {env_of}", rows=rows))
    return [*tables, *_noted(prepared.notes)]


def _servers(plan: LaunchPlan) -> list[TextSection]:
    """Return where all parameter servers run; nothing of a job without any."""
    job = plan.job
    rows = tuple(
        (str(number), str(number % job.nnodes_max), node_plan.server_log_file(job, number))
        for number in range(job.servers)
    )
    columns = ("server", "node", "log")
    return [TextSection(heading="servers", columns=columns, rows=rows)] if rows else []


def _servers_document(plan: LaunchPlan) -> dict[str, object]:
    job = plan.job
    if not job.servers:
        return {}
    rows = [
        {
            "server": number,
            "node_rank": number % job.nnodes_max,
            "log": node_plan.server_log_file(job, number),
        }
        for number in range(job.servers)
    ]
    return {"servers": rows}


def _hccl(plan: LaunchPlan) -> list[TextSection]:
    """Return the variables of HCCL that workers get, the same for all of this node."""
    names = sorted(name for name in plan.workers[0].env if name.startswith(HCCL_PREFIX))
    rows = tuple((name, plan.workers[0].env[name]) for name in names)
    return [TextSection(heading="HCCL", rows=rows)] if rows else []


def _formation(plan: LaunchPlan) -> list[TextSection]:
    """Return how the nodes find each other, nothing of a job of one node."""
    job = plan.job
    if job.is_alone:
        return []
    ranks = "assigned when all nodes have registered"
    if plan.has_ranks:
        ranks = f"if every node starts {job.workers_per_node}"
    host = f"[{job.listen_host}]" if ":" in job.listen_host else job.listen_host
    rows = (
        ("scheduler", f"{host}:{job.master_port}"),
        ("started by", "this node" if job.serves else "another node"),
        ("this node", job.address),
        ("secret", _secret(job)),
        ("ranks", ranks),
    )
    return [TextSection(heading="formation", rows=rows)]


def _formation_document(plan: LaunchPlan) -> dict[str, object]:
    job = plan.job
    return {
        "nnodes": [job.nnodes_min, job.nnodes_max],
        "world_size": job.world_size,
        "scheduler": {"host": job.listen_host, "port": job.scheduler_port},
        "serves": job.serves,
        "address": job.address,
        "secret": _secret(job),
    }


def _secret(job: JobSpec) -> str:
    """Return where the secret of several nodes comes from."""
    return "none" if job.insecure else job.secret_file or str(secret.own_file())


def mesh_document(parallel: Parallel | None, notes: tuple[str, ...]) -> dict[str, object]:
    """Return the part of `document` that needs no program."""
    return {"schema": SCHEMA, "parallel": mesh_text.document(parallel), "notes": list(notes)}


def mesh_sections(
    parallel: Parallel | None, notes: tuple[str, ...], *, is_all: bool
) -> list[TextSection]:
    """Return the part of `sections` that needs no program."""
    return [*mesh_text.sections(parallel, is_all=is_all), *_noted(notes)]


def _noted(notes: tuple[str, ...]) -> list[TextSection]:
    return [TextSection(heading="notes", rows=tuple((note,) for note in notes))] if notes else []


# Shown even where they are defaults: these are what a user of `plan` looks for first.
_ALWAYS = frozenset({"job-id", "workers-per-node", "start-method", "log-dir"})


def _row(worker: WorkerPlan, *, has_rank: bool) -> tuple[str, ...]:
    return (
        str(worker.rank) if has_rank else _NOTHING,
        str(worker.local_rank),
        _NOTHING if worker.device is None else str(worker.device),
        render_number_list(worker.cpus) or _NOTHING,
        worker.log_file,
    )


def _worker(worker: WorkerPlan, *, has_rank: bool) -> dict[str, object]:
    """Return one worker; of an unknown rank, nothing that depends on it."""
    return {
        "rank": worker.rank if has_rank else None,
        "local_rank": worker.local_rank,
        "node_rank": worker.node_rank if has_rank else None,
        "device": worker.device,
        "cpus": list(worker.cpus),
        "numa_nodes": list(worker.numa_nodes),
        "log": worker.log_file,
        "env": worker.env if has_rank else None,
    }


def _plain(name: str, value: object) -> object:
    """Return `value` with nothing in it that JSON does not have."""
    plain: object = value
    match value:
        case float():
            plain = render_duration(value)
        case enum.Enum():
            plain = value.value
        case Binding(mode=BindMode.GIVEN):
            plain = {f"device{d}": render_number_list(n) for d, n in value.by_device.items()}
        case Binding():
            plain = value.mode.value
        case frozenset():
            plain = sorted(value)
        case tuple():
            plain = list(value)
        case int() if name == "log-limit":
            plain = render_size(value)
        case None if name == "tail":
            plain = options.TAIL.default_text
        case dict() if name in ("tee", "redirects"):
            plain = _streams(value)
    return plain


def _streams(chosen: dict[int, int]) -> str:
    """Return streams by local rank as torchrun's options have them."""
    each = (str(std) if rank == EVERY_RANK else f"{rank}:{std}" for rank, std in chosen.items())
    return ",".join(each) or "-"


def _cell(plain: object) -> str:
    """Return a plain value as one cell of text."""
    match plain:
        case None:
            return _NOTHING
        case bool():
            return str(plain).lower()
        case list():
            return ",".join(map(str, plain)) or "none"
        case dict():
            return " ".join(f"{key}={shlex.quote(str(v))}" for key, v in plain.items()) or "none"
        case _:
            return str(plain)
