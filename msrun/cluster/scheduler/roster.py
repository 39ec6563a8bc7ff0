"""The nodes that have registered with the scheduler, and the ones that can run workers.

**The problem.**  The scheduler asks at every event whether its nodes are enough for a generation,
whether a further one could be used, and whether the job could go on without one of them.  A
cluster of thousands registers within seconds, so none of these questions may walk all nodes.  And
a node is not simply there or gone: it registers again, leaves, is excluded, still runs an earlier
generation, or is known from the log of an earlier scheduler and has yet to register here.

**The idea.**  `nodes` holds every node that has registered and is not lost.  A node is *ready* if a
generation could start on it: it has registered, does not leave, is not excluded and is not *stale*
(workers of an earlier generation may live on it).  `_ready` and `_slots` are kept up to date by
`_count`, which every method calls for the one node that it changes, so that `is_enough` and
`is_full` are comparisons of two numbers.

- *excluded* nodes may run no more workers.  They stay so when they come back, for as long as the
  job lasts, and the next scheduler reads them from the log.
- *stale* nodes hold every generation back, also those that could do without them: workers of two
  generations must never live at once.
- A node that *leaves* takes part in no further generation.  It is sent home once the one that runs
  has stopped, and that message stays in `_sent_home`: it may be lost and the node register again.
- *expected* nodes were members when an earlier scheduler ended.  They count when the job asks
  whether it can do without another node, and never as ready.
- *hosts* have a parameter server and no worker, in clusters that began by hand.
- *cold* nodes still import what their workers need.  A restart takes one only if there are too few
  others, unless it was a member before: that one has had its time to import.

**Invariants.**  `_ready` names exactly the ready nodes and `_slots` is the sum of their slots.  A
node rank that a user gave belongs to one node at a time (`_ranks`); it is free again when that node
is forgotten.  `nodes` keeps the order in which nodes came, which decides who is a spare.

**Tried and lost.**  Counting all nodes at each registration: forming took time in proportion to the
square of their number.  Taking newcomers at once: the running generation stopped and waited for
their imports, hence `is_warm` and the window in which newcomers are collected (`JOIN_WINDOW`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msrun.cluster.bounds import RankSet, listed
from msrun.cluster.scheduler import rank_assignment
from msrun.cluster.scheduler.rank_assignment import node_order
from msrun.cluster.scheduler.wal import Member
from msrun.cluster.wire.messages import Formation, Refused, Register
from msrun.errors import ExitCode, signal_exit_code, signal_name

# Seconds: nodes that come one after the other while a job runs change it once, not each time.
JOIN_WINDOW = 1.0


@dataclass(slots=True)
class RegisteredNode:
    """A node that has registered and is not lost.

    Args:
        incarnation: Which start of its launcher.
        registration: Its last registration.
        since: When it registered so.
        leaves_with: The signal on which it leaves the job; 0 while it stays.
        is_warm: Workers start on it at once.
    """

    incarnation: int
    registration: Register
    since: float
    leaves_with: int = 0
    is_warm: bool = False


@dataclass(slots=True)
class Roster:
    """All nodes of a job, in the order in which they came.

    Args:
        formation: How many nodes and workers the job takes, and of which versions.
        replaces: As of `SchedulerState`.
        nodes: Node id -> node; changed by the methods only, as are the next two.
        excluded: Node id -> why it may run no more workers.
        stale: Nodes on which workers of an earlier generation may still live.
        bound: Members of a job of a fixed size with parameter servers, which do not move: none of
            them may leave.
    """

    formation: Formation
    replaces: bool = False
    nodes: dict[str, RegisteredNode] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    _ready: dict[str, int] = field(default_factory=dict)
    _slots: int = 0
    _hosts: int = 0
    _ranks: dict[int, str] = field(default_factory=dict)
    _sent_home: dict[str, tuple[int, Refused]] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)

    def expect(self, members: Sequence[Member]) -> None:
        """Count on members of an earlier scheduler that have yet to register here."""
        self._expected = {m.node_id: m.count for m in members if m.node_id not in self.excluded}
        self.bind(m.node_id for m in members)

    def bind(self, members: Iterable[str]) -> None:
        """Keep the members of a generation in the job, if parameter servers on them do not move."""
        is_bound = self.formation.servers and not self.formation.is_elastic
        self.bound = set(members) if is_bound else set()

    def add(self, node_id: str, node: RegisteredNode) -> None:
        """Take in a node, or a new registration of a known one."""
        self._expected.pop(node_id, None)
        self.nodes[node_id] = node
        if node.registration.node_rank is not None:
            self._ranks[node.registration.node_rank] = node_id
        self._count(node_id)

    def remove(self, node_id: str) -> RegisteredNode:
        """Forget a node, which may come back."""
        node = self.nodes.pop(node_id)
        self.stale.discard(node_id)
        rank = node.registration.node_rank
        if rank is not None and self._ranks.get(rank) == node_id:
            del self._ranks[rank]
        self._count(node_id)
        return node

    def lose(self, node_id: str, incarnation: int) -> None:
        """Forget an incarnation of a node, if it is the one that is known."""
        self._expected.pop(node_id, None)
        node = self.nodes.get(node_id)
        if node and node.incarnation == incarnation:
            # If it comes back after all, it must hear that the job has gone on without it.
            (self.send_home if node.leaves_with else self.remove)(node_id)

    def mark_stale(self, node_id: str, *, is_stale: bool) -> None:
        """Note whether workers of an earlier generation may live on a node."""
        (self.stale.add if is_stale else self.stale.discard)(node_id)
        self._count(node_id)

    def exclude(self, node_id: str, why: str) -> None:
        """Run no more workers on a node."""
        self.excluded[node_id] = why
        self._count(node_id)

    def let_go(self, node_id: str, signum: int) -> None:
        """Note that a node leaves on a signal."""
        self.nodes[node_id].leaves_with = signum
        self._count(node_id)

    def _count(self, node_id: str) -> None:
        slots = self._ready.pop(node_id, None)
        self._slots -= slots or 0
        self._hosts -= slots == 0
        node = self.nodes.get(node_id)
        if node is None or node.leaves_with or node_id in self.stale or node_id in self.excluded:
            return
        self._ready[node_id] = node.registration.slots
        self._slots += node.registration.slots
        self._hosts += node.registration.slots == 0

    def misfit(self, node_id: str, body: Register) -> str:
        """Return why a node cannot take part, empty when it can."""
        mine, theirs = self.formation, body.formation
        who = f"node {body.host}"
        if node_id in self.excluded:
            return self.excluded[node_id]
        for program, here, there in (
            ("msrun", mine.release, theirs.release),
            ("Python", mine.python, theirs.python),
            ("torch", mine.torch, theirs.torch),
        ):
            if here != there:
                both = f"has {_version(program, there)}, the scheduler {_version(program, here)}"
                return f"{who} {both}: install the same on all nodes"
        if mine != theirs:
            both = f"was started for {render(theirs)}, the scheduler for {render(mine)}"
            return f"{who} {both}: give all nodes the same options"
        if not body.slots and not mine.has_server_nodes:
            return f"{who} has no worker, and the job has no servers that are nodes of their own"
        return self._rank_problem(node_id, body)

    def _rank_problem(self, node_id: str, body: Register) -> str:
        """Return why a node cannot have the rank that it was given, empty when it can."""
        rank, most, first = body.node_rank, self.formation.nnodes_max, 0
        if rank is None:
            return ""
        if self.formation.has_server_nodes and not body.slots:  # they come after the workers
            first = self.formation.world_size or 0
        named = "MS_NODE_ID" if body.shares_host else "--node-rank"
        given = f"{named} {rank - first} of node {body.host}"
        if rank >= most:
            return f"{given} is outside 0 to {most - first - 1}"
        holder = self._ranks.get(rank, node_id)
        if holder == node_id:
            return ""
        return f"{given} is that of node {self.nodes[holder].registration.host} already"

    def ready(self) -> dict[str, Register]:
        """Return the nodes on which a generation could start, in the order they came."""
        return {
            node_id: node.registration
            for node_id, node in self.nodes.items()
            if node_id in self._ready
        }

    def is_enough(self) -> bool:
        """Whether the job could run on the nodes that are ready, and nothing else may live."""
        ready = len(self._ready)
        is_enough = rank_assignment.is_enough(ready, self._slots, self.formation, self._hosts)
        return is_enough and not self.stale

    def is_full(self) -> bool:
        """Whether the job could use no further node."""
        ready = len(self._ready)
        return rank_assignment.is_full(ready, self._slots, self.formation, self._hosts)

    def has_room(self, members: Collection[str]) -> bool:
        """Whether newcomers may join a generation of `members` while it runs."""
        return self.formation.is_elastic and len(members) < self.formation.nnodes_max

    def can_grow(self, members: Collection[str]) -> bool:
        """Whether a newcomer could join a generation of `members` without delay."""
        return self.has_room(members) and any(n.is_warm for n in self.newcomers(members))

    def settled_at(self, members: Collection[str], *, now: float) -> float:
        """Return until when newcomers to a generation of `members` wait for each other."""
        newcomers = self.newcomers(members)
        # A cold newcomer counts as one that has just come, so the window stays open for it.
        since = max(now if not node.is_warm else node.since for node in newcomers)
        return max(now, since + JOIN_WINDOW)

    def stand_by(self, node_id: str, members: Collection[str]) -> tuple[bool, str]:
        """Return whether a node joins `members` later, and the words for it until then."""
        is_next = self.has_room(members) and not self.nodes[node_id].is_warm
        what = "joins them when its imports are done" if is_next else "stands by as a spare"
        return is_next, f"{len(members)} node(s): this one {what}"

    def newcomers(self, members: Collection[str]) -> list[RegisteredNode]:
        """Return the nodes that could join a generation of `members`."""
        return [self.nodes[node_id] for node_id in self._ready if node_id not in members]

    def cold(self, members: Mapping[str, Member]) -> set[str]:
        """Return the nodes whose imports others would wait for, but no members of before."""
        nodes = self.nodes
        return {
            node_id
            for node_id in self._ready
            if not nodes[node_id].is_warm
            and (
                node_id not in members or members[node_id].incarnation != nodes[node_id].incarnation
            )
        }

    def may_leave(self, node_id: str) -> bool:
        """Whether a node may leave: the job goes on without it, or waits for another."""
        if node_id in self.bound:
            return False
        if self.replaces and self.formation.nnodes_max > 1:
            return not self.nodes[node_id].registration.serves
        return self.can_do_without(node_id)

    def can_do_without(self, node_id: str) -> bool:
        """Whether the job could go on without a node."""
        # The node of the scheduler takes the scheduler with it.
        if self.nodes[node_id].registration.serves or self.formation.nnodes_max == 1:
            return False
        if node_id in self.bound:
            return False
        slots = self._ready.get(node_id)
        nodes = len(self._ready) - (slots is not None) + len(self._expected)
        others = self._slots - (slots or 0) + sum(self._expected.values())
        hosts = self._hosts - (slots == 0) + [*self._expected.values()].count(0)
        return rank_assignment.is_enough(nodes, others, self.formation, hosts)

    def leaving(self) -> list[str]:
        """Return the nodes that are to be sent home."""
        return [n for n, node in self.nodes.items() if node.leaves_with or n in self.excluded]

    def send_home(self, node_id: str) -> Refused:
        """Forget a node that leaves or is excluded; return the message that says so."""
        node = self.remove(node_id)
        if signum := node.leaves_with:
            name, host = signal_name(signum), node.registration.host
            reason = f"node {host} left the job, which goes on, on {name}"
            farewell = Refused(reason=reason, code=signal_exit_code(signum))
        else:
            farewell = Refused(reason=self.excluded[node_id], code=ExitCode.NODE_LOST)
        self._sent_home[node_id] = (node.incarnation, farewell)
        return farewell

    def farewell(self, node_id: str, incarnation: int) -> Refused | None:
        """Return the message that sent this incarnation of a node home; None for any other."""
        sent_home, farewell = self._sent_home.get(node_id, (-1, None))
        return farewell if sent_home == incarnation else None

    def attendance(self) -> str:
        """Return which nodes are there and which are missing, in words a person can act on."""
        ready = self.ready()
        names = [ready[n].host for n in sorted(ready, key=lambda n: node_order(n, ready[n]))]
        there = listed(names) or "none"
        workers = sum(register.slots for register in ready.values())
        if self.formation.world_size is None:
            text = f"{len(ready)} of {self.formation.nnodes_min} nodes registered: {there}"
        else:
            text = f"{workers} of {self.formation.world_size} workers"
            if self.formation.has_server_nodes:
                text += f" and {self._hosts} of {self.formation.servers} parameter servers"
            text += f" registered, on: {there}"
        ranks = {register.node_rank for register in ready.values() if register.slots}
        if ranks and None not in ranks:
            absent = sorted(set(range(self._likely_nodes(ready))) - ranks)
            text += f"; missing: node rank {RankSet.of(absent)}" if absent else ""
        return text

    def _likely_nodes(self, ready: Mapping[str, Register]) -> int:
        """Return how many nodes there will be if the missing ones have as many slots each."""
        slots = {register.slots for register in ready.values() if register.slots}
        each = slots.pop()
        if self.formation.world_size is None or slots:
            return self.formation.nnodes_min
        return max(self.formation.nnodes_min, self.formation.world_size // each)


def _version(program: str, version: str) -> str:
    return f"{program} {version}" if version else f"no {program}"


def render(formation: Formation) -> str:
    """Return the options that lead to `formation`."""
    least, most = formation.nnodes_min, formation.nnodes_max
    words = []
    if most != formation.world_size:
        words.append(f"--nnodes {least if least == most else f'{least}:{most}'}")
    if formation.world_size is not None:
        words.append(f"--worker-num {formation.world_size}")
    if formation.servers:
        words.append(f"--server-num {formation.servers}")
    return " ".join([*words, f"--lease {formation.lease:g}"])
