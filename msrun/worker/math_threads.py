"""Thread counts of numeric libraries that were loaded before the worker existed.

OpenMP and OpenBLAS read their variables once, when they are loaded: in the
forkserver.  Here a forked worker sets the counts that a fresh interpreter would have read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from msrun import environ

_OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def follow_environment(was: str) -> None:
    """Bring loaded libraries in line with this process's environment.

    Args:
        was: OMP_NUM_THREADS when they were loaded.
    """
    omp, openblas = environ.thread_counts()
    if omp and str(omp) != was and (torch := sys.modules.get("torch")):
        torch.set_num_threads(omp)
    wanted = min(openblas or omp or os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    if wanted > 1:
        _set_openblas(wanted)


def _set_openblas(threads: int) -> None:
    for path in _loaded_openblas():
        library = ctypes.CDLL(path)
        for name in _OPENBLAS_SETTERS:
            if setter := getattr(library, name, None):
                setter(threads)
                break


def _loaded_openblas() -> set[str]:
    with Path("/proc/self/maps").open() as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if "openblas" in line.lower()}
