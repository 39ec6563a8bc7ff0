"""Real parameter servers beside the ranks of a test: a store, and a process for each server."""

import multiprocessing
import os
import secrets
import signal
import socket
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist

from msrun.parallel.servers import process
from msrun.supervise.process import die_with_parent

START = multiprocessing.get_context("fork")


def _serve(parent, env):
    die_with_parent(parent)
    torch.set_num_threads(1)
    os.environ.update(env)
    os._exit(process.main())


class ServerJob:
    """The servers of one job, of which `numbers` are started, and the environment of its ranks."""

    def __init__(self, folder, servers, ranks, *, key=True, numbers=None):
        self.folder = folder
        # It outlives a store, as that of a launcher does.
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.next_store()
        if key:
            (folder / "key").write_text(secrets.token_hex(32))
        self.env = {
            "MSRUN_SERVER_NUM": str(servers),
            "MSRUN_SERVERS_DIR": str(folder),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
        }
        self.processes = {}
        # A server dies with the thread that has forked it, which waits for this.
        self.over = threading.Event()
        for server in range(servers) if numbers is None else numbers:
            self.start(server)

    def next_store(self):
        """Have the empty store of another generation at the same address."""
        self.store = None
        port = self.listening.getsockname()[1]
        self.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(self.listening.fileno()),
        )

    def start(self, server):
        env = self.env | {"MSRUN_ROLE": "server", "MSRUN_SERVER_ID": str(server)}
        started = START.Process(target=_serve, args=(os.getpid(), env))
        started.start()
        self.processes[server] = started

    def kill(self, server):
        """Kill a server at once."""
        self.processes[server].kill()
        self.processes[server].join()

    def end(self):
        """End all servers as the launcher does; return their exit codes."""
        for each in self.processes.values():
            os.kill(each.pid, signal.SIGTERM)
        for each in self.processes.values():
            each.join(20)
            if each.is_alive():
                each.kill()
                each.join()
        self.over.set()
        self.listening.close()
        return [each.exitcode for each in self.processes.values()]


@contextmanager
def serving(folder, monkeypatch, servers, ranks, *, codes=(0,), **options):
    """Run servers; ranks of this test find them."""
    folder.mkdir(parents=True, exist_ok=True)
    job = ServerJob(folder, servers, ranks, **options)
    with monkeypatch.context() as patch:
        for name, value in job.env.items():
            patch.setenv(name, value)
        try:
            yield job
        finally:
            ended = job.end()
    assert set(ended) <= set(codes), ended
