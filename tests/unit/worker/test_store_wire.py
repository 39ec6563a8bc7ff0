"""The bytes of torch's store protocol, without a socket; torch's own client is in `tests/torch`."""

import os
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.worker.store import wire
from msrun.worker.store.keys import VALUE_BYTES_MAX, StoreKeys, StoreRefusal
from msrun.worker.store.wire import StoreClient

HELLO = struct.pack("<BI", wire.VALIDATE, wire.VALIDATION)
FRAMES = int(os.environ.get("MSRUN_STORE_FRAMES", "20000"))


class Line:
    def __init__(self):
        self.sent = b""

    def send(self, data):
        self.sent += data


class Peer:
    """A client and what it has been sent."""

    def __init__(self, keys, *, hello=True):
        self.line = Line()
        self.client = StoreClient(keys, self.line)
        if hello:
            self.client.feed(HELLO)

    def ask(self, *parts):
        """Send a request; return what has come since the last call."""
        self.client.feed(request(*parts))
        return self.take()

    def take(self):
        sent, self.line.sent = self.line.sent, b""
        return sent


def text(value):
    return struct.pack("<Q", len(value)) + value


def number(value):
    return struct.pack("<q", value)


def request(kind, *parts):
    encoded = [text(part) if isinstance(part, bytes) else number(part) for part in parts]
    return bytes([kind]) + b"".join(encoded)


@pytest.fixture
def keys():
    return StoreKeys(1 << 20)


@pytest.fixture
def peer(keys):
    return Peer(keys)


@pytest.fixture
def other(keys):
    return Peer(keys)


def test_a_client_that_does_not_validate_itself_is_refused(keys):
    with pytest.raises(StoreRefusal, match="does not speak"):
        Peer(keys, hello=False).ask(wire.SET, b"k", b"v")
    with pytest.raises(StoreRefusal, match="does not speak"):
        Peer(keys, hello=False).client.feed(struct.pack("<BI", 0, 1))
    assert keys.values == {}


def test_set_get_add_check_delete_and_count(peer):
    assert peer.ask(wire.SET, b"k", b"v") == b""
    assert peer.ask(wire.GET, b"k") == text(b"v")
    assert peer.ask(wire.GET, b"none") == text(b"")
    assert peer.ask(wire.ADD, b"n", 5) == number(5)
    assert peer.ask(wire.ADD, b"n", -7) == number(-2)
    assert peer.ask(wire.GET, b"n") == text(b"-2")
    assert peer.ask(wire.CHECK, 2, b"k", b"n") == wire.READY
    assert peer.ask(wire.CHECK, 2, b"k", b"x") == wire.NOT_READY
    assert peer.ask(wire.NUM_KEYS) == number(2)
    assert peer.ask(wire.DELETE_KEY, b"k") == number(1)
    assert peer.ask(wire.DELETE_KEY, b"k") == number(0)
    assert peer.ask(wire.LIST_KEYS) == number(1) + text(b"n")


def test_a_ping_is_answered_with_its_number(peer):
    peer.client.feed(b"\x0d1234")

    assert peer.take() == b"1234"


@pytest.mark.parametrize(
    ("before", "expected", "after"),
    [(None, b"", b"new"), (None, b"x", None), (b"old", b"old", b"new"), (b"old", b"x", b"old")],
)
def test_compare_set(peer, keys, before, expected, after):
    if before is not None:
        peer.ask(wire.SET, b"k", before)

    answer = peer.ask(wire.COMPARE_SET, b"k", expected, b"new")

    assert keys.values.get(b"k") == after
    assert answer == text(after if after is not None else expected)


def test_several_keys_and_appended_values(peer):
    peer.ask(wire.MULTI_SET, 2, b"a", b"1", b"b", b"2")
    peer.ask(wire.APPEND, b"a", b"3")
    peer.ask(wire.APPEND, b"c", b"4")

    assert peer.ask(wire.MULTI_GET, 3, b"a", b"b", b"c") == text(b"13") + text(b"2") + text(b"4")


def test_a_wait_ends_when_the_last_key_is_there_and_once(peer, other):
    assert peer.ask(wire.WAIT, 2, b"a", b"b") == b""
    other.ask(wire.SET, b"a", b"")
    other.ask(wire.SET, b"a", b"")
    assert peer.take() == b""
    other.ask(wire.ADD, b"b", 1)
    other.ask(wire.SET, b"b", b"")
    assert peer.take() == wire.STOP_WAITING
    assert peer.ask(wire.WAIT, 2, b"a", b"b") == wire.STOP_WAITING


def test_a_cancelled_wait_is_not_answered_later(peer, other):
    peer.ask(wire.WAIT, 1, b"a")

    assert peer.ask(wire.CANCEL_WAIT) == wire.WAIT_CANCELED
    other.ask(wire.SET, b"a", b"")
    assert peer.take() == b""


def test_a_client_that_ends_waits_no_more(keys, peer, other):
    peer.ask(wire.WAIT, 1, b"a")
    peer.client.end()
    other.ask(wire.SET, b"a", b"")

    assert peer.take() == b""
    assert keys.values == {b"a": b""}


def test_a_client_that_waits_for_what_it_sets_itself_gets_answers_in_order(peer):
    ask = request(wire.CHECK, 1, b"k") + request(wire.WAIT, 1, b"k") + request(wire.SET, b"k", b"")

    peer.client.feed(ask + request(wire.CHECK, 1, b"k"))

    assert peer.take() == wire.NOT_READY + wire.STOP_WAITING + wire.READY


def test_a_queue_gives_values_in_order_and_wakes_one_waiter_a_value(peer, other):
    peer.ask(wire.WAIT, 1, b"q")
    other.ask(wire.WAIT, 1, b"q")
    assert peer.ask(wire.QUEUE_PUSH, b"q", b"1") == wire.STOP_WAITING
    assert other.take() == b""
    peer.ask(wire.QUEUE_PUSH, b"q", b"2")
    assert other.take() == wire.STOP_WAITING
    assert peer.ask(wire.QUEUE_LEN, b"q") == number(2)
    assert peer.ask(wire.QUEUE_POP, b"q") == number(2) + text(b"1")
    assert peer.ask(wire.QUEUE_POP, b"q") == number(1) + text(b"2")
    assert peer.ask(wire.QUEUE_POP, b"q") == number(0)
    assert peer.ask(wire.QUEUE_LEN, b"q") == number(0)


def test_a_barrier_lets_all_go_when_the_last_has_come(peer, other):
    assert peer.ask(wire.BARRIER, b"b", 2) == b""
    assert other.ask(wire.BARRIER, b"b", 2) == wire.STOP_WAITING
    assert peer.take() == wire.STOP_WAITING


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (bytes([99]), "request 99 is unknown"),
        (HELLO, "validates itself once"),
        (request(wire.GET, b"k" * 8193), "a key has 8193 bytes"),
        (bytes([wire.SET]) + text(b"k") + struct.pack("<Q", (8 << 20) + 1), "a value has 8388609"),
        (bytes([wire.WAIT]) + struct.pack("<Q", 1 << 60), "keys \\(at most 131072\\)"),
        (request(wire.ADD, b"k", 1), "'k' holds no number"),
        (request(wire.ADD, b"n", (1 << 63) - 1), "exceeds 64 bits"),
        (request(wire.SET, b"big", bytes(1 << 20)), "the store is full"),
        (request(wire.QUEUE_PUSH, b"big", bytes(1 << 20)), "the store is full"),
    ],
)
def test_what_is_refused_changes_nothing_and_is_told(peer, keys, ask, why):
    peer.ask(wire.MULTI_SET, 2, b"k", b"text", b"n", b"1")
    before = dict(keys.values), keys.size

    with pytest.raises(StoreRefusal, match=why):
        peer.client.feed(ask)

    assert (dict(keys.values), keys.size) == before


def test_a_value_grows_by_appends_to_its_limit(peer):
    keys = StoreKeys(1 << 40)
    peer = Peer(keys)
    for _ in range(8):
        peer.ask(wire.APPEND, b"k", bytes(8 << 20))

    with pytest.raises(StoreRefusal, match="would exceed 64 MiB"):
        peer.ask(wire.APPEND, b"k", b"1")
    assert len(keys.values[b"k"]) == VALUE_BYTES_MAX


def test_an_endless_request_of_many_keys_ends():
    peer = Peer(StoreKeys(1 << 30))
    peer.client.feed(bytes([wire.MULTI_SET]) + struct.pack("<Q", 100))

    def send():
        eight = 8 * (text(b"k") + text(bytes(8 << 20)))  # each piece copies all before it
        for _ in range(12):
            peer.client.feed(eight)

    with pytest.raises(StoreRefusal, match="longer than 256 MiB"):
        send()


def test_the_size_is_what_is_there(peer, keys):
    for key in (b"a", b"b", b"c"):
        peer.ask(wire.SET, key, b"1234")
        peer.ask(wire.APPEND, key, b"5")
        peer.ask(wire.QUEUE_PUSH, key, b"6")
        peer.ask(wire.BARRIER, b"n" + key, 9)
    for key in (b"a", b"b", b"c"):
        peer.ask(wire.DELETE_KEY, key)
        peer.ask(wire.DELETE_KEY, b"n" + key)
        peer.ask(wire.QUEUE_POP, key)

    assert (keys.size, keys.values) == (0, {})


ASKS = st.one_of(
    st.tuples(st.just(wire.SET), st.binary(max_size=9), st.binary(max_size=99)),
    st.tuples(st.just(wire.GET), st.binary(max_size=9)),
    st.tuples(st.just(wire.ADD), st.just(b"number"), st.integers(-5, 5)),
    st.tuples(st.just(wire.CHECK), st.just(2), st.binary(max_size=9), st.binary(max_size=9)),
    st.tuples(st.just(wire.MULTI_SET), st.just(2), *[st.binary(max_size=9)] * 4),
    st.tuples(st.just(wire.QUEUE_PUSH), st.binary(max_size=9), st.binary(max_size=9)),
    st.tuples(st.just(wire.QUEUE_POP), st.binary(max_size=9)),
    st.tuples(st.just(wire.LIST_KEYS)),
)


@given(st.lists(ASKS, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_how_a_request_is_cut_into_pieces_does_not_matter(asks, sizes):
    whole, pieces = Peer(StoreKeys(1 << 20)), Peer(StoreKeys(1 << 20))
    data = b"".join(request(*ask) for ask in asks)

    whole.client.feed(data)
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        pieces.client.feed(data[at : at + size])
        at += size

    assert pieces.take() == whole.take()


def test_a_large_value_in_small_pieces_costs_no_quadratic_time():
    """Of 8 MiB in 2,048 pieces; parsed again for each, it would be copied 2,048 times."""
    peer = Peer(StoreKeys(1 << 30))
    data = request(wire.SET, b"k", bytes(8 << 20))
    joins = 0

    for at in range(0, len(data), 4096):
        peer.client.feed(data[at : at + 4096])
        joins += peer.client._chunks == []

    assert joins == 1


def _damaged(chance):
    """Return a request, most of them with something wrong."""
    kind = chance.randrange(20)
    parts = [
        chance.choice((text(chance.randbytes(chance.randrange(20))), number(chance.randrange(4))))
        for _ in range(chance.randrange(5))
    ]
    data = bytearray(bytes([kind]) + b"".join(parts))
    for _ in range(chance.choice((0, 0, 1, 3))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.choice((len(data), chance.randrange(len(data) + 1)))])


@pytest.mark.timeout(900)
def test_noise_is_served_or_refused_and_the_store_stays_within_its_bound():
    """S-19; `MSRUN_STORE_FRAMES=1000000` for a million."""
    chance = random.Random(15)
    keys = StoreKeys(1 << 16)
    peers = [Peer(keys) for _ in range(8)]
    refused = answered = 0
    for _ in range(FRAMES):
        n = chance.randrange(len(peers))
        is_over = chance.random() < 0.3  # else most bytes would be those of an endless value
        try:
            peers[n].client.feed(_damaged(chance))
        except StoreRefusal:
            refused += 1
            is_over = True
        answered += bool(peers[n].take())
        if is_over:
            peers[n].client.end()
            peers[n] = Peer(keys)
        assert 0 <= keys.size <= 1 << 16
    for peer in peers:
        peer.client.end()

    assert refused > FRAMES // 20
    assert answered > FRAMES // 20
    assert not keys._waiting
    assert not keys._missing
