"""Plans the workers of one node in one generation: CPUs, environment, log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from msrun.backend import WorkerPlan
from msrun.environ import HcclNeeds, ServersIdentity, WorkerIdentity, hccl_env, worker_env
from msrun.job import STOP_SIGNALS, JobSpec
from msrun.supervise import affinity, network
from msrun.supervise.affinity import AffinityPlan
from msrun.supervise.logs import SAMPLES, STDERR, STDOUT
from msrun.topology import DeviceKind, Machine

LOOPBACK = "127.0.0.1"
UNKNOWN = "<port>"
UNKNOWN_HOST = "<address>"
UNKNOWN_RANK = "<rank>"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one node stands in one generation.

    Args:
        generation: The generation.
        node_rank: The node's rank.
        nnodes: Nodes in the generation.
        first_rank: Global rank of its local_rank 0.
        world_size: Workers in the generation.
        store: Host and port at which the workers of this node reach the store.
        rank0_address: Address of the node of rank 0.
        scheduler: Host and port of MindSpore's scheduler.
        run_dir: Private directory of the job on this node.
        first_local_rank: Local rank of this node's first worker.
        local_world_size: Workers on this machine; 0 for those of this node.
    """

    generation: int
    node_rank: int
    nnodes: int
    first_rank: int
    world_size: int
    store: tuple[str, str]
    scheduler: tuple[str, str]
    run_dir: str
    rank0_address: str = LOOPBACK
    first_local_rank: int = 0
    local_world_size: int = 0


def expected(job: JobSpec, run_dir: str) -> Placement:
    """Return the placement of this node that follows from the job, before any port is known.

    Of several nodes, all bring as many workers as this one, which is the first unless the
    job gives it a rank.
    """
    nnodes = job.nnodes_max
    if job.world_size is not None:
        nnodes = min(nnodes, -(-job.world_size // job.workers_per_node))
    node_rank = job.node_rank or 0
    is_first = job.is_alone or job.node_rank == 0
    return Placement(
        generation=0,
        node_rank=node_rank,
        nnodes=nnodes,
        first_rank=node_rank * job.workers_per_node,
        world_size=job.world_size or nnodes * job.workers_per_node,
        store=(LOOPBACK, str(job.store_port or UNKNOWN)),
        rank0_address=job.address if is_first else UNKNOWN_HOST,
        scheduler=(LOOPBACK, UNKNOWN),
        run_dir=run_dir,
    )


def has_ranks(job: JobSpec) -> bool:
    """Tell whether the ranks of this node follow from the job, if all nodes are alike."""
    if job.is_alone:
        return True
    is_even = job.world_size in (None, job.nnodes_max * job.workers_per_node)
    return job.node_rank is not None and job.nnodes_min == job.nnodes_max and is_even


def error_file(run_dir: str, generation: int, rank: int) -> str:
    """Return where a worker leaves its exception."""
    return str(Path(run_dir, f"g{generation}", f"error_{rank}.json"))


def beat_file(run_dir: str, generation: int, rank: int) -> str:
    """Return where a worker counts its beats."""
    return str(Path(run_dir, f"g{generation}", f"beat_{rank}"))


def stack_file(run_dir: str, generation: int, rank: int) -> str:
    """Return where a worker writes its stacks when it is asked to."""
    return str(Path(run_dir, f"g{generation}", f"stack_{rank}"))


def collective_files(run_dir: str, generation: int, rank: int) -> tuple[str, str]:
    """Return where a worker is asked for its collectives, and where it answers."""
    directory = Path(run_dir, f"g{generation}")
    return str(directory / f"ask_{rank}"), str(directory / f"collectives_{rank}")


def config_file(run_dir: str) -> str:
    """Return where the parallel configuration is handed to the workers."""
    return str(Path(run_dir, "parallel.json"))


def tls_directory(run_dir: str) -> str:
    """Return where the keys for TLS between workers are."""
    return str(Path(run_dir, "tls"))


def servers_directory(run_dir: str) -> str:
    """Return where the parameter servers of this node keep their files."""
    return str(Path(run_dir, "servers"))


def server_log_file(job: JobSpec, number: int | str) -> str:
    """Return the log of a parameter server."""
    return str(Path(job.log_dir, f"server_{number}.log"))


def plan_affinity(job: JobSpec, machine: Machine) -> AffinityPlan:
    """Return where the workers of `job` run on `machine`.

    Raises:
        UsageError: A CPU, NUMA node or device that was named is not there.
    """
    size = job.workers_per_node
    plan = affinity.plan_cpus(job.bind_core, machine.cpus, machine.devices, size)
    return affinity.plan_memory(job.bind_numa, plan, machine.cpus, machine.devices)


def slot_devices(
    job: JobSpec, machine: Machine, addresses: Callable[[Sequence[int]], Mapping[int, str]]
) -> list[tuple[int, str]]:
    """Return number and own address of the device of each worker; none where they have none each.

    Args:
        job: The job.
        machine: This node.
        addresses: Tells which of the numbers of NPUs have an address, and which.
    """
    first = 0 if job.device is None else job.device
    devices = machine.devices[first : first + job.workers_per_node]
    if len(devices) < job.workers_per_node:
        return []
    numbers = [device.physical for device in devices]
    own = addresses(numbers) if devices[0].kind is DeviceKind.NPU else {}
    return [(number, own.get(number, "")) for number in numbers]


def plan_workers(
    job: JobSpec, machine: Machine, placement: Placement, base: Mapping[str, str]
) -> tuple[WorkerPlan, ...]:
    """Return this node's workers, by local rank.

    Args:
        job: The job.
        machine: This node.
        placement: This node's place.
        base: The launcher's own environment.
    """
    bound = plan_affinity(job, machine)
    # Where all peers are on this machine, the data plane has no business on other interfaces.
    interface = "lo" if placement.nnodes == 1 else network.interface_of(job.address)
    threads = affinity.plan_threads(bound, machine.cpus)
    base = {**base, **job.env}
    npu = _npu_env(job, machine, interface if placement.nnodes > 1 else None, base)
    plans = []
    for i in range(job.workers_per_node):
        who = _identity(job, placement, i, threads[i], interface)
        log = log_file(job, machine, who.rank, who.local_rank)
        own = job.separate_streams(who.local_rank)
        plans.append(
            WorkerPlan(
                rank=who.rank,
                local_rank=who.local_rank,
                node_rank=placement.node_rank,
                device=who.device if who.device < len(machine.devices) else None,
                cpus=bound.cpus[i],
                numa_nodes=bound.numa_nodes[i],
                log_file=log,
                out_file=stream_file(log, "out") if STDOUT in own else "",
                err_file=stream_file(log, "err") if STDERR in own else "",
                env={**job.env, **npu, **worker_env(who, base)},
            )
        )
    return tuple(plans)


def _npu_env(
    job: JobSpec, machine: Machine, interface: str | None, base: Mapping[str, str]
) -> dict[str, str]:
    """Return what HCCL needs on a machine with NPUs; `interface` is None on the only node."""
    if not any(device.kind is DeviceKind.NPU for device in machine.devices):
        return {}
    needs = HcclNeeds(
        address="" if interface is None else job.address,
        interface=interface or "",
        join_timeout=join_seconds(job),
        rank_table=bool(job.rank_table),
        hang_timeout=job.hang_timeout,
    )
    return hccl_env(needs, base)


def _identity(
    job: JobSpec, placement: Placement, index: int, threads: int, interface: str
) -> WorkerIdentity:
    rank, local_rank = placement.first_rank + index, placement.first_local_rank + index
    local_world_size = placement.local_world_size or job.workers_per_node
    return WorkerIdentity(
        job_id=job.job_id,
        run_id=job.run_id or job.job_id,
        generation=placement.generation,
        rank=rank,
        world_size=placement.world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=placement.node_rank,
        nnodes=placement.nnodes,
        device=local_rank if job.device is None else job.device,
        role=job.role,
        max_restarts=job.restarts.max_restarts,
        join_timeout=join_seconds(job),
        stop_signals=",".join((*STOP_SIGNALS, *job.stop_signals)),
        store=placement.store,
        rank0_address=placement.rank0_address,
        scheduler=placement.scheduler,
        run_dir=placement.run_dir,
        error_file=error_file(placement.run_dir, placement.generation, rank),
        # The other nodes on this machine take their share of its cores.
        threads=max(1, threads * job.workers_per_node // local_world_size),
        virtual_local_rank=job.virtual_local_rank or job.device is not None,
        config=config_file(placement.run_dir) if job.parallel else "",
        interface=interface,
        rank_table=job.rank_table,
        data_tls=tls_directory(placement.run_dir) if job.data_tls else "",
        servers=servers_identity(job, placement.run_dir),
    )


def servers_identity(job: JobSpec, run_dir: str) -> ServersIdentity | None:
    """Return the parameter servers as processes of this node see them; None without any."""
    if not job.servers:
        return None
    is_counted = not job.is_alone and job.world_size is not None
    return ServersIdentity(
        total=job.servers,
        directory=servers_directory(run_dir),
        address=job.address,
        are_nodes=is_counted and job.nnodes_min < job.nnodes_max,
    )


def join_seconds(job: JobSpec) -> int:
    """Return the time to join in MindSpore's form: -1 sets no limit."""
    return -1 if math.isinf(job.join_timeout) else math.ceil(job.join_timeout)


def stream_file(log: str, stream: str) -> str:
    """Return the file of one stream beside the log of a worker."""
    return str(Path(log).with_suffix(f".{stream}"))


def samples_file(run_dir: str, generation: int, rank: int) -> str:
    """Return where a worker notes how its streams take turns."""
    return str(Path(run_dir, f"g{generation}", f"{SAMPLES}_{rank}"))


def log_file(job: JobSpec, machine: Machine, rank: int | str, local_rank: int) -> str:
    """Return the log of a worker, whose rank may be `UNKNOWN_RANK`."""
    name = job.worker_log_name.format(
        rank=rank,
        local_rank=local_rank,
        host=machine.host,
        hostname=machine.host,
        ip=job.address,
    )
    return str(Path(job.log_dir, f"{name}.log"))
