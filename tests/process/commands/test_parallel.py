"""`--parallel`: every worker finds its own job's configuration, and nobody else does."""

import json
import os

import pytest
from support import script, shell

pytestmark = pytest.mark.process

CONFIG = {"mesh": {"dp": -1, "tp": 2}, "mode": "manual"}
NAME = 'echo "config ${MSRUN_CONFIG-is not set}"'
SHOW = f"""
    {NAME}
    stat -c "mode %a" "$MSRUN_CONFIG"
    cat "$MSRUN_CONFIG"
"""


@pytest.fixture
def config(tmp_path):
    """A file that configures two workers."""
    return script(tmp_path, json.dumps({"parallel": CONFIG}), "p.yaml")


def parts(log):
    """Return path, mode and content of the file that a worker found."""
    path, mode, content = log.split("\n", 2)
    return path.removeprefix("config "), mode, json.loads(content)


def test_every_worker_finds_the_configuration(msrun, config):
    umask = os.umask(0)
    try:
        job = msrun("--parallel", config, "--workers-per-node", 2, *shell(SHOW))
    finally:
        os.umask(umask)

    assert job.wait() == 0
    expected = (str(job.run_dir / "parallel.json"), "mode 600", {"parallel": CONFIG})
    assert [parts(job.log(rank)) for rank in (0, 1)] == [expected, expected]
    assert not job.run_dir.exists()


def test_a_later_generation_finds_it_too(msrun, config):
    fail_once = f"""
        {NAME}
        test -s "$MSRUN_CONFIG" || exit 2
        [ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && exit
        [ "$RANK" = 0 ] && exit 1
        until [ -e never ]; do sleep 0.05; done
    """
    words = ("--workers-per-node", 2, "--max-restarts", 1)
    job = msrun("--parallel", config, *words, *shell(fail_once))

    assert job.wait() == 0
    assert job.log().count(f"config {job.run_dir}/parallel.json\n") == 2


def test_a_python_worker_of_its_own_interpreter_finds_it(msrun, tmp_path, config):
    program = script(tmp_path, "import os; print(open(os.environ['MSRUN_CONFIG']).read())")
    words = ("--start-method", "exec", "--workers-per-node", 2)
    job = msrun("--parallel", config, *words, program)

    assert job.wait() == 0
    assert json.loads(job.log(1)) == {"parallel": CONFIG}


@pytest.mark.parametrize(
    ("env", "expected"), [({}, "is not set"), ({"MSRUN_CONFIG": "job.yaml"}, "")], ids=str
)
def test_a_worker_without_one_does_not_inherit_the_launchers(msrun, tmp_path, env, expected):
    script(tmp_path, "grace: 1s\n", "job.yaml")
    job = msrun(*shell(NAME), env=env)

    assert job.wait() == 0
    assert job.log() == f"config {expected}\n"


def test_the_job_file_may_hold_it(msrun, tmp_path):
    text = json.dumps({"parallel": CONFIG, "workers-per-node": 2})
    script(tmp_path, text, "job.yaml")
    job = msrun(*shell(SHOW), env={"MSRUN_CONFIG": "job.yaml"})

    assert job.wait() == 0
    expected = (str(job.run_dir / "parallel.json"), "mode 600", {"parallel": CONFIG})
    assert parts(job.log(1)) == expected


def test_another_file_cannot_be_given(msrun, config):
    words = ("--parallel", config, "--env", "MSRUN_CONFIG=x", "--workers-per-node", 2)
    job = msrun(*words, *shell(NAME))

    assert job.wait() == 2
    assert job.block() == (
        "error: --env MSRUN_CONFIG=x cannot be given: msrun sets MSRUN_CONFIG in every worker\n"
    )


def test_a_mistake_is_found_before_anything_starts(msrun, config):
    job = msrun("--parallel", config, "--workers-per-node", 3, *shell(NAME))

    assert job.wait() == 2
    assert job.block() == (
        "error: --parallel FOLDER/p.yaml: parallel.mesh: tp 2 does not divide world_size 3\n"
    )
    assert not job.logs.exists()
