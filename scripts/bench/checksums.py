#!/usr/bin/env python3
"""Time loads of a checkpoint with its checksums and without, in turns.

    python scripts/bench/checksums.py                 # 512 MiB, 15 turns
    python scripts/bench/checksums.py --mib 2048 --turns 9
    python scripts/bench/checksums.py --check         # exit 1 if checksums cost more than the bar

Both checkpoints hold the same bytes; the one without is like one of an earlier release.  Each load
reads them from the disk, as after a restart; with --cached from the page cache, where reading costs
little beside checking.  Printed is the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import msrun

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime

COST_MAX = 1.05
_MIB_OF_LAYER = 16


def main() -> int:
    """Measure as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--cached", action="store_true", help="leave files in the page cache")
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    options = parser.parse_args()
    runtime = msrun.init({})
    side = 2048  # of float32: 16 MiB
    layers = [nn.Linear(side, side, bias=False) for _ in range(options.mib // _MIB_OF_LAYER)]
    model = runtime.shard(nn.Sequential(*layers))
    with tempfile.TemporaryDirectory() as folder:
        checked, bare = _save(runtime, model, Path(folder))
        ratios = []
        for _ in range(options.turns):
            for path in (checked, bare):
                if not options.cached:
                    _forget(path)
            with_sums, without = (_load(runtime, model, path) for path in (checked, bare))
            ratios.append(with_sums / without)
    runtime.close()
    low, median, high = statistics.quantiles(ratios, n=4)
    load = os.getloadavg()[0]
    print(
        f"load {load:.1f}: {options.mib} MiB with checksums take {median:.3f} of the time without "
        f"(quartiles {low:.3f} to {high:.3f}; last {with_sums:.3f} s and {without:.3f} s)"
    )
    return int(options.check and median > COST_MAX)


def _save(runtime: Runtime, model: nn.Module, folder: Path) -> tuple[Path, Path]:
    """Return two checkpoints of `model`, the second without checksums."""
    checked, bare = folder / "checked", folder / "bare"
    runtime.save(model, step=1, path=checked)
    runtime.finish()
    shutil.copytree(checked, bare)
    file = bare / "checkpoint.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"], manifest["checksums"]
    file.write_text(json.dumps(manifest))
    return checked, bare


def _forget(path: Path) -> None:
    """Have the kernel drop the files of `path` from its page cache."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _load(runtime: Runtime, model: nn.Module, path: Path) -> float:
    """Return the seconds of one load."""
    with torch.no_grad():
        next(model.parameters()).zero_()
    started = time.perf_counter()
    runtime.load(model, path=path)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
