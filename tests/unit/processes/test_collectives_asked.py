"""A worker is asked for its collectives, and what it answers may be anything."""

import json
import os
import subprocess
import sys

import pytest

from msrun import environ
from msrun.cluster.liveness.collectives import Collective
from msrun.processes.agent.node_control import ask_for_collectives, read_collectives

BEATS = "import msrun; msrun.beat(); print('up', flush=True); input(); msrun.beat()"


def test_a_worker_without_process_groups_answers_that_it_has_entered_nothing(tmp_path):
    (tmp_path / "g0").mkdir()
    own = {environ.RUN_DIR: str(tmp_path), "MSRUN_GENERATION": "0", "RANK_ID": "3"}
    question, answer = str(tmp_path / "g0/ask_3"), tmp_path / "g0/collectives_3"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BEATS], env=os.environ | own, **streams) as worker:
        worker.stdout.readline()
        found = []
        for _ in range(2):
            ask_for_collectives(question, str(answer))
            while (told := read_collectives(str(answer))) is None:
                assert worker.poll() is None
            found.append(told)
        worker.communicate(b"\n", timeout=20)

    assert (found, worker.returncode) == ([[], []], 0)


def test_who_does_not_listen_or_is_no_fifo_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "deaf")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "old").write_text("[]")
    for name in ("deaf", "file", "none"):
        ask_for_collectives(str(tmp_path / name), str(tmp_path / "old"))

    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[" * 9999,
        '[["0", -1, "x"]]',
        '[["0", 1e400, "x"]]',
        f'[["0", {"9" * 400}, "x"]]',
        json.dumps([["0", 1, "x" * 999]]),
        json.dumps([[str(n), 1, "x"] for n in range(999)]),
        '[["0", 1]]',
    ],
)
def test_what_is_no_answer_is_none(tmp_path, text):
    (tmp_path / "answer").write_text(text)

    assert read_collectives(str(tmp_path / "answer")) is None


def test_an_answer_cannot_act_on_a_terminal(tmp_path):
    (tmp_path / "answer").write_text(json.dumps([["0", 7, "all\x1b[2J"]]))

    assert read_collectives(str(tmp_path / "answer")) == [Collective("0", 7, "all\\x1b[2J")]


def test_a_fifo_in_place_of_an_answer_is_none(tmp_path):
    os.mkfifo(tmp_path / "answer")

    assert read_collectives(str(tmp_path / "answer")) is None
