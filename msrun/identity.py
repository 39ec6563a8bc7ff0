"""The rank of this process in its job, and the address where the ranks meet, from its starter.

The environment alone tells it, with the file of a rank table where that names one; only where
ranks meet is asked of Hydra, the mpirun of MPICH and Intel MPI, which tells no rank of another.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msrun import environ
from msrun.environ import Pod, RankIdentity
from msrun.errors import UsageError
from msrun.units import shown

if TYPE_CHECKING:
    from ranktable import RankTable, Server, TableDevice

# The second is MindSpore's older name.
_TABLES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")
# With one of these a process sees its devices under other numbers than the table's.
_RENUMBERED = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

_AGENT_STARTERS = ("Slurm", "Open MPI", "MPI")
_LOOPBACK = "127.0.0.1"
# Below the ports that Linux hands out by itself, so that few programs are there by chance.
_PORT_FIRST = 20_000
_PORTS = 12_000
# Patterns are compiled where there is an Open MPI: every rank imports this module.
# `711983104.0;tcp://192.0.2.2,192.0.2.3:44735;tcp6://[2001:db8::2]:34151`
_OPEN_MPI_4_ADDRESS = r"[^;]*;tcp6?://(?:\[([0-9A-Fa-f.:]+)|([0-9.]+)).*"
# `prterun-node0-19570@1` has node and process of mpirun, whose own daemon is number 0.
_OPEN_MPI_5_HOST = r"prte(?:run)?-(.+)-[0-9]+@[0-9]+"
_OPEN_MPI_5_DAEMON = r"[^;]*@0\.0;.*"


class Hand(enum.StrEnum):
    """What a process of a cluster that is started by hand finds in its environment."""

    ROLE = "MS_ROLE"
    HOST = "MS_SCHED_HOST"
    PORT = "MS_SCHED_PORT"
    WORKERS = "MS_WORKER_NUM"
    SERVERS = "MS_SERVER_NUM"
    NODE_ID = "MS_NODE_ID"
    ADDRESS = "MS_WORKER_IP"
    TIMEOUT = "MS_TOPO_TIMEOUT"
    SILENCE = "MS_NODE_TIMEOUT"
    DEVICE = "DEVICE_ID"


def read_identity(env: Mapping[str, str]) -> RankIdentity:
    """Return who the process with environment `env` is; alone when nothing says so.

    Raises:
        UsageError: A variable or the rank table contradicts itself or the other.
    """
    if not _table_path(env) or not env.get("RANK_ID") or env.get("RANK"):
        return environ.rank_identity(env)
    path = _table_path(env)
    table = _read(path)
    server, device = _entry(table, path, env)
    ranks = sorted(device.rank_id for device in server.device)
    _check_size(table, server, path, env)
    is_renumbered = any(name in env for name in _RENUMBERED)
    if not is_renumbered:
        _check_device(device, path, env)
    return RankIdentity(
        source="a rank table",
        rank=device.rank_id,
        world_size=table.world_size,
        local_rank=ranks.index(device.rank_id),
        local_world_size=len(ranks),
        node_rank=_in_order(table).index(server),
        device=None if is_renumbered else int(env.get("DEVICE_ID") or device.device_id),
    )


def find_master(env: Mapping[str, str], identity: RankIdentity) -> tuple[str, int]:
    """Return host and port at which the ranks meet: as set, else as each rank derives them.

    Every rank of the job must call this where Hydra started it: they wait for each other.

    Raises:
        UsageError: Neither is set, and the starter does not tell what they could be.
    """
    if endpoint := _told(env, identity):
        return endpoint
    if identity.source != "MPI" or not env.get("PMI_FD", "").isdecimal():
        ranks = f"{identity.source} started {identity.world_size} ranks"
        hint = "set both to a free port on the node of rank 0, or start one msrun on each node"
        raise UsageError(f"{ranks}, and MASTER_ADDR and MASTER_PORT are not set", hint=hint)
    from msrun import pmi  # Few jobs have one.

    host, key = pmi.meet(int(env["PMI_FD"]), identity.rank)
    return _LOOPBACK if _is_one_node(identity) else host, port_of(key)


def _told(env: Mapping[str, str], identity: RankIdentity) -> tuple[str, int] | None:
    """Return what the environment alone says of `find_master`'s."""
    if given := environ.master(env):
        return given
    finder = _FINDERS.get(identity.source)
    host, key = finder(env) if finder else ("", "")
    if _is_one_node(identity):
        host = _LOOPBACK
    return (host, port_of(key)) if host and key else None


def _is_one_node(identity: RankIdentity) -> bool:
    return identity.local_world_size == identity.world_size


def port_of(key: str) -> int:
    """Return the port at which the ranks of a job meet, whose name is `key`."""
    return _PORT_FIRST + zlib.crc32(key.encode()) % _PORTS


def step_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return msrun's options as variables where srun or mpirun started one msrun on each node.

    So `srun msrun train.py` is one job without any option, and so is `msrun train.py` in the pods
    of a Job of Kubernetes.  Empty elsewhere, and where the starter does not tell where to meet.
    """
    if env.get(Pod.NODES):
        return _pod_options(env)
    try:
        who = environ.rank_identity(env)
        if who.source not in _AGENT_STARTERS or who.world_size < 2 or who.local_world_size > 1:  # noqa: PLR2004 - one is alone
            return {}
        endpoint = _told(env, who)
        _, key = _FINDERS[who.source](env)
    except UsageError:
        return {}
    if endpoint is None:
        return {}
    name = f"slurm-{key}" if who.source == "Slurm" else f"mpi-{zlib.crc32(key.encode()):08x}"
    return {
        "MSRUN_NNODES": str(who.world_size),
        "MSRUN_NODE_RANK": str(who.rank),
        "MSRUN_MASTER_ADDR": endpoint[0],
        "MSRUN_MASTER_PORT": str(endpoint[1]),
        "MSRUN_JOB_ID": name,
    }


def _pod_options(env: Mapping[str, str]) -> dict[str, str]:
    """Return the same in a pod, as `launchers.kubernetes` describes it there.

    Raises:
        UsageError: The pod has no index, or not all of the variables.
    """
    options = {"MSRUN_JOB_ID": env.get(Pod.JOB, ""), "MSRUN_NNODES": env[Pod.NODES]}
    if env[Pod.NODES] == "1":
        return options
    for name in (Pod.INDEX, Pod.JOB, Pod.SCHEDULER):
        if not env.get(name):
            hint = "the pods must be those of an Indexed Job, as msrun plan renders it"
            raise UsageError(f"environment {Pod.NODES} is set and {name} is not", hint=hint)
    host, _, port = env[Pod.SCHEDULER].rpartition(":")
    # The pod's own name may not be known to the cluster yet.
    is_first, address = env[Pod.INDEX] == "0", env.get(Pod.ADDRESS, "")
    return {
        **options,
        "MSRUN_NODE_RANK": env[Pod.INDEX],
        "MSRUN_MASTER_ADDR": address if is_first and address else host,
        "MSRUN_MASTER_PORT": port,
        **({"MSRUN_SECRET_FILE": env[Pod.SECRET_FILE]} if env.get(Pod.SECRET_FILE) else {}),
    }


def torchrun_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the process with environment `env`.

    Raises:
        UsageError: As of `read_identity` and `find_master`.
    """
    identity = read_identity(env)
    host, port = find_master(env, identity) if identity.world_size > 1 else (_LOOPBACK, 0)
    fields = {
        "RANK": identity.rank,
        "WORLD_SIZE": identity.world_size,
        "LOCAL_RANK": identity.local_rank,
        "LOCAL_WORLD_SIZE": identity.local_world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in fields.items()}


# -- rank tables -----------------------------------------------------------------------


def _table_path(env: Mapping[str, str]) -> str:
    return next((env[name] for name in _TABLES if env.get(name)), "")


def _read(path: str) -> RankTable:
    from msrun.rank_table.file import read_table  # A user's folder may have the name `ranktable`.

    return read_table(path)


def _entry(table: RankTable, path: str, env: Mapping[str, str]) -> tuple[Server, TableDevice]:
    text = env["RANK_ID"]
    entries = {str(device.rank_id): (server, device) for server, device in table.by_rank()}
    if text not in entries:
        choices = f"choose 0 to {table.world_size - 1}"
        raise UsageError(
            f"environment RANK_ID={shown(text)} is no rank of {shown(path)} ({choices})"
        )
    return entries[text]


def _in_order(table: RankTable) -> list[Server]:
    """Return the servers by their ranks."""
    return sorted(table.server_list, key=lambda server: server.device[0].rank_id)


def _check_size(table: RankTable, server: Server, path: str, env: Mapping[str, str]) -> None:
    """Refuse another number of ranks than the table's; some scripts give those of a server."""
    text = env.get("RANK_SIZE")
    if text and text not in (str(table.world_size), str(len(server.device))):
        has = f"{shown(path)} has {table.world_size}"
        raise UsageError(f"environment RANK_SIZE={shown(text)} contradicts the ranks: {has}")


def _check_device(device: TableDevice, path: str, env: Mapping[str, str]) -> None:
    text = env.get("DEVICE_ID")
    known = (str(device.device_id), str(device.device_logical_id))
    if text and text not in known:
        has = f"{shown(path)} gives rank {device.rank_id} device {device.device_id}"
        raise UsageError(f"environment DEVICE_ID={shown(text)} contradicts the table: {has}")


# -- where ranks meet ------------------------------------------------------------------

# Each returns the host of rank 0, empty when the starter does not name it, and a text that only
# this job has.


def _of_table(env: Mapping[str, str]) -> tuple[str, str]:
    path = _table_path(env)
    if not path:
        return "", ""
    server, device = _read(path).by_rank()[0]
    # The narrowest first: ranks in pods and containers are not reached at the host's.
    named = (server.container_ip, server.pod_ip, server.server_ip, server.host_ip)
    return next(filter(None, named), server.server_id), f"{server.server_id} {device.device_id}"


def _of_slurm(env: Mapping[str, str]) -> tuple[str, str]:
    from msrun.hosts import hostlist  # Where Slurm is not, this would be a slow import for nothing.

    nodes = env.get("SLURM_STEP_NODELIST", "")
    try:
        host = hostlist.expand(nodes)[0] if nodes else ""
    except UsageError as error:
        raise UsageError(f"environment SLURM_STEP_NODELIST: {error.message}") from None
    return host, f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"


def _of_open_mpi(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the node of mpirun, which is that of rank 0 unless rank 0 knows better."""
    name, uri = env.get("PMIX_NAMESPACE", ""), env.get("OMPI_MCA_orte_hnp_uri", "")
    if uri:
        match = re.fullmatch(_OPEN_MPI_4_ADDRESS, uri)
        is_there = env.get("OMPI_MCA_orte_local_daemon_uri") == uri
    else:
        match = re.fullmatch(_OPEN_MPI_5_HOST, name)
        is_there = bool(re.fullmatch(_OPEN_MPI_5_DAEMON, env.get("PMIX_SERVER_URI41", "")))
    host = next(filter(None, match.groups())) if match else ""
    has_others = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env["OMPI_COMM_WORLD_SIZE"]
    if host and has_others and not is_there and env["OMPI_COMM_WORLD_RANK"] == "0":
        raise UsageError(
            f"Open MPI placed rank 0 on another node than mpirun's, {shown(host)}",
            hint="set MASTER_ADDR and MASTER_PORT, or let mpirun's node be the first of the hosts",
        )
    return host, name


def _of_hydra(env: Mapping[str, str]) -> tuple[str, str]:
    """Return what Intel MPI says: a name for the job, and no host."""
    return "", env.get("I_MPI_HYDRA_UUID", "")


_FINDERS: dict[str, Callable[[Mapping[str, str]], tuple[str, str]]] = {
    "a rank table": _of_table,
    "Slurm": _of_slurm,
    "Open MPI": _of_open_mpi,
    "MPI": _of_hydra,
}
