"""Events of the agent's state machine, and the actions that it asks of its caller."""

from __future__ import annotations

import msgspec

from msrun.cluster.tick import Tick
from msrun.cluster.verdict import RankExit, Verdict
from msrun.cluster.wire.messages import FromAgent, FromScheduler, Register, Restarting, Start
from msrun.errors import ExitCode


class SchedulerMessage(msgspec.Struct, frozen=True):
    """A message of the scheduler about `generation`.

    Args:
        generation: The generation.
        body: The message.
        age: Seconds since this node sent the latest frame that the scheduler had received.
    """

    generation: int
    body: FromScheduler
    age: float = 0.0


class Reached(msgspec.Struct, frozen=True):
    """The scheduler has answered, for the first time or after it was silent for too long."""


class SchedulerSilent(msgspec.Struct, frozen=True):
    """The scheduler has been silent for so long that it may take this node for lost."""


class Forgotten(msgspec.Struct, frozen=True):
    """The scheduler does not know this node, or is another one than before."""


class TreeReady(msgspec.Struct, frozen=True):
    """The forkserver takes orders, or failed for the reason `error`."""

    error: str | None = None


class WorkerEnded(msgspec.Struct, frozen=True):
    """A worker of `generation` ended."""

    generation: int
    exit: RankExit


class ServerStarted(msgspec.Struct, frozen=True):
    """A parameter server was started, as process `pid`."""

    server: int
    pid: int


class ServerEnded(msgspec.Struct, frozen=True):
    """A parameter server ended."""

    exit: RankExit


class GenerationSwept(msgspec.Struct, frozen=True):
    """No process of `generation` is left but those in `stuck`."""

    generation: int
    stuck: tuple[str, ...] = ()


class TreeLost(msgspec.Struct, frozen=True):
    """The reaper or the forkserver ended; no more workers can be started or swept."""

    reason: str
    code: int


class SchedulerLost(msgspec.Struct, frozen=True):
    """There is no scheduler any more.

    Args:
        reason: How that is known.
        verdict: The verdict in its log, if there is one.
        code: Exit code where there is no verdict.
    """

    reason: str
    verdict: Verdict | None = None
    code: int = ExitCode.INTERNAL


class Signalled(msgspec.Struct, frozen=True):
    """This process got a signal."""

    signum: int


Event = (
    SchedulerMessage
    | Reached
    | SchedulerSilent
    | Forgotten
    | TreeReady
    | WorkerEnded
    | ServerStarted
    | ServerEnded
    | GenerationSwept
    | TreeLost
    | SchedulerLost
    | Signalled
    | Tick
)


class Join(msgspec.Struct, frozen=True):
    """Register with a scheduler that knows nothing of this node."""

    register: Register


class SendToScheduler(msgspec.Struct, frozen=True):
    """Send `body` to the scheduler, about `generation`."""

    generation: int
    body: FromAgent


class StartWorkers(msgspec.Struct, frozen=True):
    """Start this node's workers of `generation`."""

    generation: int
    start: Start


class ForwardSignal(msgspec.Struct, frozen=True):
    """Send `signum` to the workers of `ranks`."""

    ranks: tuple[int, ...]
    signum: int


class SweepGeneration(msgspec.Struct, frozen=True):
    """Kill all processes that are left of `generation`, and all servers but `spare`.

    Args:
        generation: The generation.
        spare: Pids of the parameter servers that live on.
    """

    generation: int
    spare: tuple[int, ...] = ()


class StartServer(msgspec.Struct, frozen=True):
    """Start a parameter server.

    Args:
        server: Its number.
        restarts: How often it was started again.
    """

    server: int
    restarts: int


class SignalServers(msgspec.Struct, frozen=True):
    """Send `signum` to parameter servers."""

    servers: tuple[int, ...]
    signum: int


class CountServers(msgspec.Struct, frozen=True):
    """Let server 0, if it is here, and what starts from now on know how many servers there are."""

    total: int


class Announce(msgspec.Struct, frozen=True):
    """Tell the user that the job goes on after a failure."""

    restarting: Restarting


class Tell(msgspec.Struct, frozen=True):
    """Tell the user `sentence`; `warn` when something is wrong."""

    sentence: str
    warn: bool = False


class Conclude(msgspec.Struct, frozen=True):
    """End everything on this node and exit with the verdict's code."""

    verdict: Verdict


Action = (
    Join
    | SendToScheduler
    | StartWorkers
    | ForwardSignal
    | SweepGeneration
    | StartServer
    | SignalServers
    | CountServers
    | Announce
    | Tell
    | Conclude
)
