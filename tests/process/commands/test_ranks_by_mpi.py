"""Ranks that a real mpirun starts itself, under the command line of msrun."""

import mpi
import pytest
from support import shell

pytestmark = pytest.mark.process
MESSAGE = "mpirun starts and ends the ranks, and its exit code is the job's"
WHO = """
    import os
    from msrun.identity import find_master, read_identity
    who = read_identity(os.environ)
    said = (who.rank, who.world_size, *find_master(os.environ, who), os.environ["A"])
    os.write(1, (" ".join(map(str, said)) + os.linesep).encode())  # whole, beside the other's
"""


@pytest.fixture(params=mpi.ALL)
def start(request, msrun, tmp_path):
    if lacks := mpi.missing(request.param):
        pytest.skip(lacks)
    (tmp_path / "hosts").write_text("localhost slots=2\n")

    def call(*words):
        mpirun = ["--launcher", "mpirun", "--mpirun", mpi.program(request.param)]
        by_mpi = [*mpirun, "--ranks-by", "mpi", "--hostfile", "hosts"]
        return msrun(*by_mpi, *words, plain=True)

    return call


@pytest.mark.few(3)
def test_each_rank_knows_who_it_is_and_where_to_meet(start, tmp_path):
    (tmp_path / "who.py").write_text("\n".join(line.strip() for line in WHO.splitlines()))
    job = start("--env", "A=two words", "who.py")

    assert job.wait() == 0
    lines = sorted(line.split() for line in job.out.splitlines())
    assert [line[:3] for line in lines] == [[str(rank), "2", "127.0.0.1"] for rank in (0, 1)]
    assert len({line[3] for line in lines}) == 1
    assert all(line[4:] == ["two", "words"] for line in lines)
    assert MESSAGE in job.err


@pytest.mark.few(3)
def test_the_code_is_that_of_mpirun(start):
    assert start(*shell("exit 3")).wait() == 3
