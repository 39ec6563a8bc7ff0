"""Directories with odd names, of other users, or without space."""

import os
import stat
import subprocess
import sys

import pytest
from support import script, shell

pytestmark = pytest.mark.process

ODD = os.fsdecode(b"odd-\xff\n dir")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="other users need root")
NOBODY = 65534


def test_a_log_directory_need_not_be_utf8(msrun, tmp_path):
    job = msrun("--log-dir", tmp_path / ODD, "--workers-per-node", 2, *shell("echo hi"))
    job.logs = tmp_path / ODD

    assert job.wait() == 0, job.err
    assert job.log(1) == "hi\n"
    assert "odd-" in job.err


def test_failures_in_such_a_directory_are_reported(msrun, tmp_path):
    program = script(tmp_path, "raise ValueError('so it is')")
    job = msrun("--log-dir", tmp_path / ODD, "--max-restarts", 1, program)
    job.logs = tmp_path / ODD

    assert job.wait() == 1, job.err
    assert "ValueError: so it is" in job.err
    assert job.verdict()["code"] == 1


def test_such_a_job_is_controlled(msrun, tmp_path, runtime):
    job = msrun("--log-dir", tmp_path / ODD, *shell("echo up; exec sleep 600"))
    job.logs = tmp_path / ODD
    job.until_logged("up")
    shown = [
        [verb, *way] for verb in ("ls", "status", "logs", "stacks") for way in ([], ["--json"])
    ]
    for words in (*shown, ["stop"]):
        done = subprocess.run(
            [sys.executable, "-m", "msrun", *words],
            env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)
    assert job.wait() == 143


def test_the_current_directory_need_not_be_utf8(msrun, tmp_path):
    (tmp_path / ODD).mkdir()
    enter = ["sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path / ODD)]
    job = msrun(*shell("echo hi"), wrapper=enter, plain=True)

    assert job.wait() == 0, job.err
    (log,) = (tmp_path / ODD).glob("msrun_logs/*/worker_0.log")
    assert log.read_text() == "hi\n"


@needs_root
def test_files_that_another_user_prepared_are_not_written_to(msrun, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    theirs = ["worker_0.log", "verdict.json", "msrun.log", "scheduler.log", "worker_0.err"]
    for name in theirs:
        (logs / name).touch()
        (logs / name).chmod(0o666)
        os.chown(logs / name, NOBODY, NOBODY)
    os.chown(logs, NOBODY, NOBODY)

    job = msrun("--log-dir", logs, "-r", "2", *shell("echo secret"))
    job.logs = logs

    assert job.wait() == 0, job.err
    for name in theirs:
        status = (logs / name).stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o600), name
    assert f"warning: --log-dir {logs} belongs to user nobody" in job.err


def test_a_log_of_ours_that_others_may_read_becomes_private(msrun, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("worker_0.log", "msrun.log", "scheduler.log"):
        (logs / name).touch()
        (logs / name).chmod(0o666)

    job = msrun("--log-dir", logs, *shell("echo secret"))
    job.logs = logs

    assert job.wait() == 0, job.err
    assert {stat.S_IMODE(path.stat().st_mode) for path in logs.iterdir()} == {0o600}


def test_a_directory_that_everybody_may_write_is_said(msrun, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o777)

    job = msrun("--log-dir", logs, *shell("true"))
    job.logs = logs

    assert job.wait() == 0
    assert f"warning: --log-dir {logs} may be written by every user" in job.err


CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 1 << 14, 1 << 18
# In a mount namespace of its own `/tmp` and the run directory can be what a test wants.
ENTER = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)
call("unshare", {CLONE_NEWNS})
call("mount", b"none", b"/", None, {MS_REC | MS_PRIVATE}, None)
target, options, prepare = sys.argv[1:4]
call("mount", b"tmpfs", target.encode(), b"tmpfs", 0, options.encode())
exec(prepare)
os.execvp(sys.argv[4], sys.argv[4:])
"""


def mounted(target, options, prepare=""):
    return [sys.executable, "-c", ENTER, str(target), options, prepare]


@needs_root
def test_another_users_directory_in_tmp_keeps_nobody_from_starting(msrun, tmp_path):
    folder = tmp_path.relative_to("/tmp") if tmp_path.is_relative_to("/tmp") else None
    if folder is not None:
        pytest.skip("the tests' own directory is in /tmp, which this test replaces")
    prepare = f"os.mkdir('/tmp/msrun-0'); os.chown('/tmp/msrun-0', {NOBODY}, {NOBODY})"
    home = tmp_path / "home"
    home.mkdir()
    wrapper = mounted("/tmp", "mode=1777", prepare)
    variables = {"XDG_RUNTIME_DIR": "", "HOME": str(home)}
    job = msrun(*shell("echo hi; ls -d $MSRUN_RUN_DIR"), wrapper=wrapper, env=variables)

    assert job.wait() == 0, job.err
    place = home / ".cache" / f"msrun-{os.uname().nodename}"
    assert job.log() == f"hi\n{place / job.name}\n"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    said = f"msrun: private files are in {place}: /tmp/msrun-0 must be a directory of this user"
    assert said in job.err


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'


@needs_root
def test_a_job_in_a_directory_that_cannot_be_written_has_its_logs_elsewhere(msrun, tmp_path):
    """For root too, who may write everywhere else."""
    here, temporary = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    temporary.mkdir()
    program = script(here, "print('hi')")
    wrapper = ["unshare", "-m", "sh", "-c", READ_ONLY, str(here)]
    if subprocess.run([*wrapper, "true"], timeout=20, check=False).returncode:
        pytest.skip("mounts are not allowed here")
    job = msrun(program, wrapper=wrapper, env={"TMPDIR": str(temporary)}, plain=True)
    named = msrun("--log-dir", "logs", program, wrapper=wrapper, plain=True)

    assert (job.wait(), named.wait()) == (0, 2)
    (log,) = temporary.glob("msrun_logs-*/*/worker_0.log")
    assert log.read_text() == "hi\n"
    assert job.err.count("note: logs are in ") == 1
    assert f"note: logs are in {log.parent}: msrun_logs/" in job.err
    assert named.err.startswith(f"error: --log-dir logs: {here} may not be written")


@needs_root
def test_a_full_run_directory_is_told_as_such(msrun, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    fill = f"open('{outside}/fill', 'wb').write(bytes(4096))"
    job = msrun(
        *shell("true"),
        wrapper=mounted(outside, "mode=700,size=4k", fill),
        env={"XDG_RUNTIME_DIR": str(outside)},
    )

    assert job.wait() != 0
    assert "No space left on device" in job.err
    assert "cannot start another process" not in job.err
    assert str(outside) in job.err
    assert "bug" not in job.err
    assert job.cgroups() == []
