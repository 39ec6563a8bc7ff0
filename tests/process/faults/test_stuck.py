"""Workers that the kernel will not end: the launcher ends, and names them."""

import os
import subprocess
import sys
import time

import hung_disk
import pytest
from support import PATIENCE, alive, shell, until

from msrun.supervise.reaper import SWEEP_TIMEOUT

pytestmark = pytest.mark.process

# For which the reaper is patient once; what it knows to be stuck delays the end of the job no more.
SECONDS = SWEEP_TIMEOUT + 2.0


@pytest.fixture
def hung(tmp_path):
    """A directory in which whoever looks for a file waits for ever; what serves it."""
    directory = tmp_path / "hung"
    directory.mkdir()
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs root and /dev/fuse for a disk that hangs")
    words = [sys.executable, "-I", "-S", hung_disk.__file__, directory]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "mounted\n"
        yield directory, server
        server.kill()
        subprocess.run(["umount", "-l", directory], timeout=PATIENCE, check=True)


@pytest.mark.thorough
def test_a_worker_in_state_d_is_named_and_the_launcher_ends(msrun, runtime, hung):
    """F-12."""
    directory, server = hung
    program = f"""
        if [ $RANK = 1 ]; then echo $$ up; exec cat {directory}/file; fi
        until [ -e go ]; do sleep 0.01; done
        exit 3
    """
    job = msrun("--workers-per-node", 2, "--grace", "1s", *shell(program))
    job.until_logged("up", 1)
    assert server.stdout.readline() == "asked\n"
    pid = int(job.log(1).split()[0])
    (job.folder / "go").touch()
    began = time.monotonic()

    assert job.wait() == 3
    took = time.monotonic() - began
    verdict = job.verdict()
    server.kill()
    until(lambda: not alive(runtime), "for the end of all")
    # The kernel keeps the cgroup as long as the process; the next launcher removes it.
    assert msrun(*shell("true")).wait() == 0
    assert took <= 1.0 + SECONDS
    assert [line.strip() for line in verdict["stuck"]] == [f"{pid} D cat {directory}/file"]
    assert job.err.count(f"\n  could not be killed: {pid} D cat {directory}/file") == 1
