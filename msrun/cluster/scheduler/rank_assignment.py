"""Picks the nodes of a generation and assigns their node ranks, from which ranks follow.

The first generation gives each node the node rank that its user gave it.  The others, and all
where a given rank is larger than the number of nodes, are ordered by address as a number, else by
the natural order of their names; those with a rank go first then.  Later generations keep the
order: a node that stays keeps its node rank, and a node that replaces a lost one takes the rank of
that one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from msrun.cluster.wire.messages import Formation, Register

NodeOrder = tuple[bool, int, bool, int, int, list[tuple[int, str]], str]


def node_order(node_id: str, node: Register) -> NodeOrder:
    """Return the key by which nodes are sorted."""
    try:
        address = ipaddress.ip_address(node.store_host)
    except ValueError:
        numeric = (True, 0, 0)
    else:
        numeric = (False, address.version, int(address))
    natural = [(int(n or -1), text) for n, text in re.findall(r"(\d+)|(\D+)", node.host)]
    return (node.node_rank is None, node.node_rank or 0, *numeric, natural, node_id)


def is_full(nodes: int, slots: int, formation: Formation, hosts: int = 0) -> bool:
    """Return whether `nodes` leave no room for a further node.

    Args:
        nodes: How many there are.
        slots: Workers that they can run.
        formation: How many the job takes.
        hosts: How many of them have a parameter server and no worker.
    """
    if formation.has_server_nodes:
        return slots >= (formation.world_size or 0) and hosts >= formation.servers
    has_workers = formation.world_size is not None and slots >= formation.world_size
    return nodes >= formation.nnodes_max or has_workers


def is_enough(nodes: int, slots: int, formation: Formation, hosts: int = 0) -> bool:
    """Return whether a generation can do without further nodes; as `is_full`."""
    if formation.world_size is not None:
        return is_full(nodes, slots, formation, hosts)
    return nodes >= formation.nnodes_min


def assign_node_ranks(
    nodes: Mapping[str, Register],
    formation: Formation,
    previous: Sequence[str],
    cold: Collection[str] = (),
    first: int = 0,
) -> list[str]:
    """Return the nodes of the next generation by node rank.

    Args:
        nodes: All that could take part, in the order in which they came.
        formation: How many it takes; there are enough.
        previous: The nodes of the previous generation by node rank; empty before the first.
        cold: Nodes that still import: chosen only if there are too few others.
        first: The smallest node rank that a user can have given to one of them.
    """
    if formation.has_server_nodes:  # behind those of workers, each of which has one
        size = formation.world_size or 0
        kinds = (
            (1, msgspec.structs.replace(formation, nnodes_max=size, servers=0), previous[:size], 0),
            (0, _of_servers(formation), previous[size:], size),
        )
        return [
            node_id
            for slots, own, before, lowest in kinds
            for node_id in assign_node_ranks(
                {n: register for n, register in nodes.items() if bool(register.slots) == slots},
                own,
                before,
                [n for n in cold if bool(nodes[n].slots) == slots],
                lowest,
            )
        ]
    chosen = _pick(nodes, formation, previous, cold)
    if not previous:
        ordered = sorted(chosen, key=lambda node_id: node_order(node_id, nodes[node_id]))
        return _with_given(ordered, nodes, first)
    newcomers = [node_id for node_id in chosen if node_id not in previous]
    newcomers.sort(key=lambda node_id: node_order(node_id, nodes[node_id]))
    order: list[str] = []
    for node_id in previous:
        if node_id in chosen:
            order.append(node_id)
        elif newcomers:
            order.append(newcomers.pop(0))
    return order + newcomers


def _with_given(order: list[str], nodes: Mapping[str, Register], first: int) -> list[str]:
    """Return nodes in this order, but those with a rank of their user's in that place."""
    given = {n: rank - first for n in order if (rank := nodes[n].node_rank) is not None}
    if len(given) == len(order) or max(given.values(), default=0) >= len(order):
        return order
    places = {place: node_id for node_id, place in given.items()}
    others = iter([node_id for node_id in order if node_id not in given])
    return [places[place] if place in places else next(others) for place in range(len(order))]


def _of_servers(formation: Formation) -> Formation:
    number = formation.servers
    own = {"nnodes_min": number, "nnodes_max": number, "world_size": None, "servers": 0}
    return msgspec.structs.replace(formation, **own)


def _pick(
    nodes: Mapping[str, Register],
    formation: Formation,
    previous: Sequence[str],
    cold: Collection[str],
) -> list[str]:
    """Return the nodes that take part: members of before, then as they came; cold ones last."""
    candidates = [*(n for n in previous if n in nodes), *(n for n in nodes if n not in previous)]
    candidates.sort(key=lambda node_id: node_id in cold)
    if formation.world_size is None:
        wanted = max(len(nodes) - len(cold), formation.nnodes_min)
        return candidates[: min(wanted, formation.nnodes_max)]
    picked: list[str] = []
    missing = formation.world_size
    for node_id in candidates[: formation.nnodes_max]:
        if nodes[node_id].slots <= missing:
            picked.append(node_id)
            missing -= nodes[node_id].slots
    return picked
