"""What was decided about CPUs and memory is what the workers have."""

import os
from pathlib import Path

import pytest
from support import shell

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


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel does not show memory policies"
)
def test_memory_comes_from_the_given_node(msrun):
    job = msrun("--bind-numa", '{"device0": ["0"]}', *shell("grep -c bind:0 /proc/self/numa_maps"))

    assert job.wait() == 0
    assert int(job.log()) > 0
