"""Picks the nodes of a generation and assigns their node ranks, from which ranks follow.

The first generation orders its nodes by the node rank they were given, else by address as a
number, else by the natural order of their names.  Later generations keep the order: a node that
stays keeps its node rank, and a node that replaces a lost one takes the rank of that one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

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


def is_full(nodes: int, slots: int, formation: Formation) -> bool:
    """Return whether `nodes` with `slots` in all leave no room for a further node."""
    has_workers = formation.world_size is not None and slots >= formation.world_size
    return nodes >= formation.nnodes_max or has_workers


def is_enough(nodes: int, slots: int, formation: Formation) -> bool:
    """Return whether a generation can do without further nodes."""
    if formation.world_size is not None:
        return is_full(nodes, slots, formation)
    return nodes >= formation.nnodes_min


def assign_node_ranks(
    nodes: Mapping[str, Register],
    formation: Formation,
    previous: Sequence[str],
    cold: Collection[str] = (),
) -> list[str]:
    """Return the nodes of the next generation by node rank.

    Args:
        nodes: All that could take part, in the order in which they came.
        formation: How many it takes; there are enough.
        previous: The nodes of the previous generation by node rank; empty before the first.
        cold: Nodes that still import: chosen only if there are too few others.
    """
    chosen = _pick(nodes, formation, previous, cold)
    if not previous:
        return sorted(chosen, key=lambda node_id: node_order(node_id, nodes[node_id]))
    newcomers = [node_id for node_id in chosen if node_id not in previous]
    newcomers.sort(key=lambda node_id: node_order(node_id, nodes[node_id]))
    order: list[str] = []
    for node_id in previous:
        if node_id in chosen:
            order.append(node_id)
        elif newcomers:
            order.append(newcomers.pop(0))
    return order + newcomers


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
