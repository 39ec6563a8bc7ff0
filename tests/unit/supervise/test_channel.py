"""Messages between processes of one node, however the bytes arrive."""

import socket
import struct

import msgspec
import pytest

from msrun.supervise.channel import FRAME_BYTES_MAX, Channel, ChannelClosed, dump
from msrun.supervise.orders import Configure, ReaperOrder, Sweep

CONFIGURE = Configure(job_id="j", kind="script", argv=["x.py"], cwd="/", run_dir="/r", threads="1")


def frame(message):
    body = dump(message)
    return struct.pack("!I", len(body)) + body


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    channel = Channel(ours, ReaperOrder)
    yield channel, theirs
    channel.close()
    theirs.close()


def receive_all(channel):
    messages = []
    try:
        while True:
            messages += channel.receive()
    except ChannelClosed:
        return messages


def test_what_one_end_sends_the_other_receives(pair):
    channel, theirs = pair
    Channel(theirs, ReaperOrder).send(CONFIGURE)

    assert channel.receive() == [CONFIGURE]


def test_several_messages_arrive_in_one_read_in_order(pair):
    channel, theirs = pair
    theirs.sendall(b"".join(frame(Sweep(generation=g)) for g in range(3)))

    assert channel.receive() == [Sweep(generation=g) for g in range(3)]


def test_a_message_split_after_every_byte_arrives_whole(pair):
    channel, theirs = pair
    received = []
    for byte in frame(Sweep(generation=7)):
        theirs.sendall(bytes([byte]))
        received.append(channel.receive())

    assert received == [[]] * (len(received) - 1) + [[Sweep(generation=7)]]


def test_the_beginning_of_the_next_message_is_kept(pair):
    channel, theirs = pair
    first, second = frame(Sweep(generation=1)), frame(Sweep(generation=2))
    theirs.sendall(first + second[:5])
    before = channel.receive()
    theirs.sendall(second[5:])

    assert (before, channel.receive()) == ([Sweep(generation=1)], [Sweep(generation=2)])


def test_a_message_larger_than_one_read_arrives_whole(pair):
    channel, theirs = pair
    large = msgspec.structs.replace(CONFIGURE, argv=["x.py", "a" * 100_000])
    theirs.sendall(frame(large))
    theirs.close()

    assert receive_all(channel) == [large]


def test_a_closed_peer_shows_after_everything_it_sent(pair):
    channel, theirs = pair
    theirs.sendall(frame(Sweep(generation=1)))
    theirs.close()

    assert channel.receive() == [Sweep(generation=1)]
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_a_peer_that_closed_with_unread_bytes_is_closed_too(pair):
    channel, theirs = pair
    channel.send(Sweep(generation=1))
    theirs.close()

    with pytest.raises(ChannelClosed):
        channel.receive()


def test_half_a_message_of_a_closed_peer_is_no_message(pair):
    channel, theirs = pair
    theirs.sendall(frame(Sweep(generation=1))[:-1])
    theirs.close()

    assert receive_all(channel) == []


def test_sending_to_a_closed_peer_is_no_error(pair):
    channel, theirs = pair
    theirs.close()

    channel.send(Sweep(generation=1))
    channel.finish()


def test_a_frame_over_the_limit_ends_the_channel_before_it_is_stored(pair):
    channel, theirs = pair
    theirs.sendall(struct.pack("!I", FRAME_BYTES_MAX + 1))

    with pytest.raises(ChannelClosed):
        channel.receive()


def test_a_half_closed_channel_still_receives(pair):
    channel, theirs = pair
    channel.finish()
    theirs.sendall(frame(Sweep(generation=3)))

    assert (theirs.recv(1), channel.receive()) == (b"", [Sweep(generation=3)])


def test_bytes_that_are_no_order_are_an_error(pair):
    channel, theirs = pair
    theirs.sendall(frame({"type": "Reboot"}))

    with pytest.raises(msgspec.ValidationError):
        channel.receive()
