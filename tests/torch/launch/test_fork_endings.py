"""How a forked script ends, and what it leaves in its log, is what `python` makes of it."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import pytest
from support import environment, script

pytestmark = [pytest.mark.process, pytest.mark.torch]

# Each rank ends in its own way.  The launcher would end all of them after the first, so
# they ignore SIGTERM and none goes on before all do.
PROGRAM = """
    import os, pathlib, signal, sys, time

    def together():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"here-{RANK}").touch()
        deadline = time.monotonic() + 30
        while len(list(pathlib.Path().glob("here-*"))) < int(os.environ["RANKS"]):
            if time.monotonic() > deadline:
                sys.exit("the other ranks did not come")
            time.sleep(0.002)

    RANK = int(os.environ["RANK"])
    together()
    with open(f"ending_{RANK}.py") as file:
        source = file.read()
    exec(compile(source, f"ending_{RANK}.py", "exec"))
"""

ENDINGS = {
    "end of file": "print('done')",
    "exit None": "sys.exit(None)",
    "exit 0": "sys.exit(0)",
    "exit 7": "sys.exit(7)",
    "exit text": "sys.exit('no data')",
    "exit 259": "sys.exit(256 + 3)",
    "os._exit": "print('seen', flush=True)\nos._exit(5)",
    "an exception": "def f():\n    return 1 / 0\n\nf()",
    "a chained exception": """
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("two\\nlines") from error
        """,
    "an exception group": "raise ExceptionGroup('some', [ValueError(1), TypeError('b')])",
    "an exception of torch": """
        import torch

        torch.ones(2, 3) @ torch.ones(2, 3)
        """,
    "an exception in a thread": """
        import threading

        def work():
            raise ValueError("in a thread")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print(thread.name)
        """,
    "exit functions": """
        import atexit

        atexit.register(print, "registered first, run last")
        atexit.register(print, "registered last, run first")
        raise KeyError("k")
        """,
    "a daemon thread": """
        import threading

        threading.Thread(target=threading.Event().wait, daemon=True).start()
        """,
    "a fork": """
        if os.fork() == 0:
            print("child")
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        sys.exit(4)
        """,
    "warnings": """
        import warnings

        warnings.warn("careful")
        warnings.warn("an old name", DeprecationWarning)
        """,
    "logging": """
        import logging

        logging.warning("shown")
        logging.info("hidden")
        logging.getLogger("own").error("shown too")
        """,
    "killed by SIGTERM": """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    "killed by SIGUSR1": "os.kill(os.getpid(), signal.SIGUSR1)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)",
}
CRASHES = {
    "SIGSEGV": "import ctypes\nctypes.string_at(0)",
    "SIGABRT": "os.abort()",
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory, finished, plain):
    """Run every ending as one rank of a job, and as a program of its own."""
    folder = tmp_path_factory.mktemp("endings")
    sources = {**ENDINGS, **CRASHES}
    script(folder, PROGRAM)
    for rank, source in enumerate(sources.values()):
        script(folder, source, f"ending_{rank}.py")
    words = ("--workers-per-node", len(sources), "program.py")
    job = finished(folder, *words, env={"RANKS": str(len(sources))})
    ended = dict.fromkeys(range(len(sources)), how(0)) | how_each_failed(job.verdict())
    env = environment(folder / "run") | {"RANKS": "1", "PYTHONUNBUFFERED": "1"}
    found = {}
    for rank, name in enumerate(sources):
        under_python = ()
        if name in ENDINGS:
            code, output = plain(folder, "program.py", env=env | {"RANK": str(rank)})
            under_python = (how(code), output)
        found[name] = ((ended[rank], job.log(rank)), under_python)
    return found


def how_each_failed(verdict):
    root = verdict["root"]
    code = root["code"] if root["signum"] is None else -root["signum"]
    found = {root["rank"]: how(code)}
    for group in verdict["collateral"]:
        for low, high in group["ranks"]["runs"]:
            found |= dict.fromkeys(range(low, high + 1), group["how"])
    return found


def how(code):
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.few(7)
def test_a_forked_script_ends_as_under_python(endings, name):
    forked, under_python = endings[name]

    assert forked == under_python


@pytest.mark.parametrize(
    ("name", "words"), [("SIGSEGV", "Segmentation fault"), ("SIGABRT", "Aborted")]
)
def test_a_crash_leaves_its_stack_in_the_log(endings, name, words):
    (how_it_ended, log), _ = endings[name]

    assert how_it_ended == f"was killed by {name}"
    assert log.startswith(f"Fatal Python error: {words}\n")
    assert re.search(r'File "ending_\d+.py", line \d+ in <module>', log)


def test_a_script_that_is_no_python_is_shown_as_under_python(tmp_path, finished, plain):
    script(tmp_path, "import os\n\nx = = 1\n")
    job = finished(tmp_path, "program.py")

    assert (job.process.returncode, job.log()) == plain(tmp_path, "program.py")
    assert "  SyntaxError: invalid syntax\n" in job.block()


MODULE = """
    import json, pickle, sys
    import torch
    from . import beside
    from .beside import double

    class Point:
        def __init__(self, x):
            self.x = x

    print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])
    print(sys.orig_argv[1:], type(__loader__).__name__, __cached__)
    print(beside.__name__, double(2))
    with open(sys.argv[1], "wb") as file:
        pickle.dump(Point(double(3)), file)
    torch.save({"point": Point(double(4))}, sys.argv[2])
    raise ValueError(double(5))
"""
READER = """
    import pickle, torch

    class Point:
        pass

    with open("a.pickle", "rb") as file:
        print(pickle.load(file).x, torch.load("a.pt", weights_only=False)["point"].x)
"""


def test_a_module_of_a_package_runs_as_under_python(tmp_path, finished, plain):
    package = tmp_path / "package"
    package.mkdir()
    script(package, "", "__init__.py")
    script(package, "def double(x):\n    return 2 * x\n", "beside.py")
    script(package, MODULE, "train.py")
    job = finished(tmp_path, "-m", "package.train", "a.pickle", "a.pt")

    script(tmp_path, READER, "reader.py")
    assert plain(tmp_path, "reader.py") == (0, "6 8\n")
    assert plain(tmp_path, "-m", "package.train", "a.pickle", "a.pt") == (1, job.log())


TALKER = """
    import faulthandler, logging, os, signal, sys

    for _ in range(2):
        try:
            print("read", input(), flush=True)
        except EOFError:
            print("end of input")
    print("progress 1\\rprogress 2\\rdone", "\\u00fc\\u20ac")
    print("not a character: \\udcff", file=sys.stderr)
    sys.stdout.write("no end of line")

    def look():
        os.kill(os.getpid(), signal.SIGRTMIN + 5)

    if os.environ["WHO"] == "worker":
        print()
        look()
"""


@pytest.fixture(scope="module")
def talkers(tmp_path_factory, finished, plain):
    """Return the logs of two ranks, the first with something to read, and of `python`."""
    folder = tmp_path_factory.mktemp("talkers")
    script(folder, TALKER)
    reading, writing = os.pipe()
    os.write(writing, b"first line\n")
    os.close(writing)
    env = {"WHO": "worker", "LANG": "C", "LC_ALL": "C"}
    job = finished(folder, "--workers-per-node", 2, "program.py", env=env, stdin=reading)
    os.close(reading)
    assert job.process.returncode == 0
    env = environment(folder / "run") | env | {"WHO": "python", "PYTHONUNBUFFERED": "1"}
    code, output = plain(folder, "program.py", env=env)
    assert code == 0, output
    return job.log(0), job.log(1), output


def test_only_rank_0_reads_what_the_launcher_was_given(talkers):
    lines = [log.splitlines()[:2] for log in talkers[:2]]

    assert lines == [["read first line", "end of input"], ["end of input", "end of input"]]


def test_its_words_are_in_the_log_as_they_would_be_under_python(talkers):
    _, log, under_python = talkers

    assert log.partition("Stack (most")[0] == under_python + "\n"


def test_a_real_time_signal_leaves_a_stack_in_the_log_and_nothing_more(talkers):
    stack = talkers[1].partition("no end of line\n")[2]
    own = [line for line in stack.splitlines() if "program.py" in line]

    assert stack.startswith("Stack (most recent call first)")
    assert [line.rpartition(" ")[2] for line in own] == ["look", "<module>"]
    assert len(stack.splitlines()) <= 10, textwrap.dedent(stack)
