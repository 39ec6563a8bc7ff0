"""`rank_list`: a mesh has its ranks in the order of the configuration, or of the rules in it."""

import pytest

from msrun.errors import ConfigError
from msrun.parallel.config_file import parse_config
from msrun.parallel.layout import check_world, resolve
from msrun.parallel.notation.mesh_layout import MeshLayout

SQUARE = {"x": 2, "y": 2}


def rule(ranks):
    """Return a rule in MindSpore's `Layout` notation."""
    layout = {"device_matrix": [2, 2], "alias_name": ["a", "b"], "params": {"weight": ["a", "b"]}}
    return {"match": "*", "layout": layout | ({} if ranks is None else {"rank_list": ranks})}


def resolved(tree, *rules, world_size=4):
    return resolve(
        parse_config({"mesh": SQUARE} | tree | {"plan": [rule(r) for r in rules]}), world_size
    )


@pytest.mark.parametrize(
    ("given", "of_rules", "ranks"),
    [
        ([2, 0, 3, 1], [None], (2, 0, 3, 1)),
        ([0, 1, 2, 3], [None], ()),
        ([], [[0, 2, 1, 3]], ()),
        ([], [None, [0, 3, 1, 2]], (0, 3, 1, 2)),
        ([], [[0, 3, 1, 2], [0, 1, 3, 2]], (0, 3, 1, 2)),
        ([0, 1, 3, 2], [[0, 3, 1, 2]], (0, 1, 3, 2)),
    ],
)
@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_the_order_of_the_mesh(given, of_rules, ranks, mode):
    tree = {"rank_list": given, "mode": mode}
    assert resolved(tree, *of_rules) == MeshLayout(SQUARE, ranks=ranks)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rank_list": [0, 1]}, "parallel.rank_list: [0, 1] has not each of the 4 ranks once"),
        (
            {"rank_list": [1, 0, 2, 3], "verify": 1},
            (
                "parallel.verify: rank 0 computes the step of one process, and parallel.rank_list "
                "begins with rank 1 (let it begin with 0)"
            ),
        ),
    ],
)
def test_a_list_is_checked_before_a_mesh_is_found(tree, sentence):
    found = {"mesh": "auto", "mode": "auto"}
    assert check_world(parse_config(found | {"rank_list": [3, 1, 0, 2]}), 4) is None
    with pytest.raises(ConfigError) as caught:
        check_world(parse_config(found | tree), 4)

    assert caught.value.message == sentence


def test_a_rule_with_some_ranks_says_no_order_of_the_mesh():
    whole = {"mesh": {"dp": 2, **SQUARE}}

    assert resolved(whole, [4, 6, 5, 7], world_size=8).ranks == ()
    with pytest.raises(ConfigError, match="no order of the axes"):
        resolved(whole, [4, 7, 5, 6], world_size=8)
    order = [0, 3, 1, 2, 4, 7, 5, 6]
    assert resolved(whole | {"rank_list": order}, [4, 7, 5, 6], world_size=8).ranks == (*order,)


@pytest.mark.parametrize(
    ("tree", "rules", "sentence"),
    [
        (
            {},
            [[0, 2, 1, 3], [0, 3, 1, 2]],
            (
                "parallel.plan[0].layout.rank_list: [0, 2, 1, 3] is no order of the axes of a mesh "
                "whose ranks parallel.plan[1].layout.rank_list puts in the order [0, 3, 1, 2]"
            ),
        ),
        (
            {"rank_list": [3, 1, 2, 0]},
            [[0, 3, 1, 2]],
            (
                "parallel.plan[0].layout.rank_list: [0, 3, 1, 2] is no order of the axes of a mesh "
                "whose ranks parallel.rank_list puts in the order [3, 1, 2, 0]"
            ),
        ),
        (
            {"rank_list": [1, 2, 3, 4]},
            [None],
            "parallel.rank_list: [1, 2, 3, 4] has not each of the 4 ranks once",
        ),
        (
            {"rank_list": [1, 0, 2, 3], "verify": 1},
            [None],
            (
                "parallel.verify: rank 0 computes the step of one process, and parallel.rank_list "
                "begins with rank 1 (let it begin with 0)"
            ),
        ),
    ],
)
def test_what_contradicts_is_refused(tree, rules, sentence):
    with pytest.raises(ConfigError) as caught:
        resolved(tree, *rules)

    assert caught.value.message == sentence
