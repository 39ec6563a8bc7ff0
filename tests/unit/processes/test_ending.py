"""What a launcher leaves about a job that its own failure ends."""

import pytest

from msrun.errors import ExitCode, MsrunError
from msrun.processes import ending


@pytest.mark.parametrize(
    ("error", "known", "reason"),
    [
        (KeyError("x"), "", "this is a bug in msrun: KeyError: 'x'"),
        (
            KeyError("x"),
            "rank 3 exited with code 1",
            "this is a bug in msrun: KeyError: 'x'; before that, rank 3 exited with code 1",
        ),
        (MsrunError("the disk is full"), "", "the disk is full"),
    ],
)
def test_a_failure_of_the_launcher_leaves_a_verdict(tmp_path, error, known, reason):
    ending.record(error, known, "train", str(tmp_path), generation=2)
    verdict = ending.read(str(tmp_path), "train")

    assert (verdict.code, verdict.reason, verdict.generation) == (ExitCode.INTERNAL, reason, 2)


def test_without_a_place_for_it_the_failure_itself_is_said(tmp_path):
    ending.record(KeyError("x"), "", "train", str(tmp_path / "none"), generation=-1)

    assert ending.read(str(tmp_path / "none"), "train") is None
