"""The directory of a job is private, and removed when nobody holds it any more."""

from __future__ import annotations

import os

import pytest

from msrun.api import call_directory
from msrun.errors import UsageError
from msrun.worker.call_files import CallFiles, CallSetup


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_what_two_killed_processes_left_is_removed_by_the_next_job(temporary):
    left, lock = call_directory.make()
    held, other = call_directory.make()
    unfinished = temporary / f"msrun-call-{os.getuid()}-new"
    unfinished.mkdir()
    os.close(lock)

    _, third = call_directory.make()

    assert (left.exists(), held.exists(), unfinished.exists()) == (False, True, True)
    assert held.stat().st_mode & 0o777 == 0o700
    os.close(other)
    os.close(third)


def test_a_directory_that_cannot_be_made_is_one_sentence(temporary, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "missing"))

    with pytest.raises(UsageError, match="no temporary directory for the job can be made"):
        call_directory.make()


def test_files_are_private_and_whole(tmp_path):
    files = CallFiles(tmp_path)
    setup = CallSetup(name="train", sys_path=["/a"], argv=[])
    files.write_call(setup, b"call")
    files.write_value(2, 1, b"value")
    files.write_problem(2, 0, "no")

    assert (files.read_setup(), files.read_call()) == (setup, b"call")
    assert (files.ranks(2), files.ranks(1)) == ([0, 1], [])
    assert (files.read_value(2, 0), files.read_value(2, 1)) == (None, b"value")
    assert (files.read_problem(2, 0), files.read_problem(2, 1)) == ("no", "")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_file_of_another_kind_is_not_read(tmp_path):
    files = CallFiles(tmp_path)
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "value_0_0").symlink_to(tmp_path / "secret")
    (tmp_path / "call").mkdir()

    assert files.read_value(0, 0) is None
    with pytest.raises(UsageError, match="is no file of this user's own"):
        files.read_call()


def test_a_fifo_keeps_nobody_waiting(tmp_path):
    files = CallFiles(tmp_path)
    for name in ("value_0_0", "problem_0_0", "traceback_0_0", "call"):
        os.mkfifo(tmp_path / name)

    assert files.read_value(0, 0) is None
    assert (files.read_problem(0, 0), files.read_traceback(0, 0)) == ("", "")
    with pytest.raises(UsageError, match="is no file of this user's own"):
        files.read_call()


def test_a_text_is_read_that_is_no_text_and_none_that_is_too_long(tmp_path):
    files = CallFiles(tmp_path)
    (tmp_path / "problem_0_0").write_bytes(b"\xff\xfe")
    (tmp_path / "problem_0_1").write_bytes(b"x" * (1 << 20))

    assert files.read_problem(0, 0) == "\ufffd\ufffd"
    assert files.read_problem(0, 1) == ""


def test_a_draft_that_a_killed_rank_has_left_is_no_value(tmp_path):
    for name in ("value_0_1.new", "value_0_x", "value_0_", "problem_0_2"):
        (tmp_path / name).touch()

    assert CallFiles(tmp_path).ranks(0) == [2]


def test_a_long_text_keeps_its_end(tmp_path):
    files = CallFiles(tmp_path)
    files.write_traceback(0, 0, "ü" * 100_000 + "the end")

    text = files.read_traceback(0, 0)
    assert text.endswith("the end")
    assert len(text) < 40_000


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_read(tmp_path):
    files = CallFiles(tmp_path)
    files.write_value(0, 0, b"value")
    os.chown(tmp_path / "value_0_0", 12345, -1)

    assert files.read_value(0, 0) is None
