"""One scheduler and its agents, joined by queues, under seeded faults."""

import heapq
import math
import random
import signal
from collections import defaultdict

import pytest

from msrun.cluster import agent_events, scheduler_events, wal
from msrun.cluster.agent_state import AgentState
from msrun.cluster.messages import Formation, Register
from msrun.cluster.restart_policy import RestartPolicy
from msrun.cluster.scheduler_state import SchedulerState
from msrun.cluster.verdict import RankExit
from msrun.job import RestartLimits

pytestmark = pytest.mark.sim

SEEDS = 3000
GRACE = 10.0
JOIN_TIMEOUT = 30.0
# Four generations of at most 100 s, each with its stop and its pause, and the forming.
SECONDS_MAX = 4 * (100 + GRACE + 8 + 60) + JOIN_TIMEOUT


class World:
    """A job in virtual time; what happens when follows from `seed`."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now = 0.0
        self.queue = []
        self.count = 0
        self.arrival = defaultdict(float)
        self.written = []
        nnodes = self.random.choice([1, 1, 2, 3])
        self.formation = Formation(nnodes_min=nnodes, nnodes_max=nnodes)
        self.scheduler = SchedulerState(
            job_id="train",
            formation=self.formation,
            join_timeout=JOIN_TIMEOUT,
            policy=RestartPolicy("train", RestartLimits(max_restarts=self.random.choice([0, 3]))),
        )
        names = "abc"[:nnodes]
        self.agents = {name: self._agent(name) for name in names}
        self.live = {name: {} for name in names}  # rank -> generation
        self.codes = defaultdict(dict)  # generation -> rank -> code
        self.concluded = {}
        self.scheduler_lost = False
        self.faults = self.random.random() < 0.7
        for name in names:
            self._begin(name)
        if self.faults:
            self._plan_faults(names)

    def run(self):
        """Let everything happen; the world is at rest when this returns."""
        while True:
            dues = [(m.deadline(), name) for name, m in self._machines() if m.deadline()]
            due, name = min(dues, default=(math.inf, ""))
            if not self.queue and due == math.inf:
                return
            if self.queue and self.queue[0][0] <= due:
                self.now, _, happen = heapq.heappop(self.queue)
                happen()
            else:
                self.now = max(self.now, due)
                self._tick(name)
            assert self.now < SECONDS_MAX

    def _machines(self):
        alive = {n: a for n, a in self.agents.items() if n not in self.concluded}
        return [*alive.items(), *([] if self.scheduler_lost else [("", self.scheduler)])]

    def _tick(self, name):
        machine = self.agents.get(name, self.scheduler)
        if name:
            self._agent_handles(name, agent_events.Tick())
        else:
            self._scheduler_handles(scheduler_events.Tick())
        assert machine.deadline() is None or machine.deadline() > self.now

    def _agent(self, name):
        slots = self.random.randint(1, 3)
        register = Register(
            host=name,
            slots=slots,
            store_host=name,
            store_port=1,
            serves=name == "a",
            formation=self.formation,
        )
        return AgentState(job_id="train", register=register, grace=GRACE, form_by=JOIN_TIMEOUT + 5)

    def _begin(self, name):
        if name != "a" and self.random.random() < 0.05:
            self.concluded[name] = None  # it never comes
            return
        self._later(0, 5, lambda: self._perform(name, self.agents[name].begin()))
        error = "No module named nope" if self.random.random() < 0.05 else None
        self._later(5, 6, lambda: self._agent_handles(name, agent_events.TreeReady(error)))

    def _plan_faults(self, names):
        for _ in range(self.random.choice([0, 0, 1, 2, 3])):
            name, signum = self.random.choice(names), self.random.choice([1, 2, 15])
            event = agent_events.Signalled(signum)
            first = self.random.choice([5, 50])
            self._later(first, 60, lambda n=name, e=event: self._agent_handles(n, e))
        if self.random.random() < 0.3:
            name = self.random.choice(names)
            self._later(5, 60, lambda: self._lose_tree(name))
        if self.random.random() < 0.1:
            self._later(5, 60, self._lose_scheduler)

    def _later(self, least, most, happen):
        self._at(self.now + self.random.uniform(least, most), happen)

    def _at(self, time, happen):
        self.count += 1
        heapq.heappush(self.queue, (time, self.count, happen))

    def _deliver(self, channel, happen):
        """Let a message arrive, after those that were sent before it on its channel."""
        self.arrival[channel] = max(self.arrival[channel], self.now + self.random.uniform(0, 0.1))
        self._at(self.arrival[channel], happen)

    def _scheduler_handles(self, event):
        if self.scheduler_lost:
            return
        for action in self.scheduler.handle(event, now=self.now):
            match action:
                case scheduler_events.Write(record=wal.Decided(verdict=verdict)):
                    self.written.append(verdict)
                case scheduler_events.Send(node_id=name, generation=generation, body=body):
                    received = agent_events.Received(generation, body)
                    self._deliver(
                        ("down", name), lambda n=name, e=received: self._agent_handles(n, e)
                    )

    def _agent_handles(self, name, event):
        if name not in self.concluded:
            self._perform(name, self.agents[name].handle(event, now=self.now))

    def _perform(self, name, actions):
        for action in actions:
            match action:
                case agent_events.Join(register=body):
                    event = scheduler_events.Received(name, 1, -1, body)
                    self._deliver(("up", name), lambda e=event: self._scheduler_handles(e))
                    reached = agent_events.Reached()
                    self._deliver(
                        ("down", name), lambda n=name, e=reached: self._agent_handles(n, e)
                    )
                case agent_events.Send(generation=generation, body=body):
                    event = scheduler_events.Received(name, 1, generation, body)
                    self._deliver(("up", name), lambda e=event: self._scheduler_handles(e))
                case agent_events.StartWorkers(generation=generation, start=start):
                    self._start_workers(name, generation, start)
                case agent_events.SignalWorkers(ranks=ranks, signum=signum):
                    self._signal_workers(name, ranks, signum)
                case agent_events.Sweep(generation=generation):
                    self._sweep(name, generation)
                case agent_events.Conclude(verdict=verdict):
                    assert name not in self.concluded
                    self.concluded[name] = verdict.code
                    self.live[name].clear()

    def _start_workers(self, name, generation, start):
        others = {g for workers in self.live.values() for g in workers.values()}
        assert others <= {generation}, "workers of an earlier generation live"
        for rank in range(start.first_rank, start.first_rank + start.count):
            self.live[name][rank] = generation
            code, signum = self.random.choice([*[(0, None)] * 6, (3, None), (None, 9)])
            self._later(
                0, 100, lambda r=rank, c=code, s=signum: self._end(name, generation, r, c, s)
            )

    def _end(self, name, generation, rank, code, signum):
        if self.live[name].get(rank) != generation:
            return
        del self.live[name][rank]
        self.codes[generation][rank] = code
        end = RankExit(
            rank=rank,
            node_rank=0,
            host=name,
            local_rank=0,
            pid=1,
            code=code,
            signum=signum,
            ran_for=self.random.uniform(0, 100),
        )
        event = agent_events.WorkerEnded(generation, end)
        self._later(0, 0.1, lambda: self._agent_handles(name, event))

    def _signal_workers(self, name, ranks, signum):
        if signum == signal.SIGCONT:
            return
        if self.faults and self.random.random() < 0.1:
            self._later(0, 1, lambda: self._lose_tree(name))
        for rank in ranks:
            generation = self.live[name].get(rank)
            if generation is not None and self.random.random() < 0.7:  # the others ignore it
                self._later(0, 1, lambda r=rank, g=generation: self._end(name, g, r, None, signum))

    def _sweep(self, name, generation):
        for rank in list(self.live[name]):
            self._end(name, generation, rank, None, signal.SIGKILL)
        if self.random.random() < 0.95:
            stuck = ("4711 D python",) if self.random.random() < 0.05 else ()
            event = agent_events.Swept(generation, stuck)
            self._later(0, 0.2, lambda: self._agent_handles(name, event))

    def _lose_tree(self, name):
        self.live[name].clear()
        self._agent_handles(name, agent_events.TreeLost("the reaper ended", 120))

    def _lose_scheduler(self):
        self.scheduler_lost = True
        verdict = self.written[0] if self.written else None
        for name in self.agents:
            event = agent_events.SchedulerLost("the scheduler ended", verdict)
            self._deliver(("down", name), lambda n=name, e=event: self._agent_handles(n, e))


@pytest.mark.parametrize("seed", range(0, SEEDS, 500))
def test_every_job_ends_with_one_verdict(seed):
    for each in range(seed, seed + 500):
        world = World(each)
        world.run()
        codes = {code for code in world.concluded.values() if code is not None}

        assert len(codes) == 1, f"seed {each}: {world.concluded}"
        assert world.concluded.keys() == world.agents.keys(), f"seed {each}"
        if world.scheduler_lost and not world.written:
            assert codes == {70}, f"seed {each}"
            continue
        (verdict,) = world.written
        assert codes == {verdict.code}, f"seed {each}"
        world_size = sum(agent.register.slots for agent in world.agents.values())
        all_succeeded = list(world.codes[verdict.generation].values()) == [0] * world_size
        assert all_succeeded or verdict.code, f"seed {each}"
        assert not (all_succeeded and verdict.code) or world.faults, f"seed {each}"


def test_a_seed_tells_the_whole_story():
    first, second = World(7), World(7)
    first.run()
    second.run()

    assert (first.now, first.concluded, first.codes) == (second.now, second.concluded, second.codes)
