"""A plan as people and programs read it: aligned text, rich tables, or one JSON document."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from msrun.cli import options
from msrun.cli.output import answer, escaped
from msrun.cli.prepare import Prepared
from msrun.cli.settings import Level
from msrun.job import Binding, BindMode
from msrun.launch import WorkerPlan
from msrun.topology import render_number_list
from msrun.units import render_duration

SCHEMA = 1
_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows under a heading.

    Args:
        heading: What they are.
        columns: Names of the columns; empty writes none.
        rows: Cells, as many a row as there are columns, where these have names.
    """

    heading: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...]


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
        Section(heading="containment", rows=((plan.containment,),)),
    ]
    for worker in plan.workers:
        if worker.rank == env_of:
            rows = tuple((f"{k}={shlex.quote(v)}",) for k, v in sorted(worker.env.items()))
            found.append(Section(heading=f"environment of rank {env_of}", rows=rows))
    if prepared.notes:
        found.append(Section(heading="notes", rows=tuple((note,) for note in prepared.notes)))
    return found


# Shown even where they are defaults: whoever asks for a plan wants to know these.
_ALWAYS = frozenset({"job-id", "workers-per-node", "start-method", "log-dir"})


def show(found: Sequence[Section], *, is_terminal: bool) -> None:
    """Print `found`, with colours and lines for a person at a terminal."""
    if is_terminal:
        _show_rich(found)
    else:
        answer("\n\n".join(_text(section) for section in found))


def _text(section: Section) -> str:
    rows = [tuple(map(escaped, row)) for row in (section.columns, *section.rows) if row]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join([f"{section.heading}:", *(f"  {line}" for line in lines)])


def _show_rich(found: Sequence[Section]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for section in found:
        table = Table(
            title=section.heading,
            title_justify="left",
            title_style="bold",
            show_header=bool(section.columns),
            box=None,
            pad_edge=False,
        )
        for name in section.columns or ("",):
            table.add_column(name, style="", header_style="dim", overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(escaped(cell)) for cell in row))
        console.print(table)
        console.print()


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
