"""The forkserver's orders that need no worker of its own."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from msrun.supervise import forkserver
from msrun.supervise.channel import Channel, ChannelClosed
from msrun.supervise.orders import ForkserverOrder, SignalWorkers
from msrun.worker.mindspore_call import MindSporeCall


@pytest.fixture
def sleeper():
    """A process that only a signal ends."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as child:
        yield child
        child.kill()


def test_a_signal_that_does_not_exist_is_sent_to_nobody(sleeper):
    ours, theirs = socket.socketpair()
    wakeup, other = os.pipe()
    with ours, theirs:
        channel = Channel(ours, ForkserverOrder)
        server = forkserver.Forkserver(channel, None, SimpleNamespace(door=MindSporeCall()), wakeup)
        server._children[sleeper.pid] = forkserver._Child(0, 0)
        agent = Channel(theirs, ForkserverOrder)
        for signum in (200, 65, 0, -1, signal.SIGTERM):
            agent.send(SignalWorkers(ranks=[0], signum=signum))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):
            server.serve()
    os.close(wakeup)
    os.close(other)

    assert sleeper.wait(timeout=30) == -signal.SIGTERM
