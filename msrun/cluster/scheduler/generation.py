"""One generation: its members, how their workers ended, and why it stopped."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster.bounds import RankSet, few, listed
from msrun.cluster.scheduler.roster import RegisteredNode
from msrun.cluster.scheduler.wal import Member
from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.messages import Start

_NODES_NAMED_MAX = 8


class StopReason(enum.Enum):
    """Why a generation ends before its workers do."""

    FAILURE = "failure"
    CHANGE = "change"
    OBSTACLE = "obstacle"


class Loss(msgspec.Struct, frozen=True):
    """A node went with its workers; `at` is when it was last known to be well."""

    sentence: str
    at: float


@dataclass(slots=True)
class Generation:
    """One generation.

    Args:
        members: Node id -> its place, by node rank.
        world_size: Workers of all nodes.
        store: Host and port of the TCPStore.
        undrained: Members on which workers may still live.
        exits: Rank -> how it ended and when it failed.
        losses: Nodes that went with their workers, in the order in which that was seen.
        stuck: Node id -> processes that could not be killed.
        because: Why it was stopped; None while it goes on.
        is_blame_sure: Whether its first failure may count against a node; not after a hang of which
            the culprit is a guess.
        change: Nodes that come or go, as a sentence, if that is why it was stopped.
    """

    members: dict[str, Member] = field(default_factory=dict)
    world_size: int = 0
    store: tuple[str, int] = ("", 0)
    undrained: set[str] = field(default_factory=set)
    exits: dict[int, tuple[RankExit, float]] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    stuck: dict[str, list[str]] = field(default_factory=dict)
    because: StopReason | None = None
    is_blame_sure: bool = True
    change: str = ""
    _shifts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[Member], store: tuple[str, int]) -> Generation:
        """Return the generation of `members`, which come by node rank."""
        return cls(
            members={member.node_id: member for member in members},
            world_size=sum(member.count for member in members),
            store=store,
            undrained={member.node_id for member in members},
        )

    @property
    def all_succeeded(self) -> bool:
        """Whether every rank exited with code 0, and not because it was asked to end."""
        if self.because is StopReason.CHANGE:
            return False
        # With `stopped` a rank may exit with 0 without having finished its work.
        ends = [end for end, _ in self.exits.values()]
        are_done = all(end.succeeded and not end.stopped for end in ends)
        return len(ends) == self.world_size and are_done

    def may_live_on(self, node_id: str, incarnation: int) -> bool:
        """Whether workers of this generation may live on this incarnation of a node."""
        is_member = node_id in self.undrained
        return is_member and self.members[node_id].incarnation == incarnation

    def ranks(self, node_id: str) -> range:
        """Return the ranks of a member."""
        member = self.members[node_id]
        return range(member.first_rank, member.first_rank + member.count)

    def has_ended(self, node_id: str) -> bool:
        """Whether the end of every worker of a node is known."""
        return all(rank in self.exits for rank in self.ranks(node_id))

    def servers_on(self, node_id: str, total: int) -> list[int]:
        """Return which of `total` parameter servers are on a member.

        Nodes without workers have them, if there are any, and else all nodes.
        """
        hosts = [n for n, member in self.members.items() if not member.count] or [*self.members]
        return [*range(hosts.index(node_id), total, len(hosts))] if node_id in hosts else []

    def all_stuck(self) -> list[str]:
        """Return the processes that could not be killed, by node, of many the first."""
        return few(process for _, stuck in sorted(self.stuck.items()) for process in stuck)

    def root(self) -> RankExit | None:
        """Return the worker whose failure came first; None when a loss did, or none failed."""
        if all(end.succeeded for end, _ in self.exits.values()):
            return None
        root = verdicts.root_cause(self.exits.values())
        first_loss = min((loss.at for loss in self.losses), default=None)
        # When a node dies, the workers of its peers fail first, and its own loss is noticed later.
        return None if first_loss is not None and first_loss <= self.exits[root.rank][1] else root

    @property
    def failed_at(self) -> float:
        """Time of the first failure or loss; inf before any."""
        times = [loss.at for loss in self.losses]
        times += [at for end, at in self.exits.values() if not end.succeeded]
        return min(times, default=math.inf)

    def said_at(self, node_id: str, at: float, now: float) -> float:
        """Return the time on our clock of a node's own time `at`, in a message that came `now`.

        Messages are delayed, each by another time.  With one shift between the clocks for all of
        a node's messages, the worker that failed first on the node stays first.
        """
        return at + self._shifts.setdefault(node_id, now - at)

    def node_of(self, rank: int) -> str:
        """Return the node of a rank."""
        return next(node_id for node_id in self.members if rank in self.ranks(node_id))

    def start(self, node_id: str) -> Start:
        """Return the message that starts the workers of a node."""
        member = self.members[node_id]
        return Start(
            node_rank=member.node_rank,
            nnodes=len(self.members),
            first_rank=member.first_rank,
            count=member.count,
            world_size=self.world_size,
            store_host=self.store[0],
            store_port=self.store[1],
            serve_store=member.node_rank == 0,
            first_local_rank=member.first_local_rank,
            local_world_size=member.local_world_size,
        )

    def sentence(self, root: RankExit | None) -> str:
        """Return why the generation ended; `root` is the failure that came first, if any."""
        if self.because is StopReason.CHANGE:
            return self.change
        lost = listed([loss.sentence for loss in self.losses], "; ")
        return root.sentence() if root else lost or self.change

    def describe_ranks(self, ranks: Collection[int]) -> str:
        """Return where `ranks` are, such as `rank 3 on node b`, of many nodes only the first."""
        parts = []
        for member in self.members.values():
            own = range(member.first_rank, member.first_rank + member.count)
            if here := [rank for rank in own if rank in ranks]:
                parts.append(f"rank {RankSet.of(here)} on node {member.host}")
        more = len(parts) - _NODES_NAMED_MAX
        text = "; ".join(parts[:_NODES_NAMED_MAX])
        return text + (f" and on {more} more nodes" if more > 0 else "")


def start_generation(nodes: Mapping[str, RegisteredNode]) -> Generation:
    """Return the generation of `nodes`, which come by node rank."""
    members = []
    first_rank = 0
    # Nodes that were started by hand may share a machine; their local ranks count on.
    workers: Counter[tuple[str, str]] = Counter()
    for node in nodes.values():
        workers[_machine(node)] += node.registration.slots
    ranks_on: Counter[tuple[str, str]] = Counter()
    for node_rank, (node_id, node) in enumerate(nodes.items()):
        body, machine = node.registration, _machine(node)
        members.append(
            Member(
                node_id=node_id,
                host=body.host,
                incarnation=node.incarnation,
                node_rank=node_rank,
                first_rank=first_rank,
                count=body.slots,
                first_local_rank=ranks_on[machine] if body.shares_host else 0,
                local_world_size=workers[machine] if body.shares_host else 0,
            )
        )
        first_rank += body.slots
        ranks_on[machine] += body.slots
    master = next(iter(nodes.values())).registration
    return Generation.of(members, (master.store_host, master.store_port))


def _machine(node: RegisteredNode) -> tuple[str, str]:
    """Return a key that is equal for nodes on the same machine only."""
    return (node.registration.host, node.registration.store_host)
