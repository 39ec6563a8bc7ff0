"""Rendezvous of the ranks: joins torch's default process group under any starter."""

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

# Number of groups that this process has joined.  All ranks join the same ones, so they agree on it.
_meetings = itertools.count()


def join(
    identity: RankIdentity, env: Mapping[str, str], backend: str, timeout: float | None
) -> None:
    """Join the default process group; every rank of the job calls it.

    Args:
        identity: Identity of this rank.
        env: Environment with the address of the rendezvous.
        backend: Backend of the group.
        timeout: Seconds that a collective may take; None is torch's default.

    Raises:
        UsageError: The environment names no address.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    rank, world_size = identity.rank, identity.world_size
    if world_size == 1:
        # A single rank needs no rendezvous, and a shell may have left a stale MASTER_ADDR.
        store = dist.HashStore()  # type: ignore[attr-defined]  # in torch's documentation
        dist.init_process_group(backend, store=store, timeout=limit, rank=0, world_size=1)
        return
    host, port = find_master(env, identity)
    # These starters serve a store themselves, which `env://` joins; elsewhere rank 0 serves one.
    if identity.source in ("msrun", "torchrun"):
        options: dict[str, Any] = {} if limit is None else {"timeout": limit}
        meeting = dist.rendezvous("env://", **options)  # type: ignore[attr-defined]
        served, rank, world_size = next(meeting)
        if limit is not None:
            served.set_timeout(limit)
        # The store outlives a group: without a prefix of its own, a second group would read the
        # addresses that the ranks wrote for the first.
        own = dist.PrefixStore(f"msrun_{next(_meetings)}", served)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=own, timeout=limit, rank=rank, world_size=world_size)
        return
    if identity.local_world_size < world_size and not network.is_named():
        environ.choose_interface(network.interface_to(host))  # Gloo would choose loopback.
    address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    dist.init_process_group(
        backend, init_method=address, timeout=limit, rank=rank, world_size=world_size
    )
