"""Segments that killed processes left behind."""

from msrun.supervise import shared_memory


def test_only_segments_of_the_given_processes_are_removed(tmp_path):
    kept = ["torch_71_123_0", "torch_7_123", "psm_7", "torch_7_1_0.tmp", "sem.torch_7_1_0"]
    for name in [*kept, "torch_7_123_0", "torch_7_99_12", "torch_8_1_1"]:
        (tmp_path / name).touch()

    shared_memory.remove({7, 8, 9}, str(tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_missing_directory_holds_none(tmp_path):
    shared_memory.remove({7}, str(tmp_path / "missing"))

    assert list(tmp_path.iterdir()) == []
