"""What strangers on the machine can reach, read and change of a running job."""

import json
import os
import select
import socket
import stat
import sys
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import zmq
from support import PATIENCE, answers, listening, script, shell, until

pytestmark = pytest.mark.process

WAIT = "echo up; until [ -e go ]; do sleep 0.01; done"


@pytest.fixture
def waiting(msrun):
    """A job that runs until a file `go` is there."""
    job = msrun("--workers-per-node", 2, *shell(WAIT))
    job.until_logged("up", 0, 1)
    job.until_said("msrun: running 2/2")
    return job


def let_go(job):
    (job.folder / "go").touch()
    return job.wait()


def scheduler_port(job):
    ((_, port),) = listening([job.find("msrun scheduler")])
    return port


def test_garbage_on_the_schedulers_port_changes_nothing(waiting):
    port = scheduler_port(waiting)
    for data in (
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4096),
        b"\xff" * 65536,
        bytes.fromhex("ff00000000000000017f"),
        bytes.fromhex("ff00000000000000017f0301") + b"NULL".ljust(52, b"\0"),
    ):
        send_and_close(port, data)

    assert let_go(waiting) == 0
    assert "warning" not in waiting.err


def send_and_close(port, data):
    """Send `data` as far as the peer takes it; wait a moment for its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        try:
            connection.sendall(data)
            select.select([connection], [], [], 0.05)
        except (BrokenPipeError, ConnectionResetError):
            return


def test_a_stranger_without_the_key_is_not_heard(waiting):
    """Not without authentication, nor with a key of its own making."""
    endpoint = f"tcp://127.0.0.1:{scheduler_port(waiting)}"
    log = waiting.logs / "scheduler.log"
    until(lambda: "received Running" in log.read_text(), "for the last that the agent says")
    before = heard(waiting)
    server, _ = zmq.curve_keypair()
    with zmq.Context() as context:
        for with_curve in (False, True):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                if with_curve:
                    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                    dealer.curve_serverkey = server
                monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED)
                dealer.connect(endpoint)
                dealer.send(b"\x81\xa4type\xa8Register")
                assert monitor.poll(PATIENCE * 1000), "it was not sent away"
                dealer.disable_monitor()
                monitor.close()

    assert heard(waiting) == before
    assert let_go(waiting) == 0


def heard(job):
    """Return what the scheduler's log tells but for the number of those who were sent away."""
    lines = (job.logs / "scheduler.log").read_text().splitlines()
    return [line for line in lines if "dropped" not in line]


FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

GLOO = """
    import os, pathlib, time
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    print("up")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    dist.destroy_process_group()
"""


def test_only_the_loopback_interface_listens(msrun, tmp_path):
    """Of the scheduler, the store of the process group, and the workers' own sockets."""
    job = msrun("--workers-per-node", 2, script(tmp_path, GLOO))
    job.until_logged("up", 0, 1)
    found = sorted(listening(job.members()))

    assert len({port for _, port in found}) >= 2
    assert {host for host, _ in found} == {"127.0.0.1"}
    assert let_go(job) == 0
    assert not [place for place in found if answers(*place)]


def test_private_files_are_private(waiting):
    run_dir = waiting.run_dir

    assert stat.S_IMODE(run_dir.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert {path.name for path in run_dir.iterdir()} >= {"lock", "scheduler.wal", "g0"}
    assert stat.S_IMODE((run_dir / "scheduler.wal").stat().st_mode) == 0o600
    assert stat.S_IMODE((run_dir / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE((run_dir / "g0").stat().st_mode) == 0o700
    assert let_go(waiting) == 0


def test_a_runtime_directory_that_others_may_use_is_refused(msrun, runtime):
    (runtime / "msrun").mkdir()
    (runtime / "msrun").chmod(0o755)
    job = msrun(*shell("true"))

    assert job.wait() == 2
    assert "msrun must be a directory of this user alone, mode 0700" in job.err


# As `sitecustomize` it runs before all else.
HOLD_SCHEDULER = """
    import os, signal, sys
    if any("processes.scheduler" in word for word in sys.orig_argv):
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_secret_is_in_no_command_line_environment_log_or_file(msrun, tmp_path):
    """It is read where it passes, in the pipe to a scheduler that is held before it reads."""
    script(tmp_path, HOLD_SCHEDULER, "sitecustomize.py")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    job = msrun("--workers-per-node", 2, *shell(WAIT), env=env)
    scheduler = until(lambda: held_scheduler(job), "for the scheduler")
    try:
        secret = peek(Path(f"/proc/{scheduler.pid}/fd/0"))
    finally:
        scheduler.resume()
    job.until_logged("up", 0, 1)
    forms = (secret, secret.hex().encode(), b64encode(secret)[:40])
    found = [name for name, data in readable(job) if any(form in data for form in forms)]

    assert len(secret) == 32
    assert found == []
    assert let_go(job) == 0
    assert not [p for p in job.logs.iterdir() if any(form in p.read_bytes() for form in forms)]


def held_scheduler(job):
    for member in job.members():
        with suppress(psutil.Error):
            if member.status() == psutil.STATUS_STOPPED:
                return member
    return None


def peek(pipe):
    """Return the secret in the line that waits in a scheduler's `pipe`, and put the line back."""
    descriptor = os.open(pipe, os.O_RDWR)
    until(lambda: select.select([descriptor], [], [], 0)[0], "for the scheduler's configuration")
    line = os.read(descriptor, 65536)
    os.write(descriptor, line)
    os.close(descriptor)
    return b64decode(json.loads(line)["secret"])


def readable(job):
    """Yield name and content of all that a job shows or stores while it runs."""
    for member in job.members():
        for name in ("cmdline", "environ"):
            path = Path(f"/proc/{member.pid}/{name}")
            with suppress(FileNotFoundError, ProcessLookupError):  # The worker's `sleep` is over.
                yield str(path), path.read_bytes()
    for folder in (job.logs, job.run_dir):
        for path in folder.rglob("*"):
            if path.is_file():
                with suppress(FileNotFoundError):  # The draft of a file that has its name by now.
                    yield str(path), path.read_bytes()
