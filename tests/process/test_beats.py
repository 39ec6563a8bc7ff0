"""Beats of the workers of a job lie where its agent looks."""

import pytest
from support import script

pytestmark = pytest.mark.process

BEATING = """
import os
from pathlib import Path
import msrun
from msrun.worker.beat import LAYOUT

own = Path(os.environ["MSRUN_RUN_DIR"], "g0", "beat_" + os.environ["RANK"])
for _ in range(2 + int(os.environ["RANK"])):
    msrun.beat()
print("beats", LAYOUT.unpack(own.read_bytes())[0])
"""


def test_each_worker_has_its_own(msrun, tmp_path):
    job = msrun("--workers-per-node", 2, script(tmp_path, BEATING, "beating.py"))

    assert job.wait() == 0
    assert [job.log(rank) for rank in (0, 1)] == ["beats 2\n", "beats 3\n"]
    assert not job.run_dir.exists()
