"""Phases, events and actions of the scheduler's state machine."""

from __future__ import annotations

import enum

import msgspec

from msrun.cluster.scheduler import wal
from msrun.cluster.tick import Tick
from msrun.cluster.wire.messages import FromAgent, FromScheduler


class JobPhase(enum.Enum):
    """The state of a job."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


class AgentMessage(msgspec.Struct, frozen=True):
    """A message of an agent; incarnation and generation are those on its envelope."""

    node_id: str
    incarnation: int
    generation: int
    body: FromAgent


class Lost(msgspec.Struct, frozen=True):
    """A node is lost: no process of the job lives on it any more.

    Args:
        node_id: The node.
        incarnation: Which start of its launcher.
        reason: How that is known.
        heard_at: When it last gave a sign of life.
    """

    node_id: str
    incarnation: int
    reason: str
    heard_at: float


class Unreachable(msgspec.Struct, frozen=True):
    """A node that others cannot reach wants to register; `problem` is the sentence for its user."""

    node_id: str
    incarnation: int
    problem: str


class Woke(msgspec.Struct, frozen=True):
    """The scheduler was frozen until now: messages of that time still wait in its sockets."""


Event = AgentMessage | Lost | Unreachable | Tick | Woke


class Write(msgspec.Struct, frozen=True):
    """Put `record` on disk before the next action."""

    record: wal.Record


class SendToAgent(msgspec.Struct, frozen=True):
    """Send `body` to a node's agent, about `generation`."""

    node_id: str
    generation: int
    body: FromScheduler


Action = Write | SendToAgent
