"""The scheduler's state machine, with what is asked of a job from outside."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from msrun.cluster import verdict as verdicts
from msrun.cluster.bounds import RankSet
from msrun.cluster.scheduler.events import Action, AgentMessage, JobPhase
from msrun.cluster.scheduler.generation import Generation
from msrun.cluster.scheduler.roster import Roster
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.verdict import RankExit
from msrun.cluster.wire.messages import Interrupted

_CHOICES_MAX = 8


@dataclass(slots=True, kw_only=True)
class ControlledState(SchedulerState):
    """A job that can be looked into, stopped and drained; times and arguments as there."""

    @property
    def roster(self) -> Roster:
        """The nodes that have registered; to be read only."""
        return self._roster

    @property
    def current(self) -> Generation:
        """The latest generation; to be read only."""
        return self._current

    @property
    def is_over(self) -> bool:
        """Whether the verdict is known."""
        return self.phase in (JobPhase.DONE, JobPhase.FAILED)

    def interrupt(self, signum: int) -> list[Action]:
        """Stop the job for its user, who sent `signum` to what keeps this scheduler."""
        verdict = verdicts.interrupted(
            self.job_id, signum, generation=self.generation, restarts=self.policy.used
        )
        return self._end(verdict, signum if signum == signal.SIGINT else signal.SIGTERM)

    def stop(self, *, at_once: bool) -> list[Action]:
        """Stop the job for its user; `at_once` gives its workers no time."""
        verdict = verdicts.interrupted(
            self.job_id, signal.SIGTERM, generation=self.generation, restarts=self.policy.used
        )
        verdict = msgspec.structs.replace(verdict, reason="stopped by `msrun stop`")
        signum = signal.SIGKILL if at_once else signal.SIGTERM
        was_stopping = self.phase is JobPhase.STOPPING
        actions = self._end(verdict, signum)
        return [*actions, *self._hurry()] if was_stopping and at_once else actions

    def find_node(self, name: str) -> str | list[str]:
        """Return the node that `name` means, or the choices where it means none or several."""
        nodes = self._roster.nodes
        members = self._current.members
        found = [
            node_id
            for node_id, node in nodes.items()
            if name in (node_id, node.registration.host, node.registration.store_host)
        ]
        if not found and name.isdecimal():
            found = [n for n in nodes if n in members and members[n].node_rank == int(name)]
        if len(found) == 1:
            return found[0]
        return sorted(found or [node.registration.host for node in nodes.values()])

    def drain(self, name: str, *, now: float) -> tuple[str, list[Action]]:
        """Let the node that `name` means leave; return why it cannot, or an empty text."""
        node_id = self.find_node(name)
        if isinstance(node_id, list):
            choices = ", ".join(node_id[:_CHOICES_MAX]) or "none has registered"
            more = f" and {len(node_id) - _CHOICES_MAX} more" * (len(node_id) > _CHOICES_MAX)
            return f"no one node of the job is {name!r} (choose {choices}{more})", []
        if problem := self._why_needed(node_id):
            return problem, []
        node = self._roster.nodes[node_id]
        leaves = Interrupted(signum=signal.SIGTERM)
        event = AgentMessage(node_id, node.incarnation, self.generation, leaves)
        return "", self.handle(event, now=now)

    def _why_needed(self, node_id: str) -> str:
        node = self._roster.nodes[node_id]
        host = node.registration.host
        if self.is_over:
            return f"job {self.job_id} is over"
        if node.leaves_with:
            return f"node {host} is leaving already"
        if self._roster.can_do_without(node_id):
            return ""
        if node.registration.serves:
            return f"node {host} has the scheduler of the job, which cannot do without it"
        takes = self.formation.nnodes_min
        return (
            f"the job cannot do without node {host}: it takes {takes} node(s), no other stands by, "
            "and it was not started with --nnodes MIN:MAX"
            if not self.formation.is_elastic
            else f"the job cannot do without node {host}: it takes at least {takes} node(s)"
        )

    def give_up_on(self, worker: RankExit, *, now: float) -> list[Action]:
        """Treat a worker that hangs as one that failed when it last made progress."""
        if self.phase is not JobPhase.RUNNING:
            return []
        return self._count_exit(self._current.node_of(worker.rank), worker, now)

    def living(self) -> dict[str, list[int]]:
        """Return the ranks of the generation that have not ended, by node."""
        if self.phase not in (JobPhase.RUNNING, JobPhase.STOPPING):
            return {}
        exits = self._current.exits
        return {
            node_id: [
                rank
                for rank in range(member.first_rank, member.first_rank + member.count)
                if rank not in exits
            ]
            for node_id, member in self._current.members.items()
            if node_id in self._current.undrained and node_id in self._roster.nodes
        }

    def describe_ranks(self, ranks: Collection[int]) -> str:
        """Return where `ranks` are, such as `rank 3 on node b`, of many nodes only the first."""
        parts = []
        for member in self._current.members.values():
            own = range(member.first_rank, member.first_rank + member.count)
            if found := [rank for rank in own if rank in ranks]:
                parts.append(f"rank {RankSet.of(found)} on node {member.host}")
        more = len(parts) - _CHOICES_MAX
        return "; ".join(parts[:_CHOICES_MAX]) + (f" and on {more} more nodes" if more > 0 else "")
