"""The loops of the store's processes on several nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NoReturn, Protocol

from msrun.supervise.orders import StoreLeg
from msrun.transport.loop import Loop, new_context
from msrun.transport.sockets import io_threads
from msrun.transport.store_sockets import RelaySocket, StoreSocket
from msrun.worker.store.keys import StoreKeys
from msrun.worker.store.leg import FarClients, Relay
from msrun.worker.store.server import Connection, Feed, LoopbackServer
from msrun.worker.store.wire import StoreClient


class OpenServer(Protocol):
    """Makes the loopback end of this node."""

    def __call__(
        self, open_feed: Callable[[Connection], Feed], tell: Callable[[str], None]
    ) -> LoopbackServer:
        """Return the server whose connections `open_feed` serves."""


def serve_store(
    leg: StoreLeg,
    network: socket.socket,
    keys: StoreKeys,
    open_server: OpenServer,
    tell: Callable[[str], None],
) -> NoReturn:
    """Serve the clients of this node and, through the network, of all others."""
    loop = Loop()
    context = new_context(io_threads(leg.nnodes, len(os.sched_getaffinity(0))))
    sock = StoreSocket(context, network, _secret(leg), leg.nnodes)
    far = FarClients(sock, keys, tell)
    server = open_server(lambda line: StoreClient(keys, line), tell)
    loop.watch(sock.socket, far.serve)
    if sock.gate:
        sock.gate.serve(loop)
    _run(loop, server)


def serve_relay(leg: StoreLeg, open_server: OpenServer, tell: Callable[[str], None]) -> NoReturn:
    """Lead the clients of this node to the store."""
    loop = Loop()
    sock = RelaySocket(new_context(), (leg.host, leg.port), _secret(leg), leg.nnodes)
    relay = Relay(sock, loop)
    relay.server = open_server(relay.open_feed, tell)
    _run(loop, relay.server)


def _run(loop: Loop, server: LoopbackServer) -> NoReturn:
    loop.watch(server.fileno(), server.serve)
    loop.run(lambda: None, lambda: None)
    raise AssertionError


def _secret(leg: StoreLeg) -> bytes | None:
    return None if leg.secret is None else bytes.fromhex(leg.secret)
