"""Protocols with one rule left out each, which the simulation has to notice.

The first draft of the protocol had eight, and showed which rules it needs.  Here they are as
what became of those rules allows:

- `lateassign`: the agent refuses a `Start` that answers old news (rule 19).
- `staleidle`: a node without workers is drained only if it has seen the generation (rule 29).
- `nofence`: the agent stops its workers before it is taken for lost, and so does its reaper.
- `nodrain`: the next generation starts when the last is gone (rule 29).
- `nowal`: a scheduler goes on with what was written before it was sent (rule 28).
- `wallclock`: no two clocks are compared (rule 18).
- `stale`: the end of a worker belongs to its generation (rule 11).
- `noterm`: what was meant for an earlier scheduler is not taken (rule 14).  The agent had
  such a check as well, which no cluster could show: whoever hears of a later scheduler begins
  a new session, and what an earlier one said is of an earlier session.  So it is gone.
"""

import msgspec
from world import Build

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent.servers import NodeServers
from msrun.cluster.agent.state import AgentState
from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.events import AgentMessage
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire.messages import Drained, Register, Stop


class StartsLate(AgentState):
    """Starts workers however old the news is that the scheduler had of the node."""

    def handle(self, event, *, now):
        if isinstance(event, agent_events.SchedulerMessage):
            event = msgspec.structs.replace(event, age=0.0)
        return super().handle(event, now=now)


class TakesStaleIdle(SchedulerState):
    """Takes a node without workers for drained, of whichever generation it speaks."""

    def handle(self, event, *, now):
        if isinstance(event, AgentMessage) and isinstance(event.body, Register):
            body = event.body
            if body.running < 0 and event.node_id in self.current.undrained:
                body = msgspec.structs.replace(body, seen=self.generation, exits=[])
            event = msgspec.structs.replace(event, body=body)
        return super().handle(event, now=now)


class IgnoresTerms(AgentLinks):
    """Takes a registration for its own that an earlier scheduler was sent."""

    def _is_first(self, envelope):
        return super()._is_first(msgspec.structs.replace(envelope, term=self.term))


class RevivesSessions(AgentLinks):
    """Takes a registration for a new one whose session it took for lost."""

    def lose(self, node_id, *arguments):
        losses = super().lose(node_id, *arguments)
        if losses:
            self._lost[node_id] = (losses[0].incarnation, 0)
        return losses


class TakesAnyLife(AgentLinks):
    """Takes every life for a later one than the one that is known."""

    def _follows(self, _envelope):
        return True


class DoesNotDrain(SchedulerState):
    """Starts the next generation before the nodes say that the last one is gone."""

    def _stop(self, *arguments):
        actions = super()._stop(*arguments)
        for action in actions:
            node = self.roster.nodes[action.node_id]
            drained = AgentMessage(action.node_id, node.incarnation, self.generation, Drained())
            actions = actions + super().handle(drained, now=self._now)
        return actions

    def handle(self, event, *, now):
        type(self)._now = now
        return super().handle(event, now=now)


class ComparesClocks(AgentLinks):
    """Judges a node's silence by the node's own clock."""

    def receive(self, envelope, *, now):
        result = super().receive(envelope, now=now)
        peer = self._peers.get(envelope.node_id)
        if peer and envelope.stamp:
            peer.heard_at = envelope.stamp
        return result


class CountsStaleExits(SchedulerState):
    """Counts the ends of an earlier generation's workers as ends of this one's."""

    def _member_is_back(self, node_id, incarnation, body, now):
        actions = [a for end in body.exits for a in self._count_exit(node_id, end, now)]
        return actions + super()._member_is_back(node_id, incarnation, body, now)


class WaitsForImports(SchedulerState):
    """Takes every node for one whose workers start at once."""

    def handle(self, event, *, now):
        if isinstance(event, AgentMessage) and isinstance(event.body, Register):
            warm = msgspec.structs.replace(event.body, warm=True)
            event = msgspec.structs.replace(event, body=warm)
        return super().handle(event, now=now)


class IgnoresNodeRanks(SchedulerState):
    """Orders all nodes as if no user had said how."""

    def handle(self, event, *, now):
        if isinstance(event, AgentMessage) and isinstance(event.body, Register):
            body = msgspec.structs.replace(event.body, node_rank=None)
            event = msgspec.structs.replace(event, body=body)
        return super().handle(event, now=now)


class ForgetsNodeRanks(SchedulerState):
    """Orders the nodes of a generation anew, as if they had had no node ranks before."""

    def _start_generation(self):
        self.current.members = dict(sorted(self.current.members.items(), reverse=True))
        return super()._start_generation()


class ForgetsExclusions(SchedulerState):
    """Goes on from a log without what it says about nodes that are out."""

    def recover(self, records, *, now, is_whole=True):
        kept = [record for record in records if not isinstance(record, wal.Excluded)]
        return super().recover(kept, now=now, is_whole=is_whole)


class TrustsItsLog(SchedulerState):
    """Goes on from a log as if nothing else could have happened."""

    def _note_seen(self, generation, now):
        pass


class StartsTooSoon(SchedulerState):
    """Starts at once after a log was lost."""

    @property
    def _all_known_at(self):
        return 0.0


class LeavesWorkers(AgentState):
    """Ends without a scheduler at once, and not once nothing runs any more."""

    def _stop_alone(self, verdict, now):
        return self._conclude(verdict, now)


class ForgetsTheFence(Uplink):
    """Never finds out that the scheduler is silent."""

    def _fence_at(self):
        return None


class CountsFromReceipt(Uplink):
    """Counts the lease from when an answer came, and not from what it answers."""

    def receive(self, envelope, *, now):
        if envelope.stamp:
            envelope = msgspec.structs.replace(envelope, stamp=now)
        return super().receive(envelope, now=now)


class KeepsServers(NodeServers):
    """Leaves the servers of a node that was cut off to the sweep of its workers."""

    def kill(self):
        return []


class SparesServers(NodeServers):
    """Lets servers live on where their place may be another's in the next generation."""

    def swept(self):
        self.is_elastic = False
        return super().swept()


class StopsWorkersAlone(AgentState):
    """Leaves the servers of a generation that the job went on without."""

    def handle(self, event, *, now):
        if isinstance(event, agent_events.SchedulerMessage) and isinstance(event.body, Stop):
            body = msgspec.structs.replace(event.body, servers=False)
            event = msgspec.structs.replace(event, body=body)
        return super().handle(event, now=now)


# Nothing is wrong with this one, whose jobs have parameter servers.
WITH_SERVERS = "withservers"
# Name -> what is wrong, and by how much the dice are loaded against it.  No name, nothing wrong.
MUTANTS = {
    "": (Build(), {}),
    WITH_SERVERS: (Build(), {"servers": 3}),
    "lateassign": (Build(agent_state=StartsLate), {}),
    "staleidle": (Build(scheduler_state=TakesStaleIdle), {}),
    "nofence": (Build(uplink=ForgetsTheFence, dead_man=False), {}),
    "nodrain": (Build(scheduler_state=DoesNotDrain), {}),
    "nowal": (Build(log=False), {}),
    "wallclock": (Build(peers=ComparesClocks), {}),
    "stale": (Build(scheduler_state=CountsStaleExits), {}),
    "waitsforimports": (Build(scheduler_state=WaitsForImports), {}),
    "ignoresranks": (Build(scheduler_state=IgnoresNodeRanks), {}),
    "forgetsnoderanks": (Build(scheduler_state=ForgetsNodeRanks), {}),
    "forgetsexclusions": (
        Build(scheduler_state=ForgetsExclusions),
        {"failures": 0.4, "deaths": 0.2},
    ),
    "trustslog": (Build(scheduler_state=TrustsItsLog), {}),
    "hastens": (Build(scheduler_state=StartsTooSoon), {"log_losses": 1.0, "deaths": 0.1}),
    "agentstop": (Build(dead_man=False), {"freezes": 0.05}),
    "noterm": (Build(peers=IgnoresTerms), {"delay": 15.0, "deaths": 0.2, "doubles": 0.3}),
    "revives": (Build(peers=RevivesSessions), {}),
    "anylife": (Build(peers=TakesAnyLife), {"delay": 15.0, "crashes": 0.1}),
    "receipt": (Build(uplink=CountsFromReceipt), {}),
    "leavesworkers": (Build(agent_state=LeavesWorkers), {}),
    "keepsservers": (Build(servers=KeepsServers), {"servers": 3}),
    "sparesservers": (Build(servers=SparesServers), {"servers": 3}),
    "stopsworkersalone": (
        Build(agent_state=StopsWorkersAlone),
        {"servers": 3, "log_losses": 1.0, "deaths": 0.1},
    ),
}
