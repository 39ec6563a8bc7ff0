"""What the store's process does once it is one."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import NoReturn

from msrun.supervise import limits
from msrun.supervise.orders import SpawnStore
from msrun.worker.store.admission import LoopbackAdmission, choose_finder
from msrun.worker.store.keys import MINDSPORE_KEY, StoreKeys
from msrun.worker.store.server import LoopbackServer
from msrun.worker.store.tell import Teller
from msrun.worker.store.wire import StoreClient

_BYTES_MAX = 1 << 30
_CANNOT_SERVE = 1


def serve(order: SpawnStore, listen_fds: tuple[int, ...]) -> NoReturn:
    """Serve until this process is killed.

    Args:
        order: What to serve.
        listen_fds: Listening sockets on the loopback interface and, on several nodes, the network.
    """
    limits.raise_open_files()
    tell = Teller()
    loopback, *network = (socket.socket(fileno=descriptor) for descriptor in listen_fds)
    admission = _admission(order, tell)

    def admit(accepted: list[socket.socket]) -> list[socket.socket]:
        admitted = admission.admit(accepted)
        tell.refused(admission.refused)
        return admitted

    keys = StoreKeys(_BYTES_MAX)
    if order.mindspore:
        keys.set(MINDSPORE_KEY, order.mindspore.encode())
    open_server = partial(LoopbackServer, loopback, admit)
    if order.leg is None:
        server = open_server(lambda line: StoreClient(keys, line), tell)
        while True:
            server.serve(-1)
    from msrun.worker.store import several  # ZeroMQ, which one node does without

    if order.leg.serves:
        several.serve_store(order.leg, network[0], keys, open_server, tell)
    several.serve_relay(order.leg, open_server, tell)


def _admission(order: SpawnStore, tell: Teller) -> LoopbackAdmission:
    """Return who decides about loopback connections; ends this process when nobody can."""
    chosen = choose_finder()
    if chosen:
        return LoopbackAdmission(chosen[1], os.geteuid())
    if order.insecure:
        return LoopbackAdmission(None, os.geteuid())
    tell(
        "this kernel tells by neither socket diagnosis nor /proc/net/tcp whose a connection is, "
        "so other users of this machine could use the job's store; --insecure lets them"
    )
    os._exit(_CANNOT_SERVE)
