"""How long one of thousands of nodes that come at once may wait for its handshake."""

import pytest
import zmq

from msrun.transport.loop import new_context
from msrun.transport.sockets import AgentSocket, SchedulerSocket, endpoint, listen

SECRET = bytes(range(32))


@pytest.mark.parametrize(("nnodes", "seconds"), [(2, 5), (1000, 7), (10_000, 25), (1_000_000, 45)])
def test_a_handshake_may_take_longer_where_many_come_at_once(nnodes, seconds):
    context = new_context()
    end = SchedulerSocket(context, listen("127.0.0.1", 0), SECRET, nnodes)
    agent = AgentSocket(context, endpoint("127.0.0.1", 1), SECRET, nnodes)
    server, client = (each.socket.getsockopt(zmq.HANDSHAKE_IVL) for each in (end, agent))
    context.destroy(linger=0)

    assert round(server / 1000) == seconds
    assert server - client == 1500  # who is not answered says so before it is sent away
