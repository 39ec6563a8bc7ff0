"""The machine read from made-up roots, and the real one."""

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from msrun.supervise.machine import (
    memory_cgroup_files,
    read_cpus,
    read_machine,
    read_neighbours,
    read_oom_kills,
)
from msrun.topology import CpuTopology

GIB = 1024**3
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,name=systemd\n"
)
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def write(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
    return root


@pytest.fixture
def v2(tmp_path):
    """A process in /job/agent of a machine with cgroup v2 only."""
    return write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
            "proc/loadavg": "0.1 0.1 0.1 2/1000 77\n",
            "proc/sys/kernel/pid_max": "4194304\n",
            "proc/sys/kernel/threads-max": "500000\n",
            "proc/self/cgroup": "0::/job/agent\n",
            "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + V2,
            "sys/fs/cgroup/job/agent/cgroup.procs": "",
            "sys/fs/cgroup/job/agent/cgroup.kill": "",
            "sys/fs/cgroup/job/agent/cgroup.type": "domain\n",
        },
    )


@pytest.fixture
def v1(tmp_path):
    """A process in /job of a machine with cgroup v1 controllers."""
    return write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 33554432 kB\n",
            "proc/loadavg": "0.1 0.1 0.1 2/1000 77\n",
            "proc/sys/kernel/pid_max": "4194304\n",
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n3:pids:/job\n0::/\n",
            "proc/self/mountinfo": V1,
        },
    )


# CPUs.


def test_cpus_of_two_nodes_with_two_threads_a_core(tmp_path):
    write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
            "sys/devices/system/node/node0/distance": "10 21\n",
            "sys/devices/system/node/node1/distance": "21 10\n",
            "sys/devices/system/node/has_memory": "0-1\n",
            "sys/devices/system/node/online": "0-1\n",
            "proc/self/status": "Name:\tmsrun\nMems_allowed:\t3\nMems_allowed_list:\t1\n",
        }
        | {
            f"sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list": f"{c % 4},{c % 4 + 4}"
            for c in range(8)
        },
    )
    assert read_cpus({1, 2, 3, 5, 6}, tmp_path) == CpuTopology(
        numa={0: (1, 5), 1: (2, 3, 6)},
        siblings={1: (1, 5), 2: (2, 6), 3: (3, 7), 5: (1, 5), 6: (2, 6)},
        distances={0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}},
        memory_nodes=(1,),
    )


def test_a_machine_without_files_is_one_node_of_single_threads(tmp_path):
    assert read_cpus({2, 0}, tmp_path) == CpuTopology(numa={0: (0, 2)}, siblings={0: (0,), 2: (2,)})


def test_odd_files_are_as_good_as_none(tmp_path):
    write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "many\n",
            "sys/devices/system/node/node1/cpulist": "1\n",
            "sys/devices/system/node/node1/distance": "near far\n",
            "sys/devices/system/node/nodes": "",
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "x",
        },
    )
    assert read_cpus({0, 1}, tmp_path) == CpuTopology(numa={1: (0, 1)}, siblings={0: (0,), 1: (1,)})


def caches(cpu, *shared):
    """Return the files of a CPU's caches: for instructions, and then one for each of `shared`."""
    files = {"index0/type": "Instruction", "index0/level": 9, "index0/shared_cpu_list": cpu}
    for level, cpus in enumerate(shared, 1):
        own = f"index{level}/"
        files |= {f"{own}type": "Unified", f"{own}level": level, f"{own}shared_cpu_list": cpus}
    return {
        f"sys/devices/system/cpu/cpu{cpu}/cache/{name}": f"{text}\n" for name, text in files.items()
    }


@pytest.mark.parametrize("name", ["package_cpus_list", "core_siblings_list"])
def test_cpus_that_share_a_socket_or_a_cache(tmp_path, name):
    """Those that this process may not use are left out."""
    topology = {f"sys/devices/system/cpu/cpu{c}/topology/{name}": "0-3\n" for c in range(4)}
    files = [caches(c, c, "0-1" if c < 2 else "2-3") for c in range(4)]
    for some in (topology, *files):
        write(tmp_path, some)

    own = {0, 1, 2}
    assert read_neighbours(own, tmp_path, share="socket") == dict.fromkeys(own, (0, 1, 2))
    complexes = read_neighbours(own, tmp_path, share="core-complex")
    assert complexes == {0: (0, 1), 1: (0, 1), 2: (2,)}


@pytest.mark.parametrize("share", ["socket", "core-complex"])
def test_a_machine_that_does_not_tell_what_cpus_share(tmp_path, share):
    write(tmp_path, caches(0, "many"))

    assert read_neighbours({0, 1}, tmp_path, share=share) == {}


@pytest.mark.parametrize(
    ("own", "above", "quota"),
    [
        ("max 100000", "max 100000", math.inf),
        ("250000 100000", "max 100000", 2.5),
        ("max 100000", "50000 100000", 0.5),
    ],
)
def test_cpu_time_is_what_the_tightest_cgroup_grants(v2, own, above, quota):
    write(v2, {"sys/fs/cgroup/job/agent/cpu.max": own, "sys/fs/cgroup/job/cpu.max": above})
    assert read_machine({}, v2).cpus.quota == quota


@pytest.mark.parametrize(("spent", "quota"), [("-1", math.inf), ("150000", 1.5)])
def test_cpu_time_of_cgroup_v1(v1, spent, quota):
    directory = "sys/fs/cgroup/cpu,cpuacct/job"
    write(v1, {f"{directory}/cpu.cfs_quota_us": spent, f"{directory}/cpu.cfs_period_us": "100000"})
    assert read_machine({}, v1).cpus.quota == quota


# Memory.


def test_memory_is_what_the_kernel_says(v2):
    assert read_machine({}, v2).memory_available == 32 * GIB


def test_memory_is_lowered_by_every_cgroup_above(v2):
    write(
        v2,
        {
            "sys/fs/cgroup/job/agent/memory.max": "max",
            "sys/fs/cgroup/job/agent/memory.current": GIB,
            "sys/fs/cgroup/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/job/memory.current": 3 * GIB,
        },
    )
    assert read_machine({}, v2).memory_available == 5 * GIB


def test_page_cache_in_a_cgroup_counts_as_free(v2):
    write(
        v2,
        {
            "sys/fs/cgroup/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/job/memory.high": 6 * GIB,
            "sys/fs/cgroup/job/memory.current": 5 * GIB,
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n",
        },
    )
    assert read_machine({}, v2).memory_available == 3 * GIB


def test_memory_over_its_limit_is_none_left(v2):
    write(
        v2,
        {
            "sys/fs/cgroup/job/memory.high": 1 * GIB,
            "sys/fs/cgroup/job/memory.current": 2 * GIB,
        },
    )
    assert read_machine({}, v2).memory_available == 0


def test_memory_of_cgroup_v1(v1):
    directory = "sys/fs/cgroup/memory"
    write(
        v1,
        {
            f"{directory}/memory.limit_in_bytes": 9223372036854771712,
            f"{directory}/memory.usage_in_bytes": 40 * GIB,
            f"{directory}/job/memory.limit_in_bytes": 4 * GIB,
            f"{directory}/job/memory.usage_in_bytes": 2 * GIB,
            f"{directory}/job/memory.stat": f"total_inactive_file {GIB}\n",
        },
    )
    assert read_machine({}, v1).memory_available == 3 * GIB


# Processes.


def become(monkeypatch, uid, most=resource.RLIM_INFINITY):
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))


def test_processes_are_what_the_kernel_leaves(v2, monkeypatch):
    become(monkeypatch, 0, 100)
    assert read_machine({}, v2).processes_available == 499_000


def test_processes_are_lowered_by_every_cgroup_above(v2, monkeypatch):
    become(monkeypatch, 0, 100)
    write(
        v2,
        {
            "sys/fs/cgroup/job/agent/pids.max": "max",
            "sys/fs/cgroup/job/pids.max": 512,
            "sys/fs/cgroup/job/pids.current": 12,
        },
    )
    assert read_machine({}, v2).processes_available == 500


def test_processes_of_cgroup_v1(v1, monkeypatch):
    become(monkeypatch, 0, 100)
    write(
        v1,
        {
            "sys/fs/cgroup/pids/job/pids.max": 64,
            "sys/fs/cgroup/pids/job/pids.current": 65,
        },
    )
    assert read_machine({}, v1).processes_available == 0


def test_a_user_limit_counts_that_users_threads(v2, monkeypatch):
    for thread in range(3):
        (v2 / f"proc/10/task/{thread}").mkdir(parents=True)
    task = v2 / "proc/10/task"
    if os.geteuid() == 0:
        os.chown(task, 1, 1)
    become(monkeypatch, task.stat().st_uid, 1500)
    threads = task.stat().st_nlink - 2  # 3, but for file systems that do not count
    assert read_machine({}, v2).processes_available == 1500 - threads


def test_a_user_limit_does_not_count_other_users(v2, monkeypatch):
    (v2 / "proc/10/task/10").mkdir(parents=True)
    become(monkeypatch, (v2 / "proc").stat().st_uid + 1, 1500)
    assert read_machine({}, v2).processes_available == 1500


def test_a_user_limit_far_above_the_machine_is_not_counted_exactly(v2, monkeypatch):
    become(monkeypatch, 1, 3000)
    assert read_machine({}, v2).processes_available == 2000


def test_threads_of_a_process_are_links_of_its_directory():
    assert Path("/proc/self/task").stat().st_nlink - 2 == len(
        list(Path("/proc/self/task").iterdir())
    )


def test_no_limit_on_files_is_the_kernels(v2, monkeypatch):
    become(monkeypatch, 0)
    assert read_machine({}, v2).files_available == sys.maxsize
    write(v2, {"proc/sys/fs/nr_open": "1048576\n"})
    assert read_machine({}, v2).files_available == 1_048_576


# Cgroups.


def test_a_delegated_cgroup_is_given(v2):
    assert read_machine({}, v2).cgroup == str(v2 / "sys/fs/cgroup/job/agent")


def test_a_cgroup_without_kill_is_not_given(v2):
    (v2 / "sys/fs/cgroup/job/agent/cgroup.kill").unlink()
    write(v2, {"proc/sys/kernel/osrelease": "6.1.0\n"})
    assert read_machine({}, v2).cgroup is None


def test_a_threaded_cgroup_is_not_given(v2):
    write(v2, {"sys/fs/cgroup/job/agent/cgroup.type": "threaded\n"})
    assert read_machine({}, v2).cgroup is None


def test_a_cgroup_without_its_files_is_not_given(v2):
    (v2 / "sys/fs/cgroup/job/agent/cgroup.procs").unlink()
    assert read_machine({}, v2).cgroup is None


@pytest.mark.parametrize(
    ("release", "given"),
    [("6.18.44-x\n", True), ("5.14.0\n", True), ("5.10.0\n", False), ("odd\n", False)],
)
def test_the_root_cgroup_beside_v1_is_given_when_the_kernel_can_kill(v1, release, given):
    write(
        v1,
        {
            "proc/self/mountinfo": HYBRID,
            "proc/sys/kernel/osrelease": release,
            "sys/fs/cgroup/unified/cgroup.procs": "",
        },
    )
    expected = str(v1 / "sys/fs/cgroup/unified") if given else None
    assert read_machine({}, v1).cgroup == expected


@pytest.mark.parametrize(
    ("membership", "mounted", "expected"),
    [
        ("0::/docker/abc/x\n", "/docker/abc", "x"),
        ("0::/docker/abc\n", "/docker/abc", ""),
        ("0::/../outside\n", "/", ""),
        ("0::/elsewhere\n", "/docker/abc", ""),
    ],
)
def test_a_container_finds_its_cgroup_below_the_mount(tmp_path, membership, mounted, expected):
    own = Path("mnt/c g", expected)
    write(
        tmp_path,
        {
            "proc/self/cgroup": membership,
            "proc/self/mountinfo": f"30 23 0:26 {mounted} /mnt/c\\040g rw - cgroup2 cgroup2 rw\n",
            own / "cgroup.procs": "",
            own / "cgroup.kill": "",
        },
    )
    assert read_machine({}, tmp_path).cgroup == str(tmp_path / own)


# Out of memory.


def test_kills_are_counted_by_the_own_cgroup(v2):
    write(
        v2,
        {
            "sys/fs/cgroup/job/agent/memory.events": "low 0\noom 3\noom_kill 2\n",
            "sys/fs/cgroup/job/memory.events": "oom_kill 9\n",
        },
    )
    files = memory_cgroup_files(v2)
    assert files == [v2 / "sys/fs/cgroup/job/agent/memory.events"]
    assert read_oom_kills(files) == 2


def test_kills_are_counted_by_the_nearest_cgroup_that_does(v2):
    write(v2, {"sys/fs/cgroup/job/memory.events": "oom_kill 9\n", "proc/vmstat": "oom_kill 10\n"})
    assert read_oom_kills(memory_cgroup_files(v2)) == 9


def test_kills_of_cgroup_v1(v1):
    text = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    write(v1, {"sys/fs/cgroup/memory/job/memory.oom_control": text})
    assert read_oom_kills(memory_cgroup_files(v1)) == 4


def test_kills_outside_a_memory_cgroup_are_those_of_the_machine(v2):
    write(v2, {"proc/vmstat": "nr_free_pages 5\noom_kill 7\n"})
    assert read_oom_kills(memory_cgroup_files(v2)) == 7


def test_kills_that_nobody_counts_are_unknown(tmp_path):
    assert memory_cgroup_files(tmp_path) == []
    assert read_oom_kills([]) is None
    assert read_oom_kills([tmp_path / "gone"]) is None


# Whole machines.


def test_an_empty_root_has_sensible_values(tmp_path):
    machine = read_machine({}, tmp_path)
    assert machine.host
    assert set(machine.cpus.cpus) == os.sched_getaffinity(0)
    assert machine.devices == ()
    assert machine.memory_available > 0
    assert machine.processes_available > 0
    assert machine.files_available > 0
    assert machine.cgroup is None


def test_a_root_of_nonsense_does_not_raise(v1):
    for file in list(v1.rglob("*")):
        if file.is_file():
            file.write_bytes(b"\xff\x00 : - cgroup\n0::\n" * 3)
    machine = read_machine({}, v1)
    assert machine.memory_available > 0
    assert machine.cgroup is None


def test_the_real_machine():
    machine = read_machine({})
    assert machine.host == os.uname().nodename
    assert set(machine.cpus.cpus) == os.sched_getaffinity(0)
    assert set(machine.cpus.siblings) == os.sched_getaffinity(0)
    assert 0 < machine.memory_available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.processes_available > 0
    assert machine.files_available == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    kills = read_oom_kills(memory_cgroup_files())
    assert kills is None or kills >= 0


def test_the_cgroup_of_the_real_machine_takes_a_child_that_can_be_killed():
    cgroup = read_machine({}).cgroup
    if cgroup is None:
        pytest.skip("this process may not make cgroups")
    child = Path(cgroup, f"msrun-test-{os.getpid()}")
    child.mkdir()
    try:
        assert (child / "cgroup.kill").exists()
    finally:
        child.rmdir()


def test_reading_the_machine_imports_nothing_heavy():
    code = (
        "import sys; from msrun.supervise.machine import read_machine; read_machine({});"
        "heavy = {'torch', 'psutil', 'subprocess', 'zmq', 'asyncio', 'ctypes'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"
