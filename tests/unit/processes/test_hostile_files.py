"""Files that a worker writes, or puts in place of others: read without waiting, or not at all."""

import json
import os
import threading

import pytest

from msrun.backend import WorkerPlan
from msrun.processes.agent.node_control import read_beat, read_part
from msrun.processes.agent.worker_end import OomCounter, RunningWorker, describe
from msrun.supervise import logs
from msrun.supervise.orders import Exited
from msrun.worker.beat import LAYOUT

ENDED, NOW = 1000.0, 1001.0


def at_once(function, *args):
    """Return what `function` returns; it must not wait for the other end of a FIFO."""
    found = []

    def call():
        try:
            found.append(function(*args))
        except OSError as error:
            found.append(error.strerror)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert found, "it waits"
    return found[0]


def end_of(folder):
    plan = WorkerPlan(
        rank=0,
        local_rank=0,
        node_rank=0,
        device=None,
        cpus=(),
        numa_nodes=(),
        log_file=str(folder / "log"),
        env={},
    )
    worker = RunningWorker(plan, "a", str(folder / "error"), started_at=900.0)
    end = Exited(generation=0, rank=0, pid=7, status=256, at=ENDED)
    return describe(end, worker, OomCounter(()), now=NOW)


def error_file(monotonic="990.0", message='"one\\ntwo"'):
    return f'{{"message": {{"message": {message}, "extraInfo": {{"monotonic": {monotonic}}}}}}}'


def test_an_error_file_is_read(tmp_path):
    (tmp_path / "error").write_text(error_file())
    end = end_of(tmp_path)

    assert (end.error, end.age) == ("one", 11.0)


@pytest.mark.parametrize(
    "monotonic",
    ["1" * 401, "-Infinity", "Infinity", "NaN", "-1", "1e400", "null", '"12"', "[1]"],
    ids=lambda text: text[:9],
)
def test_a_time_that_no_clock_shows_is_none(tmp_path, monotonic):
    """And so the message about the end is one that the scheduler takes."""
    (tmp_path / "error").write_text(error_file(monotonic))
    end = end_of(tmp_path)

    assert (end.error, end.age) == ("one", 1.0)
    assert json.loads(json.dumps(end.age, allow_nan=False)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"message": ' * 100_000,
        error_file(message="[" * 100_000),
        "9" * 5000,
        "{}",
        "null",
        '{"message": []}',
        '{"message": {"message": "x", "extraInfo": 7}}',
        "\0" * 1000,
        "",
    ],
    ids=lambda text: f"{text[:12]!r}",
)
def test_what_is_no_error_file_is_no_message(tmp_path, text):
    (tmp_path / "error").write_text(text)
    end = end_of(tmp_path)

    assert (end.error, end.age) == ("", 1.0)


def test_fifos_in_place_of_files_keep_nobody_waiting(tmp_path):
    for name in ("error", "log", "beat", "directory"):
        os.mkfifo(tmp_path / name)
    log = str(tmp_path / "log")

    end = at_once(end_of, tmp_path)
    assert (end.error, end.tail) == ("", [])
    assert at_once(lambda: read_beat(str(tmp_path / "beat"), now=NOW)) is None
    assert at_once(logs.last_lines, log, 5) == []
    assert at_once(logs.Tail(log, "").read) == []
    assert at_once(read_part, log, None, 5) == "no regular file"
    for write in (logs.create, logs.reopen, logs.claim):
        assert at_once(write, log) == "No such device or address"


def test_a_fifo_that_somebody_reads_is_no_log(tmp_path):
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for write in (logs.create, logs.reopen, logs.claim):
            assert at_once(write, str(tmp_path / "log")) == "no regular file"
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LAYOUT.pack(3, 990 * 10**9), 990.0),
        (LAYOUT.pack(3, 2**64 - 1), NOW),
        (LAYOUT.pack(0, 5), None),
        (b"", None),
        (b"\xff" * 1000, None),
    ],
)
def test_a_beat_never_lies_in_the_future(tmp_path, data, expected):
    (tmp_path / "beat").write_bytes(data)

    assert read_beat(str(tmp_path / "beat"), now=NOW) == expected
