"""`--ranks-by mpi`: what mpirun is told to start, and what it cannot do for msrun."""

import pytest


@pytest.fixture
def mpirun(here):
    """An mpirun that only says whose it is, and hosts for it."""
    program = here / "mpirun"
    program.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    program.chmod(0o755)
    (here / "hosts").write_text("node[0-1] slots=2\n")
    (here / "plain").write_text("node0\n")
    return f"--launcher mpirun --mpirun {program} --ranks-by mpi --remote-python py --job-id j"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--hostfile hosts train.py --lr 1", "-hosts node0:2,node1:2 -n 4 py train.py --lr 1"),
        ("--hostfile hosts --worker-num 3 train.py", "-hosts node0:2,node1:2 -n 3 py train.py"),
        ("--hostfile plain --nproc-per-node 8 -m a.b", "-hosts node0:8 -n 8 py -m a.b"),
        ("--nnodes 2 --nproc-per-node 2 --no-python prog x", "-n 4 prog x"),
        ("--mpirun-args '-prepend-rank' train.py", "-n 1 -prepend-rank py train.py"),
    ],
)
def test_what_mpirun_starts(msrun, mpirun, words, command):
    outcome = msrun(f"plan {mpirun} {words}")

    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[1] == f"  HERE/mpirun {command}"


@pytest.mark.parametrize(
    ("words", "host", "port"),
    [
        ("--hostfile hosts", "node0", None),
        ("--hostfile plain", "127.0.0.1", None),
        ("--hostfile hosts --master-addr n9 --master-port 7", "n9", "7"),
    ],
)
def test_where_the_ranks_meet(msrun, mpirun, words, host, port):
    lines = msrun(f"plan {mpirun} {words} train.py").out.splitlines()

    assert f"  with MASTER_ADDR={host}" in lines
    (found,) = [line.partition("=")[2] for line in lines if "MASTER_PORT" in line]
    assert found == port or (port is None and int(found) in range(20_000, 32_000))


def test_without_hosts_the_starter_says_where_to_meet(msrun, mpirun):
    assert "MASTER_" not in msrun(f"plan {mpirun} --nnodes 2 train.py").out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--hostfile hosts --max-restarts 3 train.py",
            "--max-restarts 3 is msrun's to do, and with --ranks-by mpi it starts no ranks",
        ),
        (
            "--hostfile hosts --worker-num 5 train.py",
            "--worker-num 5 is more than the 4 slots of the hosts",
        ),
        ("--nproc-per-node gpu train.py", "--nproc-per-node gpu is no number, as --ranks-by mpi"),
        (
            "--nnodes 2 --master-port 7 train.py",
            "--master-port 7 needs --master-addr, since no host is named",
        ),
        (
            "--hostfile hosts --include node0:1 train.py",
            "devices of host node0 are chosen, and mpirun tells its ranks of none",
        ),
        ("--hostfile hosts", "no SCRIPT is given"),
    ],
)
def test_what_is_refused(msrun, mpirun, words, sentence):
    outcome = msrun(f"{mpirun} {words}")

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {sentence}")
