"""The resources of one machine, as values: CPUs, NUMA nodes, devices, limits."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class DeviceKind(enum.Enum):
    """Family of accelerators, which decides the process-group backend."""

    CUDA = "cuda"
    NPU = "npu"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator that this job may use.

    Args:
        kind: Its family.
        index: Position among the visible devices, from 0: what `local_rank` selects.
        physical: Its number before any visibility variable; `index` when unknown.
        numa_node: NUMA node it hangs on, None when the machine does not say.
    """

    kind: DeviceKind
    index: int
    physical: int
    numa_node: int | None = None


class CpuTopology(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs this process may run on.

    Args:
        numa: NUMA node -> its CPUs, ascending; only nodes with an allowed CPU.
        siblings: CPU -> all CPUs of its physical core, itself included.
        distances: NUMA node -> node -> cost of an access; 10 is local, as the kernel counts.
        memory_nodes: NUMA nodes this process may take memory from; empty when unknown.
        quota: CPU seconds a second that cgroups grant all these CPUs together.
    """

    numa: dict[int, tuple[int, ...]]
    siblings: dict[int, tuple[int, ...]]
    distances: dict[int, dict[int, int]] = msgspec.field(default_factory=dict)
    memory_nodes: tuple[int, ...] = ()
    quota: float = math.inf

    @property
    def cpus(self) -> tuple[int, ...]:
        """All allowed CPUs, ascending."""
        return tuple(sorted(cpu for cpus in self.numa.values() for cpu in cpus))

    def core(self, cpu: int) -> int:
        """Return the name of the physical core of `cpu`: the lowest of its CPUs."""
        return min(self.siblings.get(cpu, (cpu,)), default=cpu)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this node offers to a job.

    Args:
        host: Host name.
        cpus: CPUs this process may use.
        devices: Accelerators this process may use, by index.
        memory_available: Bytes that can be had without swapping, cgroup limits included.
        processes_available: Processes and threads that may still be started.
        files_available: File descriptors one process may open.
        cgroup: Writable cgroup v2 directory of this process, None when there is none.
        address: IP address by which others reach it; loopback when it has no other.
    """

    host: str
    cpus: CpuTopology
    devices: tuple[Device, ...]
    memory_available: int
    processes_available: int
    files_available: int
    cgroup: str | None
    address: str = "127.0.0.1"


def parse_number_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as Linux writes it, ascending and each once.

    Example: `0-2,8` -> (0, 1, 2, 8).  An empty text is an empty list.

    Raises:
        ValueError: The text is no such list.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(numbers))


def render_number_list(numbers: Iterable[int]) -> str:
    """Return `numbers` as Linux writes a list of CPUs, such as `0-2,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
