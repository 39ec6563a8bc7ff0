"""Names of environment variables: the only file that reads, builds or writes an environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from msrun.errors import UsageError

RUN_DIR = "MSRUN_RUN_DIR"
CONFIG = "MSRUN_CONFIG"
OMP_THREADS = "OMP_NUM_THREADS"
_IDENTITY = (
    "MSRUN_JOB_ID",
    "MSRUN_GENERATION",
    "MSRUN_NODE_RANK",
    RUN_DIR,
    CONFIG,
)
# One step of Slurm, Open MPI, and what speaks PMI such as MPICH.
_COPIES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


class RankIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this process is in a job, as whatever started it says.

    Args:
        source: The starter, as a person calls it.
        rank: Global rank.
        world_size: Ranks in the job.
        local_rank: Rank on its node.
        local_world_size: Ranks on its node.
        node_rank: Its node; None where the starter does not say.
        generation: How many times the job re-formed before.
    """

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0
    generation: int = 0


# Starter -> its variables of rank, world_size, local_rank, local_world_size, node_rank.
# The first whose first two are set counts; inside an allocation of Slurm but outside a step
# there is no rank yet, and Slurm sets SLURM_PROCID there all the same.
_STARTERS: dict[str, tuple[str, str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID"),
    "a rank table": ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "", ""),
    "Kubernetes": ("JOB_COMPLETION_INDEX", "WORLD_SIZE", "", "", "JOB_COMPLETION_INDEX"),
}


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who one worker is, from which its environment follows.

    Args:
        job_id: The job.
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
        store: Host and port of this generation's TCPStore.
        scheduler: Host and port of the scheduler.
        run_dir: Private directory of the job on this node.
        error_file: Where the worker leaves its exception.
        threads: Default of OMP_NUM_THREADS.
        virtual_local_rank: The worker sees only its own device, as LOCAL_RANK 0.
    """

    job_id: str
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
    scheduler: tuple[str, str]
    run_dir: str
    error_file: str
    threads: int
    virtual_local_rank: bool = False


def worker_env(identity: WorkerIdentity, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets on top of `base`, the launcher's own.

    A variable that is a mere default, such as OMP_NUM_THREADS, is left out when
    `base` has it.
    """
    env = _torchrun_env(identity) | _mindspore_env(identity) | _msrun_env(identity)
    env["PYTHONUNBUFFERED"] = "1"
    if identity.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["LOCAL_WORLD_SIZE"] = "1"
        env |= _one_device(identity.device, base)
    defaults = {
        OMP_THREADS: str(identity.threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if identity.nnodes == 1:
        # All peers are on this machine: the data plane has no business on other interfaces.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return env | {name: value for name, value in defaults.items() if name not in base}


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
        "TORCHELASTIC_RUN_ID": who.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(who.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(who.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": who.error_file,
    }


def _mindspore_env(who: WorkerIdentity) -> dict[str, str]:
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_SCHED_HOST": who.scheduler[0],
        "MS_SCHED_PORT": who.scheduler[1],
        "MS_WORKER_NUM": str(who.world_size),
        "MS_NODE_ID": str(who.rank),
        "RANK_ID": str(who.rank),
        "RANK_SIZE": str(who.world_size),
        "DEVICE_ID": str(who.device),
    }


def _msrun_env(who: WorkerIdentity) -> dict[str, str]:
    return {
        "MSRUN_JOB_ID": who.job_id,
        "MSRUN_GENERATION": str(who.generation),
        "MSRUN_NODE_RANK": str(who.node_rank),
        RUN_DIR: who.run_dir,
    }


def _one_device(device: int, base: Mapping[str, str]) -> dict[str, str]:
    """Narrow each visibility variable that is set, or else CUDA's, to one device.

    One that lists no such device, such as an empty one, stays as it is: it hides them all.
    """
    names = [n for n in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES") if n in base]
    if not names:
        return {"CUDA_VISIBLE_DEVICES": str(device)}
    narrowed = {}
    for name in names:
        visible = [entry.strip() for entry in base[name].split(",") if entry.strip()]
        if device < len(visible):
            narrowed[name] = visible[device]
    return narrowed


def current() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


def options_environment() -> dict[str, str]:
    """Return the variables that may hold options of msrun.

    Inside a worker the identity variables describe that worker, and those of Slurm and
    MPI its launcher, so they are left out: a nested msrun is alone.
    """
    env = current()
    if "MSRUN_GENERATION" in env:
        for name in (*_IDENTITY, *_COPIES):
            env.pop(name, None)
    return env


def node_env(base: Mapping[str, str], run_dir: str, threads: int) -> dict[str, str]:
    """Return the environment of a node's reaper and forkserver.

    Args:
        base: The launcher's own, with what the job adds.
        run_dir: The job's private directory, by which strays are found.
        threads: OMP_NUM_THREADS of most workers, unless `base` has it: OpenMP reads it
            when it is loaded.
    """
    return {OMP_THREADS: str(threads), **base, RUN_DIR: run_dir}


def rank_identity(env: Mapping[str, str]) -> RankIdentity:
    """Return who the process with environment `env` is; alone when nothing says so.

    Raises:
        UsageError: A variable of the starter is no number, or outside its range.
    """
    for source, names in _STARTERS.items():
        if not (env.get(names[0]) and env.get(names[1])):
            continue
        if source == "Slurm" and "SLURM_STEP_ID" not in env:
            continue
        rank, world_size = _whole(env, names[0]), _whole(env, names[1])
        if not rank < world_size:
            msg = f"environment {names[0]}={rank} must be below {names[1]}={world_size}"
            raise UsageError(msg)
        local_rank = _whole(env, names[2]) if env.get(names[2]) else 0
        return RankIdentity(
            source="msrun" if _IDENTITY[1] in env else source,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=_local_world_size(env, names[3], local_rank),
            node_rank=_whole(env, names[4]) if env.get(names[4]) else None,
            generation=_whole(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        )
    return RankIdentity(source="plain python")


def _local_world_size(env: Mapping[str, str], name: str, local_rank: int) -> int:
    """Return the ranks of this node; where nothing says it, as many as are known to be there."""
    if env.get(name):
        return _whole(env, name)
    # `2(x3),1`: tasks of each node, in the order of the nodes.
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        if count.isdecimal():
            counts += [int(count)] * int(times.rstrip(")") or 1)
    node = env.get("SLURM_NODEID", "")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    return local_rank + 1


def _whole(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if default is not None and not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"environment {name}={text} is no whole number")
    return int(text)


def config_file(env: Mapping[str, str]) -> str | None:
    """Return the file with the parallel configuration that was handed over, if there is one."""
    return env.get(CONFIG) or None


def master(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the store that `env` names, None without.

    Raises:
        UsageError: Only one of the two is there, or the port is no number.
    """
    given = [name for name in _MASTER if env.get(name)]
    if len(given) == 1:
        missing = next(name for name in _MASTER if name not in given)
        raise UsageError(f"environment {given[0]} is set and {missing} is not")
    return (env[_MASTER[0]], _whole(env, _MASTER[1])) if given else None


def copies(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable and the number by which Slurm or MPI says that it started several."""
    for name in _COPIES:
        if (text := env.get(name, "")).isdecimal() and int(text) > 1:
            return name, int(text)
    return None


def install(env: Mapping[str, str]) -> None:
    """Make `env` the whole environment of this process."""
    os.environ.clear()
    os.environ.update(env)


def hold_back_threads() -> dict[str, str | None]:
    """Keep numeric libraries from starting threads when they are imported.

    Returns:
        What the variables were before, for `restore`.
    """
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


def error_file() -> str | None:
    """Return where this worker is to leave its exception."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def thread_counts() -> tuple[int | None, int | None]:
    """Return OMP_NUM_THREADS and OPENBLAS_NUM_THREADS; None where they say nothing."""
    return _count(OMP_THREADS), _count("OPENBLAS_NUM_THREADS")


def _count(name: str) -> int | None:
    """Return the first level of a thread-count variable such as `4` or `4,2`."""
    first = os.environ.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
