"""Run whole clusters under faults, each from one seed: `python scripts/sim_soak.py --seeds N`.

A seed that breaks a promise leaves its transcript in `--out`, which
`python scripts/sim_soak.py --replay FILE` runs again, and which becomes a test when it
is put into tests/sim/clusters/.

`--servers` runs parameter servers instead, and names the seeds that break a promise.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

_SIM = Path(__file__).parents[1] / "tests" / "sim"
sys.path[:0] = [str(_SIM), str(_SIM / "servers")]
CHUNK = 50
# What else may happen to parameter servers; a seed takes the next one.
_ODDS: list[dict[str, object]] = [
    {},
    {"rounds": 1},
    {"replicas": 1},
    {"replicas": 1, "rounds": 2, "victims": "server", "kills": 0.2},
    {"replicas": 1, "victims": "servers", "nodes": 2, "kills": 0.1},
    {"together": True, "victims": "server", "scales": 0.0},
    {"victims": "node", "kills": 0.1, "scales": 0.05},
    {"parts": 2, "scales": 0.1},
]


def broken(mutant: str, stop: int, start: int) -> list[tuple[int, str, str]]:
    """Return (seed, promise, transcript) of those that broke one, from `start` on."""
    faults = importlib.import_module("faults")
    seeds = range(start, min(start + CHUNK, stop))
    return [result for result in (faults.check(seed, mutant) for seed in seeds) if result]


def broken_servers(mutant: str, stop: int, start: int) -> list[tuple[int, str, str]]:
    """Do what `broken` does, with parameter servers; they leave no transcript."""
    faults = importlib.import_module("server_faults")
    found = []
    for seed in range(start, min(start + CHUNK, stop)):
        odds = {} if mutant else _ODDS[seed % len(_ODDS)]  # a mutant has odds of its own
        if promise := faults.broken(seed, mutant, odds=odds):
            found.append((seed, f"{promise}, with {odds}", ""))
    return found


def replay(path: Path) -> int:
    """Print a transcript as it comes out now; return 1 when a promise is broken, 2 for no such."""
    try:
        text = importlib.import_module("transcript").replay(path.read_text())
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        print(f"{path}: {problem}", file=sys.stderr)
        return 2
    print(text, end="")
    return int("VIOLATION" in text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 1 when a promise was broken."""
    names = set(importlib.import_module("mutants").MUTANTS)
    of_servers = set(importlib.import_module("server_mutants").SERVER_MUTANTS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="How many.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="At most for so long.")
    parser.add_argument("--first", type=int, help="The first one; a random one by default.")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="Processes.")
    told = "Run this one instead of what we ship."
    parser.add_argument("--mutant", default="", metavar="NAME", help=told)
    parser.add_argument("--servers", action="store_true", help="Parameter servers, not clusters.")
    parser.add_argument("--out", type=Path, default=Path(), help="Where transcripts go.")
    parser.add_argument("--replay", type=Path, help="Run one transcript again.")
    options = parser.parse_args(arguments)
    names = of_servers if options.servers else names
    if options.mutant and options.mutant not in names:
        parser.error(f"no mutant {options.mutant!r} (choose {', '.join(sorted(names))})")
    if options.replay:
        return replay(options.replay)
    first = secrets.randbelow(2**32) if options.first is None else options.first
    print(f"seeds {first} to {first + options.seeds - 1}", flush=True)
    began = time.monotonic()
    count = done = 0
    with multiprocessing.Pool(options.jobs) as pool:
        stop = first + options.seeds
        run = partial(broken_servers if options.servers else broken, options.mutant, stop)
        for results in pool.imap_unordered(run, range(first, stop, CHUNK)):
            done = min(done + CHUNK, options.seeds)
            for seed, promise, text in results:
                count += 1
                print(f"seed {seed}: {promise}", flush=True)
                if text:
                    options.out.mkdir(parents=True, exist_ok=True)
                    path = options.out / f"seed_{seed}.txt"
                    path.write_text(text)
                    print(f"  {path}", flush=True)
            if time.monotonic() - began >= options.minutes * 60:
                break
    took = time.monotonic() - began
    print(f"{count} of {done} broken, {done / took:.0f} seeds/s")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
