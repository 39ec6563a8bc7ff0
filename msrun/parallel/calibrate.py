"""Measures the devices and links of a job and writes them as a topology for `msrun search`.

Every rank runs this module as a program, started like any training script.  Collectives are timed
with the executor's own redistribution, so that the figures include the copies that it makes before
and after each collective.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from msrun.errors import UsageError
from msrun.parallel.auto.redistribute import Redistributor
from msrun.parallel.runtime import Runtime, init
from msrun.parallel.search.cost.topology import CollectiveKind, Measured, NetworkLevel, Topology
from msrun.parallel.search.graph.axis_placement import PARTIAL, REPLICATED

# Placement codes before and after, as the executor of a plan redistributes.
_CHANGES: dict[CollectiveKind, tuple[int, int]] = {
    "gather": (0, REPLICATED),
    "scatter": (PARTIAL, 0),
    "reduce": (PARTIAL, REPLICATED),
    "move": (0, 1),
}
_KIB = 1024
_CPU_SIZES = (4 * _KIB, 64 * _KIB, _KIB**2, 8 * _KIB**2)
_DEVICE_SIZES = (64 * _KIB, _KIB**2, 16 * _KIB**2, 128 * _KIB**2)
_TURNS = 5
_TURN_SECONDS = 0.02
_CALLS_MAX = 200
# Turns of an overlap measurement, and calls in each turn.  The fraction is capped, so that no
# gradient reduction is free for the search.
_OVERLAP, _PAIRS, _HIDDEN_MAX = range(7), 4, 0.95


def main(path: str) -> None:
    """Measure on all ranks; rank 0 writes the topology to the YAML file `path`.

    Raises:
        UsageError: The nodes have different numbers of ranks, or the file cannot be written.
    """
    with init() as runtime:
        topology = measure(runtime)
        if runtime.is_main:
            write(topology, Path(path))


def measure(runtime: Runtime) -> Topology:
    """Return the topology of this job, measured while all ranks work at the same time."""
    per_node = runtime.local_world_size or runtime.world_size
    if runtime.world_size % per_node:
        raise UsageError(
            f"{runtime.world_size} ranks are not equally many on every node, of which this one "
            f"has {per_node}: calibrate with equal nodes"
        )
    clock = Clock(runtime)
    measured = [
        *_inside(clock, per_node),
        *_across(clock, per_node),
    ]
    inside = _link([one for one in measured if not one.across])
    across = _link([one for one in measured if one.across])
    flops, launch = _products(clock), _launch(clock)
    return Topology(
        name="calibrated",
        flops=flops,
        efficiency=1.0,
        memory_bandwidth=_copies(clock),
        memory=_memory(runtime, per_node),
        launch=launch,
        collective=launch,
        per_node=per_node,
        inside=inside or across or NetworkLevel(bandwidth=flops, latency=0.0),
        across=across or inside or NetworkLevel(bandwidth=flops, latency=0.0),
        overlap=_overlap(clock, per_node),
        measured=tuple(measured),
    )


def write(topology: Topology, path: Path) -> None:
    """Write `topology` as a file that `--topology` and the key `topology` read.

    Raises:
        UsageError: It cannot be written.
    """
    import yaml

    try:
        path.write_text(yaml.safe_dump(msgspec.to_builtins(topology), sort_keys=False))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


class Clock:
    """Times actions that all ranks run at the same time; every rank gets the slowest time.

    Args:
        runtime: Of this rank.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.device, self.world_size = runtime.device, runtime.world_size

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the seconds of one call among many in a row, as the median of several turns."""
        action()
        once = self._turn(action, 1)
        calls = max(1, min(_CALLS_MAX, int(_TURN_SECONDS / max(once, 1e-7))))
        return float(np.median([self._turn(action, calls) for _ in range(_TURNS)]))

    def hidden(self, first: Callable[[], object], second: Callable[[], object]) -> float:
        """Return the fraction of `first` that overlaps with `second`, which starts right after.

        `first`, `second` and both together are timed in turns, so that other load on the machine
        affects all three alike.
        """
        times = max(1, round(self.seconds(first) / max(self.seconds(second), 1e-7)))

        def work() -> None:
            for _ in range(times):
                second()

        def both() -> None:
            first()
            work()

        turns = [[self._turn(action, _PAIRS) for action in (first, work, both)] for _ in _OVERLAP]
        return float(np.median([hidden_fraction(*turn) for turn in turns]))

    def _turn(self, action: Callable[[], object], calls: int) -> float:
        if self.world_size > 1:
            dist.barrier()
        self._finish()
        began = time.perf_counter()
        for _ in range(calls):
            action()
        self._finish()
        taken = torch.tensor((time.perf_counter() - began) / calls, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def _finish(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()


def hidden_fraction(first: float, second: float, both: float) -> float:
    """Return the fraction of the shorter time that overlap saves if both together take `both`."""
    return min(max((first + second - both) / min(first, second), 0.0), _HIDDEN_MAX)


def fit(nbytes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return start-up seconds and seconds a byte, by least squares of the relative errors."""
    sizes, weights = np.array(nbytes, dtype=float), 1 / np.array(seconds)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) * weights[:, None]
    start, per_byte = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)[0]
    if start < 0:
        return 0.0, float(np.mean(np.array(seconds) / sizes))
    if per_byte < 0:
        return float(np.mean(seconds)), 0.0
    return float(start), float(per_byte)


def _inside(clock: Clock, per_node: int) -> list[Measured]:
    """Measure collectives of 2, 4, 8, ... neighbours on a node, in all groups at once."""
    sizes = [n for n in _powers(per_node) if per_node % n == 0]
    measured: list[Measured] = []
    for ranks in sizes:
        shape = (clock.world_size // ranks, ranks)
        mesh = init_device_mesh(clock.device.type, shape, mesh_dim_names=("outer", "inner"))
        measured += _collectives(clock, mesh["inner"], across=False)
    return measured


def _across(clock: Clock, per_node: int) -> list[Measured]:
    """Measure collectives over one rank of each node, in all such groups at once."""
    nodes = clock.world_size // per_node
    if nodes == 1:
        return []
    mesh = init_device_mesh(clock.device.type, (nodes, per_node), mesh_dim_names=("outer", "inner"))
    return _collectives(clock, mesh["outer"], across=True)


def _powers(most: int) -> list[int]:
    return sorted({2**i for i in range(1, most.bit_length()) if 2**i <= most} | {most} - {1})


def _collectives(clock: Clock, mesh: DeviceMesh, *, across: bool) -> list[Measured]:
    redistributor, ranks = Redistributor(mesh), mesh.size()
    sizes = _CPU_SIZES if clock.device.type == "cpu" else _DEVICE_SIZES
    measured = []
    for kind, (source, target) in _CHANGES.items():
        nbytes, seconds = [], []
        for size in sizes:
            side = ranks * max(1, round((size / 4) ** 0.5 / ranks))
            rows = side // ranks if source == 0 else side
            part = torch.ones(rows, side, device=clock.device)
            action = functools.partial(redistributor.redistribute, part, [source], [target])
            nbytes.append(4 * side * side)
            seconds.append(clock.seconds(action))
        start, per_byte = fit(nbytes, seconds)
        measured.append(
            Measured(kind=kind, ranks=ranks, across=across, start=start, per_byte=per_byte)
        )
    return measured


def _link(measured: list[Measured]) -> NetworkLevel | None:
    """Return bandwidth and latency from the all-gather over the most ranks; None without one."""
    gathers = [one for one in measured if one.kind == "gather" and one.per_byte]
    if not gathers:
        return None
    most = max(gathers, key=lambda one: one.ranks)
    share = (most.ranks - 1) / most.ranks
    return NetworkLevel(
        bandwidth=share / most.per_byte, latency=most.start / most.ranks.bit_length()
    )


def _products(clock: Clock) -> float:
    """Return the floating-point operations a second of large matrix products."""
    is_cpu = clock.device.type == "cpu"
    side, dtype = (512, torch.float32) if is_cpu else (8192, torch.bfloat16)
    x = torch.ones(side, side, device=clock.device, dtype=dtype)
    return 2 * side**3 / clock.seconds(lambda: x @ x)


def _copies(clock: Clock) -> float:
    """Return the bytes a second that a copy reads and writes."""
    x = torch.ones((4 if clock.device.type == "cpu" else 256) * _KIB**2, device=clock.device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / clock.seconds(lambda: y.copy_(x))


def _launch(clock: Clock) -> float:
    """Return the seconds of an operator on one element: the cost of its launch."""
    x = torch.ones(1, device=clock.device)
    return clock.seconds(lambda: x + 1)


def _overlap(clock: Clock, per_node: int) -> float:
    """Return the fraction of a gradient all-reduce that overlaps with the next matrix product.

    Measured over the ranks of a node, or over the nodes if each has one rank.
    """
    if clock.world_size == 1:
        return 0.0
    ranks = per_node if per_node > 1 else clock.world_size
    shape = (clock.world_size // ranks, ranks)
    mesh = init_device_mesh(clock.device.type, shape, mesh_dim_names=("outer", "inner"))["inner"]
    redistributor, is_cpu = Redistributor(mesh), clock.device.type == "cpu"
    part = torch.ones((_CPU_SIZES if is_cpu else _DEVICE_SIZES)[-2] // 4, device=clock.device)
    side = 256 if is_cpu else 4096
    x = torch.ones(side, side, device=clock.device)
    return clock.hidden(
        lambda: redistributor.redistribute(part, [PARTIAL], [REPLICATED]), lambda: x @ x
    )


def _memory(runtime: Runtime, per_node: int) -> int:
    if runtime.device.type == "cpu":
        return int(psutil.virtual_memory().total) // per_node
    _, total = torch.get_device_module(runtime.device).mem_get_info()
    return int(total)


if __name__ == "__main__":
    main(sys.argv[1])
