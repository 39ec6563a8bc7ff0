"""How long one of thousands of nodes that come at once may wait for its handshake."""

import contextlib
import resource

import pytest
import zmq

from msrun.cluster.wire import codec
from msrun.cluster.wire.messages import Envelope, Stop
from msrun.supervise.limits import raise_open_files
from msrun.transport.keys import key_pair
from msrun.transport.loop import new_context
from msrun.transport.sockets import (
    AGENT,
    SCHEDULER,
    AgentSocket,
    SchedulerSocket,
    endpoint,
    io_threads,
    listen,
)

NODES = 600
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


@pytest.mark.parametrize(
    ("nnodes", "cpus", "threads"), [(2, 64, 1), (1000, 2, 1), (500, 64, 3), (10_000, 64, 4)]
)
def test_many_nodes_are_served_by_several_threads_where_there_are_cpus(nnodes, cpus, threads):
    assert io_threads(nnodes, cpus) == threads


def test_all_of_many_are_admitted_and_none_keeps_a_place_at_the_gate():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_open_files() > 2 * NODES + 100
    theirs, ours = new_context(), new_context(4)
    listening = listen("127.0.0.1", 0)
    address = endpoint("127.0.0.1", listening.getsockname()[1])
    end = SchedulerSocket(ours, listening, SECRET, NODES)
    first = end.gate.socket
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        stack.callback(theirs.destroy, linger=0)
        stack.callback(ours.destroy, linger=0)
        crowd = crowd_socket(theirs)
        # Each half is enough for another gate, also where it is answered all at once.
        for half in range(2):
            numbers = range(half * NODES // 2, (half + 1) * NODES // 2)
            for number in numbers:
                connect(crowd, address, number)
            assert heard(end, len(numbers)) == {f"n{number}" for number in numbers}
        for number in range(NODES):
            end.send(says(number))
        assert {answered(crowd) for _ in range(NODES)} == {f"n{n}" for n in range(NODES)}
        assert first.closed


def crowd_socket(context):
    """Return a socket that has a connection for each node, as nodes have."""
    crowd = context.socket(zmq.ROUTER)
    own = key_pair(SECRET, AGENT)
    crowd.curve_publickey, crowd.curve_secretkey = own.public, own.secret
    crowd.curve_serverkey = key_pair(SECRET, SCHEDULER).public
    return crowd


def connect(crowd, address, number):
    crowd.setsockopt(zmq.CONNECT_ROUTING_ID, b"n%d" % number)
    crowd.setsockopt(zmq.ROUTING_ID, b"a%d" % number)
    crowd.connect(address)
    crowd.send_multipart([b"n%d" % number, codec.encode(says(number))])


def answered(crowd):
    """Return the next node that gets something."""
    assert crowd.poll(10_000)
    return codec.decode(crowd.recv_multipart()[1]).node_id


def says(number):
    """Return a message of, or to, a node."""
    who = {"job_id": "j", "node_id": f"n{number}", "incarnation": 1, "generation": 0}
    return Envelope(**who, body=Stop(reason="why"))


def heard(end, count):
    """Admit whoever asks until so many nodes were heard; return them."""
    nodes = set()
    while len(nodes) < count:
        poller = zmq.Poller()
        for source in filter(None, (end.socket, end.gate.socket, end.gate._before)):
            poller.register(source, zmq.POLLIN)
        assert poller.poll(10_000), f"{count - len(nodes)} nodes were not heard"
        end.gate.answer()
        nodes.update(envelope.node_id for envelope in end.receive())
    return nodes
