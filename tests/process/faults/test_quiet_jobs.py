"""Healthy jobs that do not beat for long, and one that hangs, under the default hang watch."""

import pytest
from support import script

pytestmark = [
    pytest.mark.process,
    # Minutes, because nothing makes the time shorter after which the default watch looks.
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

# After 20 steps, rank 0 is busy for longer than a beat may be late, and rank 1 waits for it.
PROGRAM = """
    import os, subprocess, sys, threading, time
    import torch
    import torch.distributed as dist

    import msrun

    SECONDS = float(sys.argv[2])

    def evaluate():
        model, until = torch.nn.Linear(256, 256), time.monotonic() + SECONDS
        with torch.no_grad():
            while time.monotonic() < until:
                model(torch.randn(512, 256))

    def sleep():
        time.sleep(SECONDS)

    def download():
        command = 'for i in $(seq %d); do head -c 20000; sleep 1; done < /dev/zero > got' % SECONDS
        subprocess.run(command, shell=True, check=True)

    def wait_for_ever():
        threading.Event().wait()

    dist.init_process_group("gloo")
    for _ in range(20):
        msrun.beat()
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        globals()[sys.argv[1]]()
    dist.barrier()
    print("done")
"""


@pytest.mark.parametrize("what", ["evaluate", "sleep", "download"])
def test_one_that_works_goes_on(msrun, tmp_path, what):
    job = msrun("--workers-per-node", 2, script(tmp_path, PROGRAM), what, 200)

    assert job.wait(300) == 0, job.err
    assert "warning: generation 0 may hang: no beat of rank " in job.err
    assert "hangs:" not in job.err
    assert job.log(0).endswith("done\n")


def test_one_in_which_nothing_goes_on_ends_and_the_right_rank_is_named(msrun, tmp_path):
    job = msrun("--workers-per-node", 2, script(tmp_path, PROGRAM), "wait_for_ever", 0)

    assert job.wait(300) == 124
    assert job.verdict()["root"]["rank"] == 0
    assert "rank 0 never entered barrier #" in job.block()
