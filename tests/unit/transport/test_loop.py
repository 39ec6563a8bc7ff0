"""The poll loop: its clock, its sources and its signals."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from msrun.transport.loop import Loop, pause, wait_readable


@pytest.fixture
def loop():
    before = signal.getsignal(signal.SIGUSR1)
    loop = Loop()
    yield loop
    loop.close()
    signal.signal(signal.SIGUSR1, before)


class Timers:
    """Due times and what is written down when each has come."""

    def __init__(self, loop, *delays):
        self.loop = loop
        self.due = sorted(loop.now() + delay for delay in delays)
        self.late = []

    def deadline(self):
        return self.due[0] if self.due else None

    def tick(self):
        self.late.append(self.loop.now() - self.due.pop(0))
        if not self.due:
            self.loop.stop()


def test_ticks_come_in_order_and_never_early(loop):
    timers = Timers(loop, 0.02, 0.0, -1.0, 0.01)
    loop.run(timers.deadline, timers.tick)

    assert len(timers.late) == 4
    assert min(timers.late) >= 0.0


def test_a_readable_source_is_handled(loop):
    ours, theirs = socket.socketpair()
    received = []

    def handle():
        received.append(ours.recv(10))
        loop.stop()

    loop.watch(ours.fileno(), handle)
    theirs.send(b"x")
    loop.run(lambda: None, lambda: None)
    ours.close()
    theirs.close()

    assert received == [b"x"]


def test_a_loop_that_rests_lets_more_come_before_it_looks_again():
    ours, theirs = socket.socketpair()
    loop, looked = Loop(rest=0.02), []

    def handle():
        looked.append(loop.now())
        if len(looked) == 2:
            loop.stop()

    loop.watch(ours.fileno(), handle)
    theirs.send(b"x")
    loop.run(lambda: None, lambda: None)
    loop.close()
    ours.close()
    theirs.close()

    assert looked[1] - looked[0] >= 0.02


def test_a_closed_peer_makes_a_source_readable(loop):
    ours, theirs = socket.socketpair()
    loop.watch(ours.fileno(), loop.stop)
    theirs.close()
    loop.run(lambda: None, lambda: None)
    ours.close()


def test_a_forgotten_source_is_not_handled_though_it_is_readable(loop):
    first, second = socket.socketpair(), socket.socketpair()
    handled = []

    def handle(own, other):
        handled.append(own.recv(10))
        loop.forget(other.fileno())

    for own, other in ((first[0], second[0]), (second[0], first[0])):
        loop.watch(own.fileno(), lambda own=own, other=other: handle(own, other))
    for _, theirs in (first, second):
        theirs.send(b"x")
    loop.run(lambda: loop.now() if handled else None, loop.stop)
    for sock in (*first, *second):
        sock.close()

    assert handled == [b"x"]


def test_forgetting_what_is_not_watched_is_no_error(loop):
    loop.forget(12345)


def test_stop_leaves_the_other_readable_sources_alone(loop):
    pairs = [socket.socketpair() for _ in range(3)]
    handled = []
    for ours, theirs in pairs:
        loop.watch(ours.fileno(), lambda: (handled.append(1), loop.stop()))
        theirs.send(b"x")
    loop.run(lambda: None, lambda: None)
    for sock in sum(pairs, ()):
        sock.close()

    assert handled == [1]


def test_a_signal_is_handled_in_the_loop_and_not_in_between(loop):
    received = []
    loop.on_signals([signal.SIGUSR1], lambda signum: (received.append(signum), loop.stop()))
    os.kill(os.getpid(), signal.SIGUSR1)
    before = list(received)
    loop.run(lambda: None, lambda: None)

    assert (before, received) == ([], [signal.SIGUSR1])


def test_a_signal_wakes_a_waiting_loop(loop):
    loop.on_signals([signal.SIGUSR1], lambda _: loop.stop())
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    loop.run(lambda: None, lambda: None)
    timer.join()


@pytest.mark.parametrize(("disposition", "expected"), [("SIG_IGN", 0), ("SIG_DFL", 1)])
def test_a_hangup_that_was_ignored_stays_ignored(disposition, expected):
    script = f"""
import os, signal
signal.signal(signal.SIGHUP, signal.{disposition})
from msrun.transport.loop import Loop
loop, received = Loop(), []
loop.on_signals([signal.SIGHUP, signal.SIGTERM],
                lambda n: (received.append(n), n == signal.SIGTERM and loop.stop()))
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getpid(), signal.SIGTERM)
loop.run(lambda: None, lambda: None)
print(received.count(signal.SIGHUP))
"""
    out = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=30)

    assert out == f"{expected}\n"


def test_waiting_for_a_silent_source_ends_in_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not wait_readable(ours, 0.001)
        theirs.send(b"x")
        assert wait_readable(ours, 10.0)


def test_a_pause_lasts_as_long_as_it_is_told_to():
    began = Loop.now()
    pause(0.05)

    assert Loop.now() - began >= 0.05
