"""One promise for all backends, each through its real program: codes, signals, nothing left."""

import hashlib
import os
import shlex
import signal
import sys
from pathlib import Path

import mpi
import psutil
import pytest
import ssh
from support import script, shell, until

import msrun as package
from msrun.fleet import Report, render_report

pytestmark = pytest.mark.process
HOME = Path(package.__file__).parent.parent


@pytest.fixture
def python(tmp_path, runtime):
    """A Python on the node, which has msrun and the mark of this test's processes."""
    path = tmp_path / "remote-python"
    path.write_text(
        f"#!/bin/sh\nXDG_RUNTIME_DIR={runtime} PYTHONPATH={shlex.quote(str(HOME))} "
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def ssh_words(tmp_path):
    if os.geteuid() != 0 or ssh.MISSING:
        pytest.skip(ssh.MISSING or "needs root, as whom sshd runs")
    config = ssh.write_config(tmp_path / "ssh")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return ["--launcher", "ssh", "--hostfile", str(tmp_path / "hosts"), "--ssh", f"ssh -F {config}"]


@pytest.fixture(params=["ssh", *mpi.ALL])
def start(request, msrun, python):
    """Start a job of two workers on one node through a backend."""
    if request.param == "ssh":
        words = request.getfixturevalue("ssh_words")
    elif lacks := mpi.missing(request.param):
        pytest.skip(lacks)
    else:
        mpirun = ["--launcher", "mpirun", "--mpirun", mpi.program(request.param)]
        words = [*mpirun, "--workers-per-node", "2"]

    def call(*program):
        return msrun(*words, "--remote-python", python, "--grace", "5s", *program)

    return call


@pytest.mark.few(3)
def test_a_job_that_ends_well(start):
    job = start("--env", "A=two words", *shell('echo "$RANK of $WORLD_SIZE: $A"'))

    assert job.wait() == 0
    assert [job.log(rank) for rank in (0, 1)] == [f"{rank} of 2: two words\n" for rank in (0, 1)]
    assert job.verdict()["code"] == 0
    assert "\x1e" not in job.out + job.err


@pytest.mark.few(3)
def test_the_code_is_the_first_failing_workers(start):
    job = start(*shell("[ $RANK = 1 ] && exit 3; sleep 60"))

    assert job.wait() == 3
    assert "rank 1 (node" in job.err


@pytest.mark.few(3)
def test_a_worker_that_is_killed(start):
    job = start(*shell("[ $RANK = 0 ] && kill -9 $$; sleep 60"))

    assert job.wait() == 137


@pytest.mark.sampled
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_head_ends_the_job(start, signum, code):
    job = start(*shell("trap 'exit 0' TERM; echo ready; sleep 60 & wait"))
    job.until_logged("ready", 0, 1)

    job.send(signum)

    assert job.wait() == code


@pytest.mark.few(3)
def test_a_head_that_is_killed_takes_the_job_with_it(start):
    job = start(*shell("echo ready; sleep 60"))
    job.until_logged("ready", 0, 1)

    job.send(signal.SIGKILL)
    job.wait()

    until(lambda: not job.members(), "for the end of the job's processes")


@pytest.mark.few(3)
def test_the_secret_stands_in_no_list_of_processes_and_no_worker_has_it(start, tmp_path):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_bytes(os.urandom(32))
    secret = hashlib.sha256(file.read_bytes()).hexdigest()
    os.mkfifo(tmp_path / "end")
    program = shell("env > env.$RANK; echo ready; read x < end")
    job = start("--secret-file", file, *program)
    job.until_logged("ready", 0, 1)
    lists = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    variables = [(tmp_path / f"env.{rank}").read_text() for rank in (0, 1)]

    with (tmp_path / "end").open("w") as end:
        end.write("x\nx\n")
        end.flush()
        assert job.wait() == 0

    assert any("launchers.remote" in line for line in lists)
    assert not any(secret in text for text in [*lists, *variables])
    assert not any("MSRUN_ORDER=" in text for text in [*lists, *variables])


def test_a_node_without_msrun(start, python):
    python.write_text("#!/bin/sh\necho no such module >&2; exit 1\n")
    job = start("train.py")

    assert job.wait() == 2
    assert "started no agent" in job.err


def test_a_host_that_cannot_be_reached(msrun, ssh_words, tmp_path):
    (tmp_path / "hosts").write_text("nowhere\n")
    job = msrun(*ssh_words, "train.py")

    assert job.wait() == 120
    assert "error: ssh started no agent on nowhere: exit code 255" in job.err


def test_why_a_node_refuses_arrives_with_what_ends_the_job(msrun, tmp_path):
    """Its standard error may come too late, as the launcher ends all at once."""
    report = render_report(Report(node=-1, code=2, is_last=True, reason="error: node b: odd"))
    (tmp_path / "hosts").write_text("b slots=1\n")
    (tmp_path / "report").write_bytes(report)
    refuses = Path(script(tmp_path, f"#!/bin/sh\ncat {tmp_path}/report\nexit 2\n", "ssh"))
    refuses.chmod(0o755)

    job = msrun(
        "--launcher", "ssh", "--hostfile", tmp_path / "hosts", "--ssh", refuses, *shell(":")
    )

    assert job.wait() == 2
    assert "node b: odd" in job.err
