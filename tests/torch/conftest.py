"""Jobs that several tests look at: each is run once, to its end."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from support import Job, environment

# A job that imports torch in several processes, on a busy machine.
PATIENCE = 60.0
# Tests run beside each other on all cores, and OpenMP spins where threads wait for a core: tests
# that compute much themselves took four times as long.
torch.set_num_threads(1)


def _declared():
    """Return what declares the operators without which torchvision cannot be imported, if needed.

    Models of transformers import torchvision where there is one.  One that is built for another
    torch than the installed one cannot load its operators, of which they need none.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.origin:
        return None
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


# Operators stay declared while it lives.
OPERATORS = _declared()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test marked `own_process` in a child: what it leaves in torch reaches no other test."""
    if not pyfuncitem.get_closest_marker("own_process"):
        return None
    end_warm()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    child = context.Process(target=_run, args=(pyfuncitem.obj, arguments, there))
    child.start()
    there.close()
    try:
        outcome, said = here.recv()
    except EOFError:
        outcome, said = pytest.fail, "its process ended without a word"
    child.join()
    if outcome:
        outcome(said)
    return True


def _run(function, arguments, answer):
    outcome, said = None, ""
    # Groups that earlier tests have left as garbage have threads that are not here.
    gc.freeze()
    try:
        function(**arguments)
    except pytest.skip.Exception as skipped:
        outcome, said = pytest.skip, str(skipped)
    except BaseException:  # noqa: BLE001 - the test tells it
        outcome, said = pytest.fail, traceback.format_exc()
    end_warm()
    answer.send((outcome, said))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """End the ranks that tests share when the next one is of a file that has no use for them."""
    if not hasattr(getattr(nextitem, "module", None), "run_warm"):
        end_warm()


def end_warm():
    """End the ranks that wait for the next test."""
    if "ranks" in sys.modules:
        sys.modules["ranks"].end_warm()


@pytest.fixture(scope="module")
def finished():
    """Run `msrun` with the words given to its end and return the job."""

    def run(folder, *arguments, **options):
        runtime = folder / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        job = Job(folder, arguments, runtime=runtime, **options)
        try:
            job.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
            pytest.fail(f"the launcher did not end within {PATIENCE:g} s\n{job.report()}")
        finally:
            print(f"======== {job.name}, exit code {job.process.returncode}\n{job.report()}")
        assert not job.leftovers()
        return job

    return run


@pytest.fixture(scope="module")
def plain():
    """Run `python` as a worker is run: own session, no input, both streams on one file."""

    def run(folder, *arguments, env=None, wrapper=()):
        output = folder / f"plain-{os.urandom(4).hex()}.log"
        with output.open("wb") as file:
            process = subprocess.run(
                [*wrapper, sys.executable, *map(str, arguments)],
                cwd=folder,
                env=environment(folder / "run") if env is None else env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=PATIENCE,
                check=False,
            )
        return process.returncode, output.read_text(errors="replace")

    return run
