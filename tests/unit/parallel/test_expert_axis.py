"""The axis of experts: its ranks are ranks of dp, and what does not fit is one sentence."""

import pytest

from msrun.errors import UsageError
from msrun.parallel.config_file import parse_config
from msrun.parallel.layout import resolve
from msrun.parallel.notation.mesh_layout import MeshLayout

EXPERTS = {"match": "*.experts", "style": "experts", "axis": "ep"}


def test_ranks_of_experts_are_ranks_of_dp():
    mesh = {"pp": 2, "dp": -1, "ep": 2, "tp": 2}
    tree = {"mesh": mesh, "plan": [EXPERTS, {"match": "*.up", "style": "colwise", "axis": "tp"}]}
    pipeline = {"stages": "auto", "microbatches": 2}
    layout = resolve(parse_config(tree | {"pipeline": pipeline}), 16)

    assert layout == MeshLayout({"pp": 2, "dp": 4, "tp": 2}, 2)
    assert layout.size("ep") == 2
    assert list(layout.groups("ep")) == [
        (first + offset, first + offset + 2) for first in (0, 4, 8, 12) for offset in (0, 1)
    ]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"mesh": {"ep": 2, "dp": 2}, "plan": [EXPERTS]},
            "parallel.mesh.ep: its ranks are neighbours along dp, and ep, dp is another order",
        ),
        (
            {"mesh": {"dp": 2, "ep": 2}},
            "parallel.mesh.ep: no rule of parallel.plan has style experts over it",
        ),
        (
            {
                "mesh": {"dp": 2, "ep": 2},
                "plan": [{"match": "*.up", "style": "colwise", "axis": "ep"}],
            },
            (
                "parallel.plan[0].axis: ep divides the batch and the experts, not this operator "
                "(choose style experts, or another axis)"
            ),
        ),
        (
            {
                "mesh": {"dp": 2, "ep": 2},
                "plan": [EXPERTS],
                "optimizer": {"zero": 1, "shard_size": 2},
            },
            (
                "parallel.optimizer.shard_size: 2 beside the axis ep, which divides dp by itself "
                "(choose -1)"
            ),
        ),
        (
            {"mesh": {"ep": 4}, "plan": [EXPERTS], "optimizer": {"zero": 3, "dtype": "bfloat16"}},
            (
                "parallel.optimizer.dtype: bfloat16 is for parameters that are gathered, and no "
                "other ranks have the experts of a rank (ep 4 of 4 data-parallel ranks)"
            ),
        ),
    ],
)
def test_an_axis_of_experts_that_does_not_fit_is_one_sentence(tree, sentence):
    with pytest.raises(UsageError) as caught:
        resolve(parse_config(tree), 4)

    assert caught.value.message == sentence
