"""All that can go wrong with parameter servers, from one seed."""

import heapq
import random

import msgspec
import server_mutants
from server_world import HEAD, NullDriver, ServersViolationError, ServerWorld

from msrun.cluster.servers.events import Rules

# Faults stop here; from then on everything answers within a moment.
CALM = 40.0
# All workers must have done their steps this long after.
PATIENCE = 400.0


class ServerChaos(NullDriver):
    """Tells a world what happens, as `seed` decides."""

    def __init__(self, seed, build=None, **odds):
        self.random = draw = random.Random(seed)
        self.heap, self.inputs, self.count, self.now = [], [], 0, 0.0
        self.losses = draw.choice([0.0, draw.random() * 0.3])
        self.doubles = draw.choice([0.0, draw.random() * 0.3])
        self.delay = draw.choice([0.01, 0.05, 0.5, 3.0])
        self.kills = draw.choice([0.0, 0.02, 0.1])
        self.victims = draw.choice(["server", "worker", "head", "node", "any", "any"])
        self.scales = draw.choice([0.0, 0.0, 0.03])
        self.save_time = draw.choice([0.01, 0.5, 3.0])
        self.pace = draw.choice([0.1, 1.0])
        self.parts = 1
        self.replicas = 0
        self.rounds = 0
        self.nodes = 1
        self.together = False
        self.met = set()
        for name, value in odds.items():
            setattr(self, name, value)
        staleness = draw.choice([0, 0, 0, 1, 3, float("inf")])
        self.rules = Rules(staleness=staleness, every=draw.choice([1, 3, 7]), retry=1.0)
        if self.replicas and not staleness:
            self.rules = msgspec.structs.replace(self.rules, replicas=1)
        servers, workers = draw.randint(1, 3), draw.randint(1, 4)
        steps = draw.choice([3, 10, 25])
        lengths = dict.fromkeys(range(8), steps)
        if draw.random() < 0.3:
            lengths = {rank: draw.randint(1, steps) for rank in lengths}
        tables = [("embed", 40, draw.randint(1, 5)), ("bias", 1, 1)]
        self.world = ServerWorld(
            rules=self.rules,
            tables=tables,
            servers=range(servers),
            workers=range(workers),
            lengths=lengths,
            build=build,
            driver=self,
            parts=self.parts,
            rounds=self.rounds if self.rules.is_sync else 0,
            nodes=self.nodes,
        )
        self.at(0.0, "start", *HEAD)
        for rank in range(servers):
            self.at(draw.random(), "start", "server", rank)
        for rank in range(workers):
            self.at(draw.random(), "start", "worker", rank)
        self.at(0.5, "disturb")
        self.due = {}

    @property
    def is_calm(self):
        return self.now >= CALM

    def at(self, time, verb, *words):
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, verb, words))

    def soon(self, most, verb, *words):
        self.at(self.now + self.random.random() * most, verb, *words)

    def run(self):
        """Let everything happen until all workers have left; return how many inputs there were."""
        while self.heap:
            at, _, verb, words = heapq.heappop(self.heap)
            self.now = at
            if at > CALM + PATIENCE or self._is_over():
                break
            own = getattr(self, f"on_{verb}", None)
            if own:
                own(*words)
            else:
                self.tell(verb, *words)
        self.tell("rest")
        return len(self.inputs)

    def tell(self, verb, *words):
        self.inputs.append((self.now, verb, *words))
        self.world.do(self.now, verb, *words)

    def _is_over(self):
        head = self.world.machine(HEAD)
        if not self.is_calm or head is None or head.is_changing or head.decision.before:
            return False
        return set(head.ownership.workers) <= self.world.left

    # What happens by itself.

    def on_disturb(self):
        if self.is_calm:
            for actor in self._all():
                self.soon(0.1, "start", *actor)
            return
        draw = self.random
        if draw.random() < self.kills:
            self._kill()
        if draw.random() < self.scales:
            world = self.world
            servers = sorted(draw.sample(range(5), draw.randint(1, 4)))
            workers = [rank for rank in range(6) if rank in world.workers or draw.random() < 0.2]
            self.tell("scale", tuple(servers), tuple(workers))
            for rank in servers:
                self.soon(2.0, "start", "server", rank)
            for rank in workers:
                self.soon(2.0, "start", "worker", rank)
        self.soon(0.4, "disturb")

    def _all(self):
        world = self.world
        asked = [HEAD, *(("server", rank) for rank in world.servers)]
        asked += [("server", rank) for rank in world.disks]
        return [*asked, *(("worker", rank) for rank in world.workers if rank not in world.left)]

    def _kill(self):
        draw, world = self.random, self.world
        kind = draw.choice(["server", "worker", "head", "node"])
        kind = kind if self.victims == "any" else self.victims
        rank = draw.randrange(4)
        if kind == "servers":  # all of one node
            victims = [("server", n) for n in world.servers if (n - rank) % self.nodes == 0]
        elif kind == "node":
            victims = [("server", rank), ("worker", rank)]
        else:
            victims = [HEAD if kind == "head" else (kind, rank)]
        for victim in victims:
            if victim in world.alive and not (victim[0] == "worker" and rank in world.left):
                self.tell("kill", *victim)
                self.soon(draw.choice([0.1, 3.0, 8.0]), "start", *victim)

    # What the machines ask for.

    def sent(self, number):
        if not self.is_calm and self.random.random() < self.losses:
            return
        most = 0.01 if self.is_calm else self.delay
        self.soon(most, "arrive", number)
        if not self.is_calm and self.random.random() < self.doubles:
            self.soon(most * 3, "arrive", number)

    def saving(self, rank, life, what):
        took = self.random.random() * (0.01 if self.is_calm else self.save_time)
        which, snapshot, rows = what
        self.at(self.now + took, "write", rank, life, which, snapshot, rows)
        self.at(self.now + took + 0.01, "saved", rank, life, *which)

    def computing(self, rank, life, token):
        self.met.add((rank, self.world.machine(("worker", rank)).clock))
        self.soon(0.01 if self.is_calm else self.pace, "computed", rank, life, token)

    def on_computed(self, rank, life, token):
        """Let a script compute; with `together` not before all others compute the same step."""
        if self.together and not self._has_met_all(self.world.machine(("worker", rank)).clock):
            self.soon(0.2, "computed", rank, life, token)
            return
        self.tell("computed", rank, life, token)

    def _has_met_all(self, clock):
        lengths = self.world.lengths
        asked = [rank for rank in self.world.workers if lengths[rank] > clock]
        return all((rank, clock) in self.met for rank in asked)

    def going_on(self, rank, life):
        self.soon(0.01, "go_on", rank, life)

    def woken(self, actor):
        due = self.world.deadline(actor)
        if due is None:
            self.due.pop(actor, None)
            return
        due = max(due, self.now)
        if self.due.get(actor) != due:
            self.due[actor] = due
            self.at(due, "wake", actor, due)

    def on_wake(self, actor, due):
        if self.due.get(actor) == due:
            del self.due[actor]
            if actor in self.world.alive:
                self.tell("tick", *actor)


def broken(seed, mutant="", odds=None):
    """Return the promise that a seed breaks, or None."""
    build, loaded = server_mutants.SERVER_MUTANTS[mutant]
    try:
        ServerChaos(seed, build, **loaded, **(odds or {})).run()
    except ServersViolationError as violation:
        return str(violation)
    return None


def first_broken(seeds, mutant):
    """Return the first seed that breaks a promise, and the promise."""
    for seed in seeds:
        promise = broken(seed, mutant)
        if promise:
            return seed, promise
    raise AssertionError(f"no seed breaks a promise with {mutant}")
