"""Every message between agents and the scheduler.

`Envelope` is what travels: who sends it, in which life of which node, for which
generation of which job; a receiver checks those before it looks at the body.
"""

from __future__ import annotations

import signal

import msgspec

from msrun.cluster.verdict import RankExit, Verdict

PROTOCOL_VERSION = 1


class Body(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all message bodies."""


class Register(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """A node asks to take part.

    Args:
        host: Its host name.
        slots: Workers it can run, at least 1.
        store_host: Address of the listening socket for stores, should it get rank 0.
        store_port: Port of that socket.
        node_rank: The rank it was given by hand.
    """

    host: str
    slots: int
    store_host: str
    store_port: int
    node_rank: int | None = None


class WorkerExited(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """One of the node's workers ended."""

    exit: RankExit


class Drained(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """All workers of the generation are gone from the node, with all they started.

    Args:
        stuck: Processes that SIGKILL did not end.
    """

    stuck: list[str] = []


class Interrupted(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node's launcher got a signal that asks to stop the job."""

    signum: int


class NodeFailed(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The node cannot run workers.

    Args:
        reason: Why, as one sentence.
        code: Exit code the job should end with.
    """

    reason: str
    code: int


class Start(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Start the generation's workers on this node.

    Args:
        node_rank: The node's rank.
        nnodes: Nodes in this generation.
        first_rank: Global rank of the node's local_rank 0.
        count: Workers to start here.
        world_size: Workers in the generation.
        store_host: Where its TCPStore listens.
        store_port: Port of the store.
        serve_store: This node serves the store.
    """

    node_rank: int
    nnodes: int
    first_rank: int
    count: int
    world_size: int
    store_host: str
    store_port: int
    serve_store: bool


class Stop(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Stop the generation's workers and answer `Drained`.

    Args:
        reason: Why, as one sentence.
        signum: Signal that asks the workers to end.
    """

    reason: str
    signum: int = signal.SIGTERM


class Restarting(Body, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The generation failed and another will follow, so that every node can say so.

    Args:
        reason: What failed, as one sentence.
        log_file: Log of the rank that failed first.
        delay: Seconds until the next generation may start.
        restart: Number of the restart, from 1.
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
    """The node cannot take part, and why."""

    reason: str


FromAgent = Register | WorkerExited | Drained | Interrupted | NodeFailed
FromScheduler = Start | Stop | Restarting | Finish | Refused


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message on the wire.

    Args:
        job_id: The job.
        node_id: The agent's node, whichever way the message goes.
        incarnation: Which life of that node: a new agent on it has a larger one.
        generation: The generation that the body speaks of; -1 before the first.
        body: What is said.
        version: Version of this protocol.
    """

    job_id: str
    node_id: str
    incarnation: int
    generation: int
    body: FromAgent | FromScheduler
    version: int = PROTOCOL_VERSION
