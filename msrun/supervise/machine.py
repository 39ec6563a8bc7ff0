"""The resources of this node, read from /proc, /sys and the process's own limits.

Every start of `msrun` reads it, so files are read directly and nothing heavy is
imported.  A file that is missing or odd is a limit that does not exist.
"""

from __future__ import annotations

import math
import os
import re
import resource
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from msrun.supervise.devices import read_devices, read_names, read_text
from msrun.topology import CpuTopology, Machine, parse_number_list

_SLASH = Path("/")
_NODE = re.compile(r"node([0-9]+)")
_CGROUP_KILL_SINCE = (5, 14)
_OCTAL = re.compile(r"\\([0-7]{3})")
_KERNEL_LIMITS = ("pid_max", "threads-max")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_active_file", "total_inactive_file")


def read_machine(environment: Mapping[str, str], root: Path = _SLASH) -> Machine:
    """Return the part of the machine that this process may use.

    Args:
        environment: Holds the variables that hide devices.
        root: Where /dev, /proc and /sys are; another one is for tests.
    """
    cgroups = _Cgroups(root)
    return Machine(
        host=os.uname().nodename,
        cpus=replace(read_cpus(os.sched_getaffinity(0), root), quota=_cpu_quota(cgroups)),
        devices=read_devices(root, environment),
        memory_available=_memory_available(root, cgroups),
        processes_available=_processes_available(root, cgroups),
        files_available=_files_available(root),
        cgroup=_writable_cgroup(root, cgroups),
        address=_address(),
    )


def _address() -> str:
    """Return the address of the interface that leads out of this machine.

    Connecting a datagram socket sends nothing; the peer is one of RFC 5737's addresses
    that belong to no process.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


# CPUs.


def read_cpus(allowed: Collection[int], root: Path = _SLASH) -> CpuTopology:
    """Return how the `allowed` CPUs hang together; one node 0 where the kernel has no NUMA.

    The time that cgroups grant on them is left out.
    """
    directory = root / "sys/devices/system/node"
    nodes = sorted(int(m[1]) for m in map(_NODE.fullmatch, read_names(directory)) if m)
    numa: dict[int, tuple[int, ...]] = {}
    homeless = set(allowed)
    for node in nodes:
        own = homeless & set(_numbers(read_text(directory / f"node{node}" / "cpulist")))
        homeless -= own
        if own:
            numa[node] = tuple(sorted(own))
    if homeless:
        first = next(iter(numa), 0)
        numa[first] = tuple(sorted({*numa.get(first, ()), *homeless}))
    return CpuTopology(
        numa=numa,
        siblings=_siblings(allowed, root),
        distances=_distances(directory, nodes),
        memory_nodes=_memory_nodes(root),
    )


def _siblings(allowed: Collection[int], root: Path) -> dict[int, tuple[int, ...]]:
    directory = root / "sys/devices/system/cpu"
    siblings: dict[int, tuple[int, ...]] = {}
    for cpu in sorted(allowed):
        if cpu not in siblings:
            text = read_text(f"{directory}/cpu{cpu}/topology/thread_siblings_list")
            core = tuple(sorted({cpu, *_numbers(text)}))
            siblings |= dict.fromkeys(core, core)
    return {cpu: siblings[cpu] for cpu in sorted(allowed)}


def read_neighbours(
    allowed: Collection[int], root: Path = _SLASH, *, share: str
) -> dict[int, tuple[int, ...]]:
    """Return each of the `allowed` CPUs with those of them on its socket, or at its cache.

    Args:
        allowed: CPUs.
        root: As of `read_machine`.
        share: `socket`, or `core-complex` for the last cache.

    Returns:
        CPU -> CPUs, itself included; empty where the machine does not tell.
    """
    neighbours = {}
    for cpu in allowed:
        directory = root / f"sys/devices/system/cpu/cpu{cpu}"
        if share == "socket":
            text = read_text(directory / "topology/package_cpus_list")
            # Its name before Linux 5.3.
            text = text or read_text(directory / "topology/core_siblings_list")
        else:
            text = _last_cache(directory / "cache")
        neighbours[cpu] = tuple(sorted(set(_numbers(text)) & set(allowed)))
    is_told = all(cpu in near for cpu, near in neighbours.items())
    return neighbours if is_told else {}


def _last_cache(directory: Path) -> str:
    """Return which CPUs share the cache of the highest level, as Linux writes a list."""
    levels = {}
    for name in read_names(directory):
        cache = directory / name
        if read_text(cache / "type").strip() in ("Unified", "Data"):
            level = _number(read_text(cache / "level")) or 0
            levels[level] = read_text(cache / "shared_cpu_list")
    return levels[max(levels)] if levels else ""


def _distances(directory: Path, nodes: list[int]) -> dict[int, dict[int, int]]:
    if len(nodes) < 2:  # noqa: PLR2004 - nothing to compare
        return {}
    rows = {}
    for node in nodes:
        costs = read_text(directory / f"node{node}" / "distance").split()
        if len(costs) == len(nodes) and all(cost.isdigit() for cost in costs):
            rows[node] = dict(zip(nodes, map(int, costs), strict=True))
    return rows


def _memory_nodes(root: Path) -> tuple[int, ...]:
    nodes = _numbers(read_text(root / "sys/devices/system/node/has_memory"))
    status = read_text(root / "proc/self/status")
    allowed = _numbers(_fields(status.replace(":", " ")).get("Mems_allowed_list", ""))
    return tuple(node for node in nodes if not allowed or node in allowed)


def _cpu_quota(cgroups: _Cgroups) -> float:
    """Return the CPU seconds a second that the tightest cgroup grants."""
    quota = math.inf
    for directory in cgroups.dirs(None):
        spent, _, period = read_text(directory / "cpu.max").partition(" ")
        quota = min(quota, _ratio(spent, period))
    for directory in cgroups.dirs("cpu"):
        spent = read_text(directory / "cpu.cfs_quota_us")
        quota = min(quota, _ratio(spent, read_text(directory / "cpu.cfs_period_us")))
    return quota


def _ratio(spent: str, period: str) -> float:
    granted, every = _number(spent), _number(period)
    return granted / every if granted and every else math.inf


# Limits.


def read_memory_available(root: Path = _SLASH) -> int:
    """Return bytes that this process can have without swapping."""
    return _memory_available(root, _Cgroups(root))


def _memory_available(root: Path, cgroups: _Cgroups) -> int:
    """Return bytes that can be had without swapping; page cache counts as free."""
    kib = _number(_fields(read_text(root / "proc/meminfo")).get("MemAvailable:", ""))
    if kib is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = kib * 1024
    for directory in cgroups.dirs(None):
        for limit in ("memory.max", "memory.high"):
            spare = _spare(directory, limit, "memory.current", _RECLAIMABLE)
            available = min(available, spare)
    for directory in cgroups.dirs("memory"):
        spare = _spare(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", _RECLAIMABLE_V1)
        available = min(available, spare)
    return available


def _spare(directory: Path, limit: str, usage: str, reclaimable: Iterable[str]) -> int:
    """Return how much of a cgroup's memory limit is left, `sys.maxsize` without one."""
    most = _number(read_text(directory / limit))
    if most is None:
        return sys.maxsize
    used = _number(read_text(directory / usage)) or 0
    counts = _fields(read_text(directory / "memory.stat"))
    used -= sum(_number(counts.get(name, "")) or 0 for name in reclaimable)
    return max(0, most - max(0, used))


def _processes_available(root: Path, cgroups: _Cgroups) -> int:
    """Return the processes and threads that may still be started."""
    running = _running(root)
    limits = (_number(read_text(root / f"proc/sys/kernel/{name}")) for name in _KERNEL_LIMITS)
    available = min((most - running for most in limits if most is not None), default=sys.maxsize)
    for directory in (*cgroups.dirs(None), *cgroups.dirs("pids")):
        most = _number(read_text(directory / "pids.max"))
        if most is not None:
            used = _number(read_text(directory / "pids.current")) or 0
            available = min(available, most - used)
    return max(0, min(available, _user_processes_available(root, running)))


def _running(root: Path) -> int:
    """Return how many threads the machine has, from the fourth field `running/all`."""
    fields = read_text(root / "proc/loadavg").split()
    return _number(fields[3].partition("/")[2]) or 0 if len(fields) > 3 else 0  # noqa: PLR2004


def _user_processes_available(root: Path, running: int) -> int:
    """Return the processes that RLIMIT_NPROC, which does not bind root, leaves to this user."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.geteuid() == 0 or most == resource.RLIM_INFINITY:
        return sys.maxsize
    # Counting one user's threads is slow on a large machine, and pointless below half.
    return most - (running if running * 2 < most else _own_threads(root))


def _own_threads(root: Path) -> int:
    """Return how many threads this user has; each is a link to its process's task directory."""
    count = 0
    for name in read_names(root / "proc"):
        if name.isdigit():
            try:
                status = os.stat(root / "proc" / name / "task")  # noqa: PTH116 - as read_names
            except OSError:
                continue
            count += status.st_nlink - 2 if status.st_uid == os.geteuid() else 0
    return count


def _files_available(root: Path) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return _number(read_text(root / "proc/sys/fs/nr_open")) or sys.maxsize
    return most


# Cgroups.


def memory_cgroup_files(root: Path = _SLASH) -> list[Path]:
    """Return the file that counts out-of-memory kills closest to this process.

    That is the one of its own cgroup, or of the nearest one above that counts, and
    for a process in no memory cgroup the one of the whole machine.
    """
    cgroups = _Cgroups(root)
    candidates = [
        *(directory / "memory.oom_control" for directory in cgroups.dirs("memory")),
        *(directory / "memory.events" for directory in cgroups.dirs(None)),
        root / "proc/vmstat",
    ]
    return next(([path] for path in candidates if read_oom_kills([path]) is not None), [])


def read_oom_kills(files: Iterable[Path]) -> int | None:
    """Return how many processes the kernel killed for want of memory, None when unknown.

    Only the difference of two readings means something.
    """
    counts = [_number(_fields(read_text(path)).get("oom_kill", "")) for path in files]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _writable_cgroup(root: Path, cgroups: _Cgroups) -> str | None:
    """Return this process's cgroup v2 directory if it can have children that can be killed."""
    unified = cgroups.dirs(None)
    if not unified or not _can_kill(root, unified[0]):
        return None
    own = unified[0]
    is_domain = read_text(own / "cgroup.type").strip() in {"", "domain"}
    writable = all(os.access(path, os.W_OK) for path in (own, own / "cgroup.procs"))
    return str(own) if is_domain and writable else None


def _can_kill(root: Path, own: Path) -> bool:
    """Return whether the kernel has cgroup.kill; the root cgroup, which lacks a type, hides it."""
    if (own / "cgroup.kill").exists():
        return True
    release = re.match(r"([0-9]+)\.([0-9]+)", read_text(root / "proc/sys/kernel/osrelease"))
    is_root = (own / "cgroup.procs").exists() and not (own / "cgroup.type").exists()
    return is_root and release is not None and _version(release) >= _CGROUP_KILL_SINCE


def _version(release: re.Match[str]) -> tuple[int, int]:
    return int(release[1]), int(release[2])


class _Cgroups:
    """Where this process is in the cgroup hierarchies, v1 and v2 side by side."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._membership = read_text(root / "proc/self/cgroup")
        mountinfo = read_text(root / "proc/self/mountinfo").splitlines()
        self._mountinfo = [line for line in mountinfo if " - cgroup" in line]

    def dirs(self, controller: str | None) -> list[Path]:
        """Return the directories of this process's cgroup, its own first, then those above.

        Args:
            controller: A controller of cgroup v1, or None for cgroup v2.
        """
        own = _own_cgroup(self._membership, controller)
        if own is None:
            return []
        mounts = list(_cgroup_mounts(self._mountinfo, controller))
        for top, point in mounts:
            if own.is_relative_to(top) and ".." not in own.parts:
                inside = own.relative_to(top)
                return [self._root / point / part for part in (inside, *inside.parents)]
        # The process is in no hierarchy that is mounted here, as in some containers.
        return [self._root / point for _, point in mounts[:1]]


def _own_cgroup(text: str, controller: str | None) -> Path | None:
    """Return the path in one hierarchy, from lines such as `4:memory:/a` and `0::/a`."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(",") if controller else not controllers:
            return Path(path)
    return None


def _cgroup_mounts(mountinfo: Iterable[str], controller: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the cgroup that is mounted, and where below `/`, for each mount of one hierarchy."""
    for line in mountinfo:
        mount, _, source = line.partition(" - ")
        fields, kind = mount.split(), source.split()
        if len(fields) < 5 or len(kind) < 3:  # noqa: PLR2004 - see proc_pid_mountinfo(5)
            continue
        if kind[0] == "cgroup2" if controller is None else controller in kind[2].split(","):
            yield Path(_unescape(fields[3])), Path(_unescape(fields[4]).lstrip("/"))


# Text.


def _unescape(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)


def _fields(text: str) -> dict[str, str]:
    """Return first word -> second word of every line."""
    words = (line.split() for line in text.splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}


def _number(text: str) -> int | None:
    """Return a count, None for `max`, -1 and everything else that is none."""
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return parse_number_list(text)
    except ValueError:
        return ()
