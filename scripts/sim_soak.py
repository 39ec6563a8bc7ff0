"""Run whole clusters under faults, each from one seed: `python scripts/sim_soak.py --seeds N`.

A seed that breaks a promise leaves its transcript in `--out`, which
`python scripts/sim_soak.py --replay FILE` runs again, and which becomes a test when it
is put into tests/sim/clusters/.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import secrets
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sim"))
CHUNK = 50


def broken(mutant: str, stop: int, start: int) -> list[tuple[int, str, str]]:
    """Return (seed, promise, transcript) of those that broke one, from `start` on."""
    faults, mutants = importlib.import_module("faults"), importlib.import_module("mutants")
    seeds = range(start, min(start + CHUNK, stop))
    results = (faults.check(seed, *mutants.MUTANTS.get(mutant, ())) for seed in seeds)
    return [result for result in results if result]


def main() -> int:
    """Run what was asked for; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, help="How many.")
    parser.add_argument("--first", type=int, help="The first one; a random one by default.")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="Processes.")
    parser.add_argument("--mutant", default="", help="Run this one instead of what we ship.")
    parser.add_argument("--out", type=Path, default=Path(), help="Where transcripts go.")
    parser.add_argument("--replay", type=Path, help="Run one transcript again.")
    options = parser.parse_args()
    if options.replay:
        transcript = importlib.import_module("transcript")
        print(transcript.replay(options.replay.read_text()), end="")
        return 0
    first = secrets.randbelow(2**32) if options.first is None else options.first
    print(f"seeds {first} to {first + options.seeds - 1}", flush=True)
    began = time.monotonic()
    count = 0
    with multiprocessing.Pool(options.jobs) as pool:
        stop = first + options.seeds
        run = partial(broken, options.mutant, stop)
        for results in pool.imap_unordered(run, range(first, stop, CHUNK)):
            for seed, promise, text in results:
                count += 1
                path = options.out / f"seed_{seed}.txt"
                path.write_text(text)
                print(f"seed {seed}: {promise}\n  {path}", flush=True)
    took = time.monotonic() - began
    print(f"{count} of {options.seeds} broken, {options.seeds / took:.0f} seeds/s")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
