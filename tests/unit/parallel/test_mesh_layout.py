"""Ranks of a mesh."""

from msrun.parallel.notation.mesh_layout import MeshLayout


def test_ranks_are_row_major_over_the_axes():
    layout = MeshLayout({"pp": 2, "dp": 3, "tp": 2})

    assert [layout.coordinate(rank) for rank in (0, 1, 5, 11)] == [
        {"pp": 0, "dp": 0, "tp": 0},
        {"pp": 0, "dp": 0, "tp": 1},
        {"pp": 0, "dp": 2, "tp": 1},
        {"pp": 1, "dp": 2, "tp": 1},
    ]
    assert layout.group("dp", 7) == (7, 9, 11)
    assert list(layout.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert list(layout.groups("pp")) == [(rank, rank + 6) for rank in range(6)]


def test_a_list_of_ranks_says_who_has_which_position():
    layout = MeshLayout({"dp": 2, "tp": 3}, ranks=(3, 1, 5, 0, 4, 2))

    assert [layout.rank_at(position) for position in range(6)] == [3, 1, 5, 0, 4, 2]
    assert [layout.position(rank) for rank in range(6)] == [3, 1, 5, 0, 4, 2]
    assert layout.coordinate(4) == {"dp": 1, "tp": 1}
    assert layout.group("tp", 0) == (0, 4, 2)
    assert list(layout.groups("dp")) == [(3, 0), (1, 4), (5, 2)]
    assert layout.along(("dp", "tp"), 2) == (3, 1, 5, 0, 4, 2)
    assert layout.along((), 2) == (2,)


def test_a_list_of_ranks_is_that_of_the_mesh_with_axes_joined():
    layout = MeshLayout({"dp": 2, "cp": 2, "tp": 2}, ranks=(7, 6, 5, 4, 3, 2, 1, 0))

    assert list(layout.as_data(["cp"]).groups("dp")) == [(7, 5, 3, 1), (6, 4, 2, 0)]


def test_ranks_that_share_experts_are_neighbours_along_the_data():
    layout = MeshLayout({"dp": 4, "tp": 2}, ep=2, ranks=(7, 6, 5, 4, 3, 2, 1, 0))

    assert list(layout.groups("ep")) == [(7, 5), (6, 4), (3, 1), (2, 0)]
