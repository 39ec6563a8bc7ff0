"""`msrun ranktable`: rank tables built, checked, shown, merged and converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say
from msrun.cli.render.section import TextSection, show
from msrun.cli.verbs.control import WHERE, connected
from msrun.errors import ExitCode, UsageError
from msrun.units import counted

if TYPE_CHECKING:
    from msrun.cli.system import System
    from msrun.hosts.hostlist import Host
    from ranktable import Inventory, InventoryDevice, RankTable

Words = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    """One thing to do with rank tables.

    Args:
        summary: First sentences of its help.
        params: Its words.
        act: Does it and returns the exit code.
    """

    summary: str
    params: tuple[click.Parameter, ...]
    act: Callable[[Words, System], int]


def ranktable(args: Sequence[str], system: System) -> int:
    """Do what `args` say with rank tables."""
    name, *rest = [*args, ""]
    if name in ("", "-h", "--help"):
        say(_usage())
        return ExitCode.OK if name else ExitCode.USAGE
    if name not in ACTIONS:
        raise UsageError(f"msrun ranktable has no verb {name!r} (choose {', '.join(ACTIONS)})")
    action = ACTIONS[name]
    words = read_words(f"msrun ranktable {name}", action.summary, action.params, rest[:-1])
    return action.act(words, system)


def _usage() -> str:
    rows = [f"  {name:9} {action.summary.partition('.')[0]}." for name, action in ACTIONS.items()]
    return "\n".join(["Usage: msrun ranktable VERB [OPTIONS] [FILE]...", "", *rows])


def _write(table: RankTable, output: str | None) -> int:
    from msrun.rank_table.file import write_table
    from ranktable import render_table

    if output is None:
        answer(render_table(table).rstrip("\n"))
        return ExitCode.OK
    write_table(table, output)
    say(f"{output}: {_size(table)}")
    return ExitCode.OK


def _size(table: RankTable) -> str:
    ranks, servers = counted(table.world_size, "rank"), counted(len(table.server_list), "server")
    return f"{ranks} on {servers}, version {table.version.value}"


# -- build -----------------------------------------------------------------------------


def _build(words: Words, system: System) -> int:
    from ranktable import RankTableError, build_table

    sources = [f"--{name}" for name in ("hostfile", "slurm", "job") if words[name]]
    if len(sources) > 1:
        raise UsageError(f"{sources[0]} contradicts {sources[1]} (choose one)")
    if words["job"]:
        return _write(_of_job(words, system), words["output"])
    for option in WHERE:
        if words[option.name or ""]:
            raise UsageError(f"{option.opts[0]} needs --job, whose scheduler it finds")
    hosts = _hosts(words, system)
    inventory = [_server(host) for host in hosts] if hosts else [_this_node(words, system)]
    try:
        table = build_table(inventory)
    except RankTableError as error:
        raise UsageError(f"the table would be unsound: {error.problems[0]}") from None
    return _write(table, words["output"])


def _of_job(words: Words, system: System) -> RankTable:
    """Return the table of a job that runs, as its scheduler knows it."""
    from msrun.cluster.scheduler.rank_table import table_of

    for name in ("include", "exclude", "slots", "devices", "server_id"):
        if words[name]:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} contradicts --job, whose nodes and devices are known")
    where = {name: words[name] for name in ("master_addr", "master_port", "secret_file")}
    with connected({"words": (words["job"],), **where}, system) as client:
        return table_of(client.nodes())


def _hosts(words: Words, system: System) -> tuple[Host, ...]:
    """Return the hosts that a hostfile or Slurm names, none for this node alone."""
    from msrun.cli.job.fleet import read_hostfile
    from msrun.hosts.allocation import slurm_hosts
    from msrun.hosts.hostlist import select

    if words["hostfile"]:
        hosts = read_hostfile(words["hostfile"])
    elif words["slurm"]:
        hosts = slurm_hosts(system.environment(), words["slots"])
    else:
        for flag in ("include", "exclude"):
            if words[flag]:
                raise UsageError(f"--{flag} needs --hostfile or --slurm, whose hosts it chooses")
        return ()
    for flag in ("server_id", "devices"):
        if words[flag] is not None:
            raise UsageError(f"--{flag.replace('_', '-')} is for the table of this node alone")
    return select(
        tuple(_with_slots(host, words) for host in hosts),
        include=words["include"],
        exclude=words["exclude"],
    )


def _with_slots(host: Host, words: Words) -> Host:
    from msgspec.structs import replace

    slots = host.slots or words["slots"]
    if not slots:
        where = words["hostfile"]
        raise UsageError(f"{where}: {host.name} has no slots=", hint="add it, or give --slots")
    return replace(host, slots=slots)


def _server(host: Host) -> Inventory:
    from ranktable import Inventory, InventoryDevice

    numbers = host.devices if host.devices is not None else range(host.slots or 1)
    return Inventory(
        server_id=host.name,
        host_ip=host.name if _is_address(host.name) else None,
        devices=tuple(InventoryDevice(device_id=number) for number in numbers),
    )


def _is_address(name: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _this_node(words: Words, system: System) -> Inventory:
    from ranktable import Inventory

    machine = system.read_machine({})
    name = words["server_id"] or machine.address
    return Inventory(
        server_id=name,
        host_ip=name if _is_address(name) else machine.address,
        devices=_devices_here(words, system),
    )


def _devices_here(words: Words, system: System) -> tuple[InventoryDevice, ...]:
    """Return the devices of this node; without any, its slots stand for them."""
    from msrun.topology import DeviceKind
    from ranktable import InventoryDevice

    devices = system.read_machine({}).devices
    present = [device.physical for device in devices] or list(range(words["slots"] or 1))
    if devices and words["slots"]:
        raise UsageError(f"--slots {words['slots']} is for nodes without devices; use --devices")
    chosen = present if words["devices"] is None else _number_list(words["devices"])
    if missing := sorted(set(chosen) - set(present)):
        has = ", ".join(map(str, present))
        raise UsageError(f"--devices: this node has no device {missing[0]} (choose from {has})")
    is_npu = any(device.kind is DeviceKind.NPU for device in devices)
    addresses = system.device_addresses(chosen) if is_npu else {}
    return tuple(
        InventoryDevice(device_id=number, device_ip=addresses.get(number)) for number in chosen
    )


def _number_list(text: str) -> list[int]:
    from msrun.hosts.hostlist import expand

    try:
        return [int(number) for number in expand(f"[{text}]")]
    except (UsageError, ValueError):
        raise UsageError(f"--devices {text!r} is no list of numbers such as 0-3,6") from None


# -- check and show --------------------------------------------------------------------


def _check(words: Words, system: System) -> int:
    del system
    from msrun.rank_table.file import read_text
    from ranktable import RankTableError, check_hccl, parse_table

    reports: list[dict[str, object]] = []
    for path in words["files"]:
        try:
            table = parse_table(read_text(path), is_part=words["part"])
        except RankTableError as error:
            problems, about = error.problems, ""
        else:
            problems = check_hccl(table) if words["hccl"] else ()
            about = _size(table)
        reports.append(
            {"file": path, "about": about, "problems": [asdict(problem) for problem in problems]}
        )
        if not words["json"]:
            answer("\n".join(f"{path}: {p}" for p in problems) or f"{path}: sound, {about}")
    if words["json"]:
        answer(json.dumps(reports, indent=2))
    return ExitCode.USAGE if any(report["problems"] for report in reports) else ExitCode.OK


def _show(words: Words, system: System) -> int:
    from msrun.rank_table.file import read_table

    table = read_table(words["file"], is_part=True)
    pod_of = {name: pod.super_pod_id for pod in table.super_pod_list for name in pod.server_list}
    local: dict[str, int] = {}
    rows: list[dict[str, object]] = []
    for server, device in table.by_rank():
        local_rank = local[server.server_id] = local.get(server.server_id, -1) + 1
        row: dict[str, object] = {"rank": device.rank_id, "server": server.server_id}
        row |= {"local_rank": local_rank, "device": device.device_id}
        row |= {"device_ip": device.device_ip, "host_ip": server.host_ip}
        rows.append(row | {"super_pod": pod_of.get(server.server_id)})
    if words["json"]:
        answer(json.dumps({"version": table.version.value, "ranks": rows}, indent=2))
        return ExitCode.OK
    used = [key for key in rows[0] if any(row[key] is not None for row in rows)]
    cells = tuple(tuple("-" if row[k] is None else str(row[k]) for k in used) for row in rows)
    columns = tuple(key.replace("_", " ") for key in used)
    section = TextSection(heading=f"{words['file']}, {_size(table)}", columns=columns, rows=cells)
    show([section], is_terminal=system.is_terminal())
    return ExitCode.OK


# -- merge and convert -----------------------------------------------------------------


def _merge(words: Words, system: System) -> int:
    del system
    from msrun.rank_table.file import merge_files

    return _write(merge_files(words["files"]), words["output"])


def _convert(words: Words, system: System) -> int:
    del system
    from msrun.rank_table.file import read_table
    from ranktable import RankTableError, Version, convert_table

    table = read_table(words["file"])
    try:
        made = convert_table(table, Version(words["to"]), super_pod_id=words["super_pod"])
    except RankTableError as error:
        raise UsageError(f"{words['file']}: {error.problems[0]}") from None
    return _write(made, words["output"])


_OUTPUT = click.Option(["--output", "-o"], metavar="FILE", help="File to write instead of stdout.")
_JSON = click.Option(["--json"], is_flag=True, help="JSON for programs.")
_FILE = click.Argument(["file"], metavar="FILE")
_FILES = click.Argument(["files"], metavar="FILE...", nargs=-1, required=True)

ACTIONS = {
    "build": _Action(
        summary=(
            "Write the table of this node, of the nodes of a hostfile or of Slurm, or of a running "
            "job.  Ranks follow the order of nodes and devices.  Ascend devices get their "
            "addresses from /etc/hccn.conf or hccn_tool."
        ),
        params=(
            click.Option(["--hostfile"], metavar="FILE", help="Nodes and their slots."),
            click.Option(["--slurm"], is_flag=True, help="Nodes of this allocation of Slurm."),
            click.Option(["--job"], metavar="JOB", help="Nodes of this job, by its id."),
            *WHERE,
            click.Option(
                ["--include"], default="", metavar="HOSTS", help="Nodes to keep: n[1-3]@n4:0,1."
            ),
            click.Option(["--exclude"], default="", metavar="HOSTS", help="Nodes to leave out."),
            click.Option(
                ["--slots"],
                type=click.IntRange(1, 1024),
                metavar="N",
                help="Slots of a node that has no devices or slots= of its own.",
            ),
            click.Option(
                ["--devices"], metavar="LIST", help="Devices of this node, such as 0-3,6."
            ),
            click.Option(
                ["--server-id", "--server-ip"],
                metavar="NAME",
                help="Name or address of this node instead of the one others reach it by.",
            ),
            _OUTPUT,
        ),
        act=_build,
    ),
    "check": _Action(
        summary="Report every problem of the tables and where it is.",
        params=(
            _FILES,
            click.Option(["--hccl"], is_flag=True, help="Check what HCCL needs, too."),
            click.Option(["--part"], is_flag=True, help="Ranks need not start at 0."),
            _JSON,
        ),
        act=_check,
    ),
    "show": _Action(
        summary="Show the server and the device of each rank.",
        params=(_FILE, _JSON),
        act=_show,
    ),
    "merge": _Action(
        summary="Write one table with the servers of several, in their order, ranks from 0.",
        params=(_FILES, _OUTPUT),
        act=_merge,
    ),
    "convert": _Action(
        summary="Write a table in another version.",
        params=(
            _FILE,
            click.Option(
                ["--to"], type=click.Choice(["1.0", "1.2"]), required=True, help="Version to write."
            ),
            click.Option(
                ["--super-pod"],
                metavar="ID",
                help="Super pod that all servers are in; version 1.2.",
            ),
            _OUTPUT,
        ),
        act=_convert,
    ),
}
