"""JobSpec: everything that the user asked of one launch, checked when it is built."""

from __future__ import annotations

import enum
import math
import re

import msgspec

from msrun.errors import UsageError
from msrun.units import PORT_MAX

# Workers of the largest job of which a pipe shows every rank.
_SHOWN_BY_DEFAULT_MAX = 16
# Stands for every rank where streams are chosen by local rank.
EVERY_RANK = -1
STREAMS = (1, 2)
JOB_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# As many fit with their pids into one message of a node that has them all.
SERVERS_MAX = 1024
LOOPBACK = "127.0.0.1"
# Of the scheduler, where several nodes are on one machine: the stores have LOOPBACK.
SCHEDULER_LOOPBACK = "127.0.0.2"
# With these a user ends any job; torchrun's defaults, in its order.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class ProgramKind(enum.Enum):
    """How the program's target is started."""

    SCRIPT = "script"
    MODULE = "module"
    COMMAND = "command"


class StartMethod(enum.Enum):
    """How a Python worker comes to life."""

    FORK = "fork"
    EXEC = "exec"


class Framework(enum.Enum):
    """Whose workers they are: those of MindSpore meet through MindSpore's own scheduler."""

    AUTO = "auto"
    TORCH = "torch"
    MINDSPORE = "mindspore"


class BindMode(enum.Enum):
    """Whether workers are bound to CPUs or memory, and who decides."""

    OFF = "off"
    AUTO = "auto"
    GIVEN = "given"


class WorkerProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker runs.

    Args:
        kind: Script file, module (`-m`) or any executable (`--no-python`).
        target: Path of the script, dotted name, or the command's argv[0].
        args: The program's own arguments, untouched.
        interpreter_options: Options for the Python interpreter itself, such as `-X dev`;
            they force one interpreter per worker.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()
    interpreter_options: tuple[str, ...] = ()


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One of `--bind-core` and `--bind-numa`.

    Args:
        mode: Off, decided by msrun, or given.
        by_device: With `GIVEN`, device index -> CPU numbers (or NUMA node numbers).
        is_shared: Several workers are meant to share.
    """

    mode: BindMode = BindMode.OFF
    is_shared: bool = False
    by_device: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a failed generation is followed by another.

    Args:
        max_restarts: Restarts allowed within `window`.
        window: Seconds over which restarts are counted; inf counts all of them.
        backoff_initial: Seconds before the second restart in a row; the first is at once.
        backoff_max: Most seconds between two generations.
        no_progress_limit: Stop after this many equal early failures in a row; 0 never stops.
        early: A failure within this many seconds of the start counts as early.
        exclude_after: A node whose workers failed first this often within `window` is left
            out, where the job can do without it; 0 leaves none out.
    """

    max_restarts: int = 0
    window: float = math.inf
    backoff_initial: float = 2.0
    backoff_max: float = 60.0
    no_progress_limit: int = 0
    early: float = 60.0
    exclude_after: int = 2


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job, as its user asked for it.

    The fields are flat because an `Option` of the command line names the one that it fills: a new
    flag is a field here and an `Option` there.  `restarts` is a value of its own because it goes to
    the scheduler as a whole.

    Args:
        job_id: Name of this launch, unique on the machine.
        program: What every worker runs.
        run_id: torchrun's name of this launch, which workers read; empty takes `job_id`.
        nnodes_min: Fewest nodes the job runs on.
        nnodes_max: Most nodes the job runs on; `world_size` without --nnodes.
        world_size: Workers of all nodes, if --worker-num fixes it: then the job forms when the
            workers of its nodes sum to exactly this number.
        workers_per_node: Workers this node starts, at least 1; other nodes may start others.
        servers: Parameter servers of all nodes; number i is on the node of rank i modulo nodes.
        node_rank: Rank of this node, None when the scheduler decides.
        node_name: Name of a process that was started by hand, which is a node of its own; local
            ranks count over all such nodes of one machine.  Empty for a node of msrun.
        is_server: A process that was started by hand has a parameter server and no worker.
        beside: How many other nodes of this job began on this machine before, where ranks are
            assigned.
        device: Index of the only device that this node's only worker sees; None takes the
            device of its local rank.
        master_addr: Host whose agent starts the scheduler, as its user wrote it; None for
            this node alone.
        master_port: Port where nodes meet; 0 takes a free port, on one node only.
        store_port: Port at which the workers of a node find the store, on its loopback interface;
            0 takes a free port.
        serves: This node starts the scheduler.
        listen_host: Numeric address of the scheduler, which binds it; other nodes connect to it.
        address: Numeric address by which other nodes reach this one.
        secret_file: File with the job's secret; None takes the user's own secret on several
            nodes and a fresh one on one node.
        join_timeout: Seconds in which all nodes must register.
        last_call: Seconds in which further nodes may join once `nnodes_min` have registered.
        lease: Seconds without a heartbeat after which a node is lost, at least 1.
        stop_signals: Names of the signals that end the job besides SIGTERM, SIGINT, SIGHUP and
            SIGQUIT; workers get them first, as they get those.
        grace: Seconds between SIGTERM and SIGKILL of a worker.
        hang_timeout: Seconds without msrun.beat() after which a worker hangs that has ever
            called it; None derives them from the intervals between its calls, inf never.
        detect_idle: Seconds with hardly any CPU time after which a worker hangs; inf never.
        restarts: Restart budget and pace.
        start_method: Fork from the warm parent, or one interpreter per worker.
        preload: Modules the forkserver imports besides torch.
        framework: Whether the job has MindSpore's scheduler; by default, when its workers need it.
        cwd: Working directory of every worker.
        log_dir: Directory of worker and scheduler logs.
        worker_log_name: Pattern of a worker's log file without `.log`.
        log_limit: Bytes of all log files of a worker together; None sets no limit.
        tail: Ranks shown on the console; None shows rank 0 at a terminal, no rank in a pipe, and
            in both the worker of a process that was started by hand.
        tail_local: Local ranks that may appear on the console; None sets no limit.
        tee: Local rank, or `EVERY_RANK`, -> streams shown on the console: 1 stdout, 2 stderr, 3
            both, 0 none; empty shows both.
        redirects: In the same form, streams with a file of their own beside the log, which the
            console leaves out unless ranks or streams were chosen for it.
        stdout_filters: Texts; lines of stdout with one of them are copied to one file.
        stderr_filters: The same of stderr.
        bind_core: CPU binding.
        bind_numa: Memory binding.
        event_log: Where torchelastic's events go: `console`, or `null` for nowhere.
        role: ROLE_NAME of the workers.
        virtual_local_rank: Every worker sees one device and LOCAL_RANK 0.
        env: Variables every worker gets on top of the launcher's own environment.
        parallel: Parallel configuration of the workers as JSON; empty without one.
        rank_table: RANK_TABLE_FILE of the workers; empty sets none.
        emit_rank_table: Where the node of the scheduler writes the rank table of each generation;
            empty writes none.
        insecure: Control messages are not authenticated; loopback only.
        data_tls: Workers talk over Gloo's TLS transport, with keys of the job.
        detach: The launcher returns as soon as the job runs.
        is_replaced: Another node is started in the place of one that leaves.
        launcher: Name of the backend.

    Raises:
        UsageError: A value is outside its range.
    """

    job_id: str
    program: WorkerProgram
    workers_per_node: int
    cwd: str
    log_dir: str
    run_id: str = ""
    nnodes_min: int = 1
    nnodes_max: int = 1
    world_size: int | None = None
    servers: int = 0
    node_rank: int | None = None
    node_name: str = ""
    is_server: bool = False
    beside: int = 0
    device: int | None = None
    master_addr: str | None = None
    master_port: int = 0
    store_port: int = 0
    serves: bool = True
    listen_host: str = LOOPBACK
    address: str = LOOPBACK
    secret_file: str | None = None
    join_timeout: float = 600.0
    last_call: float = 30.0
    lease: float = 10.0
    stop_signals: tuple[str, ...] = ()
    grace: float = 10.0
    hang_timeout: float | None = None
    detect_idle: float = math.inf
    restarts: RestartLimits = RestartLimits()
    start_method: StartMethod = StartMethod.FORK
    preload: tuple[str, ...] = ()
    framework: Framework = Framework.AUTO
    worker_log_name: str = "worker_{rank}"
    log_limit: int | None = None
    tail: frozenset[int] | None = None
    tail_local: frozenset[int] | None = None
    tee: dict[int, int] = msgspec.field(default_factory=dict)
    redirects: dict[int, int] = msgspec.field(default_factory=dict)
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    bind_core: Binding = msgspec.field(default_factory=Binding)
    bind_numa: Binding = msgspec.field(default_factory=Binding)
    event_log: str = "null"
    role: str = "default"
    virtual_local_rank: bool = False
    env: dict[str, str] = msgspec.field(default_factory=dict)
    parallel: str = ""
    rank_table: str = ""
    emit_rank_table: str = ""
    insecure: bool = False
    data_tls: bool = False
    detach: bool = False
    is_replaced: bool = False
    launcher: str = "dynamic"

    def __post_init__(self) -> None:
        """Check the ranges of single fields, and the fields that must fit each other."""
        if not JOB_ID_PATTERN.fullmatch(self.job_id):
            raise UsageError(
                f"--job-id {self.job_id!r} must be 1 to 64 letters, digits, '_', '.' or '-'"
            )
        if self.workers_per_node < 1:
            raise UsageError(f"--workers-per-node {self.workers_per_node} must be at least 1")
        if not 1 <= self.nnodes_min <= self.nnodes_max:
            raise UsageError(
                f"--nnodes {self.nnodes_min}:{self.nnodes_max} must be MIN:MAX with 1 <= MIN <= MAX"
            )
        if self.world_size is not None and self.world_size < self.workers_per_node:
            raise UsageError(
                f"--worker-num {self.world_size} is fewer than --workers-per-node "
                f"{self.workers_per_node}"
            )
        for name, number, most in (
            ("master-port", self.master_port, PORT_MAX),
            ("server-num", self.servers, SERVERS_MAX),
        ):
            if not 0 <= number <= most:
                raise UsageError(f"--{name} {number} is outside 0 to {most}")
        if self.restarts.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.restarts.max_restarts} must be at least 0")
        self._check_times()

    def _check_times(self) -> None:
        if not self.join_timeout > 0:
            raise UsageError(f"--join-timeout {self.join_timeout:g}s must be above zero")
        least = (
            ("last-call", self.last_call, 0),
            ("lease", self.lease, 1),
            ("grace", self.grace, 0),
        )
        for name, value, limit in least:
            if not value >= limit:
                raise UsageError(f"--{name} {value:g}s must be at least {limit:g}s")

    def is_shown(self, rank: int, local_rank: int, *, is_terminal: bool) -> bool:
        """Tell whether the console, which may be a terminal, shows the log of a worker.

        Unless ranks were chosen, a terminal shows rank 0 beside the state of the job, and a pipe or
        a file shows every rank, as torchrun does; of a large job rank 0, so that it stays readable.
        """
        if self.tail is None and self.tail_local is None:
            workers = self.world_size or self.nnodes_max * self.workers_per_node
            is_small = workers <= _SHOWN_BY_DEFAULT_MAX
            return rank == 0 or bool(self.node_name) or (is_small and not is_terminal)
        is_chosen = self.tail is None or rank in self.tail
        return is_chosen and (self.tail_local is None or local_rank in self.tail_local)

    def separate_streams(self, local_rank: int) -> frozenset[int]:
        """Return the streams of a worker that have a file of their own.

        Besides those of `redirects` these are streams of which something is wanted that is not
        wanted of the other one: then it is certain which bytes are whose, whoever wrote them.
        """
        shown = _streams(self.tee, local_rank)
        chosen = shown if len(shown) == 1 else frozenset()
        return _streams(self.redirects, local_rank) | chosen | frozenset(self.filters)

    @property
    def filters(self) -> dict[int, tuple[str, ...]]:
        """Stream -> the texts of which one must be in a line that is copied."""
        every = dict(zip(STREAMS, (self.stdout_filters, self.stderr_filters), strict=True))
        return {stream: texts for stream, texts in every.items() if texts}

    def shown_streams(self, rank: int, local_rank: int, *, is_terminal: bool) -> frozenset[int]:
        """Return the streams of a worker that the console shows."""
        if not self.is_shown(rank, local_rank, is_terminal=is_terminal):
            return frozenset()
        if any(self.tee.values()):
            return _streams(self.tee, local_rank)
        own = _streams(self.redirects, local_rank) if self.tail is None else frozenset()
        return frozenset(STREAMS) - own

    @property
    def scheduler_port(self) -> int:
        """Port of the scheduler; 0 is a free one, as no other node asks for it."""
        return 0 if self.is_alone else self.master_port

    @property
    def is_alone(self) -> bool:
        """Whether this node is the whole job."""
        return self.nnodes_max == 1

    @property
    def is_elastic(self) -> bool:
        """Whether the job runs on more or fewer workers when nodes come and go."""
        return self.world_size is None and self.nnodes_min < self.nnodes_max


def _streams(choice: dict[int, int], local_rank: int) -> frozenset[int]:
    bits = choice.get(local_rank, choice.get(EVERY_RANK, 0))
    return frozenset(stream for stream in STREAMS if bits & stream)
