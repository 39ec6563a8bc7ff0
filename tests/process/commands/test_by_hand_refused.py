"""What a process that is started by hand cannot do, in one sentence with the variable."""

import os
import socket
import subprocess
import sys

import pytest
from support import PATIENCE, alive, script, until
from terminals import TELL

pytestmark = pytest.mark.process

ALIKE = (
    "MS_SCHED_HOST, MS_SCHED_PORT, MS_WORKER_NUM and MS_SERVER_NUM are the same in every process "
    "of a cluster"
)
SERVER = {"MS_ROLE": "MS_PSERVER"}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"MS_ROLE": "MS_BOSS"},
            "MS_ROLE=MS_BOSS is no role (choose MS_SCHED, MS_WORKER, MS_PSERVER)",
        ),
        (SERVER, f"MS_ROLE=MS_PSERVER is set, and no MS_SERVER_NUM\n  hint: {ALIKE}"),
        (
            SERVER | {"MS_SERVER_NUM": "0"},
            f"MS_ROLE=MS_PSERVER is set, and MS_SERVER_NUM=0\n  hint: {ALIKE}",
        ),
        ({"MS_SERVER_NUM": "x"}, "MS_SERVER_NUM=x is no whole number from 0 to 1024"),
        (
            SERVER | {"MS_SERVER_NUM": "2", "MS_NODE_ID": "2"},
            "MS_NODE_ID=2 is no number of a server of MS_SERVER_NUM=2 (choose 0 to 1)",
        ),
        (
            {"MS_SERVER_NUM": "2", "MSRUN_FRAMEWORK": "mindspore"},
            "MS_SERVER_NUM=2: servers are for workers of torch, and --framework mindspore has none",
        ),
        *(
            ({name: None}, f"MS_ROLE=MS_WORKER is set and {name} is not\n  hint: {ALIKE}")
            for name in ("MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM")
        ),
        ({"MS_SCHED_PORT": "x"}, "MS_SCHED_PORT=x is no whole number from 1 to 65535"),
        ({"MS_SCHED_PORT": "65536"}, "MS_SCHED_PORT=65536 is no whole number from 1 to 65535"),
        ({"workers": 0}, "MS_WORKER_NUM=0 is no whole number from 1 to 999999"),
        (
            {"MS_NODE_ID": "4"},
            "MS_NODE_ID=4 is no rank of MS_WORKER_NUM=4 (choose 0 to 3)",
        ),
        (
            {"MS_NODE_ID": "../x"},
            "MS_NODE_ID=../x must be a rank, or 1 to 64 letters, digits, '_', '.' or '-'",
        ),
        (
            {"MS_SCHED_HOST": "no-such-host.invalid"},
            "MS_SCHED_HOST no-such-host.invalid: the name resolver does not know",
        ),
        (
            {"MSRUN_JOIN": "false"},
            "MSRUN_JOIN=false: a process that is started by hand waits for the end of the job",
        ),
        (
            {"MS_NODE_TIMEOUT": "0"},
            "MS_NODE_TIMEOUT '0' is out of range (choose a duration from 1s)",
        ),
        ({"MS_TOPO_TIMEOUT": "0"}, "MS_TOPO_TIMEOUT '0' must be above zero"),
        (
            {"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "192.0.2.1"},
            "MS_SCHED_HOST=192.0.2.1 is no address of this machine",
        ),
    ],
)
@pytest.mark.few(7)
def test_what_cannot_be_is_refused_with_the_variable(cluster, variables, sentence):
    role = variables.get("MS_ROLE", "MS_WORKER")
    options = {name: value for name, value in variables.items() if name != "MS_ROLE"}
    process = cluster.start(role, "-c", TELL, **options)

    assert process.wait() == 2
    assert sentence in process.err
    assert "Traceback" not in process.err
    assert process.out == ""


def test_a_port_that_is_taken_is_refused_with_its_holder(cluster):
    with socket.create_server(("127.0.0.1", cluster.port)):
        scheduler = cluster.scheduler(TELL)

        assert scheduler.wait() == 2
    assert f"MS_SCHED_PORT {cluster.port}: port {cluster.port} is in use" in scheduler.err
    assert f"pid {os.getpid()}" in scheduler.err


SPAWN = """
    import multiprocessing, sys
    def join():
        import msrun
        msrun.join()
    if __name__ == "__main__":
        child = multiprocessing.get_context(sys.argv[1]).Process(target=join)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_does_not_become_a_worker(cluster, runtime, tmp_path, method):
    process = cluster.start("MS_WORKER", script(tmp_path, SPAWN), method)

    assert process.wait() == 1
    assert "because it is a child of multiprocessing" in process.err
    # Python's own helper for such children ends a moment after their parent.
    until(lambda: not alive(runtime), "for multiprocessing's tracker")


def test_a_session_and_a_program_on_standard_input_cannot_begin_again(cluster):
    interactive = cluster.start("MS_WORKER", "-i", "-c", TELL)
    piped = subprocess.run(
        [sys.executable, "-"],
        input=TELL,
        env=cluster.env | {"MS_ROLE": "MS_WORKER"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )

    interactive.wait()
    assert "because it is an interactive session" in interactive.err
    assert "because its program came from standard input" in piped.stderr


def test_a_process_with_a_process_group_does_not_leave_it(cluster):
    code = """
import os, msrun, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    msrun.join()
except msrun.errors.UsageError as error:
    print(error, flush=True)
os._exit(0)  # The group's threads may not hold up the end.
"""
    process = cluster.worker(code)

    assert process.wait() == 0
    assert "because it has a process group already" in process.out
