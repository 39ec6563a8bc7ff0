"""What grids and parts of images cost, and why a model has none."""

from __future__ import annotations

import math

import programs
import pytest
from programs import TINY

from msrun.parallel.search.alternatives.chosen import AlternativeJob, Alternatives
from msrun.parallel.search.alternatives.grid_shapes import Grid, grids, meshes, product_transfers
from msrun.parallel.search.alternatives.images import image_alternatives, image_meshes
from msrun.parallel.search.alternatives.one_rank import OneRank
from msrun.parallel.search.plan.lowering import Modules
from msrun.parallel.search.solve.memory import OutOfMemoryError
from msrun.parallel.search.solve.problem import Setting

ROWS, WIDTH, INNER = 64, 16, 32


def received(grid):
    """Return the elements that a rank receives in two products, one of each turn."""
    moves = [
        *product_transfers(grid, 0, ROWS, (WIDTH, INNER)),
        *product_transfers(grid, 1, ROWS, (INNER, WIDTH)),
    ]
    sizes = grid.sizes
    return sum(one.nbytes * (sizes[one.axis] - 1) / sizes[one.axis] for one in moves if one)


@pytest.mark.parametrize(
    ("style", "sizes"),
    [
        ("2d", {"x": 2, "y": 4}),
        ("2d", {"x": 4, "y": 2}),
        ("2.5d", {"d": 2, "x": 2, "y": 4}),
        ("3d", {"x": 2, "y": 4, "z": 2}),
    ],
)
def test_collectives_of_a_product_are_those_of_the_formula(style, sizes):
    x, y = [*sizes.values()][:2] if style == "3d" else [*sizes.values()][-2:]
    last = sizes.get("z", 1)
    rows = ROWS / sizes.get("d", 1)
    formula = 2 * (
        rows * (INNER * (x - 1) + WIDTH * (y - 1)) + INNER * WIDTH * (last - 1)
    )  # docs/parallel.md, Grids of ranks
    assert received(Grid(style, sizes)) == formula / (x * y * last)


def test_meshes_have_axes_for_every_grid_and_image():
    assert list(meshes(4, 8)) == [{"dp": 1, "x": 2, "y": 2}]
    assert {"dp": 2, "x": 2, "y": 2} in meshes(8, 8)
    assert {"dp": 1, "x": 2, "y": 2, "z": 2} in meshes(8, 1)
    assert list(image_meshes(4, 2)) == [
        {"dp": 1, "h": 2, "w": 2},
        {"dp": 1, "h": 4},
        {"dp": 2, "h": 2},
    ]
    assert [one.style for one in grids({"dp": 2, "x": 2, "y": 2})] == ["2d", "2d"]
    assert {one.style for one in grids({"d": 2, "x": 2, "y": 2})} == {"2.5d", "3d"}
    assert list(grids({"dp": 2, "tp": 4})) == []


class Plan:
    """A plan that takes some seconds."""

    def __init__(self, seconds):
        self.seconds = seconds


def made(batch):
    return programs.transformer(2, batch=batch, length=4, width=8, heads=2)


def alternatives(**others):
    job = AlternativeJob(topology=TINY, world=4, batch=8, microbatches=1, **others)
    return Alternatives(job, lambda: (Modules(owners={}, kinds={}), ""), made)


def test_a_plan_is_kept_where_nothing_else_is_for_the_model():
    plan = Plan(1.0)
    found, other = alternatives(mesh={"tp": 4}).beside(lambda: plan)
    assert found is plan
    assert other.notes == []
    _, other = alternatives(mesh={"x": 2, "y": 2}).beside(lambda: plan)
    assert other.notes == ["grid 2d: no Linear has widths that 4 ranks divide"]


def test_where_nothing_fits_the_report_says_why_images_do_not():
    def fail():
        raise OutOfMemoryError(10.0)

    with pytest.raises(OutOfMemoryError) as caught:
        alternatives(mesh={"x": 2, "y": 2}, limit=1.0).beside(fail)
    assert caught.value.least == 10.0
    alone = OneRank(made(8), Setting(sizes=(1,), topology=TINY))
    assert image_alternatives(alone, {"h": 2}, math.inf).notes == [
        "parts of images: no input has the dims of an image"
    ]
