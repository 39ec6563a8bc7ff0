"""What parameter servers move: one server and one rank on this machine.

    python scripts/bench/servers.py            # a table
    python scripts/bench/servers.py --check    # fails below the bars

*dense* pushes the gradient of a parameter of 64 MiB, steps, and pulls the parameter; it is compared
with as many bytes that go back and forth over a bare ZeroMQ loop, and over torch's rpc.  *rows*
pulls 100,000 rows of 64 floats of a table of 1,000,000, and pushes their gradients (SGD, sparse).
Tensors are in shared memory, or travel over sockets as between nodes; with keys all bytes on
sockets are encrypted.  The server takes a snapshot every 4 steps, after which a rank's memory is
used again, and the median step has none.

All is measured in rounds, one after the other, so that what slows the machine down slows all down:
each number is the median of the rounds, and so is each ratio, of what one round has measured.  CPU
is the server's mean of one step.  *per byte* compares the CPU for 64 MiB with four times that for
16 MiB, and *memory* what a server grows by with the table and the state of Adagrad.
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
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
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
DENSE = 64 * MIB
ROWS, WIDTH, ASKED = 1_000_000, 64, 100_000
TURNS = 7
EVERY = 4
ROUNDS = 3
LEAST_OF_BARE, LEAST_OF_RPC, LEAST_ROWS = 0.5, 2.0, 10e6
MOST_PER_BYTE, MOST_MEMORY = 1.5, 1.1
KEYS = {False: "plain", True: "with keys"}
START = multiprocessing.get_context("fork")
# For servers.  A forked one would have the groups of the ranks that this process has been, and
# hang where it collects them as garbage: the threads that they end are not there.
FRESH = multiprocessing.get_context("spawn")


def _be_server(env: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(env)
    os._exit(serve())


@contextmanager
def served(*, has_keys: bool) -> Iterator[int]:
    """Run a server, for a rank in this process; yield its pid."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "key").write_text(secrets.token_hex(32) if has_keys else "insecure")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        env = {
            "MSRUN_SERVER_NUM": "1",
            "MSRUN_SERVERS_DIR": folder,
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        process = FRESH.Process(target=_be_server, args=(env | {"MSRUN_SERVER_ID": "0"},))
        process.start()
        os.environ.update(env, RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        try:
            yield process.pid or 0
        finally:
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join()


def cpu(pid: int) -> float:
    """Return the seconds of CPU that all threads of a process have taken."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def resident(pid: int) -> int:
    """Return the bytes of memory of a process that no file backs."""
    text = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def timed(step: Callable[[], object], pid: int = 0) -> tuple[float, float]:
    """Return the median seconds of a step, and the server's mean seconds of CPU."""
    for _ in range(2 * EVERY if pid else 1):
        step()
    began, took = cpu(pid) if pid else 0.0, []
    for _ in range(TURNS):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return statistics.median(took), (cpu(pid) - began) / TURNS if pid else 0.0


def floats(size: int) -> Tensor:
    """Return a matrix of so many bytes."""
    return torch.zeros(size // 256, 64)


class Dense(nn.Module):
    """One parameter of so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(floats(size))


def config_of(*, shared: bool) -> dict[str, object]:
    """Return the configuration of a rank, whose one parameter is on the server."""
    servers = {"params": ["weight"], "snapshot": {"every": EVERY}, "shared_memory": shared}
    return {"servers": servers}


def dense(pid: int, size: int, *, shared: bool) -> tuple[float, float]:
    """Time the step of a dense parameter."""
    with msrun.init(config_of(shared=shared)) as rt:
        model = Dense(size)
        rt.shard(model)
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        gradient = floats(size) + 1

        def step() -> None:
            model.weight.grad = gradient
            optimizer.step()

        return timed(step, pid)


def rows(pid: int, *, shared: bool, total: int = ROWS) -> tuple[float, float]:
    """Time pull and push of rows of a table."""
    with msrun.init(config_of(shared=shared)) as rt:
        model = rt.shard(nn.Embedding(total, WIDTH, sparse=True))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> None:
            ids = torch.randperm(total)[:ASKED]
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()

        return timed(step, pid)


def memory(pid: int) -> float:
    """Return the memory that a server needs for a table and the state of it, as a share of both."""
    rows(pid, shared=True, total=1000)  # it imports all that it needs
    with msrun.init(config_of(shared=True)) as rt:
        model = rt.shard(nn.Embedding(ROWS, WIDTH))
        before = resident(pid)
        optimizer = rt.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        for _ in range(2 * EVERY + 1):
            optimizer.zero_grad()
            model(torch.randperm(ROWS)[:256]).sum().backward()
            optimizer.step()
        model(torch.arange(3))
        return (resident(pid) - before) / (2 * ROWS * WIDTH * 4)


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
    body = bytes_of(floats(DENSE))

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


def _time_rpc(port: int, answer: Connection) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc("rank", rank=0, world_size=2, rpc_backend_options=options)
    body = floats(DENSE)
    took, _ = timed(lambda: rpc.rpc_sync("server", _returned, args=(body,)))
    answer.send(took)
    rpc.shutdown()


def by_rpc() -> float:
    """Return the seconds in which 64 MiB go over torch's rpc and come back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours, theirs = START.Pipe()
    peers = [
        START.Process(target=_be_rpc, args=(port,)),
        START.Process(target=_time_rpc, args=(port, theirs)),
    ]
    for peer in peers:
        peer.start()
    took = float(ours.recv())
    for peer in peers:
        peer.join()
    return took


@dataclass(slots=True)
class Found:
    """What the rounds have measured of one line of the table."""

    times: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    of_loop: list[float] = field(default_factory=list)
    of_rpc: list[float] = field(default_factory=list)

    def add(self, measured: tuple[float, float], loop: float = 0.0, of_rpc: float = 0.0) -> None:
        """Take what one round has measured."""
        took, used = measured
        self.times.append(took)
        self.used.append(used)
        self.of_loop.append(loop / took)
        self.of_rpc.append(of_rpc / took)


class Bench:
    """The table: name of a line -> what was measured."""

    def __init__(self) -> None:
        self.found: dict[str, Found] = {}
        self.per_byte: list[float] = []
        self.memory: list[float] = []
        self.loads: list[float] = []

    def _line(self, name: str) -> Found:
        return self.found.setdefault(name, Found())

    def round(self) -> None:
        """Measure everything once."""
        loops = {}
        for has_keys in (False, True):
            loops[has_keys] = bare(secrets.token_bytes(32) if has_keys else None)
            self._line(f"bare loop, {KEYS[has_keys]}").add((loops[has_keys], 0.0))
        of_rpc = by_rpc()
        self._line("torch rpc").add((of_rpc, 0.0))
        for has_keys, shared in ((False, True), (True, True), (False, False), (True, False)):
            kind = f"{'shared' if shared else 'sockets'}, {KEYS[has_keys]}"
            # What is shared is never encrypted, so it is held against what is not.
            loop = loops[has_keys and not shared]
            with served(has_keys=has_keys) as pid:
                whole = dense(pid, DENSE, shared=shared)
                self._line(f"dense, {kind}").add(whole, loop, of_rpc)
                self._line(f"rows, {kind}").add(rows(pid, shared=shared))
                if not has_keys and not shared:
                    _, quarter = dense(pid, DENSE // 4, shared=shared)
                    self.per_byte.append(whole[1] / quarter / 4)
        with served(has_keys=False) as pid:
            self.memory.append(memory(pid))
        self.loads.append(os.getloadavg()[0])

    def misses(self) -> Iterator[str]:
        """Print the table; yield what is below its bar."""
        half = statistics.median
        for name, found in self.found.items():
            used = half(found.used)
            text = f"{name:24} {half(found.times) * 1000:7.0f} ms"
            if name.startswith("dense"):
                of_loop, of_rpc = half(found.of_loop), half(found.of_rpc)
                text += f"  {of_loop:.0%} of bare, {of_rpc:.1f} x rpc, CPU {used * 1000:.0f} ms"
                if of_loop < LEAST_OF_BARE:
                    yield f"{name}: {of_loop:.0%} of the bare loop"
                if "shared" in name and of_rpc < LEAST_OF_RPC:
                    yield f"{name}: {of_rpc:.1f} times as fast as rpc"
            elif name.startswith("rows"):
                a_core = ASKED / max(used, 1e-3) * 60
                rate = f"{ASKED / half(found.times) * 6e-5:.1f} M rows/min"
                text += f"  {rate}, {a_core / 1e6:.1f} M a core, CPU {used * 1000:.0f} ms"
                if a_core < LEAST_ROWS:
                    yield f"{name}: {a_core / 1e6:.1f} M rows a minute a core"
            print(text, flush=True)
        per_byte, grown = half(self.per_byte), half(self.memory)
        print(f"{'CPU per byte':24} {per_byte:7.2f}     of 64 MiB to that of 16 MiB")
        print(f"{'memory of a server':24} {grown:7.2f}     of table and state")
        print(f"{'load':24} {half(self.loads):7.1f}     median of {len(self.loads)} rounds")
        if per_byte > MOST_PER_BYTE:
            yield f"CPU per byte grows by {per_byte:.2f} from 16 to 64 MiB"
        if grown > MOST_MEMORY:
            yield f"a server needs {grown:.2f} times table and state"


def main() -> int:
    """Print the table; return 1 below a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail below the bars")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench()
    for _ in range(given.rounds):
        bench.round()
    misses = list(bench.misses())
    for miss in misses:
        print("below its bar:", miss)
    return 1 if misses and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
