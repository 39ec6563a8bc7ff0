"""The rules that a rank table must keep.

Every function returns problems, at most `PROBLEMS_MAX`, and raises nothing.
"""

import ipaddress
import json
import re
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, islice, pairwise

from ranktable.model import RankTable, Server, TableDevice, TableProblem, TableStatus, Version

# A hostile file could hold millions of problems; a person reads a few.
PROBLEMS_MAX = 10_000

_UINT32_MAX = 2**32 - 1
_PORT_MAX = 65535
# Source: HCCL's parser (SERVERID_MAX_LENGTH) and the documentation of HCCL_LOGIC_SUPERPOD_ID.
_SERVER_ID_CHARS_MAX = 64
_SUPER_POD_ID_CHARS_MAX = 127
_QUOTED_CHARS_MAX = 80
# The standard library takes any text for the zone of an IPv6 address, even control characters.
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9_.-]{1,15})?")


def check_table(table: RankTable, *, is_part: bool = False) -> tuple[TableProblem, ...]:
    """Return the problems of `table` for any user of it.

    Single values are checked always.  How they fit together is checked in a
    completed table only, and once the values are right, so that one mistake is
    one problem.

    Args:
        table: The table.
        is_part: Ranks need not start at 0, because the table is one server's piece of a
            larger one.
    """
    problems = tuple(islice(_check_values(table), PROBLEMS_MAX))
    if problems or table.status is TableStatus.INITIALIZING:
        return problems
    together = chain(
        _check_servers(table),
        _check_addresses(table),
        _check_ranks(table, is_part=is_part),
        _check_super_pods(table),
    )
    return tuple(islice(together, PROBLEMS_MAX))


def check_hccl(table: RankTable) -> tuple[TableProblem, ...]:
    """Return what keeps HCCL from using `table`, which `check_table` found sound.

    Source: HCCL's parser of versions 1.0 and 1.2 and its documentation.
    """
    needs = chain(_check_completed(table), _check_device_ips(table), _check_ignored(table))
    return tuple(islice(needs, PROBLEMS_MAX))


def quote(value: str) -> str:
    """Return `value` as a terminal may show it: quoted, escaped, cut when long."""
    if len(value) > _QUOTED_CHARS_MAX:
        return json.dumps(value[:_QUOTED_CHARS_MAX]) + "..."
    return json.dumps(value)


# -- single values ---------------------------------------------------------------------


def _check_values(table: RankTable) -> Iterator[TableProblem]:
    for i, server in enumerate(table.server_list):
        yield from _check_server_values(f"server_list[{i}]", server)
        for where, device in _devices(i, server):
            yield from _check_device_values(where, device)
    for p, pod in enumerate(table.super_pod_list):
        where = f"super_pod_list[{p}]"
        yield from _check_text(f"{where}.super_pod_id", pod.super_pod_id, _SUPER_POD_ID_CHARS_MAX)


def _check_server_values(where: str, server: Server) -> Iterator[TableProblem]:
    yield from _check_text(f"{where}.server_id", server.server_id, _SERVER_ID_CHARS_MAX)
    if server.hardware_type:
        yield from _check_text(f"{where}.hardware_type", server.hardware_type, _SERVER_ID_CHARS_MAX)
    host_nic_ip = None if server.host_nic_ip == "reserve" else server.host_nic_ip
    for field, address in (
        ("host_ip", server.host_ip),
        ("server_ip", server.server_ip),
        ("container_ip", server.container_ip),
        ("pod_ip", server.pod_ip),
        ("host_nic_ip", host_nic_ip),
    ):
        if address and not _is_ip(address):
            yield TableProblem(f"{where}.{field}", f"{quote(address)} is no IP address")


def _check_device_values(where: str, device: TableDevice) -> Iterator[TableProblem]:
    for field, number in (
        ("device_id", device.device_id),
        ("rank_id", device.rank_id),
        ("super_device_id", device.super_device_id),
        ("device_logical_id", device.device_logical_id),
    ):
        if number is not None and not 0 <= number <= _UINT32_MAX:
            yield TableProblem(f"{where}.{field}", f"{number} is out of range (0 to {_UINT32_MAX})")
    for field, port in (
        ("device_port", device.device_port),
        ("backup_device_port", device.backup_device_port),
        ("host_port", device.host_port),
    ):
        if port is not None and not 1 <= port <= _PORT_MAX:
            yield TableProblem(f"{where}.{field}", f"{port} is no port (1 to {_PORT_MAX})")
    for field, addresses in (
        ("device_ip", device.device_ip),
        ("backup_device_ip", device.backup_device_ip),
    ):
        for address in _split(addresses):
            if not _is_ip(address):
                yield TableProblem(f"{where}.{field}", f"{quote(address)} is no IP address")


def _check_text(path: str, value: str, chars_max: int) -> Iterator[TableProblem]:
    if not (0 < len(value) <= chars_max and value.isprintable()):
        yield TableProblem(path, f"{quote(value)} is not 1 to {chars_max} printable characters")


def _is_ip(text: str) -> bool:
    if not _ADDRESS.fullmatch(text):
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# -- how values fit together -----------------------------------------------------------


def _check_servers(table: RankTable) -> Iterator[TableProblem]:
    if not table.server_list:
        yield TableProblem("server_list", "is empty: a completed table has at least one server")
    yield from _check_unique(
        "server_id",
        ((server.server_id, f"server_list[{i}]") for i, server in enumerate(table.server_list)),
    )
    for i, server in enumerate(table.server_list):
        if not server.device:
            yield TableProblem(
                f"server_list[{i}].device", "is empty: a server has at least one device"
            )
        devices = list(_devices(i, server))
        yield from _check_unique("device_id", ((device.device_id, at) for at, device in devices))
        yield from _check_unique(
            "host_port",
            ((device.host_port, at) for at, device in devices if device.host_port is not None),
        )


def _check_addresses(table: RankTable) -> Iterator[TableProblem]:
    devices = list(_all_devices(table))
    yield from _check_unique(
        "device_ip", ((ip, at) for at, device in devices for ip in _split(device.device_ip))
    )
    yield from _check_unique(
        "backup_device_ip",
        ((ip, at) for at, device in devices for ip in _split(device.backup_device_ip)),
    )


def _check_ranks(table: RankTable, *, is_part: bool) -> Iterator[TableProblem]:
    problems = list(
        _check_unique("rank_id", ((device.rank_id, at) for at, device in _all_devices(table)))
    )
    world_size = table.world_size
    if not is_part:
        problems += (
            TableProblem(f"{at}.rank_id", _beyond(device.rank_id, world_size))
            for at, device in _all_devices(table)
            if device.rank_id >= world_size
        )
    if problems:
        yield from problems
        return
    for i, server in enumerate(table.server_list):
        ranks = sorted(device.rank_id for device in server.device)
        gap = next(((low, high) for low, high in pairwise(ranks) if high != low + 1), None)
        if gap:
            yield TableProblem(
                f"server_list[{i}].device",
                f"rank_id {gap[0]} is followed by {gap[1]}: the ranks of a server are one block",
            )


def _beyond(rank_id: int, world_size: int) -> str:
    devices = "1 device has rank 0"
    if world_size > 1:
        devices = f"{world_size} devices have ranks 0 to {world_size - 1}"
    return f"{rank_id} is out of range: {devices}"


def _check_super_pods(table: RankTable) -> Iterator[TableProblem]:
    if not table.super_pod_list:
        return
    yield from _check_unique(
        "super_pod_id",
        ((pod.super_pod_id, f"super_pod_list[{p}]") for p, pod in enumerate(table.super_pod_list)),
    )
    members = [
        (server_id, f"super_pod_list[{p}].server_list[{k}]", pod.super_pod_id)
        for p, pod in enumerate(table.super_pod_list)
        for k, server_id in enumerate(pod.server_list)
    ]
    yield from _check_unique("server_id", ((server_id, at) for server_id, at, _ in members))
    known = {server.server_id for server in table.server_list}
    for server_id, at, _ in members:
        if server_id not in known:
            yield TableProblem(f"{at}.server_id", f"{quote(server_id)} is not in server_list")
    pod_of = {server_id: pod_id for server_id, _, pod_id in members}
    yield from _check_pod_servers(table, pod_of)
    yield from _check_pod_devices(table, pod_of)


def _check_pod_servers(table: RankTable, pod_of: dict[str, str]) -> Iterator[TableProblem]:
    for p, pod in enumerate(table.super_pod_list):
        if not pod.server_list:
            yield TableProblem(
                f"super_pod_list[{p}].server_list", "is empty: a super pod has servers"
            )
    left: set[str] = set()
    current = None
    for i, server in enumerate(table.server_list):
        path = f"server_list[{i}].server_id"
        pod_id = pod_of.get(server.server_id)
        if pod_id is None:
            yield TableProblem(path, f"{quote(server.server_id)} is in no super pod")
            continue
        if pod_id in left:
            message = f"{quote(server.server_id)} stands apart from super pod {quote(pod_id)}"
            yield TableProblem(path, f"{message}: the servers of a super pod are listed together")
        if current is not None and pod_id != current:
            left.add(current)
        current = pod_id


def _check_pod_devices(table: RankTable, pod_of: dict[str, str]) -> Iterator[TableProblem]:
    in_pod: dict[str, list[tuple[int, str]]] = {}
    for i, server in enumerate(table.server_list):
        pod_id = pod_of.get(server.server_id)
        if pod_id is None:
            continue
        for at, device in _devices(i, server):
            if device.super_device_id is None:
                yield TableProblem(
                    f"{at}.super_device_id", "is missing: the server is in a super pod"
                )
            else:
                in_pod.setdefault(pod_id, []).append((device.super_device_id, at))
    for entries in in_pod.values():
        yield from _check_unique("super_device_id", entries)


# -- what HCCL asks for ----------------------------------------------------------------


def _check_completed(table: RankTable) -> Iterator[TableProblem]:
    if table.status is not TableStatus.COMPLETED:
        yield TableProblem(
            "status", f'"{table.status.value}" is not "completed": still being written'
        )


def _check_device_ips(table: RankTable) -> Iterator[TableProblem]:
    count = len(table.server_list)
    is_one_pod = table.version is Version.V1_2 and len(table.super_pod_list) == 1
    if count <= 1 or is_one_pod:
        return
    for i, server in enumerate(table.server_list):
        if server.host_ip:
            continue
        for at, device in _devices(i, server):
            if not device.device_ip:
                yield TableProblem(
                    f"{at}.device_ip",
                    f"is missing: with {count} servers HCCL needs it, or the server's host_ip",
                )


def _check_ignored(table: RankTable) -> Iterator[TableProblem]:
    if table.version is Version.V1_0 and table.super_pod_list:
        yield TableProblem("super_pod_list", 'is ignored by HCCL in version "1.0" (use "1.2")')


# -- shared ----------------------------------------------------------------------------


def _devices(index: int, server: Server) -> Iterator[tuple[str, TableDevice]]:
    for j, device in enumerate(server.device):
        yield f"server_list[{index}].device[{j}]", device


def _all_devices(table: RankTable) -> Iterator[tuple[str, TableDevice]]:
    for i, server in enumerate(table.server_list):
        yield from _devices(i, server)


def _split(addresses: str | None) -> list[str]:
    """Return the addresses of a comma-separated list, empty ones left out."""
    return [address for address in addresses.split(",") if address] if addresses else []


def _check_unique(field: str, entries: Iterable[tuple[Hashable, str]]) -> Iterator[TableProblem]:
    """Report each (value, place) whose value an earlier place already has."""
    first: dict[Hashable, str] = {}
    for value, at in entries:
        if value in first:
            shown = quote(value) if isinstance(value, str) else value
            yield TableProblem(f"{at}.{field}", f"{shown} is already used by {first[value]}")
        else:
            first[value] = at
