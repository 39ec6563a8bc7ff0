"""What lies on a machine for those who control its jobs."""

import fcntl
import os
import stat
from base64 import b64encode

import msgspec
import pytest

from msrun.cluster.verdict import Verdict
from msrun.processes import control_file, ending, run_dir
from msrun.processes.agent.node_control import read_part
from msrun.processes.control_file import Card
from msrun.transport.keys import key_pair
from msrun.transport.sockets import AGENT, CONTROL, SCHEDULER, control_keys

CARD = Card(
    job_id="train",
    host="127.0.0.1",
    port=4242,
    keys=control_keys(bytes(32)),
    pid=42,
    log_dir="/logs",
    workers=2,
    serves=True,
    began=12.5,
)


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "msrun"


def ours(runtime):
    """Return the cards of jobs below `runtime`; other jobs of this user may run meanwhile."""
    names = {path.name for path in runtime.glob("*")}
    return [card for card in control_file.jobs() if card.job_id in names]


def test_a_job_that_runs_is_found(runtime):
    directory, lock = run_dir.create("train")
    control_file.write(directory, CARD)

    assert ours(runtime) == [CARD]
    assert stat.S_IMODE((directory / "control.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in directory.iterdir()) == ["control.json", "lock"]
    os.close(lock)
    assert ours(runtime) == []


@pytest.mark.parametrize("role", [AGENT, SCHEDULER])
def test_the_card_of_a_job_opens_no_other_role(runtime, role):
    directory, lock = run_dir.create("train")
    control_file.write(directory, CARD)
    written = (runtime / "train" / "control.json").read_bytes()
    os.close(lock)
    secret = bytes(32)

    assert key_pair(secret, CONTROL).secret in written
    for form in (key_pair(secret, role).secret, secret, secret.hex().encode(), b64encode(secret)):
        assert form not in written


@pytest.mark.parametrize("content", [None, "", "{", '{"job_id": 3}', "[]"])
def test_a_job_that_has_just_begun_is_not_there_yet(runtime, content):
    directory, lock = run_dir.create("train")
    if content is not None:
        (directory / "control.json").write_text(content)

    assert ours(runtime) == []
    os.close(lock)


def test_a_directory_that_others_may_read_is_not_looked_into(runtime):
    directory, lock = run_dir.create("train")
    control_file.write(directory, CARD)
    runtime.chmod(0o755)

    assert ours(runtime) == []
    os.close(lock)


def test_a_look_takes_no_lock_that_a_job_needs(runtime):
    directory, lock = run_dir.create("train")
    os.close(lock)
    control_file.jobs()
    again = os.open(directory / "lock", os.O_RDWR)

    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(again)
    assert runtime.is_dir()


VERDICT = Verdict(job_id="train", code=3, reason="as told", generation=1, restarts=1)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (msgspec.json.encode(VERDICT), VERDICT),
        (msgspec.json.encode(msgspec.structs.replace(VERDICT, job_id="earlier")), None),
        (b"{", None),
        (None, None),
    ],
    ids=["its own", "of an earlier job", "no verdict", "nothing"],
)
def test_the_result_of_a_job_is_found_where_its_launcher_has_left_it(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "verdict.json").write_bytes(content)

    assert ending.read(str(tmp_path), "train") == expected


@pytest.mark.parametrize(
    ("offset", "lines", "expected"),
    [
        (None, 2, (b"two\nthree", 13)),
        (None, 99, (b"one\ntwo\nthree", 13)),
        (None, 0, (b"", 13)),
        (4, 0, (b"two\nthree", 13)),
        (13, 0, (b"", 13)),
        (99, 0, (b"", 13)),
        (-1, 0, (b"one\ntwo\nthree", 13)),
    ],
)
def test_parts_of_a_log(tmp_path, offset, lines, expected):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree")

    assert read_part(str(path), offset, lines) == expected


def test_a_part_of_a_log_is_bounded(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100_000)

    assert [(len(d), o) for d, o in (read_part(str(path), at, 9) for at in (None, 0))] == [
        (32_768, 100_000),
        (32_768, 32_768),
    ]
