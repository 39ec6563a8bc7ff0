"""Submitting launchers against the lab's cluster."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
from support import until

PATIENCE = 60.0


class Front:
    """A submitting msrun, started at once, and what it says."""

    def __init__(self, cluster, folder, *words):
        self._files = [folder / "out", folder / "err"]
        streams = [path.open("wb") for path in self._files]
        own = {k: v for k, v in cluster.environ().items() if not k.startswith(("MSRUN_P", "PET_"))}
        python = [sys.executable, "-m", "msrun", "--launcher", "kubernetes", "--image", "train:1"]
        self.process = subprocess.Popen(
            [*python, *words],
            cwd=folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
        )
        for stream in streams:
            stream.close()

    @property
    def out(self):
        return self._files[0].read_text()

    @property
    def err(self):
        return self._files[1].read_text()

    def is_there(self):
        return self.process.poll() is None

    def until_said(self, text):
        until(
            lambda: text in self.err + self.out or self.process.poll() is not None, f"for {text!r}"
        )
        assert text in self.err + self.out, self.err + self.out

    def wait(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return pytest.fail(f"still there:\n{self.err}{self.out}")


@pytest.fixture
def submit(cluster, tmp_path, launched):
    """Start a front on the cluster."""
    return partial(launched, cluster, tmp_path)


@pytest.fixture
def launched():
    """Start a front; at the end it is killed if it is still there."""
    fronts = []

    def start(cluster, where, *words):
        folder = where / f"front{len(fronts)}"
        folder.mkdir()
        fronts.append(Front(cluster, folder, *words))
        return fronts[-1]

    yield start
    for front in fronts:
        if front.process.poll() is None:
            front.process.kill()
        front.process.wait()
        print(front.err, front.out)


@pytest.fixture
def left(cluster):
    """Return what is in the namespace that a job brings."""
    plurals = ("jobs", "pods", "services", "secrets", "configmaps")
    others = ("kubernetes", "kube-root-ca.crt")

    def names():
        return [
            f"{plural}/{each['metadata']['name']}"
            for plural in plurals
            for each in cluster.store.list(plural)
            if each["metadata"]["namespace"] == "default" and each["metadata"]["name"] not in others
        ]

    return names
