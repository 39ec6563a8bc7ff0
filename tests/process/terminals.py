"""Processes of a cluster that were started by hand, one in each terminal."""

import subprocess
import sys

import pytest
from ports import free_port
from support import PATIENCE, environment, until

JOIN = "import msrun, os, sys, time; msrun.join()"
TELL = f"""{JOIN}
print(*(os.environ[n] for n in "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MS_NODE_ID".split()))
"""


class Process:
    """A process of a cluster, started by hand with `python WORDS`, which `wrapper` may run."""

    def __init__(self, folder, name, words, env, wrapper):
        self.name = name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, *words],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self):
        return self._out.read_text(errors="replace")

    @property
    def err(self):
        return self._err.read_text(errors="replace")

    def wait(self, seconds=PATIENCE):
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end within {seconds:g} s")
        return 128 - code if code < 0 else code

    def until_said(self, text):
        until(
            lambda: text in self.err + self.out or self.process.poll() is not None,
            f"for {text!r} of {self.name}",
        )
        assert text in self.err + self.out


class Cluster:
    """Processes that have a scheduler's address and a number of workers in common."""

    def __init__(self, folder, runtime):
        self._folder = folder
        self.env = environment(runtime) | {"XDG_CONFIG_HOME": str(folder / "config")}
        self.port = free_port()
        self.processes = []

    def start(self, role, *words, workers=4, wrapper=(), **variables):
        given = {
            "MS_ROLE": role,
            "MS_SCHED_HOST": "127.0.0.1",
            "MS_SCHED_PORT": self.port,
            "MS_WORKER_NUM": workers,
            **variables,
        }
        env = self.env | {name: str(value) for name, value in given.items() if value is not None}
        name = f"{len(self.processes)}-{role}"
        self.processes.append(Process(self._folder, name, words, env, wrapper))
        return self.processes[-1]

    def scheduler(self, code, **options):
        return self.start("MS_SCHED", "-c", code, **options)

    def worker(self, code, **options):
        return self.start("MS_WORKER", "-c", code, **options)

    def codes(self):
        return [process.wait() for process in self.processes]
