"""Every way to be refused: one sentence, exit code 2, nothing started."""

import os
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from msrun.cli.options.table import TABLE

TRANSCRIPT = Path(__file__).with_name("refusals.txt")
PROMPT = "$ msrun"

# Of plans, in notations that have names and numbers of their own.
MINDSPORE_RULES = {
    "layout.yaml": "layout: {device_matrix: [4], alias_name: [mp], out: [mp]}",
    "alias.yaml": "layout: {device_matrix: [2], alias_name: [mp], params: {weight: [tp, None]}}",
    "strategy.yaml": "strategy: [[1, 8], [1, 8]]",
}


def test_the_transcript(msrun, system, here):
    (here / "dangling").symlink_to("nothing")
    (here / "pkg" / "train.py").touch()
    (here / "train.ipynb").write_text("{}")
    (here / "job.sh").write_text("#!/bin/bash -l\necho x\n")
    (here / "mesh.yaml").write_text("mesh: {dp: -1, tp: 2}\n")
    (here / "broken.yaml").write_text("mesh: {dp: 2\n")
    for name, rule in MINDSPORE_RULES.items():
        (here / name).write_text(f"mesh: {{dp: -1, tp: 2}}\nplan: [{{match: up, {rule}}}]\n")
    for name, size, mode in (("secret", 32, 0o600), ("short", 31, 0o600), ("open", 32, 0o640)):
        (here / name).write_bytes(bytes(size))
        (here / name).chmod(mode)
    system.busy[8118] = "is in use by pid 42 (python)"
    expected = TRANSCRIPT.read_text()

    actual = []
    for block in expected.rstrip("\n").split("\n\n"):
        command = block.partition("\n")[0]
        if not command.startswith(PROMPT):
            actual.append(block + "\n")
            continue
        outcome = msrun(command.removeprefix(PROMPT))
        assert (outcome.code, outcome.out, outcome.job) == (2, "", None), command
        actual.append(f"{command}\n{outcome.err}")

    if "REWRITE" in os.environ:
        TRANSCRIPT.write_text("\n".join(actual))
    assert "\n".join(actual) == expected


def test_every_refused_option_is_in_the_transcript():
    text = TRANSCRIPT.read_text().replace("_", "-")

    assert [o.flag for o in TABLE if o.refusal and f"{PROMPT} {o.flag}" not in text] == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"processes_available": 30},
            "at most 3, limited by processes (ulimit -u or the cgroup's pids.max)",
        ),
        (
            {"memory_available": 160 << 20},
            "at most 4, limited by memory (free memory or the cgroup's memory.max)",
        ),
        ({"files_available": 64}, "at most 0, limited by open files (ulimit -n)"),
        (
            {"memory_available": 0},
            "at most 0, limited by memory (free memory or the cgroup's memory.max)",
        ),
    ],
)
def test_more_workers_than_the_machine_can_hold(msrun, system, change, sentence):
    system.machine = replace(system.machine, **change)

    outcome = msrun("--nproc-per-node 5 train.py")

    assert (
        outcome.err == f"error: --nproc-per-node 5 is more than this machine can hold: {sentence}\n"
    )
    assert outcome.code == 2


def test_more_devices_than_the_machine_can_feed(msrun, system, gpus):
    gpus(8)
    system.machine = replace(system.machine, processes_available=30)

    assert msrun("train.py").err == (
        "error: --workers-per-node 8 is more than this machine can hold: at most 3, "
        "limited by processes (ulimit -u or the cgroup's pids.max)\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_this_user_may_not_touch(msrun, here):
    (here / "train.py").chmod(0)
    assert msrun("train.py").err == "error: script 'train.py' cannot be read: Permission denied\n"

    here.chmod(0o500)
    try:
        outcome, named = msrun("-m pkg"), msrun("--log-dir logs -m pkg")
    finally:
        here.chmod(0o700)
    folder = f"{tempfile.gettempdir()}/msrun_logs-0a1b2c0a1b2c/pkg-0a1b2c"
    assert (outcome.code, outcome.job.log_dir) == (0, folder)
    assert outcome.err == (
        f"note: logs are in {folder}: msrun_logs/pkg-0a1b2c: HERE may not be written by this user\n"
    )
    assert named.err == "error: --log-dir logs: HERE may not be written by this user\n"


def test_a_directory_that_is_gone(msrun, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    outcome = msrun("train.py")

    assert outcome.err == "error: the current directory cannot be used: No such file or directory\n"
    assert outcome.code == 2
