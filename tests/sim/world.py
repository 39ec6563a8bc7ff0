"""A whole job under a virtual clock: the real machines of both sides, and an observer.

`World` does what it is told, one input at a time, and knows no chance; who tells it is
`faults.Chaos`, or a transcript of what that did.  The observer sees every node and raises
`Violation` as soon as a promise is broken.
"""

# tidy: long file, one world has the machines of both sides and everything around them.

import signal
from dataclasses import dataclass, field

from observer import Observer, Violation
from spoken import show_message, worker_end

from msrun.cluster.agent import events as agent_events
from msrun.cluster.agent.servers import NodeServers
from msrun.cluster.agent.state import AgentState
from msrun.cluster.agent.uplink import Uplink
from msrun.cluster.liveness import lease
from msrun.cluster.liveness.freeze_detector import FreezeDetector
from msrun.cluster.scheduler import events as scheduler_events
from msrun.cluster.scheduler import wal
from msrun.cluster.scheduler.admission import Admission
from msrun.cluster.scheduler.peers import AgentLinks
from msrun.cluster.scheduler.restart_policy import RestartPolicy
from msrun.cluster.scheduler.state import SchedulerState
from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import Formation, Register
from msrun.job import RestartLimits

JOB = "train"
GRACE = 5.0
# A deadline is converted between clocks, which is no more exact than this, in seconds.
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a world is made of; mutants put something else in one of these places."""

    agent_state: type = AgentState
    servers: type = NodeServers
    uplink: type = Uplink
    peers: type = AgentLinks
    scheduler_state: type = SchedulerState
    dead_man: bool = True
    log: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the users of a job asked for."""

    least: int = 2
    most: int = 2
    restarts: int = 3
    exclude: int = 3
    join_timeout: float = 60.0
    last_call: float = 2.0
    serves: str = ""
    lease: float = 10.0
    servers: int = 0

    @property
    def formation(self):
        return Formation(
            nnodes_min=self.least,
            nnodes_max=self.most,
            lease=self.lease,
            release="1",
            servers=self.servers,
        )


@dataclass(slots=True)
class Host:
    """One life of one node: its clock, its agent, its workers and their reaper."""

    name: str
    incarnation: int
    offset: float
    drift: float
    state: AgentState
    uplink: Uplink
    is_up: bool = True
    verdict: object = None
    live: dict[int, int] = field(default_factory=dict)
    servers: dict[int, int] = field(default_factory=dict)
    notices: list = field(default_factory=list)
    kill_at: float | None = None

    def clock(self, now):
        return self.offset + now * (1 + self.drift)

    def deadline(self):
        """Return when its agent has something to do, in the time of the world."""
        due, at = self.state.deadline(), self.uplink.deadline()
        due = at if due is None else due if at is None else min(due, at)
        return None if due is None else (due - self.offset) / (1 + self.drift)


class MisfitError(ValueError):
    """What is to happen cannot, in this world."""


class Driver:
    """Whom a world tells what its machines ask for; this one does nothing about it."""

    def sent(self, frame, node, *, is_up):
        """A frame left a node, or the scheduler for it."""

    def started(self, node, ranks):
        """Workers were started."""

    def signalled(self, node, ranks, signum):
        """Workers got a signal."""

    def server_started(self, node, number):
        """A parameter server was started."""

    def servers_signalled(self, node, numbers, signum):
        """Parameter servers got a signal."""

    def swept(self, node, generation, spare):
        """The reaper is to kill what is left, but the servers with the pids in `spare`."""

    def noticed(self, node):
        """The reaper has something to tell the agent."""

    def concluded(self, node):
        """An agent has ended."""

    def probing(self, name, incarnation):
        """The scheduler finds out whether others can reach a node."""

    def scheduler_died(self):
        """The scheduler has ended in the middle of what it did."""


class World(Observer):
    """One job.

    An input is a method's name and its words; `do` applies it.
    """

    def __init__(self, settings, build=None, driver=None):
        super().__init__(settings)
        self.build = build or Build()
        self.driver = driver or Driver()
        self.now = 0.0
        self.frames = []
        self.outputs = None
        self.peers = None
        self.scheduler = None
        self.freeze_detector = None
        self.clock_offset = 0.0
        self.wal = b""
        self.lives = 0
        self.dies_at_write = ""
        self.admission = Admission()

    def do(self, at, verb, *words):
        """Let something happen at time `at`; that a machine raises breaks a promise too."""
        self.now = at
        try:
            getattr(self, verb)(*words)
        except (Violation, MisfitError):
            raise
        except Exception as error:
            raise Violation(f"raised: {error!r}") from error

    def rest(self):
        """Let nothing happen any more."""
        up = [host.name for host in self.hosts.values() if host.is_up]
        self.require(not up, "I6 nodes wait for ever", up, self.verdict)
        self.require(self.verdict or not self.peers, "I6 a job without a verdict")

    # The scheduler.

    def scheduler_deadline(self):
        if self.peers is None:
            return None
        dues = [self.scheduler.deadline(), self.peers.deadline(), self.freeze_detector.deadline()]
        return min([due for due in dues if due is not None]) - self.clock_offset

    def begin(self, offset):
        """Start a scheduler, which goes on with what the log says."""
        self.clock_offset = offset
        now = self.now + offset
        records = wal.decode(self.wal) if self.build.log else []
        self.wal = self.wal[: wal.whole(self.wal)]
        known = wal.term(wal.decode(self.wal))
        is_whole = known >= self.lives
        term = max(known, self.lives) + 1
        self.lives += 1
        self.wal += wal.encode(wal.Began(term))
        settings = self.settings
        limits = RestartLimits(max_restarts=settings.restarts, exclude_after=settings.exclude)
        times = lease.Lease(settings.lease)
        self.freeze_detector = FreezeDetector(lease=times, look_at=now)
        self.peers = self.build.peers(job_id=JOB, lease=times, term=term)
        self.scheduler = self.build.scheduler_state(
            job_id=JOB,
            formation=settings.formation,
            join_timeout=settings.join_timeout,
            last_call=settings.last_call,
            policy=RestartPolicy(JOB, limits),
            started_at=now,
        )
        for member in self.scheduler.recover(records, now=now, is_whole=is_whole):
            self.peers.expect(member.node_id, member.incarnation, now=now)
            self.admission.expect(member.node_id, member.incarnation)

    def end(self):
        """Let the scheduler die."""
        self.peers = self.scheduler = None
        self.admission = Admission()
        self.dies_at_write = ""

    def lose_log(self):
        """Lose what the scheduler has written, which is not there."""
        self.wal = b""
        self.observe_lost_log()

    def doom(self, how):
        """Let it die at the next record: `synced` after it, `torn` in it, `lost` before."""
        self.dies_at_write = how

    def check(self):
        """Let the scheduler look at its deadlines."""
        if self.peers is None:
            return
        now = self.now + self.clock_offset
        if self.freeze_detector.tick(now=now):
            self.peers.woke(now=now)
            self._schedule(scheduler_events.Woke())
        losses, frames = self.peers.tick(now=now)
        self._send_down(frames)
        for loss in losses:
            self._schedule(loss)
        self._schedule(scheduler_events.Tick())
        due = self.scheduler_deadline()
        self._require_acted(due, self.scheduler)

    def lose(self, name, incarnation):
        """Tell the scheduler that a life of a node is over, as its kernel says."""
        if self.peers is None:
            return
        for loss in self.peers.lose(name, incarnation, "its launcher has ended"):
            self._schedule(loss)

    def probed(self, name, incarnation):
        """Tell the scheduler that others can reach a node."""
        for event in self.admission.probed((name, incarnation), is_reachable=True):
            self._schedule(event)

    def _admit(self, event):
        """Hold back a node until it is known that others can reach it."""
        if self.peers is None:  # it died of the event before
            return
        if isinstance(event, scheduler_events.Lost):
            self._schedule(event)
            return
        heard, must_probe = self.admission.receive(event)
        if must_probe:
            self.driver.probing(event.node_id, event.incarnation)
        for each in heard:
            self._schedule(each)

    def _schedule(self, event):
        if self.peers is None:
            return
        if isinstance(event, scheduler_events.Lost):
            self.observe_loss(event)
            self.admission.lose(event)
        now = self.now + self.clock_offset
        for action in self.scheduler.handle(event, now=now):
            match action:
                case scheduler_events.Write(record=record):
                    if self._write(record):
                        self.end()
                        self.driver.scheduler_died()
                        return
                case scheduler_events.SendToAgent(node_id=name, generation=generation, body=body):
                    self._say(f"scheduler -> {name} g{generation} ", body)
                    self._send_down(self.peers.send(name, generation, body, now=now))

    def _write(self, record):
        """Write `record`; return whether the scheduler died of it."""
        line = wal.encode(record)
        how = self.dies_at_write
        if how == "torn":
            self.wal += line[: len(line) // 2]
            return True
        if how == "lost":
            return True
        self.wal += line
        self._say(f"scheduler wrote {type(record).__name__}", None)
        self.observe_record(record)
        return bool(how)

    def _send_down(self, frames):
        for envelope in frames:
            self._emit(envelope, is_up=False)

    # Nodes.

    def boot(self, name, incarnation, slots, offset, drift, node_rank=None):  # noqa: PLR0917 - as its words
        """Start a launcher on a node."""
        settings = self.settings
        times = lease.Lease(settings.lease)
        register = Register(
            host=name,
            slots=slots,
            store_host=name,
            store_port=1,
            node_rank=node_rank,
            serves=name == settings.serves,
            formation=settings.formation,
        )
        now = offset + self.now * (1 + drift)
        limits = RestartLimits(max_restarts=settings.restarts)
        own = None
        if settings.servers:
            is_elastic = settings.least < settings.most
            own = self.build.servers(JOB, settings.servers, limits, is_elastic)
        state = self.build.agent_state(
            servers=own,
            job_id=JOB,
            register=register,
            grace=GRACE,
            form_by=now + settings.join_timeout,
            join_timeout=settings.join_timeout,
            lease=times,
        )
        uplink = self.build.uplink(job_id=JOB, node_id=name, incarnation=incarnation, lease=times)
        host = self.hosts[name] = Host(name, incarnation, offset, drift, state, uplink)
        self._perform(host, state.begin())

    def crash(self, name):
        """Switch a node off."""
        host = self.hosts[name]
        host.is_up = False
        for rank in host.live:
            del self.live[name, rank]
        host.live.clear()
        host.servers.clear()
        host.notices.clear()

    def ready(self, name):
        self._keep_time(name)
        self._agent(name, agent_events.TreeReady())

    def signal(self, name, signum):
        self.changes += 1
        self._agent(name, agent_events.Signalled(signum))

    def gone(self, name):
        """Let a node find out that the scheduler's node is gone."""
        event = agent_events.SchedulerLost("its launcher has ended", code=120)
        self._agent(name, event)

    def tick(self, name):
        """Let an agent look at its deadlines."""
        self._keep_time(name)
        self._agent(name, agent_events.Tick())
        host = self.hosts[name]
        due = host.deadline() if host.is_up else None
        self._require_acted(due, host)

    def _require_acted(self, due, actor):
        is_acted_on = due is None or due > self.now - ROUNDING
        self.require(is_acted_on, "I6 a deadline is not acted on", actor)

    def _keep_time(self, name):
        """Let an agent see first whether its lease is over, as its process does."""
        host = self.hosts[name]
        if host.is_up:
            events, frames = host.uplink.tick(now=host.clock(self.now))
            self._after_uplink(host, events, frames)

    def arrive(self, number):
        """Deliver a frame; it may come late, twice or after others."""
        if number >= len(self.frames):
            raise MisfitError(
                f"at {self.now:g} frame {number} arrives, but only {len(self.frames)} were sent: "
                "the transcript is of another protocol; run its seed again"
            )
        envelope, is_up = self.frames[number]
        if is_up:
            self._arrive_up(envelope)
            return
        host = self.hosts[envelope.node_id]
        self._keep_time(envelope.node_id)
        if host.is_up:
            now = host.clock(self.now)
            self._after_uplink(host, *host.uplink.receive(envelope, now=now))

    def _arrive_up(self, envelope):
        if self.peers is None:
            return
        events, frames = self.peers.receive(envelope, now=self.now + self.clock_offset)
        self._send_down(frames)
        for event in events:
            self._admit(event)

    def _after_uplink(self, host, events, frames):
        self._send_up(frames)
        if self.build.dead_man:
            host.kill_at = host.uplink.live_until
        for event in events:
            self._agent(host.name, event)

    def _agent(self, name, event):
        host = self.hosts[name]
        if host.is_up:
            self._perform(host, host.state.handle(event, now=host.clock(self.now)))

    def _perform(self, host, actions):
        now = host.clock(self.now)
        for action in actions:
            match action:
                case agent_events.Join(register=body):
                    self._say(f"{host.name} joins ", body)
                    self._send_up(host.uplink.join(host.state.generation, body, now=now))
                case agent_events.SendToScheduler(generation=generation, body=body):
                    self._say(f"{host.name} -> scheduler g{generation} ", body)
                    self._send_up(host.uplink.send(generation, body, now=now))
                case agent_events.StartWorkers(generation=generation, start=start):
                    self._start(host, generation, start)
                case agent_events.ForwardSignal(ranks=ranks, signum=signum):
                    self.driver.signalled(host, ranks, signum)
                case agent_events.SweepGeneration(generation=generation, spare=spare):
                    self.driver.swept(host, generation, spare)
                case agent_events.StartServer(server=number):
                    self._start_server(host, number)
                case agent_events.SignalServers(servers=numbers, signum=signum):
                    self.driver.servers_signalled(host, numbers, signum)
                case agent_events.Conclude(verdict=verdict):
                    self._conclude(host, verdict)

    def _send_up(self, frames):
        for envelope in frames:
            self._emit(envelope, is_up=True)

    def _emit(self, envelope, *, is_up):
        codec.encode(envelope)  # which refuses what is too large
        self.frames.append((envelope, is_up))
        self.driver.sent(len(self.frames) - 1, envelope.node_id, is_up=is_up)

    # Workers, and the reaper, which lives on when the agent does not answer.

    def _start(self, host, generation, start):
        ranks = range(start.first_rank, start.first_rank + start.count)
        self.observe_start(host, generation, start, ranks)
        for rank in ranks:
            host.live[rank] = generation
            self.live[host.name, rank] = generation
            self.started[generation][rank] = host.name
        self.driver.started(host, ranks)

    def exit(self, name, rank, generation, code):
        """Let a worker end, by itself with a code or by a signal, which is negative."""
        host = self.hosts[name]
        if host.live.get(rank) == generation:
            self._ends(host, rank, code)

    def _ends(self, host, rank, code, *, swept=False):
        generation = host.live.pop(rank)
        del self.live[host.name, rank]
        self.codes[generation][rank] = code
        words = {"code": code} if code >= 0 else {"signal": signal.Signals(-code).name}
        if swept:
            words["swept"] = "yes"
        end = worker_end(rank, host=host.name, first_rank=rank, ran="100", **words)
        host.notices.append(agent_events.WorkerEnded(generation, end))
        self.driver.noticed(host)

    def _start_server(self, host, number):
        self.observe_server(host, number)
        self.pids += 1
        host.servers[number] = self.pids
        host.notices.append(agent_events.ServerStarted(number, self.pids))
        self.driver.noticed(host)
        self.driver.server_started(host, number)

    def server_exit(self, name, number, pid, code):
        """Let a parameter server end."""
        host = self.hosts[name]
        if host.servers.get(number) != pid:
            return
        del host.servers[number]
        self.server_ends.add((number, code))
        words = {"code": code} if code >= 0 else {"signal": signal.Signals(-code).name}
        end = worker_end(number, host=name, ran="100", is_server=True, **words)
        host.notices.append(agent_events.ServerEnded(end))
        self.driver.noticed(host)

    def sweep(self, name, generation, spare=""):
        """Let the reaper kill all workers, and servers, but some, as its agent asked."""
        host = self.hosts[name]
        if not host.is_up:
            return
        self._kill_servers(host, spare)
        for rank in list(host.live):
            self._ends(host, rank, -signal.SIGKILL, swept=True)
        host.notices.append(agent_events.GenerationSwept(generation))
        self.driver.noticed(host)

    def expire(self, name):
        """Let the reaper kill all workers and servers, since the lease that it was told is over."""
        host = self.hosts[name]
        for rank in list(host.live):
            self._ends(host, rank, -signal.SIGKILL)
        self._kill_servers(host)

    def _kill_servers(self, host, spare=""):
        spared = str(spare).split("+")
        for number, pid in list(host.servers.items()):
            if str(pid) not in spared:
                self.server_exit(host.name, number, pid, -signal.SIGKILL)

    def notice(self, name):
        """Let an agent hear the next thing from its reaper."""
        host = self.hosts[name]
        self._keep_time(name)
        if host.is_up and host.notices:
            self._agent(name, host.notices.pop(0))

    def _conclude(self, host, verdict):
        host.verdict = verdict
        host.is_up = False
        self._say(f"{host.name} ends with {verdict.code}: {verdict.reason}", None)
        self.observe_end(host, verdict)
        host.servers.clear()  # with the process tree
        host.notices.clear()
        self.driver.concluded(host)

    def _say(self, text, body):
        if self.outputs is not None:
            said = show_message(body) if body is not None else ""
            self.outputs.append(text + (said or ""))
