"""Run every transcript of a whole cluster in `clusters/` again.

`scripts/sim_soak.py` writes them.  After a deliberate change: `REWRITE=1 pytest tests/sim`,
then read the diff before committing it.
"""

import os
from pathlib import Path

import pytest
import transcript

pytestmark = pytest.mark.sim

PATHS = sorted((Path(__file__).parent / "clusters").glob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cluster(path):
    actual = transcript.replay(path.read_text())
    if os.environ.get("REWRITE"):
        path.write_text(actual)

    assert path.read_text() == actual
    assert "VIOLATION" not in actual


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cluster_opens_with_its_rule_in_one_sentence(path):
    first = path.read_text().split("\n")[0]

    assert first.startswith("# ")
    assert first.endswith(".")
