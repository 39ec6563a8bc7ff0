"""torch's own store client against our store, beside torch's own server: both behave alike."""

import multiprocessing
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.torch

SERVE = """
import os, socket, sys
from msrun.supervise.orders import SpawnStore
from msrun.worker.store.serving import serve
serve(SpawnStore(generation=0), (int(sys.argv[1]),))
"""
HELLO = b"\0\xce\xf7\x85\x3c"
SHORT = timedelta(milliseconds=200)


class Ours:
    """A store process of ours."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
            self.port = listening.getsockname()[1]
            command = [sys.executable, "-c", SERVE, str(listening.fileno())]
            fds = [listening.fileno()]
            self.process = subprocess.Popen(command, pass_fds=fds, stderr=subprocess.PIPE)

    def connect(self, **options):
        options = {"timeout": timedelta(seconds=20), "wait_for_workers": False, **options}
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, **options)

    def close(self):
        self.process.kill()
        self.said = self.process.communicate()[1].decode()


class Theirs(Ours):
    """torch's own server, which tells what is expected."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.server.port

    def close(self):
        self.server = None


@pytest.fixture
def ours():
    server = Ours()
    yield server
    server.close()


@pytest.fixture(params=[Ours, Theirs], ids=["ours", "theirs"])
def server(request):
    found = request.param()
    yield found
    found.close()


@pytest.fixture(params=[True, False], ids=["libuv client", "classic client"])
def store(server, request):
    return server.connect(use_libuv=request.param)


def test_values(store):
    store.set("k", "v")
    store.set("empty", "")
    store.append("k", "w")
    store.append("new", "x")
    store.multi_set(["a", "b"], ["1", "2"])

    assert store.get("k") == b"vw"
    assert store.get("empty") == b""
    assert store.multi_get(["a", "new", "b"]) == [b"1", b"x", b"2"]
    assert store.check(["a", "k"])
    assert not store.check(["a", "none"])
    assert store.num_keys() == 5
    assert sorted(store.list_keys()) == ["a", "b", "empty", "k", "new"]
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() == 4


def test_numbers(store):
    assert [store.add("n", step) for step in (1, 5, -9)] == [1, 6, -3]
    assert store.get("n") == b"-3"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_compare_set(store):
    assert store.compare_set("k", "x", "new") == b"x"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "first") == b"first"
    assert store.compare_set("k", "x", "new") == b"first"
    assert store.compare_set("k", "first", "second") == b"second"
    assert store.get("k") == b"second"


def test_queues(server):
    store, other = server.connect(), server.connect()
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    for value in ("1", "2"):
        store.queue_push("q", value)
    assert other.queue_len("q") == 2
    assert [other.queue_pop("q"), other.queue_pop("q")] == [b"1", b"2"]
    found = []
    waiting = threading.Thread(target=lambda: found.append(other.queue_pop("q")))
    waiting.start()
    store.queue_push("q", "3")
    waiting.join(20)
    assert found == [b"3"]


def test_waits_end_in_time_or_by_the_last_key(server):
    store, other = server.connect(), server.connect()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
        store.wait(["a", "b"], SHORT)
    with pytest.raises(dist.DistStoreError):
        server.connect(timeout=SHORT).get("a")
    assert store.add("still", 1) == 1
    woken = threading.Event()

    def wait():
        store.wait(["a", "b"], timedelta(seconds=20))
        woken.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    other.set("a", "")
    assert not woken.wait(0.1)
    other.set("b", "")
    waiting.join(20)
    assert woken.is_set()


def test_a_barrier_of_the_store(server):
    stores = [server.connect() for _ in range(8)]
    with pytest.raises(dist.DistStoreError, match="barrier timeout"):
        stores[0].barrier("alone", 2, SHORT)
    arrived = []

    def meet(store):
        store.barrier("all", len(stores), timedelta(seconds=20))
        arrived.append(store)

    threads = [threading.Thread(target=meet, args=(store,)) for store in stores]
    for thread in threads[1:]:
        thread.start()
    assert arrived == []
    threads[0].start()
    for thread in threads:
        thread.join(20)
    assert len(arrived) == len(stores)


def test_prefixes_and_clones(store):
    one, two = dist.PrefixStore("one", store), dist.PrefixStore("two", store)
    one.set("k", "1")
    two.set("k", "2")
    copy = dist.PrefixStore("one", store.clone())

    assert [one.get("k"), two.get("k"), copy.get("k")] == [b"1", b"2", b"1"]
    assert sorted(store.list_keys()) == ["one/k", "two/k"]


def test_the_largest_key_and_value(store):
    key, value = "k" * ((8 << 10) - 1), bytes(range(256)) * (32 << 10)

    store.set(key, value.decode("latin-1").encode("latin-1"))

    assert store.get(key) == value


def test_what_is_too_large_ends_the_connection_and_no_other(server):
    store, other = server.connect(), server.connect()

    def ask_twice():
        store.set("k", bytes((8 << 20) + 1))
        store.get("k")

    with pytest.raises(dist.DistError):
        ask_twice()
    assert not other.check(["k"])


def test_a_client_that_ends_in_the_midst_of_a_request_leaves_no_trace(ours):
    store = ours.connect()
    for cut in range(1, 60, 3):
        with socket.create_connection(("127.0.0.1", ours.port)) as sock:
            whole = HELLO + b"\1" + (5).to_bytes(8, "little") + b"/part"
            sock.sendall((whole + (1000).to_bytes(8, "little") + bytes(100))[:cut])
    store.set("k", "v")

    assert store.list_keys() == ["k"]


def test_a_client_that_takes_no_answers_keeps_nobody_from_theirs(ours):
    store = ours.connect()
    store.set("k", bytes(8 << 20))
    with socket.create_connection(("127.0.0.1", ours.port)) as sock:
        get = b"\3" + (2).to_bytes(8, "little") + b"/k"
        sock.sendall(HELLO + get * 64)
        sock.settimeout(0)
        began = time.monotonic()
        assert [store.add("n", 1) for _ in range(1000)][-1] == 1000
        assert time.monotonic() - began < 10
        rss = Path(f"/proc/{ours.process.pid}/statm").read_text().split()[1]
    assert int(rss) * 4096 < 1 << 30


def test_many_clients_wait_for_one_key(ours):
    stores = [ours.connect() for _ in range(50)]
    done = []
    threads = [
        threading.Thread(target=lambda store=store: done.append(store.get("k"))) for store in stores
    ]
    for thread in threads:
        thread.start()
    stores[0].clone().set("k", "v")
    for thread in threads:
        thread.join(20)
    assert done == [b"v"] * 50


# What PyTorch's own test/distributed/test_store.py asks of a server, beyond the lines above.


def test_keys_that_are_deleted_are_waited_for_again(store):
    for key, value in {"key": "1", "key0": "value0", "-key3": "7"}.items():
        store.set(key, value)
    assert store.get("-key3") == b"7"
    assert store.delete_key("key")
    store.set_timeout(SHORT)

    with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms, keys: /key"):
        store.get("key")

    assert store.num_keys() == 2
    store.set("key", "again")
    assert store.get("key") == b"again"


def test_a_queue_is_a_key_while_it_holds_something(server):
    store = server.connect()
    assert not store.check(["q"])
    assert store.queue_len("q") == 0
    store.queue_push("q", "1")
    assert store.check(["q"])
    store.wait(["q"], SHORT)
    assert store.queue_pop("q") == b"1"
    assert not store.check(["q"])
    assert store.queue_len("q") == 0

    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.queue_pop("q")
    store.queue_push("q", "2")
    assert store.queue_pop("q", block=False) == b"2"


def test_two_talk_through_queues(server):
    store = server.connect()

    def ask(own):
        own.queue_push("question", "a1")
        return own.queue_pop("answer")

    def answer(own):
        question = own.queue_pop("question")
        own.queue_push("answer", "b1")
        return question

    with ThreadPoolExecutor(2) as pool:
        asked, answered = pool.submit(ask, store.clone()), pool.submit(answer, store.clone())

    assert (asked.result(20), answered.result(20)) == (b"b1", b"a1")


@pytest.mark.parametrize("libuv", [True, False], ids=["libuv client", "classic client"])
def test_a_world_of_a_fixed_size_counts_itself(server, libuv):
    """`wait_for_workers`, torch's default, counts the clients under a key of its own."""
    stores = []
    for index in range(5):
        joined = server.connect(world_size=5, wait_for_workers=index == 4, use_libuv=libuv)
        joined.set(f"key{index}", f"value{index}")
        expected = joined.compare_set(f"key{index}", f"value{index}", f"next{index}")
        assert expected == f"next{index}".encode()
        stores.append(joined)

    assert stores[0].num_keys() == 6


def test_a_signal_does_not_break_a_wait(server):
    store, other = server.connect(), server.connect()
    found = []
    waiting = threading.Thread(target=lambda: found.append(store.get("k")))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        waiting.start()
        for _ in range(20):
            signal.pthread_kill(waiting.ident, signal.SIGUSR1)
        other.set("k", "v")
        waiting.join(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [b"v"]


def test_one_that_would_be_the_server_becomes_a_client_of_the_agents_store(server, monkeypatch):
    """As torch's `env://` does in a worker: TORCHELASTIC_USE_AGENT_STORE decides."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    server.connect().set("k", "v")

    master = dist.TCPStore(
        "127.0.0.1", server.port, world_size=1, is_master=True, wait_for_workers=False
    )

    assert master.port == server.port
    assert master.get("k") == b"v"


def _member(rank, size, port, answers):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = [dist.new_group(list(range(n, size))) for n in range(size)]
    dist.monitored_barrier(timeout=timedelta(seconds=30))
    everything = [None] * size
    dist.all_gather_object(everything, (rank, len(groups)))
    dist.barrier()
    answers.put(everything)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_process_group_with_sub_groups_forms(ours, size):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_member, args=(rank, size, ours.port, answers))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()

    assert [answers.get(timeout=90) for _ in ranks] == [[(r, size) for r in range(size)]] * size
    for rank in ranks:
        rank.join(20)


def test_open_files_are_not_limited_by_the_soft_limit():
    """Point 11: 128 refused client 114, and a thousand would have ended at rank 1,010."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        server = Ours()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        for number, client in enumerate(clients):
            client.sendall(HELLO + b"\x0d" + number.to_bytes(4, "little"))
        assert [int.from_bytes(client.recv(4), "little") for client in clients] == list(range(300))
        for client in clients:
            client.close()
    finally:
        server.close()
