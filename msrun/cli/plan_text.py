"""A plan as people and programs read it: sections of rows, or one JSON document."""

from __future__ import annotations

import enum
import shlex

from msrun.cli import options, parallel_text
from msrun.cli.parallel import Parallel
from msrun.cli.prepare import Prepared
from msrun.cli.section import Section
from msrun.cli.settings import Level
from msrun.job import Binding, BindMode
from msrun.launch import WorkerPlan
from msrun.topology import render_number_list
from msrun.units import render_duration

SCHEMA = 1
_NOTHING = "-"


def document(prepared: Prepared) -> dict[str, object]:
    """Return the plan for programs; keys are only ever added to it.

    Durations are texts such as `10m`, because JSON has no infinity.
    """
    plan, machine = prepared.plan, prepared.plan.machine
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
        "command": list(plan.argv),
        "workers": [_worker(worker) for worker in plan.workers],
        "parallel": parallel_text.document(prepared.draft.parallel),
        "machine": {
            "host": machine.host,
            "cpus": list(machine.cpus.cpus),
            "devices": [f"{device.kind.value}:{device.physical}" for device in machine.devices],
        },
        "containment": plan.containment,
        "notes": list(prepared.notes),
    }


def sections(prepared: Prepared, *, is_all: bool, env_of: int | None) -> list[Section]:
    """Return the plan for people."""
    plan = prepared.plan
    values = {
        name: given
        for name, given in prepared.draft.values.items()
        if is_all or given.source.level > Level.DEFAULT or name in _ALWAYS
    }
    found = [
        Section(
            heading="job",
            columns=("setting", "value", "source"),
            rows=tuple(
                (name, _cell(_plain(name, given.value)), str(given.source))
                for name, given in values.items()
            ),
        ),
        Section(heading="command", rows=((shlex.join(plan.argv),),)),
        Section(
            heading="workers",
            columns=("rank", "local_rank", "device", "cpus", "log"),
            rows=tuple(_row(worker) for worker in plan.workers),
        ),
        *parallel_text.sections(prepared.draft.parallel, is_all=is_all),
        Section(heading="containment", rows=((plan.containment,),)),
    ]
    for worker in plan.workers:
        if worker.rank == env_of:
            rows = tuple((f"{k}={shlex.quote(v)}",) for k, v in sorted(worker.env.items()))
            found.append(Section(heading=f"environment of rank {env_of}", rows=rows))
    return [*found, *_noted(prepared.notes)]


def mesh_document(parallel: Parallel | None, notes: tuple[str, ...]) -> dict[str, object]:
    """Return the part of `document` that needs no program."""
    return {"schema": SCHEMA, "parallel": parallel_text.document(parallel), "notes": list(notes)}


def mesh_sections(
    parallel: Parallel | None, notes: tuple[str, ...], *, is_all: bool
) -> list[Section]:
    """Return the part of `sections` that needs no program."""
    return [*parallel_text.sections(parallel, is_all=is_all), *_noted(notes)]


def _noted(notes: tuple[str, ...]) -> list[Section]:
    return [Section(heading="notes", rows=tuple((note,) for note in notes))] if notes else []


# Shown even where they are defaults: whoever asks for a plan wants to know these.
_ALWAYS = frozenset({"job-id", "workers-per-node", "start-method", "log-dir"})


def _row(worker: WorkerPlan) -> tuple[str, ...]:
    return (
        str(worker.rank),
        str(worker.local_rank),
        _NOTHING if worker.device is None else str(worker.device),
        render_number_list(worker.cpus) or _NOTHING,
        worker.log_file,
    )


def _worker(worker: WorkerPlan) -> dict[str, object]:
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "node_rank": worker.node_rank,
        "device": worker.device,
        "cpus": list(worker.cpus),
        "numa_nodes": list(worker.numa_nodes),
        "log": worker.log_file,
        "env": worker.env,
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
        case None if name == "tail":
            plain = options.TAIL.default_text
    return plain


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
