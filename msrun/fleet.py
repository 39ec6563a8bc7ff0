"""A fleet: agents that a launcher starts on several nodes, and the order that each of them gets.

The order is complete, so that no launcher writes options of its own: the words that a user
would type on that node, the directory, and the variables.  The secret travels beside it and
appears in no file, argument or plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import msgspec
from msgspec.structs import replace

from msrun.errors import UsageError
from msrun.hosts.hostlist import Host

# A pipe can be made to hold it, so that no launcher waits for a node to read.
ORDER_BYTES_MAX = 1 << 19
# One variable of a process may be 128 KiB long.
VARIABLE_BYTES_MAX = 100 << 10
_MARK = b"\x1emsrun "


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What is to run on which nodes.

    Args:
        job_id: The job.
        words: Options and program as a user gives them to msrun, without the launcher's own,
            `--nnodes`, `--node-rank`, `--master-addr` and `--master-port`.
        hosts: The nodes, in the order of their ranks; empty where the batch system knows them.
        nnodes: How many nodes.
        master_addr: Node of the scheduler; empty takes the first one.
        master_port: Port of the scheduler; 0 derives one where the batch system names the job.
        python: Interpreter on the nodes, whose environment has msrun; empty where the launcher
            knows it.
        cwd: Working directory on the nodes.
        env: Variables for the nodes.
        versions: Program -> version that each node must have.
        ranks: How many ranks the launcher starts without agents; `words` are the command of each.
    """

    job_id: str
    words: tuple[str, ...]
    nnodes: int
    python: str
    cwd: str
    hosts: tuple[Host, ...] = ()
    master_addr: str = ""
    master_port: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    ranks: int = 0


class NodeInstructions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The order of one node, or of each by its node_rank; the fields are those of `Fleet`.

    Args:
        hosts: Name of each node by node_rank, where the launcher numbers them otherwise.
        own: Words of each node beside those of all, by node_rank; empty adds none.
        own_env: Variables of each node, likewise.
        hides_code: The agents always end with 0, because their starter kills the others when
            one fails; the exit code of the job is in the last `Report`.
    """

    words: tuple[str, ...]
    nnodes: int
    cwd: str
    master_addr: str = ""
    master_port: int = 0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    own: tuple[tuple[str, ...], ...] = ()
    own_env: tuple[dict[str, str], ...] = ()
    hides_code: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent's first program tells the launcher, as a line of its standard output.

    Args:
        node: Its node_rank; -1 when it found none.
        code: Exit code of the agent; None says that it is about to start.
        is_last: The job is over with this code: the scheduler was there, or the order is refused.
        reason: Why it is refused, as lines for a person. On the standard error they could come
            after the report, with which the launcher ends all.
    """

    node: int
    code: int | None = None
    is_last: bool = False
    reason: str = ""


class StartCommand(msgspec.Struct, frozen=True, kw_only=True):
    """One program that the launcher runs here.

    Args:
        node: Whose agent it starts; empty for those of all.
        argv: Its words.
        order: What it reads from standard input after a line with the secret; empty reads nothing.
        env: Variables it gets, the secret beside them where `has_secret`.
        has_secret: The agents find the secret in their environment.
    """

    node: str
    argv: tuple[str, ...]
    order: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    has_secret: bool = False


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `submit` would do, as data.

    Args:
        fleet: What was asked for.
        commands: What is run here; all of it at once.
        files: Name -> text of each file that is written first.
        notes: What the user should know, one sentence each.
    """

    fleet: Fleet
    commands: tuple[StartCommand, ...]
    files: dict[str, str] = msgspec.field(default_factory=dict)
    notes: tuple[str, ...] = ()


@runtime_checkable
class FleetLauncher(Protocol):
    """One way to start the agents of a fleet."""

    def plan(self, fleet: Fleet) -> FleetPlan:
        """Return what `submit` would do; reads and changes nothing.

        Raises:
            UsageError: The fleet cannot be started this way; the message says why.
        """

    def submit(self, plan: FleetPlan, secret: bytes) -> int:
        """Carry `plan` out and return the job's exit code."""


def check_options(backend: str, options: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse an option that `backend` does not have.

    Raises:
        UsageError: There is one.
    """
    for name in options:
        if name not in (*known,):
            choices = ", ".join(f"--{name}" for name in known) or "none"
            raise UsageError(f"--launcher {backend} has no option --{name} (choose {choices})")


def make_order(fleet: Fleet) -> NodeInstructions:
    """Return the order of all nodes."""
    slots = [() if h.slots is None else ("--workers-per-node", str(h.slots)) for h in fleet.hosts]
    return NodeInstructions(
        words=("--job-id", fleet.job_id, *fleet.words),
        nnodes=fleet.nnodes,
        cwd=fleet.cwd,
        master_addr=fleet.master_addr or (fleet.hosts[0].name if fleet.hosts else ""),
        master_port=fleet.master_port,
        env=fleet.env,
        versions=fleet.versions,
        hosts=tuple(host.name for host in fleet.hosts),
        own=tuple(slots) if any(slots) else (),
        own_env=_visible(fleet.hosts),
    )


def _visible(hosts: tuple[Host, ...]) -> tuple[dict[str, str], ...]:
    """Return the variables that show each node only the devices that were chosen there."""
    if all(host.devices is None for host in hosts):
        return ()
    names = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    lists = [None if host.devices is None else ",".join(map(str, host.devices)) for host in hosts]
    return tuple({} if devices is None else dict.fromkeys(names, devices) for devices in lists)


def render_order(order: NodeInstructions) -> str:
    """Return `order` as one line of JSON."""
    return msgspec.json.encode(order).decode()


def parse_order(text: str | bytes) -> NodeInstructions:
    """Return the order that `render_order` wrote.

    Raises:
        UsageError: The text is no order.
    """
    try:
        return msgspec.json.decode(text, type=NodeInstructions)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the launcher's order is not understood: {error}") from None


def order_of_node(order: NodeInstructions, node_rank: int) -> NodeInstructions:
    """Return `order` as one node needs it, without what is for others."""
    own = order.own[node_rank] if order.own else ()
    own_env = order.own_env[node_rank] if order.own_env else {}
    words, env = (*own, *order.words), {**order.env, **own_env}
    return replace(order, words=words, env=env, hosts=(), own=(), own_env=())


def render_report(report: Report) -> bytes:
    """Return the line of `report`; no program begins a line of its output like this."""
    return _MARK + msgspec.json.encode(report) + b"\n"


def parse_report(line: bytes) -> Report | None:
    """Return the report that `line` is, None when it is a line of output."""
    if not line.startswith(_MARK):
        return None
    try:
        return msgspec.json.decode(line[len(_MARK) :], type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def agent_words(order: NodeInstructions, node_rank: int, secret_file: str) -> tuple[str, ...]:
    """Return what follows `msrun` on the node of `node_rank`.

    Raises:
        UsageError: There is no such node, or the order does not name the scheduler's node.
    """
    if not 0 <= node_rank < order.nnodes:
        raise UsageError(f"node_rank {node_rank} is outside 0 to {order.nnodes - 1}")
    own = order.own[node_rank] if order.own else ()
    if order.nnodes == 1:
        return (*own, *order.words)
    if not order.master_addr:
        raise UsageError("the order does not say which node runs the scheduler")
    port = ("--master-port", str(order.master_port)) if order.master_port else ()
    return (
        *("--nnodes", str(order.nnodes)),
        *("--node-rank", str(node_rank)),
        *("--master-addr", order.master_addr),
        *port,
        *("--secret-file", secret_file),
        *own,
        *order.words,
    )
