"""How the ranks of a job meet: torch's default process group, whoever started them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msrun import environ
from msrun.environ import RankIdentity
from msrun.identity import find_master
from msrun.supervise import network

# How often this process met the others, as they did with it.
_meetings = itertools.count()


def join(
    identity: RankIdentity, env: Mapping[str, str], backend: str, timeout: float | None
) -> None:
    """Make the default process group.

    Args:
        identity: Who this rank is.
        env: The environment, which says where ranks meet.
        backend: Of the group.
        timeout: Seconds that a collective may take; None is torch's default.

    Raises:
        UsageError: Nobody says where ranks meet.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    rank, world_size = identity.rank, identity.world_size
    if world_size == 1:
        # Nobody else is to be met, whatever MASTER_ADDR a shell has left.
        store = dist.HashStore()  # type: ignore[attr-defined]  # in torch's documentation
        dist.init_process_group(backend, store=store, timeout=limit, rank=0, world_size=1)
        return
    host, port = find_master(env, identity)
    if identity.source in ("msrun", "torchrun"):
        options: dict[str, Any] = {} if limit is None else {"timeout": limit}
        meeting = dist.rendezvous("env://", **options)  # type: ignore[attr-defined]
        served, rank, world_size = next(meeting)
        if limit is not None:
            served.set_timeout(limit)
        # It outlives groups: without a prefix one would find the addresses of that before it.
        own = dist.PrefixStore(f"msrun_{next(_meetings)}", served)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, timeout=limit, rank=rank, world_size=world_size)
        return
    if identity.local_world_size < world_size and not network.is_named():
        environ.choose_interface(network.interface_to(host))  # Gloo would take loopback.
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    dist.init_process_group(
        backend, init_method=address, timeout=limit, rank=rank, world_size=world_size
    )
