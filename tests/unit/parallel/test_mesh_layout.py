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
