"""The private directory of a job is removed, or cannot be made again, while the job runs."""

import pytest
from support import script

pytestmark = pytest.mark.process

REMOVES = """
    import os, shutil, sys
    from pathlib import Path

    folder = Path(os.environ["MSRUN_RUN_DIR"])
    if os.environ["MSRUN_GENERATION"] == "0":
        shutil.rmtree(folder)
        if "blocks" in sys.argv:
            folder.write_text("in its place")
        sys.exit(3)
    print("again in", sorted(path.name for path in folder.iterdir()))
"""


def test_a_removed_directory_is_made_again(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, REMOVES))

    assert job.wait(60) == 0, job.err
    assert "again in" in job.log(0)


def test_one_that_cannot_be_made_is_a_sentence_and_a_verdict(msrun, tmp_path):
    job = msrun("--max-restarts", "1", script(tmp_path, REMOVES), "blocks")

    assert job.wait(60) == 70
    assert "g1 cannot be made: Not a directory" in job.err
    assert "bug" not in job.err
    verdict = job.verdict()
    assert verdict["code"] == 70
    assert "cannot be made: Not a directory; before that, rank 0" in verdict["reason"]
    assert "exited with code 3" in verdict["reason"]
    [left] = (tmp_path / "run" / "msrun").glob("test-*")  # the script's own
    left.unlink()
