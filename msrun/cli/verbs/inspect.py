"""`msrun logs` and `msrun stacks`: the output and the stacks of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.options import parsers
from msrun.cli.output import answer, say
from msrun.cli.verbs.control import JSON, SCHEMA, connected, parse, parse_ranks, rank_option
from msrun.cli.verbs.status import tagless
from msrun.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from msrun.cli.system import System
    from msrun.cluster.wire.control_messages import Log
    from msrun.processes.control_client import ControlClient

LOGS = "Show the last lines of the logs of JOB."
STACKS = "Show the stacks of all ranks of JOB, ranks with equal stacks together."
_LINES = 20
_LINES_MAX = 1000
_RANKS_MAX = 64
_FOLLOW_SECONDS = 0.5
_FOLLOW_PATIENCE = 3.0


def logs(args: Sequence[str], system: System) -> int:
    """Show what ranks have written."""
    given = parse(
        "logs",
        LOGS,
        args,
        rank_option("Ranks whose logs", "0"),
        click.Option(
            ["--lines", "-n"],
            metavar="N",
            default=str(_LINES),
            help=f"Last lines of each log, at most {_LINES_MAX} or 32 KiB.  [default: {_LINES}]",
        ),
        click.Option(["--follow", "-f"], is_flag=True, help="Show new lines until the job ends."),
        JSON,
    )
    if given["follow"] and given["json"]:
        raise UsageError("--follow and --json exclude each other")
    try:
        lines = parsers.whole(0, _LINES_MAX)(given["lines"])
    except UsageError as error:
        raise UsageError(f"--lines {error.message}") from None
    ranges = parse_ranks(given["rank"] or "0")
    ranks = [rank for a, b in ranges for rank in range(a, min(b, a + _RANKS_MAX) + 1)]
    if len(ranks) > _RANKS_MAX:
        raise UsageError(f"--rank {given['rank']} is more than {_RANKS_MAX} ranks at a time")
    patience = {"patience": _FOLLOW_PATIENCE} if given["follow"] else {}
    with connected(given, system, **patience) as client:
        _show_logs(client, ranks, lines, given, system)
    return 0


def _show_logs(
    client: ControlClient, ranks: list[int], lines: int, given: dict[str, Any], system: System
) -> None:
    from msrun.cluster.wire.control_messages import GetLog, Log

    logs_by_rank = {rank: client.ask(GetLog(rank=rank, lines=lines), Log) for rank in ranks}
    if given["json"]:
        rows = [
            {
                "rank": rank,
                "host": log.host,
                "log_file": log.log_file,
                "lines": log.data.decode(errors="replace").splitlines(),
            }
            for rank, log in logs_by_rank.items()
        ]
        answer(json.dumps({"schema": SCHEMA, "logs": rows}))
        return
    readers = {rank: _LogReader(f"[rank {rank}] " if len(ranks) > 1 else "") for rank in ranks}
    for rank, log in logs_by_rank.items():
        readers[rank].show(log, is_last=not given["follow"])
    if given["follow"]:
        _follow(client, readers, system)


def _follow(client: ControlClient, readers: dict[int, _LogReader], system: System) -> None:
    """Show new lines of the logs until the job has ended."""
    from msrun.cluster.wire.control_messages import GetLog, Log

    while True:
        is_news = False
        for rank, reader in readers.items():
            try:
                log = client.ask(GetLog(rank=rank, offset=reader.offset), Log)
            except UnreachableError:
                say("msrun: the job does not answer any more: it has ended, or its scheduler has")
                return
            is_news |= bool(log.data)
            reader.show(log)
        if not is_news:
            system.pause(_FOLLOW_SECONDS)


@dataclass(slots=True)
class _LogReader:
    """One log: the bytes shown so far, and the incomplete line at its end."""

    prefix: str
    offset: int = 0
    _partial: bytes = b""

    def show(self, log: Log, *, is_last: bool = False) -> None:
        """Print the whole lines of `log`, and the one at its end if nothing will follow."""
        from msrun.supervise.logs import joined, render_line

        self.offset = log.offset
        *lines, self._partial = joined(self._partial, log.data).split(b"\n")
        if is_last and self._partial:
            lines.append(self._partial)
        for line in lines:
            answer(render_line(self.prefix, line))


def stacks(args: Sequence[str], system: System) -> int:
    """Show where the ranks are."""
    given = parse("stacks", STACKS, args, JSON)
    from msrun.cluster.liveness import stacks as pictures
    from msrun.cluster.wire.control_messages import GetStacks, Stacks

    with connected(given, system) as client:
        reply = client.ask(GetStacks(), Stacks)
    if given["json"]:
        answer(json.dumps(tagless(reply)))
        return 0
    answer(pictures.render(reply.groups))
    if reply.left_out:
        say(f"msrun: {reply.left_out} more groups of ranks are not shown")
    return 0
