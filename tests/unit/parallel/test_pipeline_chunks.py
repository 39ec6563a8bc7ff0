"""Chunks and stages, and each sentence about those that cannot be."""

import pytest

from msrun.errors import UsageError
from msrun.parallel.config import Pipeline
from msrun.parallel.pipeline.chunks import Chunks, read_chunks


def _read(stages, schedule="1f1b", microbatches=8, degree=2):
    return read_chunks(
        Pipeline(stages=stages, microbatches=microbatches, schedule=schedule), degree
    )


def test_one_segment():
    chunks, named = _read({"a": 0, "b": 1, "c": [1, 0]})

    assert chunks == Chunks(schedule="1f1b", stages=2)
    assert named == {"a": 0, "b": 1, "c": 1}


def test_segments_follow_each_other():
    chunks, named = _read({"a": 0, "b": 1, "c": (0, 1), "d": (1, 1)}, "interleaved")

    assert named == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert [chunks.stage(chunk) for chunk in range(4)] == [0, 1, 0, 1]
    assert [chunks.of_stage(stage) for stage in range(2)] == [(0, 2), (1, 3)]
    assert chunks.shown(2) == "stage 0, segment 1"


def test_segments_in_a_v():
    chunks, named = _read({"a": 0, "b": 1, "c": (1, 1), "d": (0, 1)}, "zbv")

    assert named == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert [chunks.stage(chunk) for chunk in range(4)] == [0, 1, 1, 0]
    assert [chunks.of_stage(stage) for stage in range(2)] == [(0, 3), (1, 2)]


@pytest.mark.parametrize(("schedule", "segments"), [("gpipe", 1), ("looped_bfs", 2), ("zbv", 2)])
def test_auto_has_as_many_segments_as_the_schedule_needs(schedule, segments):
    assert _read("auto", schedule)[0].segments == segments


STAGES = "parallel.pipeline.stages: "
MICROBATCHES = "parallel.pipeline.microbatches: "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (({},), STAGES + "no module has a stage (choose auto, or name them)"),
        (({"a": 2},), STAGES + "'a' is in stage 2, and axis pp has 2 (0 to 1)"),
        (({"a": -1},), STAGES + "'a' is in stage -1, and axis pp has 2 (0 to 1)"),
        (
            ({"a": (0, -1)},),
            STAGES + "'a' is in segment -1, which must be at least 0",
        ),
        (
            ({"a": 0, "b": (1, 1)},),
            STAGES + "'b' is in segment 1, and 1f1b has only segment 0"
            " (choose interleaved, looped_bfs, interleaved_zb, zbv or dualpipev)",
        ),
        (({"a": 0},), STAGES + "no pattern names stage 1 of 2 stages"),
        (
            ({"a": 0, "b": 1, "c": (0, 1)}, "interleaved"),
            STAGES + "no pattern names stage 1, segment 1 of 2 stages",
        ),
        (
            ({"a": 0, "b": 1}, "zbv"),
            STAGES + "zbv needs segments 0 and 1, not 1 segment(s)",
        ),
        (
            ({"a": 0, "b": 1, "c": (1, 1), "d": (0, 1), "e": (0, 2)}, "dualpipev"),
            STAGES + "dualpipev needs segments 0 and 1, not 3 segment(s)",
        ),
        (
            ({"a": 0, "b": 1}, "1f1b", 1),
            MICROBATCHES + "1 is too few, 1f1b with 2 stages needs 2",
        ),
        (
            ("auto", "dualpipev", 3),
            MICROBATCHES + "3 is too few, dualpipev with 2 stages needs 4",
        ),
        (
            ("auto", "interleaved", 5),
            MICROBATCHES + "5 does not divide into 2 rounds, as interleaved with 2 stages does "
            "(choose 4)",
        ),
    ],
)
def test_refusals(arguments, sentence):
    with pytest.raises(UsageError) as caught:
        _read(*arguments)

    assert str(caught.value) == sentence
