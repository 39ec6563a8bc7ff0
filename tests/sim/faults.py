"""All that can go wrong, from one seed: the network, clocks, nodes, workers, the scheduler."""

import heapq
import math
import random
import signal
import time

import transcript
from mutants import MUTANTS
from observer import Violation
from world import GRACE, Driver, Settings, World

# Faults stop here; from then on everything answers within a moment.
CALM = 60.0
# A verdict must be there this long after, and on every node.
PATIENCE = 300.0
# 4,000 take a minute at most where two processes run a half each.
SEEDS_PER_CPU_SECOND_MIN = 4000 / 60 / 2
SCHEDULER = "scheduler"


class Chaos(Driver):
    """Tells a world what happens, as `seed` decides."""

    def __init__(self, seed, build=None, **odds):
        self.random = draw = random.Random(seed)
        self.inputs = []
        self.heap = []
        self.count = 0
        self.now = 0.0
        self.timers = {}
        self.frozen = {}
        self.cuts = {}
        self.is_revived = True
        self.losses = draw.choice([0.0, draw.random() * 0.3])
        self.doubles = draw.choice([0.0, draw.random() * 0.3])
        self.delay = draw.choice([0.05, 0.05, 0.5, 3.0, 15.0])
        self.tick_delay = draw.choice([0.0, 0.0, 0.5])
        self.failures = draw.choice([0.0, 0.1, 0.4])
        self.hangs = draw.choice([0.0, 0.0, 0.2])
        self.ignores = draw.choice([0.0, 0.3])
        self.crashes = draw.choice([0.0, 0.01, 0.03])
        self.cuttings = draw.choice([0.0, 0.02, 0.05])
        self.freezes = draw.choice([0.0, 0.02])
        self.deaths = draw.choice([0.0, 0.01, 0.05])
        self.log_losses = draw.choice([0.0, 0.0, 0.3])
        self.signals = draw.choice([0.0, 0.0, 0.003])
        # Of their own, so that the other worlds stay as they are.
        self.dice = random.Random(f"servers {seed}")
        self.servers = 0
        for name, value in odds.items():
            setattr(self, name, value)
        self.length = draw.choice([5.0, 20.0, 60.0])
        most = draw.randint(1, 4)
        least = draw.choice([most, most, draw.randint(1, most)])
        names = "abcdef"[: most + draw.choice([0, 0, 1, 2])]
        settings = Settings(
            least=least,
            most=most,
            restarts=draw.choice([0, 1, 3, 5, 5, 5]),
            exclude=draw.choice([0, 2, 3]),
            serves=draw.choice(["", "", "", "a"]),
            lease=draw.choice([5.0, 10.0, 10.0, 30.0]),
            servers=self.servers,
        )
        self.world = World(settings, build, driver=self)
        self.slots = {name: draw.randint(1, 2) for name in names}
        given = draw.choice([0.0, 0.0, 0.0, 0.5, 1.0])
        # What one node too many is given is beyond all others, or another's as well.
        self.ranks = {
            name: (draw.choice([rank, rank % most]),)
            for rank, name in enumerate(draw.sample(names, len(names)))
            if draw.random() < given
        }
        self.lives = dict.fromkeys(names, 0)
        offset = draw.choice([1.0, draw.uniform(1, 1e5)])
        self.at(0.0, "begin", offset)
        for name in names:
            self.at(draw.choice([0.1, 5.0, 20.0]) * draw.random(), "boot", name)
        self.at(1.0, "disturb")
        self.at(CALM, "calm")

    def run(self):
        """Let everything happen until all nodes are at rest; return the events there were."""
        while self.heap:
            at, _, verb, words = heapq.heappop(self.heap)
            self.now = at
            if at > CALM + PATIENCE:
                break
            if self._is_over():
                break
            self._happen(at, verb, words)
        self.tell("rest")
        return len(self.inputs)

    def _is_over(self):
        if not self.is_calm:
            return False
        world = self.world
        is_up = any(host.is_up for host in world.hosts.values())
        return not is_up and (world.verdict or not world.peers)

    def at(self, time, verb, *words):
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, verb, words))

    def soon(self, most, verb, *words):
        self.at(self.now + self.random.random() * most, verb, *words)

    @property
    def is_calm(self):
        return self.now >= CALM

    # What happens.

    def _happen(self, at, verb, words):
        own = getattr(self, f"_on_{verb}", None)
        if own:
            own(*words)
            return
        actor = self._actor(verb, words)
        if self.frozen and self.frozen.get(actor, 0.0) > at:
            self.at(self.frozen[actor], verb, *words)
            return
        self.tell(verb, *words)
        if actor:
            self._watch(actor)

    def tell(self, verb, *words):
        """Let the world do something, and remember it."""
        self.inputs.append((self.now, verb, *words))
        self.world.do(self.now, verb, *words)

    def _actor(self, verb, words):
        if verb == "arrive":
            envelope, is_up = self.world.frames[words[0]]
            return SCHEDULER if is_up else envelope.node_id
        if verb in ("check", "lose", "begin", "probed"):
            return SCHEDULER
        return words[0] if verb in ("tick", "notice", "ready", "signal", "gone") else ""

    def _watch(self, actor):
        """Have the deadlines of `actor` kept."""
        if actor == SCHEDULER:
            due = self.world.scheduler_deadline()
        else:
            host = self.world.hosts[actor]
            if not host.is_up:
                return
            due = host.deadline()
            if host.kill_at is not None and (host.live or host.servers):
                self._watch_lease(host)
        if due is None:
            return
        due = max(due, self.now)
        if due < self.timers.get(actor, math.inf):
            self.timers[actor] = due
            if self.tick_delay and not self.is_calm:
                due += self.random.random() * self.tick_delay
            self.at(due, "timer", actor, due)

    def _on_timer(self, actor, due):
        if actor != SCHEDULER and not self.world.hosts[actor].is_up:
            self.timers.pop(actor, None)
            return
        thaw = self.frozen.get(actor, 0.0)
        if thaw > self.now:
            self.at(thaw, "timer", actor, due)
            return
        self.timers.pop(actor, None)
        is_node = actor != SCHEDULER
        due = self.world.hosts[actor].deadline() if is_node else self.world.scheduler_deadline()
        # Rounding: what is due a moment later is due.
        if due is not None and due <= self.now + 1e-6:
            self.now = max(self.now, due) + 1e-6
            self.tell(*(("tick", actor) if is_node else ("check",)))
        self._watch(actor)

    def _watch_lease(self, host):
        due = (host.kill_at - host.offset) / (1 + host.drift)
        key = (host.name, host.incarnation, "lease")
        if key not in self.timers:
            self.timers[key] = due
            self.at(max(due, self.now), "lease", host.name, host.incarnation)

    def _on_lease(self, name, incarnation):
        self.timers.pop((name, incarnation, "lease"), None)
        host = self.world.hosts[name]
        is_bare = not (host.live or host.servers)
        if host.incarnation != incarnation or not host.is_up or is_bare:
            return
        if host.clock(self.now) >= host.kill_at - 1e-6:
            self.tell("expire", name)
        else:
            self._watch_lease(host)

    # Nodes.

    def _on_boot(self, name):
        host = self.world.hosts.get(name)
        if host and host.is_up:
            return
        if name == self.world.settings.serves and self.lives[name]:
            return  # a job whose scheduler is gone has no second life
        draw = self.random
        self.lives[name] += 1
        self.timers.pop(name, None)
        self.frozen.pop(name, None)
        offset, drift = draw.choice([1.0, draw.uniform(1, 1e5)]), draw.uniform(-2e-4, 2e-4)
        incarnation = draw.getrandbits(32)
        rank = self.ranks.get(name, ())
        self.tell("boot", name, incarnation, self.slots[name], offset, drift, *rank)
        self._watch(name)
        self.soon(draw.choice([0.3, 5.0]), "imports", name, incarnation)

    def _on_imports(self, name, incarnation):
        if self._lives(name, incarnation):
            self._happen(self.now, "ready", (name,))

    def _lives(self, name, incarnation):
        host = self.world.hosts[name]
        return host.is_up and host.incarnation == incarnation

    def _crash(self, name):
        world, draw = self.world, self.random
        incarnation = world.hosts[name].incarnation
        self.tell("crash", name)
        if name == world.settings.serves:
            self.tell("end")
            for other in world.hosts:
                self.soon(draw.choice([0.5, 70.0]), "miss", other)
            return
        if draw.random() < 0.5:
            self.soon(1.0, "lose", name, incarnation)
        if draw.random() < 0.8:
            self.soon(draw.choice([1.0, 30.0]), "boot", name)

    def _on_miss(self, name):
        if self.world.hosts[name].is_up:
            self._happen(self.now, "gone", (name,))

    def concluded(self, host):
        if host.name == self.world.settings.serves and self.world.verdict is None:
            self.tell("end")
            for other in self.world.hosts:
                self.soon(1.0, "miss", other)
        elif not self.is_calm and self.random.random() < 0.2:
            self.soon(10.0, "boot", host.name)

    # Workers.

    def started(self, host, ranks):
        draw = self.random
        generation = host.live[ranks[0]]
        length = min(draw.expovariate(1 / self.length), max(1.0, CALM + 10 - self.now))
        for rank in ranks:
            code, after = 0, length + draw.random()
            if not self.is_calm and draw.random() < self.failures:
                code, after = draw.choice([3, 3, -signal.SIGKILL]), after * draw.random()
            elif not self.is_calm and draw.random() < self.hangs:
                after = CALM - self.now + 5 * draw.random()
            self.at(self.now + after, "exit", host.name, rank, generation, code)

    def signalled(self, host, ranks, signum):
        if signum == signal.SIGCONT:
            return
        for rank in ranks:
            generation = host.live.get(rank)
            if generation is not None and self.random.random() >= self.ignores:
                self.soon(1.0, "exit", host.name, rank, generation, -signum)

    def server_started(self, host, number):
        if not self.is_calm and self.dice.random() < 0.4:
            code = self.dice.choice([0, 1, -signal.SIGKILL])
            after = self.dice.expovariate(1 / self.length)
            self.at(self.now + after, "server_exit", host.name, number, host.servers[number], code)

    def servers_signalled(self, host, numbers, signum):
        ends = [] if signum == signal.SIGCONT else [n for n in numbers if n in host.servers]
        for number in ends:
            pid = host.servers[number]
            # SIGKILL goes the way of orders, which a start on another node cannot overtake.
            late = 2 * GRACE * self.dice.random() if signum == signal.SIGTERM else 0.0
            self.at(self.now + late, "server_exit", host.name, number, pid, -signum)

    def swept(self, host, generation, spare):
        self.soon(0.2, "purge", host.name, host.incarnation, generation, spare)

    def _on_purge(self, name, incarnation, generation, spare):
        if self._lives(name, incarnation):
            words = ["+".join(map(str, spare))] if spare else []
            self.tell("sweep", name, generation, *words)

    def noticed(self, host):
        self.soon(0.05, "notice", host.name)

    # The network.

    def sent(self, frame, node, *, is_up):
        draw = self.random
        if self.now >= CALM:
            self.at(self.now + 0.01 * draw.random(), "arrive", frame)
            return
        cut = self.cuts.get(node)
        if cut and self.now < cut[0] and cut[1] in (2, is_up):
            return
        if draw.random() < self.losses:
            return
        self.at(self.now + 0.001 + draw.random() * self.delay, "arrive", frame)
        if draw.random() < self.doubles:
            self.at(self.now + 0.001 + draw.random() * self.delay, "arrive", frame)

    # The scheduler, and whatever else goes wrong.

    def probing(self, name, incarnation):
        self.soon(self.random.choice([0.01, 5.0]), "probed", name, incarnation)

    def scheduler_died(self):
        self.soon(3.0, "revive")

    def _on_revive(self):
        world = self.world
        served = world.settings.serves
        is_gone = served and served in world.hosts and not world.hosts[served].is_up
        if world.peers is None and not is_gone:
            self.timers.pop(SCHEDULER, None)
            draw = self.random
            if world.verdict is None and draw.random() < self.log_losses:
                self.tell("lose_log")
            self.tell("begin", draw.choice([1.0, draw.uniform(1, 1e5)]))
            self._watch(SCHEDULER)

    def _on_disturb(self):
        draw, world = self.random, self.world
        if self.is_calm:
            return
        for host in list(world.hosts.values()):
            if host.is_up:
                self._disturb(host.name)
        if world.peers and draw.random() < self.deaths:
            if draw.random() < 0.5:
                self.tell("doom", draw.choice(["synced", "torn", "lost"]))
            else:
                self.tell("end")
                self.soon(5.0, "revive")
        if draw.random() < self.freezes / 4:
            self.frozen[SCHEDULER] = self.now + draw.uniform(0.5, 15)
        self.soon(2.0, "disturb")

    def _disturb(self, name):
        draw, world = self.random, self.world
        if draw.random() < self.crashes * (0.2 if name == world.settings.serves else 1):
            self._crash(name)
            return
        if draw.random() < self.cuttings:
            self.cuts[name] = (self.now + draw.uniform(1, 40), draw.choice([0, 1, 2]))
        if draw.random() < self.freezes:
            self.frozen[name] = self.now + draw.uniform(1, 20)
        if draw.random() < self.signals:
            self._happen(self.now, "signal", (name, draw.choice([15, 15, 15, 2])))

    def _on_calm(self):
        self.cuts.clear()
        for actor, until in self.frozen.items():
            self.frozen[actor] = min(until, self.now + 1)
        if self.world.peers is None:
            self.soon(1.0, "revive")
        for name, host in self.world.hosts.items():
            if not host.is_up and host.verdict is None and self.random.random() < 0.7:
                self.soon(10.0, "boot", name)


def check(seed, mutant=""):
    """Return (seed, promise, transcript) when `seed` breaks a promise, else None."""
    build, odds = MUTANTS[mutant]
    chaos = Chaos(seed, build, **odds)
    try:
        chaos.run()
    except Violation as violation:
        text = transcript.render(chaos.world.settings, chaos.inputs, mutant)
        return seed, str(violation), f"# Seed {seed}: {str(violation).split(':')[0]}.\n{text}"
    return None


def first_broken(seeds, mutant=""):
    """Return what `check` says of the first of `seeds` that breaks a promise, else None."""
    return next(filter(None, (check(seed, mutant) for seed in seeds)), None)


def hold(seeds, mutant=""):
    """Return how many seeds are run in a second of CPU time.

    Raises:
        Violation: One of `seeds` breaks a promise; it has the transcript.
    """
    began = time.process_time()
    if broken := first_broken(seeds, mutant):
        seed, promise, text = broken
        raise Violation(f"{promise} (seed {seed})\n{text}")
    rate = len(seeds) / (time.process_time() - began)
    print(f"{rate:.0f} seeds per CPU-second")
    return rate
