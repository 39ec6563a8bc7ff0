"""What `--preload` imports is shared by forked workers, or the launcher says why it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import script

pytestmark = [pytest.mark.process, pytest.mark.torch]

# Tells whether the module that was preloaded ran in this process or in one before it.
PROGRAM = """
    import os, sys

    preloaded = [name for name in ("wanted", "package.wanted") if name in sys.modules]
    import wanted

    print(preloaded, wanted.PID == os.getpid(), wanted.__file__, sys.path[0])
"""
WANTED = "import os\nPID = os.getpid()\n"
# What comes back shows that it is no longer in the midst of its start.
START_CAT = """
from subprocess import PIPE, Popen
CHILD = Popen(["cat", "-u"], stdin=PIPE, stdout=PIPE, bufsize=0)
CHILD.stdin.write(b"up")
CHILD.stdout.read(2)
"""
UNSAFE = {
    "a thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "the preloaded modules started 1 thread(s)",
    ),
    "a process": (
        START_CAT,
        "the preloaded modules started a process (cat -u)",
    ),
}
FAILING = {
    "a missing one": (None, "ModuleNotFoundError: No module named 'wanted'"),
    "an exception": ("raise ValueError('no data')", "ValueError: no data"),
    "an exit": ("raise SystemExit(0)", "SystemExit: 0"),
}


@pytest.fixture
def folder(tmp_path):
    """A directory in which the job is started, with the program in another below it."""
    (tmp_path / "beside").mkdir()
    script(tmp_path / "beside", PROGRAM)
    return tmp_path


def last_line(log):
    return log.splitlines()[-1]


def test_a_module_beside_the_script_is_imported_once(folder, finished):
    path = script(folder / "beside", WANTED, "wanted.py")
    # The script finds that of its own directory first, and so must the forkserver.
    script(folder, "raise AssertionError", "wanted.py")
    job = finished(folder, "--preload", "wanted", "--workers-per-node", 2, "beside/program.py")

    assert job.process.returncode == 0
    expected = f"['wanted'] False {path} {folder / 'beside'}"
    assert [last_line(job.log(rank)) for rank in (0, 1)] == [expected, expected]


def test_a_module_of_the_working_directory_is_imported_once_for_a_module(folder, finished):
    path = script(folder, WANTED, "wanted.py")
    job = finished(folder, "--preload", "wanted", "-m", "beside.program")

    assert job.process.returncode == 0
    assert last_line(job.log()) == f"['wanted'] False {path} {folder}"


@pytest.mark.parametrize(("source", "reason"), UNSAFE.values(), ids=UNSAFE)
def test_what_makes_forking_unsafe_is_named_and_the_job_goes_on(folder, finished, source, reason):
    path = script(folder / "beside", WANTED + source, "wanted.py")
    job = finished(folder, "--preload", "wanted", "beside/program.py")

    assert job.process.returncode == 0
    assert f"warning: {reason}, so every worker is an interpreter of its own\n" in job.err
    assert last_line(job.log()) == f"[] True {path} {folder / 'beside'}"


@pytest.mark.parametrize(
    "kind", ["a missing one", pytest.param("an exception", marks=pytest.mark.slow), "an exit"]
)
def test_a_module_that_cannot_be_imported_is_named(folder, finished, kind):
    source, reason = FAILING[kind]
    if source is not None:
        script(folder / "beside", source, "wanted.py")
    job = finished(folder, "--preload", "wanted", "beside/program.py")

    assert job.process.returncode == 2
    assert job.block() == f"error: cannot import wanted: {reason}\n"
    assert not job.log()


def test_a_module_that_crashes_leaves_its_stack(folder, finished):
    path = script(folder / "beside", "import os\n\nos.abort()", "wanted.py")
    job = finished(folder, "--preload", "wanted", "beside/program.py")

    assert job.process.returncode == 120
    assert job.block() == "error: the forkserver was killed by SIGABRT during its imports\n"
    assert "Fatal Python error: Aborted\n" in job.err
    assert f'  File "{path}", line 3 in <module>\n' in job.err


@pytest.mark.parametrize(
    "words",
    [("--start-method", "exec"), pytest.param(("python", "-X", "dev"), marks=pytest.mark.slow)],
    ids=str,
)
def test_nothing_is_preloaded_where_nothing_is_forked(folder, finished, words):
    path = script(folder / "beside", WANTED, "wanted.py")
    job = finished(folder, "--preload", "wanted", *words, "beside/program.py")

    assert job.process.returncode == 0
    assert job.log() == f"[] True {path} {folder / 'beside'}\n"


@pytest.mark.parametrize(("use", "is_loaded"), [("", False), ("import torch", True)], ids=str)
def test_torch_is_loaded_for_a_script_that_may_use_it(folder, finished, use, is_loaded):
    script(folder, f"import sys\nprint('torch.nn' in sys.modules)\n{use}")
    job = finished(folder, "program.py")

    assert job.log() == f"{is_loaded}\n"


def test_options_of_the_interpreter_are_followed(folder, finished):
    script(folder, "import sys\nprint(sys.warnoptions, sys._xoptions, sys.flags.optimize)")
    job = finished(folder, "python", "-W", "error", "-X", "a=b", "-O", "program.py")

    assert job.log() == "['error'] {'a': 'b'} 1\n"


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(),
    reason="this kernel gives no large pages",
)
def test_torch_lies_in_large_pages_that_workers_do_not_ask_for(folder, finished):
    script(
        folder,
        """
        import os
        import torch
        sizes = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup") if ":  " in line)
        print(int(sizes["AnonHugePages:"]) > 0, "GLIBC_TUNABLES" in os.environ)
        """,
    )
    job = finished(folder, "program.py")

    assert last_line(job.log(0)) == "True False"
