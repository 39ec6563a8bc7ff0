"""Real MindSpore beside msrun: in this interpreter, or in that of MINDSPORE_PYTHON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mindspores import real_python
from sides import side_by_side

# MindSpore's own launcher takes seconds to start, and half a minute to end after a failure.
PATIENCE = 110.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def mindspore_python():
    return real_python()


@pytest.fixture
def launch(tmp_path, mindspore_python):
    """Start one of the two commands in a folder of its own; nothing of it may be left."""
    # MindSpore's msrun runs the `python` of PATH.
    path = f"{Path(mindspore_python).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    with side_by_side(tmp_path / "run", PATIENCE) as start:

        def launched(command, words, *, env=None):
            place = tmp_path / command.partition(".")[0]
            return start([mindspore_python, "-m", command, *words], place, own | dict(env or {}))

        yield launched
