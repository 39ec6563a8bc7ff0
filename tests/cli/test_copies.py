"""Several copies of msrun that another launcher started, and a job that anyone may disturb."""

import pytest

from msrun import environ


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_copies_are_refused(msrun, name):
    outcome = msrun("train.py", **{name: "4"})

    assert (outcome.code, outcome.job) == (2, None)
    assert outcome.err == (
        f"error: environment {name}=4: 4 copies of msrun run for 1 node\n"
        "  hint: add --nnodes and --master-addr for one job of them all, or start one, "
        "such as by `srun --ntasks 1` or `mpirun -n 1`\n"
    )


@pytest.mark.parametrize("nnodes", ["4", "1:8"])
def test_one_copy_on_each_node_runs(msrun, nnodes):
    words = f"--nnodes {nnodes} --master-addr node0 train.py"

    assert msrun(words, SLURM_STEP_NUM_TASKS="4").code == 0


def test_more_copies_than_nodes_are_refused(msrun):
    outcome = msrun("--nnodes 2 --master-addr node0 train.py", OMPI_COMM_WORLD_SIZE="4")

    assert (outcome.code, outcome.job) == (2, None)
    assert outcome.err == (
        "error: environment OMPI_COMM_WORLD_SIZE=4: 4 copies of msrun run for 2 nodes\n"
        "  hint: start one on each node, such as by `srun --ntasks-per-node 1` or "
        "`mpirun -npernode 1`\n"
    )


@pytest.mark.parametrize("value", ["1", "", "many"])
def test_one_copy_runs(msrun, value):
    assert msrun("train.py", SLURM_STEP_NUM_TASKS=value).code == 0


def test_a_launcher_inside_a_worker_is_alone(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("MSRUN_GENERATION", "0")

    assert environ.copies(environ.options_environment()) is None


def test_a_job_without_authentication_says_so(msrun):
    outcome = msrun("--insecure train.py")

    assert outcome.err == (
        "note: --insecure: any process on this machine can stop this job or make it fail\n"
    )
