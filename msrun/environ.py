"""Names of environment variables: the only file that reads, builds or writes an environment."""

# tidy: long file, the one file that knows the names of environment variables, by decision

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

import msgspec

from msrun.errors import UsageError
from msrun.units import PORT_MAX, shown

RUN_DIR = "MSRUN_RUN_DIR"
CONFIG = "MSRUN_CONFIG"
# Of jobs with parameter servers: `worker` or `server`, which server, and how many there are.
ROLE = "MSRUN_ROLE"
SERVER_ID = "MSRUN_SERVER_ID"
SERVER_NUM = "MSRUN_SERVER_NUM"
# Directory of this node for their files; address of this node for their sockets.
SERVERS_DIR = "MSRUN_SERVERS_DIR"
SERVER_ADDR = "MSRUN_SERVER_ADDR"
# Over how many nodes servers are divided.
SERVER_NODES = "MSRUN_SERVER_NODES"
# In that directory, the hexadecimal digits of their secret, or with --insecure this word.
SERVERS_KEY = "key"
SERVERS_INSECURE = "insecure"
SERVERS_COUNT = "count"
# From `msrun verify` to rank 0: the file for its report.
VERIFY = "MSRUN_VERIFY"
OMP_THREADS = "OMP_NUM_THREADS"
RANK_TABLE_FILE = "RANK_TABLE_FILE"
# Directory with the function that a worker calls, until it has been loaded.
CALL = "MSRUN_CALL"
# The FIFO of torch's file timers, and whether a server of them is wanted.
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
_TIMERS = "TORCHELASTIC_ENABLE_FILE_TIMER"
# From a launcher to its agents, never further.
SECRET = "MSRUN_SECRET"  # noqa: S105 - its name
ORDER = "MSRUN_ORDER"


class Pod(enum.StrEnum):
    """What an agent finds in its environment in a pod, beside the index of Kubernetes."""

    INDEX = "JOB_COMPLETION_INDEX"
    JOB = "MSRUN_POD_JOB"
    NODES = "MSRUN_POD_NODES"
    SCHEDULER = "MSRUN_POD_SCHEDULER"
    SECRET_FILE = "MSRUN_POD_SECRET_FILE"  # noqa: S105 - its name
    ADDRESS = "MSRUN_POD_ADDRESS"
    MESSAGE = "MSRUN_POD_MESSAGE"


_IDENTITY = (
    "MSRUN_JOB_ID",
    "MSRUN_GENERATION",
    "MSRUN_NODE_RANK",
    "MSRUN_RANK0_ADDR",
    RUN_DIR,
    CONFIG,
    ROLE,
    SERVER_ID,
    SERVER_NUM,
    SERVERS_DIR,
    SERVER_ADDR,
    SERVER_NODES,
    "MS_SERVER_NUM",
)
# One step of Slurm, Open MPI, and what speaks PMI such as MPICH.
_COPIES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# One pod of several.
_PODS = frozenset(Pod)
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
# What torch leaves in memory is in large pages then, of which a fork and an end of a process have
# fewer to go through. Of glibc from 2.35 on; where the kernel gives none, nothing changes.
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLOO_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
_TLS = "TCP_TLS"
# Files of a node for Gloo's TLS, in a directory of their own.
TLS_KEY, TLS_CERTIFICATE, TLS_CA = "key.pem", "certificate.pem", "ca.pem"
_TLS_FILES = {
    f"{_GLOO_TRANSPORT}_{_TLS}_PKEY": TLS_KEY,
    f"{_GLOO_TRANSPORT}_{_TLS}_CERT": TLS_CERTIFICATE,
    f"{_GLOO_TRANSPORT}_{_TLS}_CA_FILE": TLS_CA,
}
_TLS_CA_PATH = f"{_GLOO_TRANSPORT}_{_TLS}_CA_PATH"  # may take the place of the last
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
# What a parameter server has in common with the workers of its node.
_SHARED_WITH_SERVERS = (
    *_MASTER,
    "MSRUN_JOB_ID",
    "MSRUN_NODE_RANK",
    RUN_DIR,
    CONFIG,
    "WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MS_WORKER_NUM",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "PYTHONUNBUFFERED",
    OMP_THREADS,
    _GLOO_INTERFACE,
)
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_WHOLE = r"[0-9]{1,15}"  # compiled where it is used, as in `units`


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process in its job, as its starter describes it.

    Args:
        source: The starter, as a person calls it.
        rank: Global rank.
        world_size: Ranks in the job.
        local_rank: Rank on its node.
        local_world_size: Ranks on its node.
        node_rank: Its node; None where the starter does not say.
        generation: How many times the job re-formed before.
        device: Number of its device among those it sees; None for that of its local rank.
    """

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0
    generation: int = 0
    device: int | None = None


class _Starter(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the variables by which one starter says who a process is; empty where it does not.

    Args:
        source: As of `RankIdentity`.
        rank: Set, as are `world_size` and `proof`, in each process of this starter.
        world_size: As the fields of `RankIdentity`, like those that follow.
        local_rank: Without it every rank is the first of its node.
        local_world_size: Without it, the ranks that are known to run on the node.
        node_rank: Unknown without it.
        proof: A further variable that others who set `rank` and `world_size` do not.
    """

    source: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    proof: str = ""


# The innermost first: mpirun may run inside a step of Slurm, torchrun inside either.
_STARTERS = (
    _Starter(
        source="torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        proof="LOCAL_WORLD_SIZE",
    ),
    _Starter(source="a script", rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK"),
    # Its OMPI_COMM_WORLD_NODE_RANK counts ranks on a node, not nodes.
    _Starter(
        source="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and Intel MPI; `srun --mpi=pmi2` sets the first two as well, and no local rank.
    _Starter(
        source="MPI",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        proof="MPI_LOCALRANKID",
    ),
    # A batch script has a SLURM_PROCID as well, and is not in a step.
    _Starter(
        source="Slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        node_rank="SLURM_NODEID",
        proof="SLURM_STEP_ID",
    ),
    # What else speaks PMI, such as Cray's.
    _Starter(
        source="MPI",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_world_size="PMI_LOCAL_SIZE",
    ),
    _Starter(source="a rank table", rank="RANK_ID", world_size="RANK_SIZE", local_rank="DEVICE_ID"),
    _Starter(
        source="Kubernetes",
        rank="JOB_COMPLETION_INDEX",
        world_size="WORLD_SIZE",
        node_rank="JOB_COMPLETION_INDEX",
    ),
)
# Whoever has the first and means it has the second; an index of Kubernetes may mean anything.
_PAIRS = (("RANK", "WORLD_SIZE"), ("RANK_ID", "RANK_SIZE"))
_TASKS = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


class ServersIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The parameter servers of a job, as each of its processes sees them.

    Args:
        total: How many there are.
        directory: Private directory of this node for their files.
        address: Address of this node for their sockets.
        are_nodes: Each is a node of its own, without workers, in a cluster that began by hand.
    """

    total: int
    directory: str
    address: str
    are_nodes: bool = False


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who one worker is, from which its environment follows.

    Args:
        job_id: The job.
        run_id: The job in torchrun's words.
        generation: How many times the job re-formed before this worker started.
        rank: Global rank.
        world_size: Workers in the job.
        local_rank: Rank on its node.
        local_world_size: Workers on its node.
        node_rank: Its node.
        nnodes: Nodes in the job.
        device: Index of its device among those of the node.
        role: Name of its role.
        max_restarts: Restart budget of the job.
        store: Host and port of this generation's store, on the worker's own node.
        rank0_address: Address of the node of rank 0.
        scheduler: Host and port of MindSpore's scheduler, if there is one.
        run_dir: Private directory of the job on this node.
        error_file: Where the worker leaves its exception.
        stop_signals: Names of the signals that end the job, separated by commas.
        join_timeout: Seconds in which all nodes must register; -1 sets no limit.
        threads: Default of OMP_NUM_THREADS.
        virtual_local_rank: The worker sees only its own device, as LOCAL_RANK 0.
        config: File with the parallel configuration; empty without one.
        interface: Network interface to the other workers; empty leaves it to the libraries.
        rank_table: File with the job's rank table; empty without one.
        data_tls: Directory with the keys for Gloo's TLS; empty without TLS.
        servers: The job's parameter servers; None without any.
    """

    job_id: str
    run_id: str
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nnodes: int
    device: int
    role: str
    max_restarts: int
    store: tuple[str, str]
    rank0_address: str
    scheduler: tuple[str, str]
    run_dir: str
    error_file: str
    threads: int
    stop_signals: str
    join_timeout: int = 600
    virtual_local_rank: bool = False
    config: str = ""
    interface: str = ""
    rank_table: str = ""
    data_tls: str = ""
    servers: ServersIdentity | None = None


def worker_env(identity: WorkerIdentity, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets on top of `base`, the launcher's own.

    A variable that is a mere default, such as OMP_NUM_THREADS, is left out when
    `base` has it.

    Raises:
        UsageError: As `data_tls_env`.
    """
    env = _torchrun_env(identity) | _mindspore_env(identity) | _msrun_env(identity)
    env["PYTHONUNBUFFERED"] = "1"
    if identity.servers:
        env |= {ROLE: "worker", **_servers_env(identity.servers)}
    elif SERVER_NUM in base:  # an option that a stronger one has overruled
        env[SERVER_NUM] = "0"
    if identity.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["LOCAL_WORLD_SIZE"] = "1"
        env |= _one_device(identity.device, base)
    defaults = {
        OMP_THREADS: str(identity.threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if identity.interface:
        # Gloo would take the one of the host's name, which is often loopback.
        defaults[_GLOO_INTERFACE] = identity.interface
    if identity.data_tls:
        env |= data_tls_env(base, identity.data_tls)
    if identity.config or CONFIG in base:
        # What the launcher's own names is a job file, or another job's.
        env[CONFIG] = identity.config
    return env | {name: value for name, value in defaults.items() if name not in base}


# Prefix of the variables of HCCL, the collectives of NPUs.
HCCL_PREFIX = "HCCL_"
_HCCL_ADDRESS = ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "HCCL_SOCKET_FAMILY")
# Seconds.  HCCL's own limits, and its default of the time that a collective may take.
_HCCL_CONNECT_MIN, _HCCL_CONNECT_MAX, _HCCL_EXEC_DEFAULT = 300, 7200, 1836
_HANG_REPORT_SECONDS = 60


class HcclNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What HCCL must know of a job.

    Args:
        address: Numeric address of this node, empty if all ranks are on it.
        interface: Name of the interface that has it, empty if none has.
        join_timeout: Seconds in which nodes join; below 0 for no limit.
        rank_table: Whether ranks read a rank table.
        hang_timeout: Seconds after which msrun reports a hang; None if it does not.
    """

    address: str
    interface: str
    join_timeout: int
    rank_table: bool
    hang_timeout: float | None


def hccl_env(needs: HcclNeeds, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of HCCL that follow from the job and that `base` lacks.

    `HCCL_IF_IP` goes before the names of interfaces in HCCL, so where `base` has any of them it
    gets none.  Ranks of several nodes, or of a table, connect one after the other; and a collective
    that waits must not end before msrun has said who hangs.
    """
    env: dict[str, str] = {}
    if needs.address and not any(name in base for name in _HCCL_ADDRESS):
        env["HCCL_IF_IP"] = needs.address
        env["HCCL_SOCKET_FAMILY"] = "AF_INET6" if ":" in needs.address else "AF_INET"
        if needs.interface:
            env["HCCL_SOCKET_IFNAME"] = f"={needs.interface}"  # that very name, no prefix of others
    if needs.address or needs.rank_table:
        limit = _HCCL_CONNECT_MAX if needs.join_timeout < 0 else needs.join_timeout
        seconds = min(max(limit, _HCCL_CONNECT_MIN), _HCCL_CONNECT_MAX)
        env["HCCL_CONNECT_TIMEOUT"] = str(seconds)
    if needs.hang_timeout is not None and math.isfinite(needs.hang_timeout):
        seconds = math.ceil(needs.hang_timeout) + _HANG_REPORT_SECONDS
        if seconds > _HCCL_EXEC_DEFAULT:
            env["HCCL_EXEC_TIMEOUT"] = str(seconds)
    return {name: value for name, value in env.items() if name not in base}


def server_env(
    number: int, servers: ServersIdentity, worker: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """Return the variables of a parameter server, on top of the launcher's own.

    Args:
        number: Its number.
        servers: All servers.
        worker: Variables of a worker of its node, of which it gets what is not of that one alone.
        error_file: Where it leaves its exception.
    """
    env = {name: worker[name] for name in _SHARED_WITH_SERVERS if name in worker}
    # A node with workers has one of them where servers are nodes of their own.
    others = int(worker["WORLD_SIZE"]) if servers.are_nodes else 0
    return {
        **env,
        **_servers_env(servers),
        SERVER_NODES: str(int(worker["GROUP_WORLD_SIZE"]) - others),
        ROLE: "server",
        SERVER_ID: str(number),
        # After `msrun scale` it may be one too many, and lives until others have its rows.
        SERVER_NUM: str(max(servers.total, number + 1)),
        "MS_ROLE": "MS_PSERVER",
        "TORCHELASTIC_ERROR_FILE": error_file,
    }


def _servers_env(servers: ServersIdentity) -> dict[str, str]:
    return {
        SERVER_NUM: str(servers.total),
        SERVERS_DIR: servers.directory,
        SERVER_ADDR: servers.address,
        "MS_SERVER_NUM": str(servers.total),
    }


def server_words() -> list[str]:
    """Return which parameter server this is, and of which job, for lists of processes."""
    return [os.environ.get(SERVER_ID, ""), os.environ.get(_IDENTITY[0], "")]


def data_tls_env(base: Mapping[str, str], directory: str) -> dict[str, str]:
    """Return the variables for TLS between workers that `base` lacks.

    Args:
        base: The launcher's own, with what the job adds.
        directory: Where the keys of this node are; unused where `base` names keys.

    Raises:
        UsageError: `base` asks for another transport, or names keys in part.
    """
    transport = base.get(_GLOO_TRANSPORT) or _TLS
    if transport != _TLS:
        msg = f"--data-tls contradicts {_GLOO_TRANSPORT}={shown(transport)}"
        raise UsageError(msg, hint="leave one of them out")
    named = [name for name in (*_TLS_FILES, _TLS_CA_PATH) if base.get(name)]
    env = {_GLOO_TRANSPORT: _TLS}
    if not named:
        return env | {name: f"{directory}/{file}" for name, file in _TLS_FILES.items()}
    *own, authority = _TLS_FILES
    missing = [name for name in own if name not in named]
    if authority not in named and _TLS_CA_PATH not in named:
        missing.append(authority)
    if missing:
        msg = f"--data-tls: {named[0]} is set and {' and '.join(missing)} is not"
        raise UsageError(msg, hint="set all of them, or none: then msrun makes the keys")
    return env


def _torchrun_env(who: WorkerIdentity) -> dict[str, str]:
    return {
        "RANK": str(who.rank),
        "WORLD_SIZE": str(who.world_size),
        "LOCAL_RANK": str(who.local_rank),
        "LOCAL_WORLD_SIZE": str(who.local_world_size),
        "GROUP_RANK": str(who.node_rank),
        "GROUP_WORLD_SIZE": str(who.nnodes),
        "ROLE_RANK": str(who.rank),
        "ROLE_NAME": who.role,
        "ROLE_WORLD_SIZE": str(who.world_size),
        "MASTER_ADDR": who.store[0],
        "MASTER_PORT": who.store[1],
        "TORCHELASTIC_RUN_ID": who.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(who.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(who.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": who.error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": who.stop_signals,
    }


def _mindspore_env(who: WorkerIdentity) -> dict[str, str]:
    table = {RANK_TABLE_FILE: who.rank_table} if who.rank_table else {}
    return {
        **table,
        "MS_ROLE": "MS_WORKER",
        **mindspore_scheduler_at(*who.scheduler),
        "MS_WORKER_NUM": str(who.world_size),
        "MS_NODE_ID": str(who.rank),
        "MS_TOPO_TIMEOUT": str(who.join_timeout),
        "RANK_ID": str(who.rank),
        "RANK_SIZE": str(who.world_size),
        "DEVICE_ID": str(who.device),
    }


def mindspore_scheduler_env(
    host: str, port: int, *, workers: int, join_timeout: int, rank_table: str
) -> dict[str, str]:
    """Return what MindSpore's scheduler finds in its environment.

    Args:
        host: Address at which it listens.
        port: Port of it.
        workers: How many it waits for.
        join_timeout: As of `WorkerIdentity`, like the one that follows.
        rank_table: File by which it numbers the workers; empty without one.
    """
    table = {RANK_TABLE_FILE: rank_table} if rank_table else {}
    return {
        **table,
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": str(workers),
        "MS_TOPO_TIMEOUT": str(join_timeout),
        "RANK_ID": "0",
        "RANK_SIZE": str(workers),
        **mindspore_scheduler_at(host, str(port)),
    }


def mindspore_scheduler_at(host: str, port: str) -> dict[str, str]:
    """Return the variables by which MindSpore's workers find their scheduler."""
    return {"MS_SCHED_HOST": host, "MS_SCHED_PORT": port}


def _msrun_env(who: WorkerIdentity) -> dict[str, str]:
    return {
        "MSRUN_JOB_ID": who.job_id,
        "MSRUN_GENERATION": str(who.generation),
        "MSRUN_NODE_RANK": str(who.node_rank),
        "MSRUN_RANK0_ADDR": who.rank0_address,
        RUN_DIR: who.run_dir,
    }


def _one_device(device: int, base: Mapping[str, str]) -> dict[str, str]:
    """Narrow each visibility variable that is set, or else all of them, to one device.

    One that lists no such device, such as an empty one, stays as it is: it hides them all.
    """
    names = [name for name in _VISIBILITY if name in base]
    if not names:
        return dict.fromkeys(_VISIBILITY, str(device))
    narrowed = {}
    for name in names:
        visible = [entry.strip() for entry in base[name].split(",") if entry.strip()]
        if device < len(visible):
            narrowed[name] = visible[device]
    return narrowed


def current() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def call_directory() -> str:
    """Return where the function is that this worker calls; empty before and after it is loaded."""
    return os.environ.get(CALL, "")


def end_call() -> None:
    """Forget the function: it has been loaded, and may start jobs of its own."""
    os.environ.pop(CALL, None)


def options_environment() -> dict[str, str]:
    """Return the variables that may hold options of msrun.

    Inside a worker the identity variables describe that worker, and those of Slurm, MPI and
    Kubernetes its launcher, so they are left out: a nested msrun is alone.
    """
    env = current()
    if "MSRUN_GENERATION" in env:
        for name in _IDENTITY:
            env.pop(name, None)
        return without_copies(env)
    return env


def without_copies(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without what Slurm, MPI and Kubernetes say about other processes and pods."""
    return {name: value for name, value in env.items() if name not in (*_COPIES, *_PODS)}


def role_by_hand(env: Mapping[str, str]) -> str:
    """Return the role of a process that a person started; empty of one that has its rank."""
    is_started = _IDENTITY[1] in env or _is_of(_STARTERS[0], env)
    return "" if is_started else env.get("MS_ROLE", "")


def node_env(base: Mapping[str, str], run_dir: str, threads: int) -> dict[str, str]:
    """Return the environment of a node's reaper and forkserver; workers get one of their own.

    Args:
        base: The launcher's own, with what the job adds.
        run_dir: The job's private directory, by which strays are found.
        threads: OMP_NUM_THREADS of most workers, unless `base` has it: OpenMP reads it
            when it is loaded.
    """
    return {OMP_THREADS: str(threads), **_LARGE_PAGES, **base, RUN_DIR: run_dir}


def timer_file(env: Mapping[str, str], run_dir: str) -> str:
    """Return the FIFO of torch's file timers, empty where `env` asks for no server of them.

    Args:
        env: The launcher's own, with what the job adds.
        run_dir: The job's private directory.
    """
    if env.get(_TIMERS) != "1":
        return ""
    given = env.get(TIMER_FILE, "")
    # That of a job around this one has a server already.
    is_outer = bool(env.get(RUN_DIR)) and given.startswith(f"{env[RUN_DIR]}/")
    return given if given and not is_outer else f"{run_dir}/timers"


def rank_identity(env: Mapping[str, str]) -> RankIdentity:
    """Return who the process with environment `env` is; alone when nothing says so.

    Raises:
        UsageError: A variable of the starter is no number or outside its range, or the process
            is one of several without a way to know how many.
    """
    for starter in _STARTERS:
        if _is_of(starter, env):
            return _identity_by(starter, env)
    for rank, world_size in _PAIRS:
        if env.get(rank) and _whole(env, rank) > 0:
            raise UsageError(f"environment {rank}={env[rank]} is set and {world_size} is not")
    if role := env.get("MS_ROLE"):
        raise UsageError(
            f"environment MS_ROLE={shown(role)}, and this process has not joined its cluster",
            hint="call msrun.join(), or msrun.init(), which does it first",
        )
    return RankIdentity(source="plain python")


def _is_of(starter: _Starter, env: Mapping[str, str]) -> bool:
    return all(map(env.get, filter(None, (starter.rank, starter.world_size, starter.proof))))


def _identity_by(starter: _Starter, env: Mapping[str, str]) -> RankIdentity:
    rank = _below(env, starter.rank, starter.world_size)
    local_rank = _whole(env, starter.local_rank, default=0)
    if env.get(starter.local_world_size):
        local_rank = _below(env, starter.local_rank, starter.local_world_size, default=0)
        local_world_size = _whole(env, starter.local_world_size)
    else:
        local_world_size = max(local_rank + 1, _tasks_of_step(env))
    return RankIdentity(
        source="msrun" if _IDENTITY[1] in env else starter.source,
        rank=rank,
        world_size=_whole(env, starter.world_size),
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_whole(env, starter.node_rank) if env.get(starter.node_rank) else None,
        generation=_whole(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _tasks_of_step(env: Mapping[str, str]) -> int:
    """Return how many tasks Slurm started on this node, 0 outside a step."""
    # `2(x3),1`: tasks of each node, in the order of the nodes.
    texts = env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
    parts = [re.fullmatch(_TASKS, text) for text in texts]
    node = _whole(env, "SLURM_NODEID", default=0)
    for part in filter(None, parts):
        node -= int(part[2] or 1)
        if node < 0:
            return int(part[1])
    return 0


def _below(env: Mapping[str, str], name: str, limit: str, default: int | None = None) -> int:
    number, most = _whole(env, name, default), _whole(env, limit)
    if number >= most:
        raise UsageError(f"environment {name}={number} must be below {limit}={most}")
    return number


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if default is not None and not text:
        return default
    if not re.fullmatch(_WHOLE, text):
        raise UsageError(f"environment {name}={shown(text)} is no whole number")
    return int(text)


def config_file(env: Mapping[str, str]) -> str | None:
    """Return the file with the parallel configuration that was handed over, if there is one."""
    return env.get(CONFIG) or None


class ServersPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The parameter servers of a job, as one of its processes finds them.

    Args:
        count: How many there are; 0 in a job without.
        server: Which of them this process is; -1 in a worker.
        directory: Private directory of this node; empty without one.
        address: Address of this node for their sockets.
        ranks: Workers of the job.
        nodes: Nodes with servers: number i is on the i-th of them, modulo their number.
    """

    count: int
    server: int
    directory: str
    address: str
    ranks: int
    nodes: int = 1


def servers_place(env: Mapping[str, str]) -> ServersPlace:
    """Return where the parameter servers of this job are.

    Raises:
        UsageError: A number in the environment is none.
    """
    count = _whole(env, SERVER_NUM, 0)
    return ServersPlace(
        count=count,
        server=_below(env, SERVER_ID, SERVER_NUM) if env.get(SERVER_ID) else -1,
        directory=env.get(SERVERS_DIR, ""),
        address=env.get(SERVER_ADDR) or "127.0.0.1",
        ranks=_whole(env, "WORLD_SIZE", 1),
        nodes=max(1, _whole(env, SERVER_NODES, 1)),
    )


def verify_report(env: Mapping[str, str]) -> str | None:
    """Return the file for the report of `msrun verify`, if that runs this job."""
    return env.get(VERIFY) or None


def master(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the store that `env` names, None without.

    Raises:
        UsageError: Only one of the two is there, or the port is none.
    """
    given = [name for name in _MASTER if env.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = next(name for name in _MASTER if name not in given)
        raise UsageError(f"environment {given[0]} is set and {missing} is not")
    port = _whole(env, _MASTER[1])
    if not 0 < port <= PORT_MAX:
        raise UsageError(f"environment {_MASTER[1]}={port} is outside 1 to {PORT_MAX}")
    return env[_MASTER[0]], port


def copies(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable and the number by which Slurm or MPI says that it started several."""
    for name in _COPIES:
        if (text := env.get(name, "")).isdecimal() and int(text) > 1:
            return name, int(text)
    return None


def nodes_of_allocation(env: Mapping[str, str]) -> int:
    """Return how many nodes Slurm has given a shell or batch script; 1 in what srun has started."""
    text = env.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdecimal() and not env.get("SLURM_STEP_NUM_TASKS") else 1


def install(env: Mapping[str, str]) -> None:
    """Make `env` the whole environment of this process."""
    os.environ.clear()
    os.environ.update(env)


def add(env: Mapping[str, str]) -> None:
    """Set variables of this process and of those that it starts."""
    os.environ.update(env)


def choose_interface(name: str) -> None:
    """Have gloo in this process use the network interface `name`, unless another is set."""
    if name:
        os.environ.setdefault(_GLOO_INTERFACE, name)


def take_order() -> tuple[str, str]:
    """Return secret and order that a launcher left for this node, and forget them."""
    return os.environ.pop(SECRET, ""), os.environ.pop(ORDER, "")


def without_options() -> dict[str, str]:
    """Return this process's environment without options of msrun, which an order has as words."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("MSRUN_", "PET_"))}


def hold_back_threads() -> dict[str, str | None]:
    """Keep numeric libraries from starting threads; return what `restore` takes."""
    before = {name: os.environ.get(name) for name in _WITHOUT_THREADS}
    os.environ.update(_WITHOUT_THREADS)
    return before


def restore(before: Mapping[str, str | None]) -> None:
    """Undo `hold_back_threads`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def runtime_dir() -> str | None:
    """Return the user's own directory for sockets and the like, None when there is none."""
    return os.environ.get("XDG_RUNTIME_DIR")


def config_dir() -> Path | None:
    """Return where this user's programs keep their settings, None without a home directory."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if Path(named).is_absolute():  # As the XDG specification has it, others do not count.
        return Path(named)
    try:
        return Path.home() / ".config"
    except RuntimeError:
        return None


def cache_dir() -> Path | None:
    """Return where this user's programs keep what they can make again; None without a home."""
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def is_pod() -> bool:
    """Whether this process runs in a pod of ours."""
    return bool(os.environ.get(Pod.NODES))


def message_file() -> str:
    """Return where an agent in a pod leaves its last words; empty elsewhere and inside workers."""
    return "" if "MSRUN_GENERATION" in os.environ else os.environ.get(Pod.MESSAGE, "")


def error_file() -> str | None:
    """Return where this worker is to leave its exception."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def rank_file(name: str) -> str | None:
    """Return a private file of this worker and what it starts; None outside of a job."""
    # Not RANK, which a launcher inside of a worker gives its own children.
    names = (RUN_DIR, "MSRUN_GENERATION", "RANK_ID")
    run_dir, generation, rank = (os.environ.get(name, "") for name in names)
    if not (run_dir and generation.isdecimal() and rank.isdecimal()):
        return None
    return f"{run_dir}/g{generation}/{name}_{rank}"


def terminal() -> tuple[str, bool]:
    """Return the kind of our terminal, empty if unknown, and whether it may have colours."""
    return os.environ.get("TERM", ""), not os.environ.get("NO_COLOR")


def line_prefix(role: str, rank: int, local_rank: int) -> str:
    """Return what stands before each line of a worker on the console.

    torchrun's variable has the template; without it the rank is named.
    """
    template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def thread_counts() -> tuple[int | None, int | None]:
    """Return OMP_NUM_THREADS and OPENBLAS_NUM_THREADS; None where they say nothing."""
    return _count(OMP_THREADS), _count("OPENBLAS_NUM_THREADS")


def _count(name: str) -> int | None:
    first = os.environ.get(name, "").partition(",")[0].strip()  # the first level of `4,2`
    return int(first) if first.isdecimal() and int(first) > 0 else None
