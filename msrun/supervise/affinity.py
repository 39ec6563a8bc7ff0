"""Decides which CPUs and which NUMA memory each worker of a node gets; the worker binds itself.

The unit that workers share is the physical core, as long as there is one for each
worker, else the single CPU.  All workers get the same number of units, up to one,
because the slowest rank sets the pace of all.  A worker's units come first from the
NUMA node of its device (its *home*), then from the nearest other node, at equal
distance from one that no device claims; this is MindSpore's rule, with nothing left over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from msrun.errors import UsageError
from msrun.job import Binding, BindMode
from msrun.topology import CpuTopology, Device, render_number_list

Numbers = tuple[int, ...]

_LOCAL = 10
_REMOTE = 20
_ROUNDING = 1e-9


class AffinityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the workers of one node run, by local rank.

    Args:
        cpus: CPUs of each worker, ascending; empty when it is not bound.
        numa_nodes: NUMA nodes of each worker's memory; empty when it is not bound.
        notes: Remarks for the user, such as why a worker is not bound.
    """

    cpus: tuple[Numbers, ...]
    numa_nodes: tuple[Numbers, ...]
    notes: tuple[str, ...] = ()


def plan_cpus(
    binding: Binding, cpus: CpuTopology, devices: tuple[Device, ...], local_world_size: int
) -> AffinityPlan:
    """Decide the CPUs of each worker; memory stays unbound.

    Given CPUs belong to the device of that number before any visibility variable,
    and to the local rank of that number on a node without devices.

    Raises:
        UsageError: A given CPU or device is not there.
    """
    nowhere: tuple[Numbers, ...] = ((),) * local_world_size
    if binding.mode is BindMode.OFF:
        return AffinityPlan(cpus=nowhere, numa_nodes=nowhere)
    if binding.mode is BindMode.AUTO:
        shares, notes = _divide(cpus, _homes(devices, local_world_size))
    else:
        given = _Given(option="--bind-core", noun="CPU", available=cpus.cpus)
        shares, notes = given.by_worker(binding.by_device, devices, local_world_size)
        notes += [] if binding.is_shared else _overlaps(shares)
    return AffinityPlan(cpus=shares, numa_nodes=nowhere, notes=tuple(notes))


def plan_memory(
    binding: Binding, plan: AffinityPlan, cpus: CpuTopology, devices: tuple[Device, ...]
) -> AffinityPlan:
    """Return `plan` with the memory of each worker decided too.

    A worker that has no CPUs of its own is bound to those of its NUMA nodes, as with
    `numactl --membind N --cpunodebind N`: memory without CPUs near it gains nothing.

    Raises:
        UsageError: A given NUMA node or device is not there.
    """
    if binding.mode is BindMode.OFF:
        return plan
    size = len(plan.cpus)
    if binding.mode is BindMode.AUTO:
        nodes, notes = _nearest_memory(plan, cpus, _homes(devices, size))
    else:
        given = _Given(option="--bind-numa", noun="NUMA node", available=_memory_nodes(cpus))
        nodes, notes = given.by_worker(binding.by_device, devices, size)
    near = [tuple(sorted(c for n in own for c in cpus.numa.get(n, ()))) for own in nodes]
    return replace(
        plan,
        cpus=tuple(own or other for own, other in zip(plan.cpus, near, strict=True)),
        numa_nodes=nodes,
        notes=(*plan.notes, *notes),
    )


def plan_threads(plan: AffinityPlan, cpus: CpuTopology) -> tuple[int, ...]:
    """Return a good OMP_NUM_THREADS for each worker: its physical cores, at least 1.

    A core that several workers may use counts as a fraction for each, and the CPU
    time that cgroups grant is shared evenly.
    """
    everywhere = cpus.cpus
    cores = [{cpus.core(cpu) for cpu in own or everywhere} for own in plan.cpus]
    users = Counter(core for own in cores for core in own)
    granted = cpus.quota / max(1, len(cores))
    return tuple(
        max(1, math.floor(min(granted, sum(1 / users[core] for core in own)) + _ROUNDING))
        for own in cores
    )


class _Given(msgspec.Struct, frozen=True, kw_only=True):
    """One option with devices in its value."""

    option: str
    noun: str
    available: Numbers

    def by_worker(
        self, by_device: dict[int, Numbers], devices: tuple[Device, ...], size: int
    ) -> tuple[tuple[Numbers, ...], list[str]]:
        """Return the numbers of each worker, checked, and notes."""
        physical = {device.index: device.physical for device in devices}
        others = set(range(size)) - set(physical.values())
        names = [physical.get(i, i if i in others else None) for i in range(size)]
        usable = sorted(name for name in names if name is not None)
        notes = []
        for device, numbers in sorted(by_device.items()):
            self._check(device, numbers)
            if device in usable:
                continue
            if device not in physical.values():
                msg = (
                    f"{self.option} names device{device}, which no worker on this node uses "
                    f"(choose from {render_number_list(usable)})"
                )
                raise UsageError(msg)
            notes.append(f"{self.option}: device{device} has no worker, so its entry is not used")
        shares = tuple(
            () if name is None else tuple(sorted(set(by_device.get(name, ())))) for name in names
        )
        if idle := [i for i, share in enumerate(shares) if not share]:
            notes.append(f"{self.option} does not name {_workers(idle)}, not bound")
        return shares, notes

    def _check(self, device: int, numbers: Numbers) -> None:
        if not numbers:
            msg = f"{self.option} gives device{device} no {self.noun} (leave the device out)"
            raise UsageError(msg)
        if missing := sorted(set(numbers) - set(self.available)):
            msg = (
                f"{self.option} gives device{device} {self.noun} {render_number_list(missing)}, "
                f"not available on this node (choose from {render_number_list(self.available)})"
            )
            raise UsageError(msg)


def _overlaps(shares: Sequence[Numbers]) -> list[str]:
    users = Counter(cpu for share in shares for cpu in share)
    shared = [cpu for cpu, count in users.items() if count > 1]
    return [f"--bind-core gives CPU {render_number_list(shared)} to several workers"] * bool(shared)


def _homes(devices: Iterable[Device], size: int) -> list[int | None]:
    """Return the NUMA node of each worker's device; local rank i uses device i."""
    by_index = {device.index: device.numa_node for device in devices}
    return [by_index.get(i) for i in range(size)]


def _workers(local_ranks: Iterable[int]) -> str:
    """Return `worker 3` or `workers 0-3`."""
    ranks = list(local_ranks)
    return f"worker{'s' * (len(ranks) > 1)} {render_number_list(ranks)}"


# Sharing out: first how many units of each node a worker takes, then which.


def _divide(
    cpus: CpuTopology, homes: Sequence[int | None]
) -> tuple[tuple[Numbers, ...], list[str]]:
    """Return equal, disjoint CPUs that use all of `cpus`, and notes."""
    size = len(homes)
    cores = _cores(cpus)
    if (count := len(cpus.cpus)) < size:
        plural = "s" * (count != 1)
        return ((),) * size, [
            f"no worker has CPUs of its own: {size} workers on {count} CPU{plural}"
        ]
    notes = []
    units = cores
    if (whole := sum(map(len, cores.values()))) < size:
        notes.append(f"workers share physical cores: {size} workers on {whole} cores")
        units = {node: [(cpu,) for core in own for cpu in core] for node, own in cores.items()}
    division = _Division(cpus, {node: len(own) for node, own in units.items()}, homes)
    notes += division.settle()
    return division.cut(units), notes


def _cores(cpus: CpuTopology) -> dict[int, list[Numbers]]:
    """Return node -> its physical cores, each as its allowed CPUs, by lowest CPU."""
    units: dict[int, list[Numbers]] = {}
    for node, own in sorted(cpus.numa.items()):
        cores: dict[int, list[int]] = {}
        for cpu in sorted(own):
            cores.setdefault(cpus.core(cpu), []).append(cpu)
        units[node] = sorted(map(tuple, cores.values()))
    return units


class _Division:
    """How many units of each NUMA node every worker takes.

    Args:
        cpus: The CPU topology, for its distances.
        left: Node -> units that are still free.
        homes: NUMA node of each worker's device.
    """

    def __init__(
        self, cpus: CpuTopology, left: dict[int, int], homes: Sequence[int | None]
    ) -> None:
        self._cpus = cpus
        self._left = dict(left)
        self._homes = homes
        self._quota = sum(left.values()) // len(homes)
        self._taken: list[Counter[int]] = [Counter() for _ in homes]
        self._claimed = {home for home in homes if home is not None}

    def settle(self) -> list[str]:
        """Hand out every unit; return notes on workers that got too few at home."""
        notes = self._settle_at_home()
        self._settle_whole()
        self._fill_up()
        self._spread_rest()
        return notes

    def cut(self, units: dict[int, list[Numbers]]) -> tuple[Numbers, ...]:
        """Return the CPUs of each worker: on every node one run of units a worker."""
        queues = {node: iter(own) for node, own in units.items()}
        shares = []
        for taken in self._taken:
            own = [
                cpu
                for node, count in taken.items()
                for _ in range(count)
                for cpu in next(queues[node])
            ]
            shares.append(tuple(sorted(own)))
        return tuple(shares)

    def _settle_at_home(self) -> list[str]:
        """Give workers units of their home, in even parts where it is too small."""
        notes = []
        for home in sorted(self._claimed):
            residents = [rank for rank, own in enumerate(self._homes) if own == home]
            units = self._left.get(home, 0)
            each, extra = divmod(units, len(residents))
            for position, rank in enumerate(residents):
                self._take(rank, home, min(self._quota, each + (position < extra)))
            if units < self._quota * len(residents):
                notes.append(
                    f"{_workers(residents)} must also use CPUs far from the device: "
                    f"NUMA node {home} has {'too few' if units else 'none for this job'}"
                )
        return notes

    def _settle_whole(self) -> None:
        """Keep each worker without units on one node, where one has room for it."""
        for rank, taken in enumerate(self._taken):
            roomy = [node for node, units in self._left.items() if units >= self._quota]
            if not taken and roomy:
                _, node = min((self._distance(rank, node), node) for node in roomy)
                self._take(rank, node, self._quota)

    def _fill_up(self) -> None:
        """Bring every worker up to the quota from the nearest nodes."""
        for rank, taken in enumerate(self._taken):
            while (need := self._quota - taken.total()) > 0:
                node = self._source(rank)
                self._take(rank, node, min(need, self._left[node]))

    def _source(self, rank: int) -> int:
        """Return the node that a worker takes further units from."""

        def cost(node: int) -> tuple[int, bool, int, int]:
            return self._distance(rank, node), node in self._claimed, -self._left[node], node

        return min((node for node, units in self._left.items() if units), key=cost)

    def _spread_rest(self) -> None:
        """Give the units beyond the quotas to workers, one each, near ones first."""
        for node in sorted(self._left):
            while self._left[node]:
                self._take(self._taker(node), node, 1)

    def _taker(self, node: int) -> int:
        """Return the worker that gets one unit of `node` on top of its quota."""

        def cost(rank: int) -> tuple[bool, int, int]:
            return not self._taken[rank][node], self._distance(rank, node), rank

        plain = (r for r, taken in enumerate(self._taken) if taken.total() == self._quota)
        return min(plain, key=cost)

    def _take(self, rank: int, node: int, count: int) -> None:
        if count:
            self._left[node] -= count
            self._taken[rank][node] += count

    def _distance(self, rank: int, node: int) -> int:
        """Return the cost of `node` for a worker: from its home, else from its first units."""
        base = self._homes[rank]
        if base is None:
            base = next(iter(self._taken[rank]), None)
        if base is None:
            return _LOCAL
        fallback = _LOCAL if base == node else _REMOTE
        return self._cpus.distances.get(base, {}).get(node, fallback)


# Memory.


def _memory_nodes(cpus: CpuTopology) -> Numbers:
    return cpus.memory_nodes or tuple(sorted(cpus.numa))


def _nearest_memory(
    plan: AffinityPlan, cpus: CpuTopology, homes: Sequence[int | None]
) -> tuple[tuple[Numbers, ...], list[str]]:
    """Return the nodes of each worker's CPUs, else of its device, else an even part."""
    node_of = {cpu: node for node, own in cpus.numa.items() for cpu in own}
    memory = set(_memory_nodes(cpus))
    usable = sorted(memory & set(cpus.numa))
    nodes: list[Numbers] = []
    for rank, (own, home) in enumerate(zip(plan.cpus, homes, strict=True)):
        if own:
            wanted = {node_of[cpu] for cpu in own} & memory
        elif home in usable:
            wanted = {home}
        else:
            wanted = set(_part(usable, rank, len(homes)))
        nodes.append(tuple(sorted(wanted)))
    lost = [rank for rank, own in enumerate(nodes) if not own]
    notes = [f"the memory of {_workers(lost)} is not bound: no memory is near their CPUs"]
    return tuple(nodes), notes * bool(lost)


def _part(nodes: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Return the nodes of one worker when all workers share `nodes` evenly, in order."""
    first = rank * len(nodes) // size
    return nodes[first : max(first + 1, (rank + 1) * len(nodes) // size)]
