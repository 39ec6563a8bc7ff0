"""`msrun status` and `msrun ls`: phase, nodes and ranks of jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import msgspec

from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say
from msrun.cli.verbs.control import JSON, PATIENCE, SCHEMA, connected, parse
from msrun.errors import UnreachableError
from msrun.units import shown

if TYPE_CHECKING:
    from msrun.cli.render.section import TextSection
    from msrun.cli.system import System
    from msrun.cluster.wire.control_messages import NodeRow, RankRow, ServerRow, Status
    from msrun.processes.control_client import ControlClient
    from msrun.processes.control_file import Card

STATUS = "Show where JOB stands: its phase, nodes, ranks, restarts and their causes."
LS = "List your jobs on this machine."
_WATCH_SECONDS = 1.0
_WATCH_PATIENCE = 3.0
_ROWS_MAX = 256
_MINUTE = 60


def status(args: Sequence[str], system: System) -> int:
    """Show where a job stands."""
    watch = click.Option(
        ["--watch", "-w"], is_flag=True, help="Show it every second until the job ends."
    )
    given = parse("status", STATUS, args, watch, JSON)
    if given["watch"]:
        return _watch(given, system)
    with connected(given, system, PATIENCE) as client:
        _show(_read(client), as_json=given["json"], system=system)
    return 0


_State: TypeAlias = "tuple[Status, list[NodeRow], list[RankRow], list[ServerRow]]"


def _read(client: ControlClient) -> _State:
    from msrun.cluster.wire.control_messages import GetStatus, Status

    job = client.ask(GetStatus(), Status)
    servers = list(client.servers()) if job.formation.servers else []
    return job, list(client.nodes()), list(client.ranks()), servers


def _watch(given: dict[str, Any], system: System) -> int:
    """Show the job anew until it has ended."""
    is_live = system.is_terminal() and not given["json"]
    with connected(given, system, _WATCH_PATIENCE) as client:
        state = _read(client)
        while True:
            if is_live:
                click.clear()
            _show(state, as_json=given["json"], system=system)
            if state[0].verdict:
                return 0
            if not is_live and not given["json"]:
                answer("")
            system.pause(_WATCH_SECONDS)
            try:
                state = _read(client)
            except UnreachableError:
                say(_ending(client.card))
                return 0


def _ending(card: Card) -> str:
    """Return how a job ended whose scheduler no longer answers."""
    from msrun.processes import ending

    verdict = ending.read(card.log_dir, card.job_id) if card.log_dir else None
    if verdict is None:
        return "msrun: the job does not answer any more: it has ended, or its scheduler has"
    result = verdict.reason or "all ranks succeeded"
    return f"msrun: job {card.job_id} has ended with exit code {verdict.code}: {result}"


def _show(state: _State, *, as_json: bool, system: System) -> None:
    from msrun.cli.render.section import show

    if as_json:
        answer(json.dumps(document(*state)))
        return
    show(sections(*state), is_terminal=system.is_terminal())


def document(
    job: Status, nodes: list[NodeRow], ranks: list[RankRow], servers: list[ServerRow]
) -> dict[str, Any]:
    """Return everything as plain values; keys are only ever added."""
    return {
        **tagless(job),
        "nodes": msgspec.to_builtins(nodes),
        "ranks": msgspec.to_builtins(ranks),
        "servers": msgspec.to_builtins(servers),
    }


def tagless(reply: msgspec.Struct) -> dict[str, Any]:
    """Return a reply as plain values, with the number of their schema for the tag of the wire."""
    return {
        "schema": SCHEMA,
        **{k: v for k, v in msgspec.to_builtins(reply).items() if k != "type"},
    }


def sections(
    job: Status, nodes: list[NodeRow], ranks: list[RankRow], servers: list[ServerRow]
) -> list[TextSection]:
    """Return everything as tables."""
    from msrun.cli.render.section import TextSection

    tables = [TextSection(heading=f"job {job.job_id}", rows=tuple(_job_rows(job)))]
    if nodes:
        tables.append(
            TextSection(
                heading=_heading("nodes", nodes),
                columns=("node", "host", "address", "role", "ranks", "silent"),
                rows=tuple(_node_cells(node) for node in nodes[:_ROWS_MAX]),
            )
        )
    if ranks:
        tables.append(
            TextSection(
                heading=_heading("ranks", ranks),
                columns=("rank", "host", "local", "pid", "for", "state"),
                rows=tuple(_rank_cells(rank) for rank in ranks[:_ROWS_MAX]),
            )
        )
    if servers:
        tables.append(
            TextSection(
                heading=_heading("servers", servers),
                columns=("server", "host", "pid", "restarts"),
                rows=tuple(_server_cells(server) for server in servers[:_ROWS_MAX]),
            )
        )
    if job.causes:
        rows = tuple((cause,) for cause in job.causes)
        tables.append(TextSection(heading="what ended earlier generations", rows=rows))
    return tables


def _heading(what: str, rows: Sequence[object]) -> str:
    hidden = len(rows) - _ROWS_MAX
    return f"{what} (the first {_ROWS_MAX} of {len(rows)}; --json has all)" if hidden > 0 else what


def _job_rows(job: Status) -> list[tuple[str, str]]:
    formation = job.formation
    takes = f"{formation.nnodes_min}"
    if formation.nnodes_max != formation.nnodes_min:
        takes += f" to {formation.nnodes_max}"
    restarts = f"{job.failures} of {job.max_restarts}"
    if job.losses:
        restarts += f", and {job.losses} of {job.max_restarts} after lost nodes"
    rows = [
        ("phase", job.phase),
        ("generation", str(job.generation)),
        ("scheduler runs for", duration(job.uptime)),
        ("nodes", f"{job.nodes} registered, takes {takes}"),
        ("ranks", str(job.world_size)),
        ("restarts", restarts),
    ]
    if job.scheduler_restarts:
        rows.append(("restarts of the scheduler", str(job.scheduler_restarts)))
    if job.waiting_for:
        rows.append(("waits", job.waiting_for))
    if job.verdict:
        rows.append(("exit code", str(job.verdict.code)))
        rows.append(("result", job.verdict.reason or "all ranks succeeded"))
    return rows


def _node_cells(node: NodeRow) -> tuple[str, ...]:
    ranks = "-"
    if node.ranks:
        first, count = node.ranks
        ranks = str(first) if count == 1 else f"{first}-{first + count - 1}"
    return (
        "-" if node.node_rank is None else str(node.node_rank),
        node.host,
        node.address or "-",
        f"{node.role}, scheduler" if node.scheduler else node.role,
        ranks,
        "-" if node.silent is None else duration(node.silent),
    )


def _rank_cells(rank: RankRow) -> tuple[str, ...]:
    return (
        str(rank.rank),
        rank.host,
        str(rank.local_rank),
        str(rank.pid) if rank.pid else "-",
        "-" if rank.seconds is None else duration(rank.seconds),
        rank.state,
    )


def _server_cells(server: ServerRow) -> tuple[str, ...]:
    pid = str(server.pid) if server.pid else "-"
    return (str(server.server), server.host or "-", pid, str(server.restarts))


def duration(seconds: float) -> str:
    """Return a time as a person reads it at a glance: `12s`, `3m05s`, `2h07m`, `4d01h`."""
    minutes, rest = divmod(int(seconds), _MINUTE)
    hours, minutes = divmod(minutes, _MINUTE)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def ls(args: Sequence[str], system: System) -> int:
    """List the jobs on this machine."""
    clean = click.Option(
        ["--clean"],
        is_flag=True,
        help="Remove what killed launchers have left, as the next job would.",
    )
    given = read_words("msrun ls", LS, (clean, JSON), args)
    as_json = given["json"]
    for name in system.clean() if given["clean"] else ():
        say(f"msrun: removed what job {shown(name)} had left")
    cards = system.jobs()
    ages = [system.now() - card.began for card in cards]
    if as_json:
        rows = [
            {
                "job_id": card.job_id,
                "pid": card.pid,
                "workers": card.workers,
                "scheduler": f"{card.host}:{card.port}",
                "serves": card.serves,
                "seconds": age,
                "log_dir": card.log_dir,
            }
            for card, age in zip(cards, ages, strict=True)
        ]
        answer(json.dumps({"schema": SCHEMA, "jobs": rows}))
        return 0
    if not cards:
        say("msrun: no job of yours runs on this machine")
        return 0
    from msrun.cli.render.section import TextSection, show

    cells = tuple(
        (
            card.job_id,
            str(card.pid),
            str(card.workers),
            f"{card.host}:{card.port}",
            duration(age),
            card.log_dir,
        )
        for card, age in zip(cards, ages, strict=True)
    )
    columns = ("job", "pid", "workers", "scheduler", "for", "logs")
    show(
        [TextSection(heading="jobs", columns=columns, rows=cells)], is_terminal=system.is_terminal()
    )
    return 0
