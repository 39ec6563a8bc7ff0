"""Messages between the agent, the reaper and the forkserver.

An *order* goes down from the agent, a *report* comes up.  The agent has one
channel to the reaper and one to the forkserver; the reaper's is also the lifeline:
when it closes, for whatever reason, the node's whole tree dies.
"""

from __future__ import annotations

import msgspec

# The module of a parameter server, which imports torch: only it and the forkserver load it.
SERVER = "msrun.parallel.servers.process"
SERVER_PRELOAD = "msrun.parallel.servers.preload"


class Order(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all orders and reports."""


class Configure(Order, frozen=True, tag=True, kw_only=True):
    """First order to the reaper, before anything is forked.

    Args:
        job_id: The job.
        kind: `script`, `module` or `command`, as in `job.ProgramKind`.
        argv: Target and arguments.
        interpreter_options: Options of the Python interpreter; exec only.
        cwd: Working directory of the workers.
        preload: Modules that the forkserver imports, torch first.
        preload_of_user: Further ones, which may also lie where the program finds its own.
        fork: Whether to fork Python workers from the warm forkserver.
        run_dir: Private directory that the reaper removes at the end.
        cgroup: The job's own cgroup v2 directory; None without one.
        threads: OMP_NUM_THREADS of the forkserver, which libraries read when it loads them.
        framework: `auto`, `torch` or `mindspore`, as in `job.Framework`.
    """

    job_id: str
    kind: str
    argv: list[str]
    cwd: str
    run_dir: str
    threads: str
    interpreter_options: list[str] = []
    preload: list[str] = []
    preload_of_user: list[str] = []
    fork: bool = True
    cgroup: str | None = None
    framework: str = "auto"


class Sweep(Order, frozen=True, tag=True, kw_only=True):
    """Kill everything below the reaper but the forkserver and some of its children.

    Args:
        generation: The generation that is over.
        spare: Pids of the parameter servers that live on.
    """

    generation: int
    spare: list[int] = []


class LiveUntil(Order, frozen=True, tag=True, kw_only=True):
    """Let the workers of `generation` live until `at`, then kill them unless told again.

    The agent sends it whenever it hears from the scheduler.  So if the agent is frozen, no worker
    is left on its node by the time at which other nodes may get its ranks.

    Args:
        generation: The generation that runs.
        at: A time of this machine's monotonic clock.
    """

    generation: int
    at: float


class Ping(Order, frozen=True, tag=True, kw_only=True):
    """Answer with `Pong`: the agent asks whether the process still does its work."""


class SpawnWorker(Order, frozen=True, tag=True, kw_only=True):
    """Start one rank.

    Args:
        generation: Its generation.
        rank: Its global rank.
        env: Its whole environment.
        log_file: File that takes its stdout and stderr.
        out_file: File that takes its stdout instead; empty for none.
        err_file: File that takes its stderr instead; empty for none.
        descriptors: Open files that come with the order: its log, opened once for stdout and once
            for stderr, or none.
        append: Keep the log of earlier generations.
        cpus: CPUs to run on; empty for all.
        numa_nodes: NUMA nodes of its memory; empty for all.
        keep_stdin: It may read the launcher's standard input.
        until: After which it must not start any more, on the monotonic clock; None for ever.
        asks_for_mindspore: It learns from the store where MindSpore's scheduler is.
    """

    generation: int
    rank: int
    env: dict[str, str]
    log_file: str
    out_file: str = ""
    err_file: str = ""
    descriptors: int = 0
    append: bool = False
    cpus: list[int] = []
    numa_nodes: list[int] = []
    keep_stdin: bool = False
    until: float | None = None
    asks_for_mindspore: bool = False


class StoreLeg(msgspec.Struct, frozen=True, kw_only=True):
    """How the store of several nodes reaches from one to the others.

    Args:
        serves: This node has the store; else it has a relay.
        host: Address of the store's end.
        port: Port of it.
        secret: Hexadecimal digits of a secret of this generation's store; None without keys.
        nnodes: Nodes in the generation.
    """

    serves: bool
    host: str
    port: int
    secret: str | None
    nnodes: int


class SpawnStore(Order, frozen=True, tag=True, kw_only=True):
    """Serve a store for `generation` on the inherited listening sockets.

    Args:
        generation: Its generation; the store of an earlier one must be gone.
        leg: The way to the other nodes; None on one node.
        insecure: Serve also where the kernel does not tell whose a connection is.
        lazy: Wait for the first connection, since a program that is not Python may
            have no use for a store.
        mindspore: Host and port of MindSpore's scheduler, separated by a space, for the
            workers of all nodes; empty without one.
    """

    generation: int
    leg: StoreLeg | None = None
    insecure: bool = False
    lazy: bool = False
    mindspore: str = ""


class SpawnMindSpore(Order, frozen=True, tag=True, kw_only=True):
    """Run MindSpore's scheduler for `generation`.

    Args:
        generation: Its generation.
        host: Address at which it listens.
        port: Port of it.
        env: What its environment has besides the forkserver's.
        log_file: File that takes its output.
        append: Keep the log of earlier generations.
        when_called: Wait until a worker that has loaded MindSpore connects to the port.
        refusal: Why the job has no such scheduler, for the worker that connects; empty when it has.
    """

    generation: int
    host: str
    port: int
    env: dict[str, str]
    log_file: str
    append: bool = False
    when_called: bool = False
    refusal: str = ""


class SpawnServer(Order, frozen=True, tag=True, kw_only=True):
    """Start a parameter server, which outlives the generations.

    Args:
        server: Its number.
        env: Its whole environment.
        log_file: File that takes its stdout and stderr.
        banner: Text before its output in a log that is kept; empty for a new log.
        until: After which it must not start any more, on the monotonic clock; None for ever.
    """

    server: int
    env: dict[str, str]
    log_file: str
    banner: str = ""
    until: float | None = None


class ServerSignal(Order, frozen=True, tag=True, kw_only=True):
    """Send `signum` to the living parameter servers among `servers`."""

    servers: list[int]
    signum: int


class SignalWorkers(Order, frozen=True, tag=True, kw_only=True):
    """Send `signum` to the living workers among `ranks`, or to their process groups."""

    ranks: list[int]
    signum: int
    group: bool = False


class Swept(Order, frozen=True, tag=True, kw_only=True):
    """The answer to `Sweep`.

    Args:
        generation: As ordered.
        stuck: Processes that SIGKILL did not end, as `pid state command`.
    """

    generation: int
    stuck: list[str] = []


class Pong(Order, frozen=True, tag=True, kw_only=True):
    """The answer to `Ping`."""


class ForkserverStarted(Order, frozen=True, tag=True, kw_only=True):
    """The reaper has forked the forkserver, process `pid`."""

    pid: int


class ForkserverExited(Order, frozen=True, tag=True, kw_only=True):
    """The forkserver ended, which it never does by itself; `status` as of `waitpid`."""

    status: int


class Ready(Order, frozen=True, tag=True, kw_only=True):
    """The forkserver takes orders.

    Args:
        fork: Whether Python workers will be forked.
        reason: Why they will not, when they were meant to be.
        seconds: Time the imports took.
        error: Why the job cannot start at all; None when it can.
        mindspore: The workers use MindSpore, whose scheduler starts with them.
    """

    fork: bool
    seconds: float
    reason: str = ""
    error: str | None = None
    mindspore: bool = False


class Spawned(Order, frozen=True, tag=True, kw_only=True):
    """A worker process exists; its program may not have begun."""

    generation: int
    rank: int
    pid: int
    at: float


class ServerSpawned(Order, frozen=True, tag=True, kw_only=True):
    """A parameter server exists; its program may not have begun."""

    server: int
    pid: int
    at: float


class ServerExited(Order, frozen=True, tag=True, kw_only=True):
    """A parameter server ended.

    Args:
        server: Its number.
        pid: Its pid, 0 when it could not be started.
        status: As of `waitpid`.
        at: When, on this machine's monotonic clock.
        reason: Why it could not be started; empty otherwise.
    """

    server: int
    pid: int
    status: int
    at: float
    reason: str = ""


class Exited(Order, frozen=True, tag=True, kw_only=True):
    """A worker ended; when `rank` is None, MindSpore's scheduler or the store.

    Args:
        generation: Its generation.
        rank: Its rank.
        pid: Its pid, 0 when it could not be started.
        status: As of `waitpid`.
        at: When, on this machine's monotonic clock.
        reason: Why it could not be started; empty otherwise.
        is_mindspore: It was MindSpore's scheduler.
    """

    generation: int
    rank: int | None
    pid: int
    status: int
    at: float
    reason: str = ""
    is_mindspore: bool = False


ReaperOrder = Configure | LiveUntil | Sweep | Ping
ReaperReport = Swept | ForkserverStarted | ForkserverExited | Pong
ForkserverOrder = (
    SpawnWorker | SpawnStore | SpawnMindSpore | SpawnServer | SignalWorkers | ServerSignal | Ping
)
ForkserverReport = Ready | Spawned | Exited | ServerSpawned | ServerExited | Pong
