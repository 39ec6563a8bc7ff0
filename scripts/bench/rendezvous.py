"""How fast a cluster forms: one real scheduler, N simulated agents over loopback TCP.

    python scripts/bench/rendezvous.py                      # 100, 1,000, 5,000 and 10,000 agents
    python scripts/bench/rendezvous.py --agents 1000 --no-curve
    python scripts/bench/rendezvous.py --peer 8 32 64       # torch's rendezvous beside it
    python scripts/bench/rendezvous.py --busy 4             # beside so many processes that compute
    python scripts/bench/rendezvous.py --check              # exit 1 and name the missed bars

Each agent registers, is probed, gets its ranks and acknowledges them; then all go on to
send signs of life.  The agents share the machine with the scheduler, so its cores are what
is measured: the load before is printed.  Real nodes start while all CPUs import torch, which is
what `--busy` is for: the bar there is a multiple of what ZeroMQ alone takes beside the same load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from msrun.cluster.wire.messages import Formation
from msrun.job import RestartLimits
from msrun.processes.scheduler.config import SchedulerConfig
from msrun.processes.scheduler.handle import SchedulerProcess
from msrun.transport.sockets import listen
from scripts.bench.simulated_agents import Settings

HERE = Path(__file__).resolve().parent
PROCESSES = 4
BEAT_SECONDS = 10.0
LEASE = 10.0
MIB = 1 << 20
# Seconds to form, with authentication, on two cores.
BARS = {1_000: 0.6, 10_000: 5.0}
RSS_BAR = 400.0
BEAT_BAR = 0.30
PEER_BAR = 20.0
PEER_AGENTS = 64
# Times what bare connections take beside the same busy processes.
BUSY_BAR = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """One forming of `agents`: seconds, CPU seconds and MiB of the scheduler, cores to beat.

    `bare` is the seconds that ZeroMQ's connections alone took, in turns with it.
    """

    agents: int
    bare: float
    wall: float
    cpu: float
    rss: float
    beats: float


def main() -> int:
    """Measure, print, and return the exit code."""
    options = _parse_options()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max(options.agents)
    if hard < most + 1_000:
        sys.exit(f"--agents {most} needs {most + 1_000} open files, the limit is {soft}:{hard}")
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores, curve={options.curve}")
    peers = {agents: _seconds_of("c10d.py", agents) for agents in options.peer}
    ours = {agents: form(agents, 0.0, curve=options.curve).wall for agents in options.peer}
    for agents, seconds in peers.items():
        times = seconds / ours[agents]
        print(
            f"{agents:>6} agents: torch {seconds:.2f} s, msrun {ours[agents]:.3f} s: {times:.0f} x"
        )
    with _busy(options.busy):
        results = [_measure(agents, options) for agents in options.agents]
    if not options.check:
        return 0
    return _check_busy(results) if options.busy else _check(results, peers, ours)


def _measure(agents: int, options: argparse.Namespace) -> Result:
    """Form and connect in turns; print and return the medians."""
    tries, bare = [], []
    for _ in range(options.tries):
        tries.append(form(agents, BEAT_SECONDS, curve=options.curve))
        bare.append(_seconds_of("bare_connections.py", agents))
    median = statistics.median(result.wall for result in tries)
    nearest = min(tries, key=lambda one: abs(one.wall - median))
    result = replace(nearest, wall=median, bare=statistics.median(bare))
    print(
        f"{agents:>6} agents: formed in {median:.3f} s (bare ZeroMQ connections "
        f"{result.bare:.3f} s), scheduler {result.cpu:.2f} CPU-s, {result.rss:.0f} MiB, "
        f"{100 * result.beats:.1f} % of a core for signs of life"
    )
    return result


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def form(agents: int, beat_seconds: float, *, curve: bool) -> Result:
    """Let `agents` form once, and beat for a while."""
    secret = secrets.token_bytes(32) if curve else None
    formation = Formation(nnodes_min=agents, nnodes_max=agents, lease=LEASE)
    listening = listen("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as directory, listening:
        config = SchedulerConfig(
            job_id="bench",
            formation=formation,
            join_timeout=120.0,
            last_call=0.0,
            restarts=RestartLimits(),
            secret=secret,
            wal_file=f"{directory}/wal",
            log_file=f"{directory}/scheduler.log",
            parent=os.getpid(),
        )
        scheduler = SchedulerProcess(config, listening, os.environ)
        try:
            process = psutil.Process(scheduler.pid)
            _until_listening(Path(config.log_file))
            port = listening.getsockname()[1]
            settings = Settings(
                job_id="bench",
                port=port,
                secret=secret.hex() if secret else "",
                first=0,
                agents=agents,
                formation=formation,
                beat_seconds=beat_seconds,
            )
            return _run(settings, process)
        finally:
            scheduler.end(2.0)


def _run(settings: Settings, scheduler: psutil.Process) -> Result:
    """Divide the agents of `settings` over a few processes and let them form and beat."""
    agents, beat_seconds = settings.agents, settings.beat_seconds
    share = -(-agents // PROCESSES)
    crowds = [
        _start(msgspec.structs.replace(settings, first=first, agents=min(share, agents - first)))
        for first in range(0, agents, share)
    ]
    try:
        for crowd in crowds:
            _expect(crowd, "ready")
        before = scheduler.cpu_times()
        for crowd in crowds:
            _tell(crowd, "go")
        placed = [_expect(crowd, "placed") for crowd in crowds]
        after = scheduler.cpu_times()
        rss = scheduler.memory_info().rss / MIB
        wall = max(p["ended"] for p in placed) - min(p["began"] for p in placed)
        for crowd in crowds:
            _expect(crowd, "beating")
        beaten = scheduler.cpu_times()
    finally:
        for crowd in crowds:
            crowd.kill()
            crowd.communicate()
    cores = (_seconds(beaten) - _seconds(after)) / beat_seconds if beat_seconds else 0.0
    return Result(agents, 0.0, wall, _seconds(after) - _seconds(before), rss, cores)


def _start(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "simulated_agents.py")]
    crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _tell(crowd, msgspec.json.encode(settings).decode())
    return crowd


def _tell(crowd: subprocess.Popen[str], line: str) -> None:
    if crowd.stdin:
        crowd.stdin.write(line + "\n")
        crowd.stdin.flush()


def _expect(crowd: subprocess.Popen[str], what: str) -> dict[str, float]:
    line = crowd.stdout.readline() if crowd.stdout else ""
    if not line:
        sys.exit(f"a process of simulated agents ended before it was {what}")
    said: dict[str, float] = json.loads(line)
    return said


def _until_listening(log: Path) -> None:
    while "listening" not in (log.read_text() if log.exists() else ""):
        time.sleep(0.01)


def _seconds(times: psutil._ntuples.pcputimes) -> float:
    return float(times.user + times.system)


def _seconds_of(script: str, agents: int) -> float:
    command = [sys.executable, str(HERE / script), str(agents)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def _check(results: list[Result], peers: dict[int, float], ours: dict[int, float]) -> int:
    """Name every bar that was missed; return the exit code."""
    missed = [
        f"{r.agents} agents: {r.wall:.2f} s, the bar is {BARS[r.agents]:g} s"
        for r in results
        if r.wall > BARS.get(r.agents, float("inf"))
    ]
    last = results[-1]
    if last.rss > RSS_BAR:
        missed.append(f"{last.agents} agents: {last.rss:.0f} MiB, the bar is {RSS_BAR:g} MiB")
    if last.beats > BEAT_BAR:
        missed.append(f"{last.agents} agents: {last.beats:.2f} cores, the bar is {BEAT_BAR:g}")
    if PEER_AGENTS in peers and peers[PEER_AGENTS] / ours[PEER_AGENTS] < PEER_BAR:
        missed.append(f"{PEER_AGENTS} agents: less than {PEER_BAR:g} times as fast as torch")
    for sentence in missed:
        print(f"missed: {sentence}")
    return bool(missed)


def _check_busy(results: list[Result]) -> int:
    """Name every forming that took too much longer than bare connections; return the exit code."""
    missed = [result for result in results if result.wall > BUSY_BAR * result.bare]
    for result in missed:
        times = result.wall / result.bare
        print(f"missed: {result.agents} agents: {times:.1f} x bare, the bar is {BUSY_BAR:g} x")
    return bool(missed)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[100, 1_000, 5_000, 10_000])
    parser.add_argument("--peer", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--curve", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--busy", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
