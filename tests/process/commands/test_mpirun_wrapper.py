"""`scripts/mpirun_wrapper.sh` under real mpiruns, and msrun.init's identity with it."""

import os
import subprocess
import sys
from pathlib import Path

import mpi
import pytest

import msrun as package

pytestmark = pytest.mark.process
HOME = Path(package.__file__).parent.parent
WRAPPER = HOME / "scripts/mpirun_wrapper.sh"
SHOW = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"'


def run(*words, **variables):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        words,
        env={**os.environ, **root, "PYTHON": sys.executable, "PYTHONPATH": str(HOME), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(params=mpi.ALL)
def mpirun(request):
    if lacks := mpi.missing(request.param):
        pytest.skip(lacks)
    return [mpi.program(request.param), *["--oversubscribe"] * ("openmpi" in request.param)]


def test_ranks_get_the_variables_of_torchrun(mpirun):
    done = run(*mpirun, "-n", "2", WRAPPER, "sh", "-c", SHOW)

    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [line[:4] for line in lines] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]], done.stderr
    places = {tuple(line[4:]) for line in lines}
    assert len(places) == 1
    host, port = places.pop()
    assert host == "127.0.0.1"
    assert int(port) in range(20_000, 32_000)


def test_a_starter_that_does_not_say_where_to_meet_is_named():
    done = run(WRAPPER, "true", PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1")

    assert done.returncode == 2
    assert done.stderr.startswith("error: MPI started 2 ranks, and MASTER_ADDR and MASTER_PORT")


def test_a_program_alone():
    done = run(WRAPPER, "sh", "-c", SHOW)

    assert (done.returncode, done.stdout) == (0, "0 1 0 1 127.0.0.1 0\n")
    assert run(WRAPPER).returncode == 2
