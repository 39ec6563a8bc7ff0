"""Kills processes of a job that trains on parameter servers, and checks each loss of the job.

    python scripts/kill_servers.py --kills 100 --replicas 1 --seed 1 --busy 4
    python scripts/kill_servers.py --kills 20 --nodes 2 --others 0.5

Each job trains for as long as there are kills: each server once, now and then a worker, the
scheduler, or with `--nodes 2` all processes of the second node at once, whose place another one
takes.  Every rank compares each loss with that of one process.  Prints how long the ranks had
no step after each kill of a server, beside the load of the machine.  Exits with 1 if a job failed
or hung, or a loss was another; with `--most S` also if a pause was longer than S seconds and what
the threads of the job waited for a core.  `--busy N` keeps N processes busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil

# Pauses above are printed, each with how long a rank had work and no core.
_LONG_SECONDS = 1.0
# A job without a step for that long hangs.
_HANGS_SECONDS = 120.0

TRAIN = """
import os, pathlib, time
import torch
import msrun
from torch import nn

REPLICAS, EVERY = {replicas}, {every}

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(5000, 8), nn.Linear(8, 1))

def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 5000, (8, 5), generator=draw), torch.rand(8, 1, generator=draw)

servers = {{"params": ["0.weight"], "replicas": REPLICAS, "snapshot": {{"every": EVERY}}}}
rt = msrun.init({{"servers": servers, "checkpoint": {{"dir": "checkpoints", "every": 50}}}})
loss_of = nn.functional.mse_loss
alone = build()
ours = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
model = rt.shard(build())
theirs = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
begin = rt.resume(model, theirs)
step = 0
log = open(f"steps-{{rt.rank}}", "a", buffering=1)
while True:
    ids, values = batch(step)
    expected = loss_of(alone(ids), values)
    ours.zero_grad()
    expected.backward()
    ours.step()
    if step >= begin:
        mine = slice(4 * rt.rank, 4 * rt.rank + 4)
        loss = rt.step(model, theirs, loss_of, ids[mine], values[mine])
        assert abs(loss.item() - expected.item()) < 1e-6, (step, loss.item(), expected.item())
        print(step, time.monotonic(), file=log)
        is_over = torch.tensor(float(pathlib.Path("over").exists()))
        if step % 10 == 0 and rt.mean_over_data(is_over).item() == 1:
            break
    step += 1
print("equal", step)
"""


SCRIPT = "train.py"
# What the command lines of a job's processes have, each kind its own.
SERVER, RANK = "msrun server", SCRIPT
OTHERS = {"workers": RANK, "schedulers": "msrun scheduler", "nodes": ""}


def family(launcher: psutil.Process, name: str) -> list[psutil.Process]:
    """Return the processes of a job that have a name."""
    found = []
    for each in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(each.cmdline()):
                found.append(each)
    return found


def last_step(folder: Path) -> tuple[int, float]:
    """Return the last step of rank 0, and when it was done."""
    lines = (folder / "steps-0").read_text().splitlines() if (folder / "steps-0").exists() else []
    step, at = lines[-1].split() if lines else ("-1", "0")
    return int(step), float(at)


def pause_after(folder: Path, at: float) -> float | None:
    """Return how long the ranks were without a step around a time; None as long as they are."""
    times = [float(line.split()[1]) for line in (folder / "steps-0").read_text().splitlines()]
    after = [time for time in times if time > at]
    if len(after) <= 5:  # noqa: PLR2004 - the pause is not over
        return None
    around = [max(time for time in times if time <= at), *after]
    return max(late - early for early, late in pairwise(around))


def waited(processes: list[psutil.Process]) -> dict[Path, float]:
    """Return how long each thread was ready to run and had no core, in seconds."""
    found = {}
    for each in processes:
        for path in Path(f"/proc/{each.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended
                found[path] = int(path.read_text().split()[1]) / 1e9
    return found


def server_number(victim: psutil.Process) -> str:
    """Return which server a process is."""
    return " ".join(victim.cmdline()).partition(f"{SERVER} ")[2].split()[0]


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep so many processes busy."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary(pauses: list[float]) -> str:
    """Return what there is to say about pauses."""
    if not pauses:
        return "no pause"
    ranked = sorted(pauses)
    near_all = ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))]
    half = statistics.median(ranked)
    return f"pause median {half:.2f} s, 95 % {near_all:.2f} s, most {ranked[-1]:.2f} s"


class Job:
    """One job, in which each server is killed once: for a second time it would wait.

    Args:
        folder: Where it runs.
        given: The words of the command line.
        draw: What is random.
    """

    def __init__(self, folder: Path, given: argparse.Namespace, draw: random.Random) -> None:
        self._folder, self._given, self._draw = folder, given, draw
        self.pauses: list[float] = []
        # The same, less what all threads of the job waited for a core.
        self.own_pauses: list[float] = []
        self.others = dict.fromkeys(OTHERS, 0)
        self._launchers: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def run(self) -> int:
        """Return the exit code of the job."""
        given = self._given
        code = TRAIN.format(replicas=given.replicas, every=given.every)
        (self._folder / SCRIPT).write_text(code)
        (self._folder / "secret").write_bytes(os.urandom(32))
        (self._folder / "secret").chmod(0o600)
        self._launchers = [self._launch(node) for node in range(given.nodes)]
        try:
            self._torment()
        except TimeoutError as error:
            print(error, flush=True)
            for launcher in self._launchers:
                launcher.terminate()
        (self._folder / "over").touch()
        return max(abs(self._code_of(launcher)) for launcher in self._launchers)

    @staticmethod
    def _code_of(launcher: subprocess.Popen[bytes]) -> int:
        try:
            return launcher.wait(_HANGS_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no end within {_HANGS_SECONDS:.0f} s", flush=True)
            launcher.kill()
            return launcher.wait()

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        given, place = self._given, self._folder / f"place-{self.others['nodes']}-{node}"
        place.mkdir(mode=0o700)
        words = ["--server-num", str(given.servers), "--max-restarts", "9999"]
        if given.nodes == 1:
            words += ["--worker-num", "2"]
        else:
            words += ["--nnodes", str(given.nodes), "--node-rank", str(node)]
            words += ["--workers-per-node", str(2 // given.nodes), "--lease", "3s"]
            words += ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
            words += ["--job-id", self._folder.name, "--secret-file", "secret"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(place)}
        words = [sys.executable, "-m", "msrun", *words, SCRIPT]
        return subprocess.Popen(words, cwd=self._folder, env=env)

    @property
    def _is_running(self) -> bool:
        return all(launcher.poll() is None for launcher in self._launchers)

    def _all(self, name: str) -> list[psutil.Process]:
        return [
            each
            for launcher in self._launchers
            for each in family(psutil.Process(launcher.pid), name)
        ]

    def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something, as long as the job runs.

        Raises:
            TimeoutError: It takes long.
        """
        limit = time.monotonic() + _HANGS_SECONDS
        while self._is_running and not is_so():
            if time.monotonic() > limit:
                text = f"no step for {_HANGS_SECONDS:.0f} s after step {last_step(self._folder)[0]}"
                raise TimeoutError(text)
            time.sleep(0.01)

    def _torment(self) -> None:
        killed: set[str] = set()
        while len(killed) < self._given.servers and self._is_running:
            before = last_step(self._folder)[0]
            self._until(lambda: last_step(self._folder)[0] >= before + 5)  # noqa: B023 - at once
            time.sleep(self._draw.random() * 0.2)
            if self._draw.random() < self._given.others:
                self._kill_other(self._draw.choice([*OTHERS][: 1 + self._given.nodes]))
                continue
            victims = [v for v in self._all(SERVER) if server_number(v) not in killed]
            if victims:
                victim = self._draw.choice(victims)
                killed.add(server_number(victim))
                self._kill(victim)

    def _kill_other(self, kind: str) -> None:
        if kind == "nodes":
            self._kill_node()
        elif victims := self._all(OTHERS[kind]):
            self._draw.choice(victims).kill()
            self.others[kind] += 1

    def _kill_node(self) -> None:
        """Kill all of the last node at once, so that nothing there can clean up."""
        launcher, node = self._launchers.pop(), len(self._launchers)
        members = [psutil.Process(launcher.pid), *family(psutil.Process(launcher.pid), "")]
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for each in members:
                with contextlib.suppress(psutil.Error):
                    act(each)
        launcher.wait()
        self.others["nodes"] += 1
        self._launchers.append(self._launch(node))

    def _kill(self, victim: psutil.Process) -> None:
        number, before, at = server_number(victim), waited(self._all("")), time.monotonic()
        victim.kill()
        self._until(lambda: pause_after(self._folder, at) is not None)
        pause = pause_after(self._folder, at)
        if pause is None:  # the job has ended
            return
        idle = sum(late - before.get(each, 0.0) for each, late in waited(self._all("")).items())
        self.pauses.append(pause)
        self.own_pauses.append(max(0.0, pause - idle))
        if pause > _LONG_SECONDS:
            said = f"no step for {pause:.2f} s; all threads waited {idle:.2f} s for a core"
            print(f"server {number}: {said} meanwhile", flush=True)


def main() -> int:
    """Run jobs, and kill their processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--others", type=float, default=0.1, help="share of the rest")
    parser.add_argument("--nodes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--most", type=float, default=math.inf, help="seconds of a pause")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy")
    given = parser.parse_args()
    with busy(given.busy):
        return torment(given)


def torment(given: argparse.Namespace) -> int:
    """Return 1 if a job failed, or a pause was too long."""
    draw = random.Random(given.seed)  # noqa: S311 - of faults
    pauses: list[float] = []
    longest = 0.0
    others = dict.fromkeys(OTHERS, 0)
    code = 0
    while len(pauses) + sum(others.values()) < given.kills and not code:
        with tempfile.TemporaryDirectory() as place:
            job = Job(Path(place), given, draw)
            code = job.run()
        pauses += job.pauses
        longest = max(longest, *job.own_pauses, 0.0)
        others = {kind: number + job.others[kind] for kind, number in others.items()}
        words = ", ".join(f"{number} of {kind}" for kind, number in others.items())
        text = f"{len(pauses)} kills of servers, {words}; exit code {code}"
        load = os.getloadavg()[0]
        print(f"{text}; {summary(pauses)}; load {load:.0f}", flush=True)
    if longest > given.most:
        print(
            f"a pause of {longest:.2f} s beside waits for a core, and {given.most:g} s are allowed"
        )
    return 1 if code or longest > given.most else 0


if __name__ == "__main__":
    sys.exit(main())
