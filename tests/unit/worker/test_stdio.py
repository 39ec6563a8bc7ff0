"""Logs of workers on a full disk, and the descriptors that lead to them."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msrun.worker.stdio import LogFile

LIMITED = """
import os, resource, signal, sys
from msrun.worker import stdio

path = sys.argv[1]
descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(descriptor, 1)
stdio.install()


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


"""


def run_limited(tmp_path, body):
    """Return what stands in the log after `body` ran, and what its process said."""
    path = tmp_path / "log"
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED + body, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return path.read_text(), ended.returncode, ended.stderr


def test_a_full_disk_does_not_fail_the_program(tmp_path):
    body = "limit(6)\nprint('one')\nprint('two, three')\nsys.exit(3)"

    assert run_limited(tmp_path, body) == ("one\ntw", 3, "")


def test_a_reader_learns_what_is_missing_once_there_is_space(tmp_path):
    body = """
limit(4)
print('one')
print('lost')
limit(1000)
print('two')
print('three')
"""
    expected = "one\n[msrun] 5 bytes lost: the log's disk was full\ntwo\nthree\n"

    assert run_limited(tmp_path, body) == (expected, 0, "")


def test_bytes_that_fitted_are_not_counted_as_lost(tmp_path):
    body = "limit(3)\nsys.stdout.write('abcdef')\nlimit(1000)\nsys.stdout.write('g')"
    expected = "abc[msrun] 3 bytes lost: the log's disk was full\ng"

    assert run_limited(tmp_path, body) == (expected, 0, "")


def test_what_comes_while_even_the_marker_does_not_fit_is_counted_too(tmp_path):
    body = """
limit(4)
sys.stdout.write('one\\nlost')
sys.stdout.write('lost')
sys.stdout.write('lost')
limit(1000)
sys.stdout.write('two')
"""
    expected = "one\n[msrun] 12 bytes lost: the log's disk was full\ntwo"

    assert run_limited(tmp_path, body) == (expected, 0, "")


def test_a_program_sees_its_output_accepted_in_full():
    with LogFile("/dev/full", "w") as log:
        assert [log.write(b"abc"), log.write(b"de"), log.dropped] == [3, 2, 5]


def test_everything_that_has_a_buffer_is_written(tmp_path):
    with LogFile(tmp_path / "log", "w") as log:
        counts = [log.write(memoryview(b"ab")), log.write(bytearray(b"c")), log.write(b"")]

    assert counts == [2, 1, 0]
    assert (tmp_path / "log").read_bytes() == b"abc"


def test_another_error_is_still_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    with LogFile(writing, "w") as log, pytest.raises(BrokenPipeError):
        log.write(b"x")


def test_a_large_write_to_a_slow_pipe_is_whole():
    script = """
import sys
from msrun.worker import stdio
stdio.install()
sys.stdout.write('x' * 1_000_000)
"""
    out = subprocess.check_output([sys.executable, "-c", script], timeout=30)

    assert out == b"x" * 1_000_000


INSTALLED = """
import json, os, sys
from msrun.worker import stdio
{}
stdio.install()
for stream in (sys.stdout, sys.stderr):
    facts = [stream.name, stream.mode, stream.encoding, stream.errors, stream.write_through]
    facts += [stream.line_buffering, stream.newlines, stream.closed, stream.writable()]
    print(json.dumps(facts))
print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__)
"""


@pytest.mark.parametrize("env", [{}, {"PYTHONIOENCODING": "latin-1:replace"}])
def test_streams_look_like_those_of_unbuffered_python(env):
    ours, plain = (
        subprocess.check_output(
            [sys.executable, "-u", "-c", INSTALLED.replace("stdio.install()", install)],
            env=os.environ | env,
            text=True,
            timeout=30,
        )
        for install in ("stdio.install()", "")
    )

    assert ours == plain


REDIRECT = """
import os, sys
from msrun.worker import stdio
path, append = sys.argv[1], sys.argv[2] == "append"
try:
    stdio.redirect(path, append=append, banner="banner\\n" if append else "")
except OSError as error:
    sys.exit(error.errno)
os.write(1, b"out\\n")
os.write(2, b"err\\n")
"""


def redirect(path, how):
    """Return exit code and output of a process that redirects to `path`, then writes."""
    ended = subprocess.run(
        [sys.executable, "-c", REDIRECT, str(path), how],
        capture_output=True,
        text=True,
        timeout=30,
        umask=0,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_log_takes_both_streams_and_is_private(tmp_path):
    path = tmp_path / "log"

    assert redirect(path, "anew") == (0, "")
    assert path.read_text() == "out\nerr\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_log_begins_anew(tmp_path):
    path = tmp_path / "log"
    path.write_text("old, and longer than what comes\n")
    redirect(path, "anew")

    assert path.read_text() == "out\nerr\n"


def test_a_log_that_goes_on_says_where(tmp_path):
    path = tmp_path / "log"
    path.write_text("old\n")
    redirect(path, "append")

    assert path.read_text() == "old\nbanner\nout\nerr\n"


@pytest.mark.parametrize("how", ["anew", "append"])
def test_a_link_in_place_of_a_log_is_refused(tmp_path, how):
    target = tmp_path / "target"
    target.write_text("precious\n")
    (tmp_path / "log").symlink_to(target)

    assert redirect(tmp_path / "log", how) == (errno.ELOOP, "")
    assert target.read_text() == "precious\n"


def test_a_log_in_a_missing_directory_is_refused(tmp_path):
    assert redirect(tmp_path / "missing/log", "anew") == (errno.ENOENT, "")
    assert not Path(tmp_path, "missing").exists()
