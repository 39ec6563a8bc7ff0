"""The resources of one node for a job: its directory, sockets and processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from msrun import environ
from msrun.backend import LaunchPlan, WorkerPlan
from msrun.cluster.liveness.lease import Lease, lease
from msrun.cluster.wire.messages import Register, Start
from msrun.errors import MsrunError, UsageError
from msrun.job import ProgramKind
from msrun.processes import control_file, run_dir
from msrun.processes.agent.configure import configure
from msrun.processes.agent.mindspore import MindSporePort
from msrun.processes.agent.output import NodeOutput
from msrun.processes.agent.place import Place, node_name
from msrun.processes.agent.terminal import is_foreground
from msrun.processes.agent.worker_end import RunningWorker
from msrun.processes.ending import VERDICT_FILE
from msrun.processes.rendezvous import formation, job_secret, listen_or_refuse
from msrun.processes.scheduler.supervisor import SchedulerSupervisor, scheduler_config
from msrun.supervise import affinity, containment, node_plan, process, shared_memory
from msrun.supervise.hccn import ask_hccn_tool, read_device_ips
from msrun.supervise.logs import banner
from msrun.supervise.node_plan import LOOPBACK, Placement
from msrun.supervise.orders import (
    LiveUntil,
    SignalWorkers,
    SpawnStore,
    SpawnWorker,
    StoreLeg,
)
from msrun.supervise.tree import ProcessTree, end_strays
from msrun.transport.keys import hkdf
from msrun.transport.loop import Loop, new_context
from msrun.transport.sockets import (
    AgentSocket,
    check_own_library,
    endpoint,
)
from msrun.worker.stacks import AGENT_SIGNAL

SCHEDULER_SECONDS = 2.0
# With several nodes it first tells all of them how the job ended, which takes seconds where a
# network loses frames.
FAREWELL_SECONDS = 22.0
TREE_SECONDS = 8.0


class NodeResources:
    """Everything that this node opens for a job, and closes at its end.

    The listening sockets and the private directory are opened first, so that a conflict with
    another program shows before any process is started.

    Args:
        place: What is this launcher's own, with the plan of the job; closed with the rest.
        stderr: As of `ProcessTree`.

    Raises:
        UsageError: A port is in use, the job runs already, or libzmq is too old.
    """

    tree: ProcessTree
    scheduler: SchedulerSupervisor | None = None
    socket: AgentSocket
    containment: str

    def __init__(self, place: Place, *, stderr: int | None = None) -> None:
        self._place = place
        plan = self._plan = place.plan
        self._stderr = stderr
        self._job = plan.job
        self._base = {**environ.current(), **plan.job.env}
        self.timer_file = environ.timer_file(self._base, str(place.directory))
        if self.timer_file:
            self._base[environ.TIMER_FILE] = self.timer_file
        self._opened: set[str] = set()
        self._workers: list[RunningWorker] = []
        self._worker_env: dict[str, str] = {}
        self._context = new_context()
        job = plan.job
        self.formation = formation(job)
        check_own_library()
        self._secret = job_secret(job)
        listening = place.listening
        port = listening.getsockname()[1] if listening else job.master_port
        self.scheduler_address = (job.listen_host, str(port))
        # Workers reach the store over this interface alone; on several nodes the stores' ends meet
        # on another socket.
        self._store_sockets = [place.store]
        if not job.is_alone:
            self._store_sockets.append(listen_or_refuse(job.address, 0, "the address of this node"))
        self.store = (job.address, str(self._store_sockets[-1].getsockname()[1]))
        self.mindspore = MindSporePort(job)
        self._dir = place.directory
        self._cgroup: str | None = None
        if listening:
            config = scheduler_config(job, self.formation, self._secret, self._dir, alone=False)
            self.scheduler = SchedulerSupervisor(config, listening, self._base)

    @property
    def scheduler_name(self) -> str:
        """Where the scheduler listens, in words."""
        host, port = self.scheduler_address
        named = self._job.master_addr
        return f"{named} ({host}), port {port}" if named and named != host else f"{host}:{port}"

    @property
    def node_id(self) -> str:
        """Name of this node in the job, the same whenever an agent is started on it again."""
        words = (self._plan.machine.host, self._job.address, node_name(self._job))
        return "/".join(filter(None, words))

    @property
    def run_dir(self) -> str:
        """The private directory of the job on this node."""
        return str(self._dir)

    @property
    def pids(self) -> set[int]:
        """Pids of the processes that were started here and are waited for."""
        return {self.tree.pid, *(self.scheduler.pids if self.scheduler else ())}

    @property
    def lease(self) -> Lease:
        """How long this node may go on without the scheduler."""
        return lease(self.formation.lease)

    def register(self) -> Register:
        """Return what this node tells the scheduler of itself."""
        return Register(
            host=self._plan.machine.host,
            slots=0 if self._job.is_server else self._job.workers_per_node,
            store_host=self.store[0],
            store_port=int(self.store[1]),
            node_rank=self._job.node_rank,
            serves=self._job.serves,
            shares_host=bool(self._job.node_name),
            formation=self.formation,
            devices=self.devices(),
        )

    def devices(self) -> list[tuple[int, str]]:
        """Return the devices of this node's workers, as a rank table has them."""
        # hccn_tool is slow, so only a job that writes a rank table asks it.
        ask = ask_hccn_tool if self._job.emit_rank_table else lambda _: ""
        return node_plan.slot_devices(
            self._job,
            self._plan.machine,
            lambda numbers: read_device_ips(Path("/"), numbers, ask),
        )

    def open(self) -> None:
        """Start the processes that are ours.

        Raises:
            MsrunError: The machine does not let us.
        """
        self._forget_earlier_job()
        self._hand_over_config()
        self._hand_over_keys()
        try:
            self._open()
        except OSError as error:
            if error.filename and Path(str(error.filename)).is_relative_to(self._dir):
                raise _unwritable(str(error.filename), error) from error
            msg = f"{self._plan.machine.host} cannot start another process: {error.strerror}"
            raise MsrunError(msg, hint="see `ulimit -u`, `ulimit -n` and free memory") from error

    def _forget_earlier_job(self) -> None:
        """Remove an earlier job's verdict and logs, which would be taken for this job's."""
        verdict_file = str(Path(self._job.log_dir, VERDICT_FILE))
        # Of several nodes, which may share the directory, none knows its ranks yet.
        workers = self._plan.workers if self._job.is_alone else ()
        for path in (verdict_file, *(path for worker in workers for path in worker.logs)):
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                msg = f"{path} of an earlier job cannot be replaced: {error.strerror}"
                raise UsageError(msg, hint="choose another --log-dir") from None

    def _hand_over_config(self) -> None:
        """Write the parallel configuration to the file that every worker reads."""
        if not self._job.parallel:
            return
        path = node_plan.config_file(str(self._dir))
        try:
            run_dir.write_private(path, self._job.parallel)
        except OSError as error:
            raise _unwritable(path, error) from error

    def _hand_over_keys(self, *, again: bool = False) -> None:
        """Make the keys for TLS between workers, and check that torch can use them.

        Args:
            again: They were there before, so torch can.
        """
        if not self._job.data_tls or self._secret is None:
            return
        from msrun.processes import data_tls  # Few jobs have use for it.

        directory = node_plan.tls_directory(str(self._dir))
        env = environ.data_tls_env(self._base, directory)
        try:
            if len(env) > 1:  # else the user names keys
                data_tls.write_keys(Path(directory), self._secret, self._job.job_id)
        except OSError as error:
            raise _unwritable(directory, error) from error
        if not again and self._job.program.kind is not ProgramKind.COMMAND:
            data_tls.check_torch({**self._base, **env})

    def hand_over_servers(self) -> None:
        """Make the directory of the parameter servers, if there are any, with their key.

        Raises:
            OSError: It cannot be made.
        """
        if self._job.servers:
            from msrun.processes import server_files  # Few jobs have any.

            directory = Path(node_plan.servers_directory(self.run_dir))
            server_files.hand_over(directory, self._secret, self._job.job_id)

    def count_servers(self, total: int) -> None:
        """Let server 0 and all processes from now on know how many servers there are.

        Raises:
            OSError: It cannot be written.
        """
        from msrun.processes import server_files

        self._job = msgspec.structs.replace(self._job, servers=total)
        self.hand_over_servers()
        server_files.count(Path(node_plan.servers_directory(self.run_dir)), total)

    def server_env(self, number: int, error_file: str) -> dict[str, str]:
        """Return the environment of a parameter server, once there are workers.

        Args:
            number: Its number.
            error_file: Where it leaves its exception.
        """
        servers = node_plan.servers_identity(self._job, self.run_dir)
        if servers is None:
            raise RuntimeError("the job has no servers")
        own = environ.server_env(number, servers, self._worker_env, error_file)
        return {**self._base, **own}

    def _open(self) -> None:
        env = environ.node_env(self._base, str(self._dir), _threads(self._plan))
        cgroup = self._cgroup = self._make_cgroup()
        self.containment = containment.describe(cgroup)
        self.tree = ProcessTree(
            configure(self._job, str(self._dir), cgroup, env[environ.OMP_THREADS]),
            self._store_sockets,
            env,
            lock=self._place.lock,
            stderr=self._stderr,
        )
        self._opened.add("tree")
        if self.scheduler:
            self.scheduler.start()
        host, port = self.scheduler_address
        self.socket = AgentSocket(
            self._context, endpoint(host, int(port)), self._secret, self._job.nnodes_max
        )
        self._hand_over_control()

    def _hand_over_control(self) -> None:
        """Write the file with which tools on this machine control the job."""
        card = control_file.card_of(
            self._job,
            int(self.scheduler_address[1]),
            self._secret,
            workers=self._job.workers_per_node,
            began=Loop.now(),
        )
        try:
            control_file.write(self._dir, card)
        except OSError as error:
            raise _unwritable(str(self._dir), error) from error

    def _make_cgroup(self) -> str | None:
        if self._plan.machine.cgroup is None:
            return None
        try:
            return run_dir.make_cgroup(self._dir, self._plan.machine.cgroup)
        except OSError as error:
            raise _unwritable(str(self._dir), error) from error

    def let_live(self, generation: int, until: float | None) -> None:
        """Let the workers live until then and no longer; None for ever."""
        if until is not None:
            self.tree.reaper.send(LiveUntil(generation=generation, at=until))

    def start_workers(
        self, generation: int, start: Start, until: float | None, output: NodeOutput
    ) -> list[RunningWorker]:
        """Order the store and the workers of a generation; return the workers.

        Args:
            generation: The generation.
            start: Which part of it is here.
            until: After which none may start any more; None for ever.
            output: Opens their logs where it has to.
        """
        self._remove_segments()
        placement = Placement(
            generation=generation,
            node_rank=start.node_rank,
            nnodes=start.nnodes,
            first_rank=start.first_rank,
            world_size=start.world_size,
            store=(LOOPBACK, str(self._store_sockets[0].getsockname()[1])),
            scheduler=self.mindspore.seen_by_workers,
            run_dir=str(self._dir),
            rank0_address=start.store_host,
            first_local_rank=start.first_local_rank,
            local_world_size=start.local_world_size,
        )
        self._make_generation_dir(generation)
        self.let_live(generation, until)
        self.hand_over_servers()
        if start.serve_store or not self._job.is_alone:
            self._order_store(generation, start)
        if order := self.mindspore.order(generation, start):
            self.tree.forkserver.send(order)
        plans = node_plan.plan_workers(self._job, self._plan.machine, placement, self._base)
        self._worker_env = plans[0].env
        try:
            self._workers = [
                self._order_worker(generation, plan, until, output) for plan in plans[: start.count]
            ]
        except OSError as error:
            msg = f"generation {generation} cannot be started: {error.filename}: {error.strerror}"
            raise MsrunError(msg, hint="see `ulimit -n` and free space") from error
        return self._workers

    def _remove_segments(self) -> None:
        """Remove the shared memory of the workers of the last generation, all of which has ended.

        The reaper does so for what it has killed itself.
        """
        pids = {worker.pid or worker.last_pid for worker in self._workers} - {0}
        shared_memory.remove({pid for pid in pids if not process.is_alive(pid)})

    def _make_generation_dir(self, generation: int) -> None:
        """Make the private directory of a generation, and that of the job if it was removed.

        Raises:
            MsrunError: It cannot be made, as on a full file system.
        """
        try:
            if not self._dir.exists():
                lock = run_dir.make_again(self._dir)
                os.close(self._place.lock)
                self._place.lock = lock
                self._hand_over_config()
                self._hand_over_keys(again=True)
            (self._dir / f"g{generation}").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            msg = f"{error.filename or self._dir} cannot be made: {error.strerror}"
            hint = "it holds the job's private files; choose another place with XDG_RUNTIME_DIR"
            raise MsrunError(msg, hint=hint) from error

    def _order_store(self, generation: int, start: Start) -> None:
        order = SpawnStore(
            generation=generation,
            leg=None if self._job.is_alone else self._store_leg(generation, start),
            insecure=self._job.insecure,
            lazy=self._job.program.kind is ProgramKind.COMMAND,
            mindspore=self.mindspore.told_by(start),
        )
        self.tree.forkserver.send(order)

    def _store_leg(self, generation: int, start: Start) -> StoreLeg:
        secret = self._secret
        if secret is not None:
            secret = hkdf(secret, f"msrun store {self._job.job_id} {generation}".encode())
        return StoreLeg(
            serves=start.serve_store,
            host=start.store_host,
            port=start.store_port,
            secret=secret.hex() if secret else None,
            nnodes=start.nnodes,
        )

    def _order_worker(
        self, generation: int, plan: WorkerPlan, until: float | None, output: NodeOutput
    ) -> RunningWorker:
        is_later = generation > 0
        heading = len(banner(generation)) if is_later else 0
        starts = {path: _size(path) + heading if is_later else 0 for path in plan.logs}
        samples = node_plan.samples_file(str(self._dir), generation, plan.rank)
        streams = output.open(plan, samples, starts[plan.log_file])
        order = SpawnWorker(
            generation=generation,
            rank=plan.rank,
            env={**self._base, **plan.env},
            log_file=plan.log_file,
            out_file=plan.out_file,
            err_file=plan.err_file,
            descriptors=len(streams),
            append=is_later,
            cpus=list(plan.cpus),
            numa_nodes=list(plan.numa_nodes),
            # A job in the background must not take the keys that the shell is to get.
            keep_stdin=plan.rank == 0 and (not os.isatty(0) or is_foreground()),
            until=until,
            asks_for_mindspore=self.mindspore.asks_store,
        )
        worker = RunningWorker(
            plan=plan,
            host=self._plan.machine.host,
            error_file=node_plan.error_file(str(self._dir), generation, plan.rank),
            beat_file=node_plan.beat_file(str(self._dir), generation, plan.rank),
            stack_file=node_plan.stack_file(str(self._dir), generation, plan.rank),
            collective_files=node_plan.collective_files(str(self._dir), generation, plan.rank),
            log_starts=starts,
        )
        self.tree.forkserver.send(order, streams)
        return worker

    def signal_workers(self, ranks: tuple[int, ...], signum: int) -> None:
        """Send `signum` to workers: to Python's main process, of other programs to the group."""
        is_group = self._job.program.kind is ProgramKind.COMMAND
        self.tree.forkserver.send(SignalWorkers(ranks=list(ranks), signum=signum, group=is_group))

    def signal_groups(self, ranks: Sequence[int], signum: int) -> None:
        """Send `signum` to the process groups of workers."""
        self.tree.forkserver.send(SignalWorkers(ranks=list(ranks), signum=signum, group=True))

    def ask_for_stacks(self, ranks: tuple[int, ...]) -> None:
        """Have Python workers write where they are, each into its `stack_file`."""
        self.tree.forkserver.send(SignalWorkers(ranks=list(ranks), signum=AGENT_SIGNAL))

    def kill_by_force(self) -> list[str]:
        """Kill the rest of the tree after its reaper has ended; return the processes that stay.

        What the reaper had adopted is ours now, in whatever session and environment it runs.
        """
        return self.tree.kill_by_force(run_dir.cookie(self._dir), self._adopted)

    def _adopted(self) -> list[int]:
        own = self.pids
        return [pid for pid in process.descendants(os.getpid()) if pid not in own]

    def close(self) -> list[str]:
        """End all processes and remove their files; return those that could not be killed."""
        stuck: list[str] = []
        if self.scheduler:
            is_alone = self._job.is_alone
            timeout = SCHEDULER_SECONDS if is_alone else FAREWELL_SECONDS
            self.scheduler.end(timeout, tells_again=not is_alone)
        if "tree" in self._opened:  # with which the directory goes, and the scheduler's log
            stuck = self.tree.end(TREE_SECONDS, run_dir.cookie(self._dir), self._adopted)
        if not stuck:  # else its cgroup is noted for the next launcher
            self._end_what_is_left()
        self._remove_segments()
        # Left to the garbage collector, it may wait for sockets that are garbage too, for ever.
        self._context.destroy(linger=0)
        if self.scheduler:
            self.scheduler.close()
        for sock in self._store_sockets:
            sock.close()
        self.mindspore.close()
        self._place.release()
        return stuck

    def _end_what_is_left(self) -> None:
        """Do what the reaper could not: it may never have begun, or was killed."""
        if self._cgroup is None or not Path(self._cgroup).exists():
            return
        end_strays(run_dir.cookie(self._dir), self._cgroup)
        if Path(self._cgroup).exists():
            containment.note_remains(self._cgroup, str(self._dir))


def _unwritable(path: str, error: OSError) -> MsrunError:
    hint = "it holds the job's private files; choose another place with XDG_RUNTIME_DIR"
    return MsrunError(f"{path} cannot be written: {error.strerror}", hint=hint)


def _threads(plan: LaunchPlan) -> int:
    """Return the thread count of most workers."""
    bound = node_plan.plan_affinity(plan.job, plan.machine)
    return affinity.plan_threads(bound, plan.machine.cpus)[0]


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
