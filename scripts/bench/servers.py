"""What parameter servers move: one server and one rank on this machine.

    python scripts/bench/servers.py            # a table
    python scripts/bench/servers.py --check    # fails below the bars

*dense* pushes the gradient of a parameter of 64 MiB, steps, and pulls the parameter; it is compared
with as many bytes that go back and forth over a bare ZeroMQ loop, and over torch's rpc.  *rows*
pulls 100,000 rows of 64 floats of a table of 1,000,000, and pushes their gradients (SGD, sparse).
Tensors are in shared memory, or travel over sockets as between nodes; with keys all bytes on
sockets are encrypted.  The last column is the server's CPU of one step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

import msrun
from msrun.parallel.servers.process import main as serve
from msrun.parallel.servers.wire import bytes_of
from msrun.transport.data_sockets import DataConnection, DataListener
from msrun.transport.loop import new_context
from msrun.transport.sockets import listen

MIB = 1 << 20
DENSE = (16 * MIB // 64, 64)  # of floats: 64 MiB
ROWS, WIDTH, ASKED = 1_000_000, 64, 100_000
TURNS = 7
LEAST_OF_BARE, LEAST_OF_RPC, LEAST_ROWS = 0.5, 2.0, 10e6
KEYS = {False: "plain", True: "with keys"}
START = multiprocessing.get_context("fork")


def _be_server(env: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    os._exit(serve())


@contextmanager
def served(*, has_keys: bool) -> Iterator[int]:
    """Run a server, for a rank in this process; yield its pid."""
    with tempfile.TemporaryDirectory() as folder:
        if has_keys:
            Path(folder, "key").write_text(secrets.token_hex(32))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        env = {
            "MSRUN_SERVER_NUM": "1",
            "MSRUN_SERVERS_DIR": folder,
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        process = START.Process(target=_be_server, args=(env | {"MSRUN_SERVER_ID": "0"},))
        process.start()
        os.environ.update(env, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        try:
            yield process.pid or 0
        finally:
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join()


def cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(step: Callable[[], object], pid: int = 0) -> tuple[float, float]:
    """Return the median seconds of a step, and the server's mean seconds of CPU."""
    step()
    began, took = cpu(pid) if pid else 0.0, []
    for _ in range(TURNS):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return statistics.median(took), (cpu(pid) - began) / TURNS if pid else 0.0


class Dense(nn.Module):
    """One parameter of 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DENSE))


def config_of(*, shared: bool) -> dict[str, object]:
    """Return the configuration of a rank, whose one parameter is on the server."""
    servers = {"params": ["weight"], "snapshot": {"every": 1000}, "shared_memory": shared}
    return {"servers": servers}


def dense(pid: int, *, shared: bool) -> tuple[float, float]:
    """Time the step of a dense parameter."""
    with msrun.init(config_of(shared=shared)) as rt:
        model = Dense()
        rt.shard(model)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            model.weight.grad = torch.ones(DENSE)
            optimizer.step()

        return timed(step, pid)


def rows(pid: int, *, shared: bool) -> tuple[float, float]:
    """Time pull and push of rows of a table."""
    with msrun.init(config_of(shared=shared)) as rt:
        model = rt.shard(nn.Embedding(ROWS, WIDTH, sparse=True))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            ids = torch.randperm(ROWS)[:ASKED]
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()

        return timed(step, pid)


def _echo(listening: socket.socket, secret: bytes | None) -> None:
    """Send each message back."""
    listener = DataListener(new_context(), listening, secret, 1)
    while True:
        if listener.gate and listener.gate.socket.poll(1):
            listener.gate.answer()
        if listener.socket.poll(1 if listener.gate else 1000):
            for route, parts in listener.receive():
                listener.send(route, parts)


def bare(secret: bytes | None) -> float:
    """Return the seconds in which 64 MiB go over bare sockets and come back."""
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()[:2]
    peer = START.Process(target=_echo, args=(listening, secret), daemon=True)
    peer.start()
    connection = DataConnection(new_context(), address, secret, 1)
    if not connection.wait_up(5000):
        raise SystemExit("no connection")
    body = bytes_of(torch.zeros(DENSE))

    def step() -> None:
        connection.send([body])
        connection.socket.poll()
        connection.receive()

    took, _ = timed(step)
    peer.kill()
    return took


def _returned(tensor: Tensor) -> Tensor:
    return tensor


def _be_rpc(port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("server", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


def by_rpc() -> float:
    """Return the seconds in which 64 MiB go over torch's rpc and come back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    peer = START.Process(target=_be_rpc, args=(port,))
    peer.start()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("rank", rank=0, world_size=2, rpc_backend_options=options)
    body = torch.zeros(DENSE)
    took, _ = timed(lambda: rpc.rpc_sync("server", _returned, args=(body,)))
    rpc.shutdown()
    peer.join()
    return took


def show(name: str, seconds: float, rest: str = "") -> None:
    """Print a line of the table."""
    print(f"{name:26} {seconds * 1000:8.0f} ms  {rest}", flush=True)


def main() -> int:
    """Print the table; return 1 below a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail below the bars")
    is_checked = parser.parse_args().check
    torch.set_num_threads(1)
    misses: list[str] = []
    loops = {}
    for has_keys in (False, True):
        loops[has_keys] = bare(secrets.token_bytes(32) if has_keys else None)
        show(f"bare loop, {KEYS[has_keys]}", loops[has_keys])
    rpc_took = by_rpc()
    show("torch rpc", rpc_took)
    for has_keys, shared in ((False, True), (True, True), (False, False), (True, False)):
        kind = f"{'shared' if shared else 'sockets'}, {KEYS[has_keys]}"
        # What is shared is never encrypted, so it is held against what is not.
        loop = loops[has_keys and not shared]
        with served(has_keys=has_keys) as pid:
            took, used = dense(pid, shared=shared)
            of_loop, of_rpc = loop / took, rpc_took / took
            text = f"{of_loop:.0%} of bare, {of_rpc:.1f} x rpc, CPU {used * 1000:.0f} ms"
            show(f"dense, {kind}", took, text)
            if shared and of_loop < LEAST_OF_BARE:
                misses.append(f"dense, {kind}: {of_loop:.0%} of the bare loop")
            if shared and of_rpc < LEAST_OF_RPC:
                misses.append(f"dense, {kind}: {of_rpc:.1f} times as fast as rpc")
            took, used = rows(pid, shared=shared)
            a_core = ASKED / max(used, 1e-3) * 60
            rate = f"{ASKED / took * 6e-5:.1f} M rows/min, {a_core / 1e6:.1f} M a core"
            show(f"rows, {kind}", took, f"{rate}, CPU {used * 1000:.0f} ms")
            if a_core < LEAST_ROWS:
                misses.append(f"rows, {kind}: {a_core / 1e6:.1f} M a minute a core")
    print("load", *os.getloadavg())
    for miss in misses:
        print("below its bar:", miss)
    return 1 if misses and is_checked else 0


if __name__ == "__main__":
    sys.exit(main())
