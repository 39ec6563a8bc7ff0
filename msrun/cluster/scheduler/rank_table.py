"""The rank table of a job that has formed: its nodes as servers, its slots as devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from msrun.cluster.wire.control_messages import NodeRow
from msrun.errors import UsageError
from ranktable import Inventory, InventoryDevice, RankTable, RankTableError, build_table


def table_of(rows: Iterable[NodeRow]) -> RankTable:
    """Return the rank table of the nodes that have ranks, wherever they stand among `rows`.

    A slot without a device of its own stands for one, numbered from 0 on each server.

    Raises:
        UsageError: No node has ranks, or no sound table can describe them.
    """
    members = sorted((row for row in rows if row.ranks), key=lambda row: row.ranks or (0, 0))
    if not members:
        raise UsageError("the job has no ranks yet, of which a table could be made")
    if gone := [row.host for row in members if not row.address]:
        raise UsageError(f"the job has lost node {gone[0]}, whose address a table needs")
    # Several nodes that were started by hand may share a machine, which is one server.
    servers = [_server(key, [*rows]) for key, rows in groupby(members, lambda row: row.address)]
    try:
        return build_table(servers)
    except RankTableError as error:
        raise UsageError(f"the table would be unsound: {error.problems[0]}") from None


def _server(address: str, rows: list[NodeRow]) -> Inventory:
    counts = [row.ranks[1] if row.ranks else 0 for row in rows]
    pairs = [pair for row, count in zip(rows, counts, strict=True) for pair in row.devices[:count]]
    if len(pairs) < sum(counts):
        pairs = [(number, "") for number in range(sum(counts))]
    devices = tuple(
        InventoryDevice(device_id=number, device_ip=own or None) for number, own in pairs
    )
    return Inventory(server_id=address, host_ip=address, devices=devices)
