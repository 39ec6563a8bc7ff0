"""Jobs that several tests look at: each is run once, to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import Job, environment

# A job that imports torch in several processes, on a busy machine.
PATIENCE = 60.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem):
    """End the ranks that tests share when the next one is of a file that has no use for them."""
    if "ranks" in sys.modules and not hasattr(getattr(nextitem, "module", None), "run_warm"):
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
