"""Names of environment variables: the only file that reads, builds or writes an environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

RUN_DIR = "MSRUN_RUN_DIR"
OMP_THREADS = "OMP_NUM_THREADS"
_IDENTITY = (
    "MSRUN_JOB_ID",
    "MSRUN_GENERATION",
    "MSRUN_NODE_RANK",
    RUN_DIR,
    "MSRUN_CONFIG",
)
# One step of Slurm, Open MPI, and what speaks PMI such as MPICH.
_COPIES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1"}


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
