"""Probing an address when there is no file left to do it with."""

import errno
import os
import resource
import socket

import pytest
from ports import free_port

from msrun.transport.loop import Loop
from msrun.transport.probe import Prober


def test_a_probe_waits_for_a_free_file():
    loop = Loop()
    prober = Prober(loop)
    answers = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        descriptor = os.dup(0)
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor, before[1]))
        try:
            prober.probe("127.0.0.1", server.getsockname()[1], answers.append)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        waiting = (list(answers), prober.deadline() is not None)
        loop.run(lambda: prober.deadline() if not answers else stop(loop), prober.tick)
    loop.close()

    assert waiting == ([], True)
    assert answers == [0]


def stop(loop):
    loop.stop()
    return loop.now()


def test_a_probe_of_a_port_at_which_nobody_listens_is_refused():
    loop = Loop()
    prober = Prober(loop)
    answers = []
    prober.probe("127.0.0.1", free_port(), answers.append)
    loop.run(lambda: prober.deadline() if not answers else stop(loop), prober.tick)
    loop.close()

    assert answers == [errno.ECONNREFUSED]


class Frozen(Loop):
    """A loop of a process that was frozen."""

    def now(self):
        return super().now() + self.seconds

    seconds = 0.0


def test_an_answer_that_came_while_this_process_was_frozen_counts():
    loop = Frozen()
    prober = Prober(loop)
    answers = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        prober.probe("127.0.0.1", server.getsockname()[1], answers.append)
        loop.seconds = 100.0
        prober.tick()
    loop.close()

    assert answers == [0]


@pytest.mark.parametrize("host", ["", "localhost", "x" * 300, "256.0.0.1"])
def test_a_name_is_not_looked_up(host):
    loop = Loop()
    answers = []
    Prober(loop).probe(host, 1, answers.append)
    loop.close()

    assert answers == [errno.EADDRNOTAVAIL]


def test_an_end_between_a_connection_and_its_answer_is_noticed():
    """The listener ends while the connection waits to be accepted: the kernel resets it."""
    loop = Loop()
    prober = Prober(loop)
    ended = []
    server = socket.create_server(("127.0.0.1", 0))
    prober.watch_end("127.0.0.1", server.getsockname()[1], lambda: ended.append(loop.now()))
    server.close()
    is_over = loop.now() + 5
    loop.run(
        lambda: stop(loop) if ended or loop.now() > is_over else prober.deadline() or is_over,
        prober.tick,
    )
    loop.close()

    assert len(ended) == 1
