"""With a staleness, a rank that makes no step delays the others only at the bound."""

import contextlib
import datetime as dt

import msgspec
import pytest
import torch
import torch.distributed as dist
from ranks import run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, build, part
from test_server_starts import PLAN, Coordinator

import msrun
from msrun.cluster.servers.events import Rules
from msrun.cluster.servers.messages import (
    Adopt,
    Adopted,
    Open,
    Opened,
    Pull,
    Push,
    Rows,
    Welcome,
    WorkerHello,
)
from msrun.cluster.servers.ownership import Ownership
from msrun.parallel.servers.wire import RANK, Begin

pytestmark = pytest.mark.torch

STALENESS = 2
LIMIT = dt.timedelta(seconds=60)
TEMPTATION = dt.timedelta(seconds=0.5)


def go_ahead(path):
    """Train on two ranks, of which the last begins when it is let; return what the first saw.

    Rank 0 lets it only when it has made as many steps as the bound allows, so a rank that waits for
    a slow one would wait for ever.  One step more than that needs a step of the slow rank, which
    counts its steps just before it makes them, and gives rank 0 time to go beyond the bound.
    """
    rt = msrun.init({"servers": {"params": ["*"], "sync": {"staleness": STALENESS}}})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    store = dist.FileStore(path, 2)
    store.set_timeout(LIMIT)
    seen = []
    if rt.rank == 1:
        store.wait(["go"])
        with contextlib.suppress(RuntimeError):
            store.wait(["beyond"], TEMPTATION)
    for step in range(STALENESS + 2):
        *inputs, labels = part(step, rt.rank, rt.world_size)
        update.zero_grad()
        LOSS(model(*inputs), labels).backward()
        if rt.rank == 1:
            store.add("steps", 1)
        update.step()
        if rt.rank == 0:
            seen.append(store.add("steps", 0))
            if step == STALENESS - 1:
                store.set("go", "")
            elif step >= STALENESS:
                store.set("beyond", "")
    rt.close()
    return seen


def test_a_slow_rank_delays_the_others_at_the_bound_and_not_before(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 1, 2):
        seen, _ = run_warm(go_ahead, 2, str(tmp_path / "store"))

    assert seen[:STALENESS] == [0] * STALENESS
    assert [seen[STALENESS] >= 1, seen[STALENESS + 1] >= 2] == [True, True]


class Ranks:
    """Stands in for two ranks, of which each message is answered before the next is sent."""

    def __init__(self, peers):
        self._peers = peers

    def say(self, kind, rank, payload=None, **words):
        sender = (RANK, rank)
        word = kind(worker=rank, life=0, epoch=1, **words)
        self._peers.say(word, sender=sender, payload=payload)

    def step(self, kind, rank, clock, payload):
        self.say(kind, rank, payload, clock=clock, floor=0, settled=clock, safe=0)

    def push(self, rank, clock):
        self.step(Push, rank, clock, {"gradients": {}, "options": {}})

    def heard(self, rank):
        """Return the rows that this rank has got by now."""
        self.say(WorkerHello, rank)
        words = []
        while not any(isinstance(word, Welcome) for word in words):
            words += self._peers.hear()
        return [(word.asked, word.oldest) for word in words if isinstance(word, Rows)]


def test_a_server_answers_at_the_bound_and_not_beyond_it(tmp_path, monkeypatch):
    """A real one: what it answers and when, on the wire."""
    rules = Rules(staleness=STALENESS)
    plan = msgspec.structs.replace(PLAN, rules=rules, workers=2, tables=[], suppliers={})
    owned = Ownership(epoch=1, version=0, clocks={0: 0, 1: 0}, owners={})
    with serving(tmp_path, monkeypatch, 2, 2, numbers=[1]) as job:
        peers = Coordinator(job, tmp_path)
        peers.say(Begin(plan=plan))
        peers.say(Adopt(term=0, count=1, ownership=owned, before=None))
        peers.hear_until(Adopted)
        peers.say(Open(term=0, count=2, epoch=1))
        peers.hear_until(Opened)
        ranks, found = Ranks(peers), []
        for clock in range(STALENESS + 2):
            ranks.step(Pull, 0, clock, {})
            found.append(ranks.heard(0))
            ranks.push(0, clock)
        ranks.push(1, 0)
        late = ranks.heard(1)
        peers.close()

    assert found == [*([(clock, 0)] for clock in range(STALENESS + 1)), []]
    assert late == [(STALENESS + 1, 1)]
