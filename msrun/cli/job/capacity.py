"""The largest number of workers that a machine can hold.

The costs are what an idle worker cannot do without, so a job that is refused here
could not have started; one that is not refused may still be too large for its data.
"""

from __future__ import annotations

from msrun.topology import Machine

_MIB = 1 << 20

# Of the launcher, the scheduler, the parent of the workers and the store together.
_PROCESSES_OURS = 24
_MEMORY_OURS = 128 * _MIB
_FILES_OURS = 64

# Of one worker: itself and one thread; private pages of a forked, idle interpreter with
# torch; the launcher's pipe, log and process handles, or its connections to the store, which
# torch clones.
_PROCESSES_EACH = 2
_MEMORY_EACH = 8 * _MIB
_FILES_EACH = 4


def capacity(machine: Machine, nnodes: int = 1) -> tuple[int, str]:
    """Return the most workers that `machine` can hold, and what limits them.

    Of `nnodes`, any may get the store, to which each other node has a connection.
    """
    connections = nnodes if nnodes > 1 else 0
    limits = (
        (
            (machine.processes_available - _PROCESSES_OURS) // _PROCESSES_EACH,
            "processes (ulimit -u or the cgroup's pids.max)",
        ),
        (
            (machine.memory_available - _MEMORY_OURS) // _MEMORY_EACH,
            "memory (free memory or the cgroup's memory.max)",
        ),
        (
            (machine.files_available - _FILES_OURS - connections) // _FILES_EACH,
            "open files (ulimit -n)",
        ),
    )
    most, what = min(limits)
    return max(0, most), what
