"""Who sees every node of a world, and what none of them may ever do."""

import math
from collections import defaultdict

from msrun.cluster.agent.state import AgentPhase
from msrun.cluster.scheduler import wal


class Violation(AssertionError):  # noqa: N818 - a verdict on what is tested, no error in it
    """A promise was broken."""


class Observer:
    """Sees one job from outside, and knows what really happened.

    Args:
        settings: What its users asked for.
    """

    def __init__(self, settings):
        self.settings = settings
        self.hosts = {}
        self.live = {}  # (node, rank) -> generation
        self.started = defaultdict(dict)  # generation -> rank -> node
        self.codes = defaultdict(dict)  # generation -> rank -> exit code
        self.announced = {}  # generation -> GenerationStarted
        self.verdict = None
        self.changes = 0
        self.forms_anew = False
        self.excluded = set()
        self.pids = 0
        self.server_ends = set()  # (server, exit code)

    def require(self, condition, promise, *details):
        if not condition:
            raise Violation(" ".join([f"{promise}:", *map(str, details)]))

    def observe_loss(self, loss):
        host = self.hosts[loss.node_id]
        is_dead = host.incarnation != loss.incarnation or not host.live or self.verdict
        self.require(is_dead, "I2 a node is lost on which workers live", loss, host.live)
        is_dead = host.incarnation != loss.incarnation or not host.servers or self.verdict
        self.require(is_dead, "I13 a node is lost on which servers live", loss, host.servers)

    def observe_server(self, host, number):
        where = [other.name for other in self.hosts.values() if number in other.servers]
        self.require(not where, "I13 a server lives twice", number, host.name, where)

    def observe_start(self, host, generation, start, ranks):
        self.require(generation in self.announced, "R5 a generation was not written", generation)
        others = {g for g in self.live.values() if g != generation}
        self.require(not others, "I2 two generations live", generation, others)
        again = self.started[generation].keys() & set(ranks)
        self.require(not again, "I1 a rank was started twice", generation, again)
        member = next(
            (m for m in self.announced[generation].members if m.node_id == host.name), None
        )
        expected = (host.incarnation, start.first_rank, start.count)
        actual = member and (member.incarnation, member.first_rank, member.count)
        self.require(actual == expected, "I1 a rank has two places", expected, actual)
        size = sum(m.count for m in self.announced[generation].members)
        self.require(start.world_size == size, "I1 the world is another", start)
        self.require(host.state.phase is AgentPhase.RUNNING, "an agent runs no generation", host)

    def observe_record(self, record):
        if isinstance(record, wal.Decided):
            self.observe_verdict(record.verdict)
            return
        if isinstance(record, wal.Excluded):
            self.excluded.add(record.node_id)
            return
        generation, members = record.generation, record.members
        if self.changes == math.inf:  # the log was lost
            self._forget_unseen(generation, members)
        self.require(self.verdict is None, "I4 a generation after the verdict", generation)
        self.require(
            generation > max(self.announced, default=-1), "I3 a generation again", generation
        )
        out = self.excluded & {member.node_id for member in members}
        self.require(not out, "I11 an excluded node takes part", record, out)
        self.require(not self.live, "I2 workers live at a new generation", generation, self.live)
        ranks = [r for m in members for r in range(m.first_rank, m.first_rank + m.count)]
        self.require(ranks == list(range(len(ranks))), "I1 ranks are not dense", members)
        names = [member.node_id for member in members]
        self.require(len(names) == len(set(names)), "I1 a node has two places", names)
        within = self.settings.least <= len(names) <= self.settings.most
        self.require(within, "I1 too few or too many nodes", names)
        self.require(
            len(names) == self.settings.least
            # Right after it has lost its log it forms as at first, when all do their imports.
            or self.forms_anew
            or not any(map(self._is_newly_cold, members)),
            "I10 a generation waits for a node that it does not need",
            members,
        )
        self._require_places(names)
        budget = self.settings.restarts
        is_within = record.restarts <= budget and record.losses <= budget
        self.require(is_within, "I5 the budget is overspent", record)
        spent = record.restarts + record.losses + self.changes
        self.require(
            generation <= spent or self.settings.least < self.settings.most,
            "I5 a restart was not counted",
            record,
        )
        self.announced[generation] = record
        self.forms_anew = False

    def _require_places(self, names):
        """Require that nodes are where they were, and before that as their users said."""
        if self.announced and not self.forms_anew:
            before = [m.node_id for m in self.announced[max(self.announced)].members]
            stay = [name for name in before if name in names]
            still = [name for name in names if name in before]
            self.require(still == stay, "I12 nodes change places", before, names)
            return
        ranks = [self.hosts[name].state.register.node_rank for name in names]
        given = sorted({rank for rank in ranks if rank is not None})
        others = [None] * ranks.count(None)
        order = given + others
        if given and given[-1] < len(names):  # each can have the very rank it was given
            order = [place if place in given else None for place in range(len(names))]
        self.require(ranks == order, "I12 nodes are not in the order of their ranks", names, ranks)

    def observe_lost_log(self):
        """Let budgets be spent again, and numbers come again that no member has seen."""
        self.changes = math.inf
        self.forms_anew = True
        self.excluded.clear()

    def _forget_unseen(self, generation, members):
        hosts = [self.hosts[m.node_id] for m in members]
        if any(host.is_up and host.state.generation >= generation for host in hosts):
            return
        for about in (self.announced, self.started, self.codes):
            for number in [number for number in about if number >= generation]:
                del about[number]

    def _is_newly_cold(self, member):
        """Whether a generation after the first gets a node that has not done its imports."""
        host = self.hosts[member.node_id]
        last = self.announced[max(self.announced)].members if self.announced else [member]
        before = {(m.node_id, m.incarnation) for m in last}
        is_new = (member.node_id, member.incarnation) not in before
        is_cold = not host.state._ready
        return is_new and host.incarnation == member.incarnation and is_cold

    def observe_verdict(self, verdict):
        self.require(self.verdict is None, "I4 two verdicts", self.verdict, verdict)
        self.require(not self.live, "I7 workers live at the verdict", verdict, self.live)
        self.verdict = verdict
        if root := verdict.root:
            code = self.codes[verdict.generation].get(root.rank)
            own = root.code or -(root.signum or 0)
            if root.is_server and (root.rank, own) in self.server_ends:
                code = own
            self.require(code == own, "P8 a root that was none", root)
        if verdict.code:
            return
        members = self.announced[verdict.generation].members
        size = sum(member.count for member in members)
        codes = self.codes[verdict.generation]
        self.require(
            codes == dict.fromkeys(range(size), 0), "I4 a success that was none", verdict, codes
        )

    def observe_end(self, host, verdict):
        self.require(not host.live, "I7 workers outlive their agent", host.name, host.live)
        is_success = self.verdict is not None and self.verdict.code == 0
        told = "I4 a node ends with a success that was none"
        self.require(verdict.code or is_success, told, verdict)
