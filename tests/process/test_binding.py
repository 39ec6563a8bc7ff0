"""What was decided about CPUs and memory is what the workers have."""

import os
from pathlib import Path

import pytest
from support import shell

from msrun.supervise.machine import read_machine, read_neighbours
from msrun.topology import parse_number_list

pytestmark = pytest.mark.process

CPUS = sorted(os.sched_getaffinity(0))
SHOW = "grep Cpus_allowed_list /proc/self/status; echo threads $OMP_NUM_THREADS"


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU cannot be divided")
def test_each_worker_runs_on_the_cpus_that_it_was_given(msrun):
    given = f'{{"device0": ["{CPUS[1]}"], "device1": ["{CPUS[0]}"]}}'
    job = msrun("--workers-per-node", 2, "--bind-core", given, *shell(SHOW))

    assert job.wait() == 0
    assert [job.log(rank) for rank in (0, 1)] == [
        f"Cpus_allowed_list:\t{cpu}\nthreads 1\n" for cpu in (CPUS[1], CPUS[0])
    ]


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU cannot be divided")
def test_auto_divides_the_cpus_among_the_workers(msrun):
    show = "grep ^Cpus_allowed: /proc/self/status"
    job = msrun("--workers-per-node", 2, "--bind-core", "auto", *shell(show))

    assert job.wait() == 0
    masks = [int(job.log(rank).split()[1].replace(",", ""), 16) for rank in (0, 1)]
    assert all(masks)
    assert masks[0] & masks[1] == 0


@pytest.mark.parametrize("mode", ["node", "socket", "core-complex"])
def test_torchruns_modes_bind_to_what_the_machine_tells(msrun, mode):
    """Both workers of a machine with one node, socket and cache have all of its CPUs."""
    machine = read_machine({}).cpus
    near = read_neighbours(CPUS, share=mode) if mode != "node" else dict.fromkeys(CPUS, tuple(CPUS))
    groups = sorted({*near.values()} or {*machine.numa.values()})
    job = msrun("--workers-per-node", 2, "--numa-binding", mode, *shell(SHOW))

    assert job.wait() == 0
    for rank in (0, 1):
        wanted = groups[rank * len(groups) // 2] if len(machine.numa) == 1 else None
        shown = parse_number_list(job.log(rank).splitlines()[0].partition("\t")[2])
        assert shown == wanted or (wanted is None and set(shown) < set(CPUS))


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel does not show memory policies"
)
def test_memory_comes_from_the_given_node(msrun):
    job = msrun("--bind-numa", '{"device0": ["0"]}', *shell("grep -c bind:0 /proc/self/numa_maps"))

    assert job.wait() == 0
    assert int(job.log()) > 0
