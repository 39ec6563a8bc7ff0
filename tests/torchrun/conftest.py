"""torchrun and msrun side by side: the same words, the same program, the same surroundings."""

from __future__ import annotations

import shutil
import sys

import pytest
from ports import free_port
from sides import side_by_side

# Both start at once on a busy machine, and torchrun alone takes seconds.
PATIENCE = 90.0
OURS, THEIRS = "msrun", "torchrun"


@pytest.fixture
def launch(tmp_path):
    """Start one of the two commands in a folder of its own; nothing of it may be left."""
    assert shutil.which(THEIRS), "torchrun is not on PATH"
    with side_by_side(tmp_path / "run", PATIENCE) as start:

        def launched(command, words, *, folder="", env=None):
            module = "msrun" if command == OURS else "torch.distributed.run"
            program = [sys.executable, "-m", module, *words]
            return start(program, tmp_path / (folder or command), env)

        yield launched


@pytest.fixture
def both(launch):
    """Run the same words under both commands, at once; return ours and theirs, ended.

    Both listen there, so PORT becomes another port for each.
    """

    def run(words, *, env=None):
        sides = []
        for command in (OURS, THEIRS):
            port = str(free_port())
            sides.append(launch(command, [str(w).replace("PORT", port) for w in words], env=env))
        for side in sides:
            side.wait()
        return sides

    return run
