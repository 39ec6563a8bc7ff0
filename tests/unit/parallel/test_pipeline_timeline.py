"""Waiting and memory of schedules, by arithmetic."""

import pytest

from msrun.parallel.pipeline.timeline import Action, bubble, peak_live, plain_order


def _orders(stages, microbatches, *, is_gpipe):
    return [
        plain_order(stage, microbatches, warm=microbatches if is_gpipe else stages - stage)
        for stage in range(stages)
    ]


@pytest.mark.parametrize("is_gpipe", [True, False])
@pytest.mark.parametrize("microbatches", [4, 8, 32])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_bubble_is_that_of_the_formula(stages, microbatches, is_gpipe):
    expected = (stages - 1) / (microbatches + stages - 1)

    assert bubble(_orders(stages, microbatches, is_gpipe=is_gpipe)) == pytest.approx(expected)


def test_one_forward_one_backward_keeps_fewer():
    assert [peak_live(order) for order in _orders(4, 8, is_gpipe=False)] == [4, 3, 2, 1]
    assert [peak_live(order) for order in _orders(4, 8, is_gpipe=True)] == [8, 8, 8, 8]


def test_chunks_of_different_sizes():
    order = [Action(kind, chunk, 0) for kind, chunk in (("F", 0), ("F", 1), ("B", 1), ("B", 0))]

    assert peak_live(order, [10, 3]) == 13
    assert peak_live([*order[:2], *reversed(order[2:]), order[0]], [10, 3]) == 13
    assert peak_live([order[1], order[2], order[0]], [10, 3]) == 10


def test_what_a_stage_does():
    order = plain_order(1, 3, warm=2)

    assert "".join(f"{action.kind}{action.part}" for action in order) == "F0F1B0F2B1B2"


def test_weights_can_wait():
    order = [Action(kind, 0, 0) for kind in ("F", "I", "W")]

    assert bubble([order]) == 0
    assert peak_live(order) == 1


def test_an_order_that_waits_for_itself():
    with pytest.raises(ValueError, match="waits for itself"):
        bubble([[Action("F", 1, 0), Action("F", 0, 0)]])
