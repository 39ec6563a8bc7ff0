"""Workers of MindSpore find a scheduler of theirs in every job, or a sentence at once."""

import signal
import sys

import pytest
from mindspores import install_fake
from support import script, shell, until

pytestmark = pytest.mark.process

MEET = """
    import os, sys
    from mindspore.communication import init
    init()
    print("MET", os.environ["MS_NODE_ID"], flush=True)
"""
HIDDEN = "import importlib; importlib.import_module('meet')"
LOG = "mindspore_scheduler.log"


@pytest.fixture
def mindspore(tmp_path):
    """What makes Python find the package in MindSpore's place."""
    return install_fake(tmp_path / "packages")


def scheduler_log(job):
    return (job.logs / LOG).read_text()


def assert_all_met(job, workers):
    assert job.wait() == 0
    assert [job.log(rank).splitlines()[-1] for rank in range(workers)] == [
        f"MET {rank}" for rank in range(workers)
    ]
    assert f"all {workers} are here" in scheduler_log(job)


def test_a_script_that_imports_mindspore_has_its_scheduler_from_the_start(
    msrun, tmp_path, mindspore
):
    job = msrun("-n", 3, script(tmp_path, MEET), env=mindspore)

    assert_all_met(job, 3)


def test_a_module_that_imports_mindspore_has_it_too(msrun, tmp_path, mindspore):
    script(tmp_path, MEET)

    assert_all_met(msrun("-n", 2, "-m", "program", env=mindspore), 2)


def test_a_program_that_does_not_show_it_has_it_when_it_calls(msrun, tmp_path, mindspore):
    script(tmp_path, MEET, "meet.py")

    assert_all_met(msrun("-n", 2, script(tmp_path, HIDDEN), env=mindspore), 2)


def test_a_command_has_it_when_it_calls(msrun, tmp_path, mindspore):
    words = shell(f"{sys.executable} {script(tmp_path, MEET)}; true")

    assert_all_met(msrun("-n", 2, *words, env=mindspore), 2)


@pytest.mark.parametrize("given", [(), ("--framework", "mindspore")])
def test_each_generation_has_one_of_its_own(msrun, tmp_path, mindspore, given):
    failing = MEET + "    sys.exit(os.environ['MSRUN_GENERATION'] + os.environ['RANK'] == '01')\n"
    name = script(tmp_path, failing, "meet.py")
    name = name if given else script(tmp_path, HIDDEN)

    job = msrun("-n", 2, *given, "--max-restarts", 1, name, env=mindspore)

    assert_all_met(job, 2)
    assert scheduler_log(job).count("all 2 are here") == 2


def test_its_death_ends_the_job_and_is_named(msrun, tmp_path, mindspore):
    waiting = MEET.replace("import os", "import os, signal") + "    signal.pause()\n"
    job = msrun("-n", 2, script(tmp_path, waiting), env=mindspore)
    job.until_logged("MET", 0, 1)
    job.find("mindspore-scheduler").send_signal(signal.SIGKILL)

    assert job.wait() == 120
    assert job.block() == f"error: MindSpore's scheduler was killed by SIGKILL; log: LOGS/{LOG}\n"


def test_a_failing_scheduler_is_named(msrun, tmp_path, mindspore):
    broken = tmp_path / "packages" / "mindspore" / "communication.py"
    broken.write_text(
        f"import os\nassert os.environ['MS_ROLE'] != 'MS_SCHED'\n{broken.read_text()}"
    )

    job = msrun("-n", 2, script(tmp_path, MEET), env=mindspore)

    assert job.wait() == 120
    assert job.block() == f"error: MindSpore's scheduler exited with code 1; log: LOGS/{LOG}\n"
    assert "AssertionError" in scheduler_log(job)


def refused(job):
    """Return the end of the sentence by which a job ended that has no such scheduler."""
    assert job.wait() == 2
    return job.block().removeprefix("error: a worker called MindSpore's init(): ").strip()


def test_without_one_the_job_says_so_at_once(msrun, tmp_path, mindspore):
    words = "-n", 2, "--framework", "torch", script(tmp_path, MEET)

    said = refused(msrun(*words, env=mindspore))

    assert said == "--framework torch leaves it without a scheduler"


def test_without_mindspore_beside_msrun_the_job_says_so_at_once(msrun, tmp_path, mindspore):
    path = mindspore["PYTHONPATH"]
    finding = f"import sys; sys.path.insert(0, {path!r}); {HIDDEN}"
    script(tmp_path, MEET, "meet.py")

    said = refused(msrun("-n", 2, script(tmp_path, finding)))

    assert said == (
        f"its scheduler needs MindSpore, which {sys.executable} does not have "
        "(install msrun into the Python environment that has it)"
    )


def test_what_cannot_be_had_is_refused_before_any_worker(msrun, tmp_path):
    job = msrun("-n", 2, "--framework", "mindspore", script(tmp_path, MEET))

    assert job.wait() == 2
    assert job.block() == (
        f"error: --framework mindspore: its scheduler needs MindSpore, which {sys.executable} does "
        "not have (install msrun into the Python environment that has it)\n"
    )
    assert job.log() == ""


def test_other_connections_start_nothing_and_end_nothing(msrun, tmp_path, mindspore):
    knock = """
        import os, socket
        where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])
        for _ in range(3):
            with socket.create_connection(where) as line:
                print("KNOCKED", line.recv(1), flush=True)
    """
    job = msrun("-n", 2, script(tmp_path, knock), env=mindspore)

    assert job.wait() == 0
    assert job.log().splitlines() == ["KNOCKED b''"] * 3
    assert not (job.logs / LOG).exists()


@pytest.mark.parametrize(
    ("signum", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, 137)],
)
def test_it_ends_with_the_launcher(msrun, tmp_path, mindspore, signum, code):
    waiting = MEET.replace("import os", "import os, signal") + "    signal.pause()\n"
    job = msrun("-n", 2, script(tmp_path, waiting), env=mindspore)
    job.until_logged("MET", 0, 1)
    scheduler = job.find("mindspore-scheduler")

    job.send(signum)

    assert job.wait() == code
    until(lambda: not scheduler.is_running(), "for the end of the scheduler")
    until(lambda: not job.leftovers(), "for the end of all else")
