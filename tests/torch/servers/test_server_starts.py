"""A server that was killed starts again, whatever it hears first."""

import socket
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_warm
from server_jobs import serving

import msrun
from msrun.cluster.servers.events import Rules
from msrun.cluster.servers.messages import ServerHello, Snapshot
from msrun.parallel.servers.addresses import read_key
from msrun.parallel.servers.disk import ServerDisk
from msrun.parallel.servers.recipe import Recipe
from msrun.parallel.servers.wire import (
    HEAD,
    SERVER,
    Begin,
    Begun,
    Hail,
    Packet,
    SessionPlan,
    decode,
    encode,
)
from msrun.transport.data_sockets import DataConnection
from msrun.transport.loop import new_context

pytestmark = pytest.mark.torch

PATIENCE = 60
PLAN = SessionPlan(
    session="0-1-a",
    tables=[],
    recipe=Recipe(kind="SGD", options={}),
    rules=Rules(),
    workers=1,
    suppliers={},
)
SNAPSHOT = Snapshot(epoch=1, version=6, clocks={0: 6})


class Coordinator:
    """Stands in for server 0, which has the coordinator beside itself, and talks to server 1."""

    def __init__(self, job, folder):
        patience = timedelta(seconds=PATIENCE)
        self.store = dist.PrefixStore(
            "msrun_servers", dist.TCPStore("127.0.0.1", job.store.port, timeout=patience)
        )
        port, host = self.store.get("1").decode().split()
        self._context = new_context()
        self._connection = DataConnection(
            self._context, (host, int(port)), read_key(str(folder)), peers=4
        )
        assert self._connection.wait_up(PATIENCE * 1000)

    def say(self, word):
        packet = Packet(session=PLAN.session, sender=(HEAD, 0), target=(SERVER, 1), word=word)
        assert self._connection.send(encode(packet))

    def hear(self):
        assert self._connection.socket.poll(PATIENCE * 1000)
        return [decode(parts)[0].word for parts in self._connection.receive()]

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
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(tmp_path, monkeypatch, 1, 1, numbers=[]) as job,
    ):
        _, port = taken.getsockname()
        taken.close()
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
