"""A rank table as a list of nodes: the host, the devices and the workers of each.

`msrun --rank-table-file t.json` on each node finds its own entry by the node's addresses;
from one node, the hosts of the table are those of ssh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msrun.errors import UsageError
from msrun.hosts.hostlist import Host
from msrun.units import shown
from ranktable import RankTable, Server, TableDevice


def hosts_of(table: RankTable) -> tuple[Host, ...]:
    """Return the servers of `table` as hosts, in the order of their ranks."""
    return tuple(
        Host(
            name=addresses_of(server)[0],
            slots=len(server.device),
            devices=devices_of(server),
        )
        for server in servers_of(table)
    )


def servers_of(table: RankTable) -> tuple[Server, ...]:
    """Return the servers by their ranks: the index of one is its node_rank."""
    return tuple(sorted(table.server_list, key=lambda server: _by_rank(server)[0].rank_id))


def devices_of(server: Server) -> tuple[int, ...]:
    """Return the physical numbers of a server's devices, by the ranks on them."""
    return tuple(device.device_id for device in _by_rank(server))


def addresses_of(server: Server) -> tuple[str, ...]:
    """Return the names by which a server may be reached, the narrowest first."""
    named = (server.container_ip, server.pod_ip, server.server_ip, server.host_ip)
    return tuple(dict.fromkeys([*filter(None, named), server.server_id]))


def find_server(
    table: RankTable, is_here: Callable[[str], bool], *, told: int | None = None
) -> int:
    """Return the node_rank of this node.

    Args:
        table: A sound table.
        is_here: Tells whether a name or address is this node's.
        told: The node_rank that this node was told, where it was.

    Raises:
        UsageError: No server, or more than one, is this node, or another one than it was told.
    """
    servers = servers_of(table)
    here = [rank for rank, server in enumerate(servers) if any(map(is_here, addresses_of(server)))]
    if told is not None:
        _check_told(servers, here, told)
        return told
    if len(here) == 1:
        return here[0]
    if not here:
        names = shown(", ".join(server.server_id for server in servers))
        raise UsageError(
            f"the rank table has no server with an address of this node (it has {names})",
            hint="give --node-rank, or write the table anew",
        )
    first, second = (servers[rank].server_id for rank in here[:2])
    raise UsageError(
        f"this node is both server {shown(first)} and server {shown(second)} of the rank table",
        hint="give --node-rank",
    )


def _check_told(servers: Sequence[Server], ranks_here: Sequence[int], told: int) -> None:
    if told >= len(servers):
        raise UsageError(f"the rank table has no server {told} (choose 0 to {len(servers) - 1})")
    if ranks_here and told not in ranks_here:
        named, here = (shown(servers[rank].server_id) for rank in (told, ranks_here[0]))
        raise UsageError(
            f"server {told} of the rank table is {named}, and this node is server {ranks_here[0]}, "
            f"{here}"
        )


def check_devices(server: Server, present: tuple[int, ...]) -> None:
    """Refuse a table that names devices which this node does not have.

    Args:
        server: This node in the table.
        present: Physical numbers of the node's devices; empty where there are none to count.

    Raises:
        UsageError: A device of the table is missing.
    """
    missing = sorted(set(devices_of(server)) - set(present))
    if present and missing:
        has = ", ".join(map(str, present))
        name = shown(server.server_id)
        raise UsageError(
            f"the rank table gives server {name} device {missing[0]}, and this node has {has}"
        )


def _by_rank(server: Server) -> list[TableDevice]:
    return sorted(server.device, key=lambda device: device.rank_id)
