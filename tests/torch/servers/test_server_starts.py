"""A server that was killed starts again, whatever it hears first, and hears no earlier session."""

import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_warm
from server_jobs import serving

import msrun
from msrun.cluster.servers.events import Rules
from msrun.cluster.servers.messages import (
    Adopt,
    Adopted,
    Open,
    Opened,
    Push,
    ServerHello,
    Snapshot,
    Welcome,
    WorkerHello,
)
from msrun.cluster.servers.ownership import Ownership, Table
from msrun.parallel.servers.addresses import read_key
from msrun.parallel.servers.disk import ServerDisk
from msrun.parallel.servers.recipe import Recipe
from msrun.parallel.servers.wire import (
    HEAD,
    RANK,
    SERVER,
    Begin,
    Begun,
    Hail,
    Packet,
    SessionPlan,
    Setup,
    WantContents,
    decode,
    encode,
)
from msrun.transport.data_sockets import DataConnection
from msrun.transport.loop import new_context

pytestmark = pytest.mark.torch

PATIENCE = 60
WEIGHT = Table(name="weight", rows=4, row_bytes=8)


def plan_of(session):
    return SessionPlan(
        session=session,
        tables=[WEIGHT],
        recipe=Recipe(kind="SGD", options={}),
        rules=Rules(),
        workers=1,
        suppliers={"weight": 0},
    )


PLAN = plan_of("1-2-a")
# Of an earlier generation, whatever it counts, and an earlier one of the same generation.
EARLIER = ["0-9-b", "1-1-c"]
SNAPSHOT = Snapshot(epoch=1, version=6, clocks={0: 6})


class Coordinator:
    """Stands in for all that talk to one server: the coordinator, and a rank."""

    def __init__(self, job, folder, number=1):
        self._server = (SERVER, number)
        patience = timedelta(seconds=PATIENCE)
        self.store = dist.PrefixStore(
            "msrun_servers", dist.TCPStore("127.0.0.1", job.store.port, timeout=patience)
        )
        port, host = self.store.get(str(number)).decode().split()
        self._context = new_context()
        self._connection = DataConnection(
            self._context, (host, int(port)), read_key(str(folder)), peers=4
        )
        assert self._connection.wait_up(PATIENCE * 1000)

    def say(self, word, *, session=PLAN.session, sender=(HEAD, 0), target=None, payload=None):
        packet = Packet(session=session, sender=sender, target=target or self._server, word=word)
        assert self._connection.send(encode(packet, payload))

    def hear(self):
        return [packet.word for packet in self.hear_packets()]

    def hear_packets(self):
        assert self._connection.socket.poll(PATIENCE * 1000)
        return [decode(parts)[0] for parts in self._connection.receive()]

    def hear_until(self, kind):
        """Return the first word of a kind."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            for word in self.hear():
                if isinstance(word, kind):
                    return word
        raise AssertionError(f"no {kind.__name__}")

    def close(self):
        self._connection.close()
        self._context.term()


@contextmanager
def started_again(folder, monkeypatch):
    """Start a server that has a session and a snapshot on its disk, and a store without a word."""
    disk = ServerDisk(folder / "server-1")
    disk.write_plan(PLAN)
    disk.save(SNAPSHOT, {})
    with serving(folder, monkeypatch, 2, 1, numbers=[1]) as job:
        coordinator = Coordinator(job, folder)
        try:
            yield coordinator, disk
        finally:
            coordinator.close()


def test_a_server_that_hears_of_its_session_from_the_coordinator_keeps_its_snapshots(
    tmp_path, monkeypatch
):
    """After kills of all servers the coordinator may be faster than the store."""
    with started_again(tmp_path, monkeypatch) as (coordinator, disk):
        coordinator.say(Begin(plan=PLAN))

        words = coordinator.hear()

        assert Begun() in words or ServerHello(server=1, life=0) in words
        assert disk.snapshots() == [SNAPSHOT]


def test_a_server_goes_on_with_a_session_that_the_store_names_later(tmp_path, monkeypatch):
    """The ranks say which session they are in just after the coordinator has begun it."""
    with started_again(tmp_path, monkeypatch) as (coordinator, disk):
        coordinator.say(Hail())  # so that it knows a way to the coordinator

        coordinator.store.set("session", PLAN.session)

        assert ServerHello(server=1, life=0) in coordinator.hear()
        assert disk.snapshots() == [SNAPSHOT]


@pytest.mark.parametrize("earlier", EARLIER)
def test_a_server_takes_nothing_of_an_earlier_session(earlier, tmp_path, monkeypatch):
    """What ranks that were killed have sent may arrive after those that took their place begin."""
    rank, step = (RANK, 0), {"worker": 0, "life": 0, "epoch": 1}
    push = Push(**step, clock=6, floor=6, settled=6, safe=0)
    gradients = {"gradients": {}, "options": {}}
    owned = Ownership(epoch=1, version=0, clocks={0: 0}, owners={"weight": [1]})
    with started_again(tmp_path, monkeypatch) as (coordinator, disk):
        coordinator.say(Begin(plan=PLAN))
        coordinator.say(Adopt(term=0, count=1, ownership=owned, before=None))
        coordinator.hear_until(Adopted)
        coordinator.say(Open(term=0, count=2, epoch=1))
        coordinator.hear_until(Opened)

        coordinator.say(Begin(plan=plan_of(earlier)), session=earlier)
        coordinator.say(push, session=earlier, sender=rank, payload=gradients)
        coordinator.say(WorkerHello(**step), sender=rank)

        assert coordinator.hear_until(Welcome).clock == 6
        assert disk.plan() == PLAN
        assert disk.snapshots() == [SNAPSHOT]


@pytest.mark.parametrize("earlier", EARLIER)
def test_a_coordinator_begins_no_earlier_session(earlier, tmp_path, monkeypatch):
    rank, head = (RANK, 0), (HEAD, 0)
    with serving(tmp_path, monkeypatch, 1, 1) as job:
        ranks = Coordinator(job, tmp_path, 0)
        ranks.say(Setup(plan=PLAN), sender=rank, target=head)
        ranks.say(Hail(), sender=rank)
        ranks.store.set("session", PLAN.session)
        ranks.hear_until(WantContents)

        ranks.say(Setup(plan=plan_of(earlier)), session=earlier, sender=rank, target=head)
        for session in (earlier, PLAN.session):
            ranks.say(Hail(), session=session, sender=rank)

        assert {packet.session for packet in ranks.hear_packets()} == {PLAN.session}
        assert ServerDisk(tmp_path / "head").plan() == PLAN
        ranks.close()


def look_up(begun):
    rt = msrun.init({"servers": {"params": ["weight"]}})
    model = rt.shard(torch.nn.Embedding(4, 2, _weight=torch.ones(4, 2)))
    begun.touch()
    rt.optimizer(torch.optim.SGD(model.parameters()))
    found = model(torch.arange(4))
    rt.close()
    return found.tolist()


def test_ranks_find_a_server_that_was_killed_before_they_reached_it(tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    with (
        socket.socket() as taken,
        serving(tmp_path, monkeypatch, 1, 1, numbers=[]) as job,
    ):
        taken.bind(("127.0.0.1", 0))  # nobody listens there, or may
        _, port = taken.getsockname()
        job.store.set("msrun_servers/0", f"{port} 127.0.0.1")  # of its first life

        def start():
            while not begun.exists():
                job.over.wait(0.01)
            job.start(0)
            job.over.wait()

        starter = threading.Thread(target=start, daemon=True)
        starter.start()
        found = run_warm(look_up, 1, begun)

    assert found == [[[1.0, 1.0]] * 4]
