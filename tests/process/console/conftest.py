"""torchrun, beside which a launcher is tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support import environment


@pytest.fixture
def torchrun(tmp_path, runtime):
    """Run torchrun with the words given; skip where there is none."""
    pytest.importorskip("torch")
    command = shutil.which("torchrun", path=os.path.dirname(sys.executable))  # noqa: PTH120 - a path
    if command is None:
        pytest.skip("no torchrun beside this Python")

    def run(*words, variables=None, **options):
        options = {"stdin": subprocess.DEVNULL, **options}
        return subprocess.run(
            [command, "--standalone", *map(str, words)],
            cwd=tmp_path,
            env=environment(runtime) | (variables or {}),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            **options,
        )

    return run
