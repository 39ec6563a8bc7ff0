"""A look at the stacks of a worker does not end it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

# Calls that come and go, in two threads beside the main one.
BUSY = """
    import os, sys, threading
    from msrun.worker import stacks

    def work(depth):
        exec("x = 1")
        if depth:
            work(depth - 1)

    def always():
        while True:
            work(300)
            work(3)

    stacks.show_on_signal()
    for _ in range(2):
        threading.Thread(target=always, daemon=True).start()
    print("up", flush=True)
    sys.stdin.read()
    os._exit(0)
"""


def test_threads_may_run_while_the_stacks_of_their_worker_are_taken(tmp_path):
    env = {**os.environ, "RANK": "0", "MSRUN_RUN_DIR": str(tmp_path), "MSRUN_GENERATION": "0"}
    command = [sys.executable, "-c", textwrap.dedent(BUSY)]
    ends = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with (
        (tmp_path / "err").open("wb") as err,
        subprocess.Popen(command, env=env, stderr=err, **ends) as worker,
    ):
        assert worker.stdout.readline() == b"up\n"
        for _ in range(3000):
            worker.send_signal(signal.SIGRTMIN + 5)
            os.sched_yield()
        worker.stdin.close()
        assert worker.wait(20) == 0
    assert "in <module>" in (tmp_path / "err").read_text()
