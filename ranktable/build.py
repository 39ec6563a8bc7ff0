"""Rank tables made from what each server has, from smaller tables, or from another version."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ranktable.check import check_hccl, check_table, quote
from ranktable.model import (
    Extra,
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableProblem,
    TableStatus,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryDevice:
    """A device that has no rank yet; the fields are those of `TableDevice`."""

    device_id: int
    device_ip: str | None = None
    super_device_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What one server brings; the fields are those of `Server`.

    Args:
        server_id: Unique name of the server.
        devices: Its devices, in the order in which they get their ranks.
        host_ip: Address of the host.
        pod_ip: Address of the pod.
        host_nic_ip: An address, or the literal "reserve" that hccl_tools writes.
        super_pod_id: Super pod the server belongs to; None outside of one.
    """

    server_id: str
    devices: tuple[InventoryDevice, ...]
    host_ip: str | None = None
    pod_ip: str | None = None
    host_nic_ip: str | None = None
    super_pod_id: str | None = None


def build_table(servers: Sequence[Inventory]) -> RankTable:
    """Return a completed table in which ranks follow the order given, from 0.

    It has version 1.2 if any server names its super pod, otherwise 1.0.

    Raises:
        RankTableError: The table would be unsound; paths are those of the table.
    """
    ranks = count()
    pods = tuple(
        SuperPod(super_pod_id=server.super_pod_id, server_list=(server.server_id,))
        for server in servers
        if server.super_pod_id is not None
    )
    return _checked(
        RankTable(
            version=Version.V1_2 if pods else Version.V1_0,
            server_list=tuple(_server(server, ranks) for server in servers),
            super_pod_list=_join_pods(pods),
        )
    )


def merge_tables(parts: Sequence[RankTable]) -> RankTable:
    """Return one table with the servers of all `parts`, in order, and ranks from 0.

    Inside a part the order of its ranks stays, wherever they start.  Super pods
    with the same id become one.

    Raises:
        RankTableError: The parts do not fit together.  Paths begin with `parts[i]`, or
            are those of the merged table.
    """
    problems = _check_parts(parts)
    if problems:
        raise RankTableError(problems)
    servers: list[Server] = []
    world_size = 0
    for part in parts:
        servers += _renumbered(part, world_size)
        world_size += part.world_size
    return _checked(
        replace(
            parts[0],
            server_list=tuple(servers),
            super_pod_list=_join_pods([pod for part in parts for pod in part.super_pod_list]),
        )
    )


def convert_table(
    table: RankTable, version: Version, *, super_pod_id: str | None = None
) -> RankTable:
    """Return `table` as a file of `version`, its ranks as they were.

    Version 1.0 has no super pods: what only they need is left out.

    Args:
        table: A sound table.
        version: Version to write.
        super_pod_id: With version 1.2, the super pod that all servers are in; None keeps those
            of the table.

    Raises:
        RankTableError: HCCL could not use the result, or super pods are asked of version 1.0;
            paths are those of the table.
    """
    if version is Version.V1_0:
        if super_pod_id is not None:
            problem = TableProblem(
                "super_pod_list",
                f'{quote(super_pod_id)} is asked for, and version "1.0" has no super pods',
            )
            raise RankTableError((problem,))
        servers = tuple(_without_fabric(server) for server in table.server_list)
        table = replace(table, version=version, server_list=servers, super_pod_list=())
    else:
        table = replace(table, version=version)
    if super_pod_id is not None:
        members = tuple(server.server_id for server in table.server_list)
        pods = (SuperPod(super_pod_id=super_pod_id, server_list=members),)
        table = replace(table, super_pod_list=pods)
    problems = check_table(table) or check_hccl(table)
    if problems:
        raise RankTableError(problems)
    return table


def _without_fabric(server: Server) -> Server:
    devices = tuple(
        replace(device, super_device_id=None, backup_device_ip=None, backup_device_port=None)
        for device in server.device
    )
    return replace(server, device=devices)


def _checked(table: RankTable) -> RankTable:
    problems = check_table(table)
    if problems:
        raise RankTableError(problems)
    return table


def _server(server: Inventory, ranks: Iterator[int]) -> Server:
    return Server(
        server_id=server.server_id,
        device=tuple(
            TableDevice(
                device_id=device.device_id,
                rank_id=next(ranks),
                device_ip=device.device_ip,
                super_device_id=device.super_device_id,
            )
            for device in server.devices
        ),
        host_ip=server.host_ip,
        pod_ip=server.pod_ip,
        host_nic_ip=server.host_nic_ip,
    )


def _join_pods(pods: Sequence[SuperPod]) -> tuple[SuperPod, ...]:
    """Return each pod once with all its servers, in order of first appearance."""
    # Pods with one id and different unknown fields stay apart, which check_table reports.
    joined: dict[tuple[str, Extra], list[str]] = {}
    for pod in pods:
        joined.setdefault((pod.super_pod_id, pod.extra), []).extend(pod.server_list)
    return tuple(
        SuperPod(super_pod_id=super_pod_id, server_list=tuple(server_list), extra=extra)
        for (super_pod_id, extra), server_list in joined.items()
    )


def _check_parts(parts: Sequence[RankTable]) -> tuple[TableProblem, ...]:
    if not parts:
        return (TableProblem("parts", "is empty: there is nothing to merge"),)
    problems: list[TableProblem] = []
    first = parts[0]
    for i, part in enumerate(parts):
        where = f"parts[{i}]"
        if part.status is not TableStatus.COMPLETED:
            text = f'{quote(part.status.value)} is not "completed": still being written'
            problems.append(TableProblem(f"{where}.status", text))
        if part.version is not first.version:
            text = f"{quote(part.version.value)} differs from {quote(first.version.value)}"
            problems.append(TableProblem(f"{where}.version", f"{text} of parts[0]"))
        mine, others = dict(part.extra), dict(first.extra)
        problems += (
            TableProblem(f"{where}.{key}", "differs from that of parts[0]")
            for key in sorted(mine.keys() | others.keys())
            if mine.get(key) != others.get(key)
        )
    return tuple(problems)


def _renumbered(part: RankTable, first_rank: int) -> list[Server]:
    old_ranks = sorted(device.rank_id for server in part.server_list for device in server.device)
    new_ranks = dict(zip(old_ranks, count(first_rank), strict=False))
    return [
        replace(
            server,
            device=tuple(
                replace(device, rank_id=new_ranks[device.rank_id]) for device in server.device
            ),
        )
        for server in part.server_list
    ]
