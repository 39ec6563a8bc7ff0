"""Phases of the scheduler's state machine, what can happen to it, and what it asks for."""

from __future__ import annotations

import enum

import msgspec

from msrun.cluster.scheduler import wal
from msrun.cluster.tick import Tick
from msrun.cluster.wire.messages import FromAgent, FromScheduler


class JobPhase(enum.Enum):
    """Where a job is in its life."""

    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"


class AgentMessage(msgspec.Struct, frozen=True):
    """An agent said something; of its node's life and generation as on the envelope."""

    node_id: str
    incarnation: int
    generation: int
    body: FromAgent


class Lost(msgspec.Struct, frozen=True):
    """Nothing lives on a node any more.

    Args:
        node_id: The node.
        incarnation: Which life of it.
        reason: How that is known.
        heard_at: When it last gave a sign of life.
    """

    node_id: str
    incarnation: int
    reason: str
    heard_at: float


class Unreachable(msgspec.Struct, frozen=True):
    """A node would register that others cannot reach; `problem` says so in one sentence."""

    node_id: str
    incarnation: int
    problem: str


class Woke(msgspec.Struct, frozen=True):
    """The scheduler was frozen up to now: what it was sent meanwhile has yet to be heard."""


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
