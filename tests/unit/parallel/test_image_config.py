"""The key `data`: what is refused before anything is made."""

import pytest

from msrun.errors import ConfigError
from msrun.parallel.config_file import parse_config
from msrun.parallel.layout import plan_axes, resolve, tokens_as_data
from msrun.parallel.notation.image_parts import pieces, spans

HEIGHT = {"mesh": {"h": 8}, "data": {"image": ["dp", "h"]}}
ALONE = [
    ({"image": ["h", None]}, "parallel.data.image: dim 0 has the samples, which h cannot divide"),
    ({"image": ["dp", None, "h", "h"]}, "parallel.data.image: an axis stands there twice"),
    (
        {"image": ["dp", ["h", "w"]]},
        "parallel.data.image: dim 1 is over several axes, and can be over one",
    ),
    (
        {"image": ["dp", "..."]},
        "parallel.data.image: ... is for rules of plan (write null for each dim)",
    ),
    (
        {"image": ["dp", "cp"]},
        "parallel.data.image: cp divides no dim of images (choose such as h)",
    ),
    (
        {"image": [None, "dp"]},
        "parallel.data.image: dp divides samples, which are dim 0, not dim 1",
    ),
    ({"image": []}, "parallel.data.image: [] names no dim (choose such as [dp, null, h, w])"),
]
ON_A_MESH = [
    (
        {"mesh": {"dp": 4, "h": 2}, "data": {"image": ["dp", "h", "w"]}},
        "parallel.data.image: axis 'w' is not in mesh (dp, h)",
    ),
    (
        {"mesh": {"h": 2, "dp": 4}, "data": {"image": ["dp", "h"]}},
        "parallel.mesh: axes that divide images follow dp, and (h, dp) is another order",
    ),
    (
        {"mesh": {"dp": 4, "h": 2}, "data": {"image": [None, "h"]}},
        "parallel.data.image: dim 0 has the samples, which dp divides (write dp for null)",
    ),
    (
        {**HEIGHT, "reduce": {"op": "sum"}},
        "parallel.reduce.op: sum does not know parts of images, of parallel.data over h",
    ),
    (
        {**HEIGHT, "verify": 1},
        "parallel.verify does not know parts of images, of parallel.data over h",
    ),
    (
        {
            **HEIGHT,
            "plan": [{"match": "*", "style": "2d", "axes": ["x", "y"]}],
            "mesh": {"h": 2, "x": 2, "y": 2},
        },
        "parallel.plan[0].style: 2d does not know parts of images, of parallel.data over h",
    ),
    (
        {
            **HEIGHT,
            "plan": [{"match": "table", "rows": [2, 3], "axis": "tp"}],
            "mesh": {"h": 4, "tp": 2},
        },
        "parallel.plan[0].rows does not know parts of images, of parallel.data over h",
    ),
    (
        {
            **HEIGHT,
            "plan": [{"match": "up", "strategy": [[1, 1], [2, 1]]}],
            "mesh": {"h": 4, "tp": 2},
        },
        "parallel.plan[0].strategy does not know parts of images, of parallel.data over h",
    ),
    (
        {**HEIGHT, "mode": "auto"},
        "parallel.mode: auto does not know parts of images, of parallel.data over h",
    ),
    ({"mesh": {"h": 8}}, "parallel.mesh.h: no rule of parallel.plan uses this axis"),
    (
        {**HEIGHT, "float8": {"modules": ["*"]}},
        "parallel: float8: was not compared over the axis h",
    ),
]


@pytest.mark.parametrize(("data", "expected"), ALONE)
def test_dims_that_divide_no_batch_are_refused(data, expected):
    with pytest.raises(ConfigError) as error:
        parse_config({"data": data})
    assert expected == error.value.message


@pytest.mark.parametrize(("tree", "expected"), ON_A_MESH)
def test_what_does_not_know_parts_of_images_is_refused(tree, expected):
    with pytest.raises(ConfigError) as error:
        resolve(parse_config(tree), 8)
    assert error.value.message.startswith(expected)


def test_ranks_that_share_images_are_data_parallel_ranks():
    config = parse_config(
        {"mesh": {"dp": 2, "h": 2, "w": 2}, "data": {"image": ["dp", None, "h", "w"]}}
    )
    layout = resolve(config, 8)
    assert layout.images == ("h", "w")
    assert plan_axes(layout) == ()
    assert tokens_as_data(layout).axes == {"dp": 8}


def test_stages_have_ranks_that_share_images():
    pipeline = {"stages": "auto", "microbatches": 2}
    config = parse_config({**HEIGHT, "mesh": {"pp": 2, "h": 4}, "pipeline": pipeline})
    assert tokens_as_data(resolve(config, 8)).axes == {"pp": 2, "dp": 4}


def test_rows_are_divided_unless_there_are_fewer_than_ranks():
    assert spans(7, 2) == ((0, 4), (4, 7))
    assert spans(2, 3) == ((0, 2),) * 3


def test_rows_come_from_the_rank_itself_where_it_has_them():
    have = spans(6, 3)
    plan = pieces(have, (((0, 3),), ((1, 6),), ((4, 6), (0, 1))))
    assert plan == (
        ((0, 0, 2), (1, 2, 3)),
        ((0, 1, 2), (1, 2, 4), (2, 4, 6)),
        ((2, 4, 6), (0, 0, 1)),
    )
