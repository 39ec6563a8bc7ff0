"""Every message between agents and the scheduler.

Each message travels in an `Envelope`, which names its job, node, incarnation, session and
generation; a receiver checks these before it looks at the body.
"""

from __future__ import annotations

import signal
from typing import Annotated

import msgspec

from msrun.cluster.bounds import PROCESS_BYTES_MAX, PROCESSES_MAX, RANGES_MAX
from msrun.cluster.liveness.collectives import GROUPS_MAX, Collective
from msrun.cluster.liveness.stacks import Frame
from msrun.cluster.verdict import Name, RankExit, Seconds, Verdict
from msrun.job import SERVERS_MAX

PROTOCOL_VERSION = 9

TERM_MAX = (1 << 31) - 1

# Impossible values are refused by the decoder, so that no machine ever counts with them.
Slots = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Servers = Annotated[int, msgspec.Meta(ge=0, le=SERVERS_MAX)]
Signum = Annotated[int, msgspec.Meta(ge=1, le=64)]
Code = Annotated[int, msgspec.Meta(ge=0, le=255)]
Term = Annotated[int, msgspec.Meta(ge=0, le=TERM_MAX)]
Port = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Generation = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
NodeId = Annotated[str, msgspec.Meta(max_length=600)]
Reason = Annotated[str, msgspec.Meta(max_length=2_000)]
Ranges = Annotated[list[tuple[Number, Number]], msgspec.Meta(max_length=RANGES_MAX)]
Process = Annotated[str, msgspec.Meta(max_length=PROCESS_BYTES_MAX)]
Collectives = Annotated[list[Collective], msgspec.Meta(max_length=GROUPS_MAX)]
Processes = Annotated[list[Process], msgspec.Meta(max_length=PROCESSES_MAX + 1)]


class Body(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all message bodies."""


class Formation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that must be equal on all nodes of a job.

    Args:
        nnodes_min: Fewest nodes the job runs on, at least 1.
        nnodes_max: Most nodes the job runs on.
        world_size: Workers that all nodes have together; None leaves it to them.
        lease: Seconds after which a silent node is lost; 0 on one node, which has no other.
        release: Version of msrun.
        python: Version of Python that workers run, as far as programs must know it: `3.11`.
        torch: Version of torch that they import; empty without torch, or without Python.
        servers: Parameter servers that all nodes have together.
    """

    nnodes_min: int = 1
    nnodes_max: int = 1
    world_size: int | None = None
    lease: float = 0.0
    release: Name = ""
    python: Name = ""
    torch: Name = ""
    servers: Servers = 0

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change while the job runs."""
        return self.world_size is None and self.nnodes_min < self.nnodes_max

    @property
    def has_server_nodes(self) -> bool:
        """Whether each parameter server is a node of its own, in a cluster that began by hand.

        Elsewhere servers are beside workers.
        """
        is_counted = self.world_size is not None
        return self.servers > 0 and is_counted and self.nnodes_min < self.nnodes_max


class Register(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A node asks to take part, and reports its state to a scheduler that may not know it.

    Args:
        host: Its host name.
        slots: Workers it can run; 0 where it has a parameter server and no worker.
        store_host: Numeric address of the listening socket for stores, should it get rank 0.
        store_port: Port of that socket.
        node_rank: The node rank that its user gave it.
        serves: The scheduler runs on it, so the job cannot go on without it.
        shares_host: Other nodes may be on its machine; their workers count local ranks together.
        formation: The formation that its user asked for.
        devices: Physical number of the device of each slot, and the address that the device has
            of its own, if any; none where slots have no device each.
        running: Generation of the workers that live on it; -1 without any.
        seen: Largest generation that was started on it, or stopped before it was.
        spared: Largest generation that it stood by for as a spare.
        exits: Workers of `seen` that have ended.
        stuck: Processes of `seen` that SIGKILL did not end.
        warm: As of `Warmed`.
        follows: The incarnation of this node that an `Unknown` named; None without one.
    """

    host: Name
    slots: Slots
    store_host: Name
    store_port: Port
    node_rank: int | None = None
    serves: bool = False
    shares_host: bool = False
    formation: Formation = Formation()
    devices: list[tuple[int, str]] = []
    running: Generation = -1
    seen: Generation = -1
    spared: Generation = -1
    exits: list[RankExit] = []
    stuck: Processes = []
    warm: bool = False
    follows: int | None = None

    @property
    def is_new(self) -> bool:
        """Whether the node has taken part in nothing yet."""
        return self.seen < 0 and self.running < 0


class Warmed(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node has imported the modules of its workers, which start at once from now on."""


class WorkerExited(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """One of the node's workers ended.

    Args:
        exit: Its end.
        at: The node's own time, which orders the ends of its workers.
    """

    exit: RankExit
    at: Seconds


class Drained(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """All workers of the generation have ended on the node, and all processes they started.

    Args:
        stuck: Processes that SIGKILL did not end.
    """

    stuck: Processes = []


class Interrupted(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node's launcher got a signal that asks to stop the job.

    Args:
        signum: The first; SIGKILL for any further one, after which no worker gets more time.
    """

    signum: Signum


class NodeFailed(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node cannot run workers.

    Args:
        reason: Why, as one sentence.
        code: Exit code the job should end with.
    """

    reason: Reason
    code: Code


class RunningServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter server.

    Args:
        server: Its number.
        pid: Its pid; 0 while none is known.
        restarts: How often it was started again.
    """

    server: Number
    pid: Number
    restarts: Number = 0


class ServersChanged(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The parameter servers of the node, each time one of them starts or ends."""

    servers: Annotated[list[RunningServer], msgspec.Meta(max_length=SERVERS_MAX)]


class ServerFailed(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter server ended and is not started again, so the job cannot go on.

    Args:
        exit: Its end.
        reason: Why it is not started again; empty where no restart was asked for.
        code: Exit code that replaces its own; None keeps it.
        hint: What to do next.
    """

    exit: RankExit
    reason: Reason = ""
    code: Code | None = None
    hint: Reason = ""


class Start(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Start the generation's workers on this node.

    Args:
        node_rank: The node's rank.
        nnodes: Nodes in this generation.
        first_rank: Global rank of the node's local_rank 0.
        count: Workers to start here.
        world_size: Workers in the generation.
        store_host: Address of its TCPStore.
        store_port: Port of the store.
        serve_store: This node serves the store.
        first_local_rank: Local rank of its first worker, above 0 behind nodes on its machine.
        local_world_size: Workers on its machine; 0 where they are those of this node.
    """

    node_rank: int
    nnodes: int
    first_rank: int
    count: int
    world_size: int
    store_host: str
    store_port: int
    serve_store: bool
    first_local_rank: int = 0
    local_world_size: int = 0


class Stop(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Stop the generation's workers and answer `Drained`.

    Args:
        reason: Why, as one sentence.
        signum: Signal that asks the workers to end.
        servers: Kill the parameter servers too: they may be other nodes' by now.
    """

    reason: str
    signum: Signum = signal.SIGTERM
    servers: bool = False


class Serve(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Have these parameter servers, from now on, or from the next `Start` on.

    Without it a node has those whose number modulo the nodes is its rank.

    Args:
        servers: Their numbers.
        total: Servers of all nodes.
    """

    servers: Annotated[list[Number], msgspec.Meta(max_length=SERVERS_MAX)]
    total: Servers


class Restarting(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The generation ended early and another follows; every node reports it to its user.

    Args:
        reason: The failure or change, as one sentence.
        log_file: Log of the rank that failed first; empty when none did.
        delay: Seconds until the next generation may start.
        restart: Number of the restart, from 1; 0 for one that no budget counts.
        max_restarts: Restarts allowed.
    """

    reason: str
    log_file: str
    delay: float
    restart: int
    max_restarts: int


class Finish(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The job is over."""

    verdict: Verdict


class Refused(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node does not take part, or not any more.

    Args:
        reason: Why, as one sentence.
        code: Exit code of its launcher.
    """

    reason: str
    code: int


class Waiting(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes that a registered node waits for, or the ranks that others may wait for in vain.

    Args:
        reason: The missing nodes, or the ranks that have finished and have not, as one sentence.
        spare: No node is missing: this one stands by to replace a lost one.
    """

    reason: str
    spare: bool = False


class Unknown(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler does not know the sender, which has to register (again).

    Args:
        known: The last incarnation of the sender's node that it knows; None without one.
    """

    known: int | None = None


class Running(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """All workers of the generation were started on the node.

    Args:
        pids: Their pids, by local rank.
        age: Seconds since then.
    """

    pids: list[Number]
    age: Seconds


class Stalled(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A worker makes no progress.

    Args:
        rank: Its rank.
        seconds: Time since its last sign of progress.
        sign: The sign of progress that did not come, such as `beat`.
    """

    rank: Number
    seconds: Seconds
    sign: Name


class DumpStacks(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer with a `Stack` for each worker that runs on the node.

    Args:
        inquiry: Number that the answers carry.
    """

    inquiry: Number


class Stack(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The stack of one worker.

    Args:
        inquiry: As asked.
        worker: The worker, described as if it had ended; `stalled` is the time since its last beat.
        frames: Its main thread, innermost first.
        problem: Why there are no frames; empty when there are.
        entered: The latest collective of each of its process groups; None if it did not say.
    """

    inquiry: Number
    worker: RankExit
    frames: list[Frame] = []
    problem: str = ""
    entered: Collectives | None = None


class ReadLog(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Answer with a `LogPart`.

    Args:
        inquiry: Number that the answer carries.
        rank: The rank of the log.
        offset: First byte that is wanted; None for the last `lines` lines.
        lines: How many.
    """

    inquiry: Number
    rank: Number
    offset: Offset | None = None
    lines: Number = 0


class LogPart(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a worker's log.

    Args:
        inquiry: As asked.
        log_file: Its path on its node.
        data: The part.
        offset: The byte after it.
        problem: Why there is none; empty when there is.
    """

    inquiry: Number
    log_file: str = ""
    data: bytes = b""
    offset: Offset = 0
    problem: str = ""


class SignalRanks(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Send `signum` to those workers of the node whose rank is in one of `ranks`.

    Args:
        ranks: First and last rank of each range.
        signum: The signal.
    """

    ranks: Ranges
    signum: Signum


class Hung(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The generation makes no progress and will be stopped, or may hang and goes on.

    Args:
        report: The stacks of all ranks, as text.
    """

    report: str


FromAgent = (
    Register
    | Warmed
    | WorkerExited
    | Drained
    | Interrupted
    | NodeFailed
    | ServersChanged
    | ServerFailed
    | Running
    | Stalled
    | Stack
    | LogPart
)
FromScheduler = (
    Start
    | Stop
    | Serve
    | Restarting
    | Finish
    | Refused
    | Waiting
    | Unknown
    | DumpStacks
    | ReadLog
    | SignalRanks
    | Hung
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message on the wire.

    Args:
        job_id: The job.
        node_id: The agent's node, in both directions.
        incarnation: Random number that each agent on the node draws anew; it has no order.
        session: Which registration of that life, from 1; numbers start anew with each.
        seq: Number of the body, from 1; 0 for a frame that may be lost.
        ack: Largest number up to which the sender has got everything.
        stamp: From an agent, its own monotonic clock when it asks for a sign of life, else
            0; from the scheduler, the latest that it got from that agent.
        term: Number of the scheduler that speaks, or is spoken to, from 1; 0 from an agent
            that has not heard of any.
        generation: The generation that the body speaks of; -1 before the first.
        body: The message; None for a sign of life alone.
        version: Version of this protocol.
    """

    job_id: Name
    node_id: NodeId
    incarnation: int
    session: int = 1
    seq: int = 0
    ack: int = 0
    stamp: float = 0.0
    term: Term = 0
    generation: int = -1
    body: FromAgent | FromScheduler | None = None
    version: int = PROTOCOL_VERSION
