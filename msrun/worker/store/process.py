"""The process that serves a generation's store, or leads to it on another node.

On one node it serves the workers over loopback.  On several, the node of rank 0 has the store, and
each other node a relay: workers connect to their own node's loopback interface alone, and between
the nodes the bytes travel through one CURVE connection a node, whose keys follow from the job's
secret and the generation.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from msrun import entry, environ
from msrun.supervise import channel, containment, limits, process, title
from msrun.supervise.forkserver import SpawnContext
from msrun.supervise.orders import SpawnStore
from msrun.supervise.reaper import Next
from msrun.worker.store.admission import LoopbackAdmission, choose_finder
from msrun.worker.store.keys import StoreKeys
from msrun.worker.store.server import LoopbackServer
from msrun.worker.store.tell import Teller
from msrun.worker.store.wire import StoreClient

_BYTES_MAX = 1 << 30
_CANNOT_SERVE = 1


def become_store(context: SpawnContext, order: SpawnStore) -> Next:
    """Turn this fresh fork into the store of `order`; return the call that serves it."""
    wakeup = signal.set_wakeup_fd(-1)
    for descriptor in (context.wakeup, wakeup):
        os.close(descriptor)
    process.die_with_parent(context.parent)
    title.set_name("msrun store")
    title.show_as(["msrun", "store", context.configure.job_id], environ.current())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, context.signals)
    if context.configure.cgroup:
        containment.enter_generation(context.configure.cgroup, order.generation)
    if not context.fork:
        _exec(context, order)
    return partial(serve, order, context.listen_fds)


def _exec(context: SpawnContext, order: SpawnStore) -> NoReturn:
    # Not on the command line, which every user of the machine can read.
    handed_over = os.memfd_create("msrun store")
    os.write(handed_over, channel.dump(order))
    arguments = [str(descriptor) for descriptor in (handed_over, *context.listen_fds)]
    for descriptor in (handed_over, *context.listen_fds):
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional only
    start = [sys.executable, str(Path(entry.__file__)), f"{__name__}:main", *arguments]
    os.execv(sys.executable, start)  # noqa: S606 - no shell is wanted


def main(arguments: list[str]) -> NoReturn:
    """Serve in an interpreter of its own: descriptors of the order, and of the sockets."""
    handed_over, *listen_fds = map(int, arguments)
    line = os.pread(handed_over, channel.FRAME_BYTES_MAX, 0)
    os.close(handed_over)
    order = channel.load(line, SpawnStore)
    if not isinstance(order, SpawnStore):
        raise TypeError
    serve(order, tuple(listen_fds))


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
