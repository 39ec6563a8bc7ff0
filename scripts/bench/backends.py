"""Time from a command to the first all-reduce of its ranks: each backend beside its bare peer.

    python scripts/bench/backends.py                       # 5 pairs, 8 ranks on this machine
    python scripts/bench/backends.py --pairs 1 --ranks 2
    python scripts/bench/backends.py --check               # exit 1 and name the missed bars

The two take turns.  A backend whose programs are not here is left out by name.  Slurm is one
node of its own on this machine, and sshd runs for each connection, for which both need root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lab import slurm, ssh

ROOT = Path(__file__).resolve().parents[2]
BAR = 0.7
PATIENCE = 120.0
PROGRAM = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
if dist.get_rank() == 0:
    assert found.item() == int(os.environ["BENCH_RANKS"])
    with open(os.environ["BENCH_FILE"], "w") as file:
        file.write(str(time.monotonic()))
dist.barrier()
dist.destroy_process_group()
"""
# What a program of torchrun's reads, which a bare mpirun does not tell.
BARE = """
import os, runpy
for name, theirs in {"RANK": "RANK", "WORLD_SIZE": "SIZE"}.items():
    os.environ[name] = os.environ.get(f"OMPI_COMM_WORLD_{theirs}") or os.environ[f"PMI_{theirs}"]
runpy.run_path("first.py", run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two commands that start the same ranks."""

    name: str
    ours: list[str]
    peer: list[str]
    env: Mapping[str, str] = field(default_factory=dict)


def main() -> int:
    """Measure, print, and return the exit code."""
    options = _parse_options()
    cores, load = os.cpu_count(), os.getloadavg()[0]
    print(f"{options.ranks} ranks on one host, {cores} cores, load {load:.2f} before")
    missed = []
    with tempfile.TemporaryDirectory(prefix="b") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "first.py").write_text(PROGRAM)
        (folder / "bare.py").write_text(BARE)
        for pair in _pairs(folder, options.ranks, stack):
            seconds: dict[str, list[float]] = {"msrun": [], "peer": []}
            for turn in range(options.pairs):
                both = [("msrun", pair.ours), ("peer", pair.peer)]
                for who, command in both if turn % 2 == 0 else reversed(both):
                    seconds[who].append(_measure(folder, command, options.ranks, pair.env))
            ours, peer = (statistics.median(values) for values in seconds.values())
            print(f"{pair.name:16} msrun {ours:6.2f} s, bare {peer:6.2f} s: {ours / peer:.2f}")
            if ours > BAR * peer:
                missed.append(f"{pair.name}: {ours / peer:.2f} of its peer (at most {BAR})")
    for shortfall in missed if options.check else ():
        print(f"missed: {shortfall}", file=sys.stderr)
    return int(options.check and bool(missed))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each")
    parser.add_argument("--ranks", type=int, default=8, metavar="N")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser.parse_args()


def _pairs(folder: Path, ranks: int, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Yield each backend that can run here; `stack` ends what was started for it."""
    python = sys.executable
    msrun, program = [python, "-P", "-m", "msrun"], ["--workers-per-node", str(ranks), "first.py"]
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "first.py"]
    for name, words in {"mpirun.openmpi": ["--oversubscribe"], "mpirun.mpich": []}.items():
        if not shutil.which(name):
            print(f"{name:16} is not here")
            continue
        ours = [*msrun, "--launcher", "mpirun", "--mpirun", name, *program]
        yield Pair(name, ours, [name, *words, "-n", str(ranks), python, "bare.py"])
    is_root = os.geteuid() == 0
    if ssh.MISSING or not is_root:
        print(f"{'ssh':16} {ssh.MISSING or 'needs root'}")
    else:
        client = ["ssh", "-F", str(ssh.write_config(folder / "ssh")), "-T", "localhost"]
        (folder / "hosts").write_text("localhost\n")
        names = ("PYTHONPATH", "BENCH_FILE", "BENCH_RANKS")
        there = f"cd {folder} && " + " ".join(f"{name}=${name}" for name in names)
        peer = ["sh", "-c", f'exec "$@" "{there} {" ".join(torchrun)}"', "sh", *client]
        started = ["--ssh", " ".join(client[:3]), "--env", f"BENCH_RANKS={ranks}"]
        started += ["--env", f"BENCH_FILE={folder}/reduced", "--hostfile", "hosts"]
        started += ["--remote-python", _remote_python(folder)]
        yield Pair("ssh", [*msrun, "--launcher", "ssh", *started, *program], peer)
    if slurm.MISSING or not is_root:
        print(f"{'slurm':16} {slurm.MISSING or 'needs root'}")
        return
    env = stack.enter_context(slurm.cluster(folder / "slurm"))
    srun = ["srun", "--ntasks-per-node=1"]
    yield Pair("slurm", [*srun, *msrun, *program], [*srun, *torchrun], env)


def _remote_python(folder: Path) -> str:
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def _measure(folder: Path, command: list[str], ranks: int, env: Mapping[str, str]) -> float:
    """Return the seconds from starting `command` to the first all-reduce of its ranks."""
    reduced = folder / "reduced"
    reduced.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    bench = {"BENCH_FILE": str(reduced), "BENCH_RANKS": str(ranks), "PYTHONPATH": str(ROOT)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **root, **meeting, **bench, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode or not reduced.exists():
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return float(reduced.read_text()) - began


if __name__ == "__main__":
    sys.exit(main())
