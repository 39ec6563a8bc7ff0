"""`--rank-table-file` on each node: the table stands in for --nnodes, --node-rank and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrun.cli.job.draft import merge_env
from msrun.cli.options import catalog as options
from msrun.cli.options.settings import Given, Settings
from msrun.errors import UsageError
from msrun.rank_table.file import read_table
from msrun.rank_table.nodes import addresses_of, check_devices, devices_of, find_server, servers_of
from msrun.topology import DeviceKind
from msrun.units import counted

if TYPE_CHECKING:
    from msrun.cli.options.option import Option
    from msrun.cli.system import System
    from msrun.topology import Machine
    from ranktable import RankTable

_VISIBLE = {
    DeviceKind.CUDA: "CUDA_VISIBLE_DEVICES",
    DeviceKind.NPU: "ASCEND_RT_VISIBLE_DEVICES",
}


def with_table(settings: Settings, given: Given[str], system: System) -> Settings:
    """Return `settings` with what the rank table `given` says of the job and of this node.

    Raises:
        UsageError: The table is not sound, has no entry for this node or a device that is not
            there, or another option contradicts it.
    """
    table = read_table(given.value)
    machine = system.read_machine(merge_env(settings).value)
    try:
        node_rank = _find(settings, table, machine, system)
        numbers = devices_of(servers_of(table)[node_rank])
        check_devices(
            servers_of(table)[node_rank], tuple(device.physical for device in machine.devices)
        )
    except UsageError as error:
        raise UsageError(f"{given.cite()}: {error.message}", hint=error.hint) from None
    said = _values(table, node_rank)
    _check(settings, given, said)
    values: dict[Option[object], tuple[Given[object], ...]] = {
        option: (Given(value, given.source, given.text),) for option, (value, _) in said.items()
    }
    is_named = any(map(settings.get, (options.MASTER_ADDR, options.RDZV_ENDPOINT)))
    if len(table.server_list) > 1 and not is_named:
        first = addresses_of(servers_of(table)[0])[0]
        values[options.MASTER_ADDR] = (Given(first, given.source, given.text),)
    if machine.devices:
        visible = {_VISIBLE[machine.devices[0].kind]: ",".join(map(str, numbers))}
        own = Given(visible, given.source, given.text)
        values[options.ENV] = (own, *settings.every(options.ENV))
    return settings.with_values(values)


def _find(settings: Settings, table: RankTable, machine: Machine, system: System) -> int:
    def is_here(name: str) -> bool:
        is_named = name.lower() == machine.host.lower()
        return is_named or any(map(system.is_own, system.resolve(name)))

    told = settings.get(options.NODE_RANK)
    return find_server(table, is_here, told=told.value if told else None)


def _values(table: RankTable, node_rank: int) -> dict[Option[object], tuple[object, str]]:
    """Return the value that the table has for each option, with words for a refusal."""
    nnodes, here = len(table.server_list), len(servers_of(table)[node_rank].device)
    return {
        options.NNODES: ((nnodes, nnodes), f"has {counted(nnodes, 'server')}"),
        options.WORKER_NUM: (table.world_size, f"has {counted(table.world_size, 'rank')}"),
        options.WORKERS_PER_NODE: (here, f"gives this node {counted(here, 'rank')}"),
        options.NODE_RANK: (node_rank, f"has this node as server {node_rank}"),
    }


def _check(
    settings: Settings, table: Given[str], said: dict[Option[object], tuple[object, str]]
) -> None:
    for option, (value, words) in said.items():
        other = settings.get(option)
        if other and other.value != value:
            raise UsageError(f"{other.cite()} contradicts {table.cite()}, which {words}")
