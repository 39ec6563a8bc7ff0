"""The process that serves a generation's store, or leads to it on another node.

On one node it serves the workers over loopback.  On several, the node of rank 0 has the store, and
each other node a relay: workers connect to their own node's loopback interface alone, and between
the nodes the bytes travel through one CURVE connection a node, whose keys follow from the job's
secret and the generation.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from msrun import entry, environ
from msrun.supervise import channel, containment, process, title
from msrun.supervise.forkserver import SpawnContext
from msrun.supervise.orders import SpawnStore
from msrun.supervise.reaper import Next


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
    return partial(_serve, order, context.listen_fds)


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
    title.set_name("msrun store")
    handed_over, *listen_fds = map(int, arguments)
    line = os.pread(handed_over, channel.FRAME_BYTES_MAX, 0)
    os.close(handed_over)
    order = channel.load(line, SpawnStore)
    if not isinstance(order, SpawnStore):
        raise TypeError
    _serve(order, tuple(listen_fds))


def _serve(order: SpawnStore, listen_fds: tuple[int, ...]) -> NoReturn:
    # Not before: no worker has a use for it, and all would wait for the import.
    from msrun.worker.store.serving import serve

    serve(order, listen_fds)
