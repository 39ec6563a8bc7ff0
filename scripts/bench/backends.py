"""Time from a command to the first all-reduce of its ranks: each backend beside its bare peer.

    python scripts/bench/backends.py                       # 5 pairs, 8 ranks on 4 hosts
    python scripts/bench/backends.py --pairs 1 --hosts 2
    python scripts/bench/backends.py --check               # exit 1 and name the missed bars

Hosts are made of network namespaces, with one more for the command, which takes root.  The two
of a pair take turns.  A backend whose programs are not here is left out by name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/lab"))

from tests.lab import slurm, ssh
from tests.lab.hosts import Lab, missing

ROOT = Path(__file__).resolve().parents[2]
BAR = 0.7
PATIENCE = 120.0
SLOTS = 2
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
if dist.get_rank() == 0:
    assert found.item() == dist.get_world_size() == int(sys.argv[1])
    with open("reduced", "w") as file:
        file.write(str(time.monotonic()))
dist.barrier()
dist.destroy_process_group()
"""
# What a program of torchrun's reads, which a bare mpirun does not tell.
BARE = """
import os, runpy, sys
for name, theirs in {"RANK": "RANK", "WORLD_SIZE": "SIZE"}.items():
    os.environ[name] = os.environ.get(f"OMPI_COMM_WORLD_{theirs}") or os.environ[f"PMI_{theirs}"]
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "n0", "29600"
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
    if lacks := missing():
        sys.exit(f"the hosts cannot be made: {lacks}")
    ranks, cores, load = options.hosts * SLOTS, os.cpu_count(), os.getloadavg()[0]
    print(f"{ranks} ranks on {options.hosts} hosts, {cores} cores, load {load:.2f} before")
    names = [f"n{number}" for number in range(options.hosts)]
    missed = []
    with (
        tempfile.TemporaryDirectory(prefix="b") as name,
        Lab(Path(name), "head", *names) as lab,
        contextlib.ExitStack() as stack,
    ):
        for pair in _pairs(lab, _write_files(lab.folder, names), stack):
            seconds: dict[str, list[float]] = {"msrun": [], "peer": []}
            for turn in range(options.pairs):
                both = [("msrun", pair.ours), ("peer", pair.peer)]
                for who, command in both if turn % 2 == 0 else reversed(both):
                    seconds[who].append(_measure(lab, command, pair.env))
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
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="with 2 ranks each")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser.parse_args()


def _write_files(folder: Path, names: list[str]) -> str:
    """Write what the commands name, and return the Python of all hosts."""
    (folder / "first.py").write_text(PROGRAM)
    (folder / "bare.py").write_text(BARE)
    (folder / "hosts").write_text("".join(f"{name} slots={SLOTS}\n" for name in names))
    python = folder / "python"
    settings = f"PYTHONPATH={shlex.quote(str(ROOT))} OMP_NUM_THREADS=1"
    python.write_text(
        f'#!/bin/sh\ncd {folder} && {settings} exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


def _pairs(lab: Lab, python: str, stack: contextlib.ExitStack) -> Iterator[Pair]:
    """Yield each backend that can run here; `stack` ends what was started for it."""
    names = [host.name for host in lab.hosts[1:]]
    ranks = len(names) * SLOTS
    msrun, first = [python, "-P", "-m", "msrun"], ["first.py", str(ranks)]
    size = [f"--nnodes={len(names)}", f"--nproc-per-node={SLOTS}"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={names[0]}:29500"]
    torchrun = [python, "-m", "torch.distributed.run", *size, *meeting, *first]
    if ssh.MISSING:
        print(f"{'ssh':16} {ssh.MISSING}")
    else:
        env = ssh.serve(lab.folder / "ssh", *lab.hosts[1:])
        fleet = ["--hostfile", "hosts", "--remote-python", python]
        slots = ",".join(f"{name}:{SLOTS}" for name in names)
        flags = {"mpirun.openmpi": ["--allow-run-as-root", "--host"], "mpirun.mpich": ["-hosts"]}
        for name, words in flags.items():
            if not shutil.which(name):
                print(f"{name:16} is not here")
                continue
            ours = [*msrun, "--launcher", "mpirun", "--mpirun", name, *fleet, *first]
            bare = [python, "bare.py", str(ranks)]
            yield Pair(name, ours, [name, *words, slots, "-n", str(ranks), *bare], env)
        lines = [f"ssh {name} {shlex.join(torchrun)} &" for name in names]
        peer = ["sh", "-c", "\n".join([*lines, "wait"])]
        yield Pair("ssh", [*msrun, "--launcher", "ssh", *fleet, *first], peer, env)
    if slurm.MISSING:
        print(f"{'slurm':16} {slurm.MISSING}")
        return
    env = stack.enter_context(slurm.cluster_on(lab.folder / "slurm", *lab.hosts))
    srun = ["srun", f"-N{len(names)}", "--ntasks-per-node=1"]
    ours = [*srun, *msrun, f"--workers-per-node={SLOTS}", *first]
    yield Pair("slurm", ours, [*srun, *torchrun], env)


def _measure(lab: Lab, command: list[str], env: Mapping[str, str]) -> float:
    """Return the seconds from starting `command` to the first all-reduce of its ranks."""
    reduced = lab.folder / "reduced"
    reduced.unlink(missing_ok=True)
    began = time.monotonic()
    done = lab.hosts[0].run(command, cwd=lab.folder, env=env, timeout=PATIENCE)
    if done.returncode or not reduced.exists():
        sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return float(reduced.read_text()) - began


if __name__ == "__main__":
    sys.exit(main())
