"""The same line in several terminals: nodes of one job, and jobs that share a name or directory."""

from __future__ import annotations

import json

import pytest
from ports import free_port
from support import script

pytestmark = [pytest.mark.torch, pytest.mark.process]

WHO = """
    import os, time, uuid
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID".split()
    with open(f"said-{uuid.uuid4().hex}", "w") as file:
        file.write(" ".join(os.environ[name] for name in names))
    time.sleep(NAP)
"""


def who(folder, nap=0.0):
    return script(folder, WHO.replace("NAP", str(nap)))


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["msrun", "torchrun"])
def test_the_same_elastic_line_in_two_terminals_is_one_job(launch, tmp_path, command):
    words = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=100"]
    words += [f"--rdzv-endpoint=localhost:{free_port()}", who(tmp_path)]

    sides = [launch(command, words) for _ in range(2)]

    assert [side.wait() for side in sides] == [0, 0]
    expected = [f"{n} 4 {n % 2} 2 {n // 2} 100" for n in range(4)]
    assert sorted(sides[0].written()) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["msrun", "torchrun"])
def test_two_jobs_share_the_name_and_the_log_directory(launch, tmp_path, command):
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=100"]
    words += ["--log-dir=logs", who(tmp_path, 1.0)]

    sides = [launch(command, words) for _ in range(2)]

    assert [side.wait() for side in sides] == [0, 0]
    assert sides[0].written() == ["0 1 0 1 0 100"] * 2


def test_a_later_run_overwrites_nothing_of_an_earlier_one(launch, tmp_path):
    program = script(tmp_path, "import sys; print(sys.argv[1])")
    for words in (["first"], ["second"], ["third"]):
        assert launch("msrun", ["--log_dir=logs", program, *words]).wait() == 0

    logs = tmp_path / "msrun" / "logs"
    texts = {str(p.relative_to(logs)): p.read_text() for p in logs.rglob("worker_0.log")}
    assert texts == {
        "worker_0.log": "third\n",
        "earlier-1/worker_0.log": "first\n",
        "earlier-2/worker_0.log": "second\n",
    }
    verdicts = [path.parent.name for path in logs.rglob("verdict.json")]
    assert sorted(verdicts) == ["earlier-1", "earlier-2", "logs"]


def test_what_is_not_ours_stays_in_the_log_directory(launch, tmp_path):
    logs = tmp_path / "msrun" / "logs"
    logs.mkdir(parents=True)
    for name in ("notes.log", "worker_x.log", "worker_0.log"):
        (logs / name).write_text(name)

    assert launch("msrun", ["--log-dir=logs", script(tmp_path, "print('new')")]).wait() == 0

    kept = {name: (logs / name).read_text() for name in ("notes.log", "worker_x.log")}
    assert kept == {"notes.log": "notes.log", "worker_x.log": "worker_x.log"}
    assert (logs / "worker_0.log").read_text() == "new\n"
    assert (logs / "earlier-1" / "worker_0.log").read_text() == "worker_0.log"


def test_a_job_beside_another_says_where_its_logs_are(launch, tmp_path):
    words = ["--log-dir=logs", who(tmp_path, 1.0)]
    sides = [launch("msrun", ["--job-id", name, *words]) for name in ("a", "b")]

    assert [side.wait() for side in sides] == [0, 0]
    said = [side.err.count("another job writes to") for side in sides]
    assert sorted(said) == [0, 1]
    second = "ab"[said.index(1)]
    logs = tmp_path / "msrun" / "logs"
    assert json.loads((logs / second / "verdict.json").read_text())["job_id"] == second
    assert (logs / second / "worker_0.log").exists()


def test_a_port_that_another_program_has_is_still_refused(launch, tmp_path):
    program = who(tmp_path, 30.0)
    port = free_port()
    first = launch("msrun", [f"--master-port={port}", program])
    first.process.stderr.readline()

    words = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=7", program]
    second = launch("msrun", words)

    assert second.wait() == 2
    assert f"port {port} is in use by pid" in second.err
    first.process.terminate()
    first.wait()
