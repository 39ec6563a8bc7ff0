"""What `msrun advise` says of grids of ranks and of parts of images."""

from __future__ import annotations

import pytest
import torch
from advise_models import Held, request
from ranks import run_ranks
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.advise.advise import advise_model

pytestmark = [
    pytest.mark.torch,
    pytest.mark.own_process,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

WIDTH, INNER, BLOCKS = 64, 128, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(functional.relu(self.up(self.norm(x))))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 1)

    def forward(self, image):
        x = functional.relu(self.norm(self.stem(image)))
        x = functional.max_pool2d(x + self.inner(x), 2)
        return self.head(x.mean((2, 3))).pow(2).mean()


MODELS = {"rows": (Rows, (WIDTH,)), "images": (Pixels, (3, 64, 64))}


def advised(kind, world, batch):
    make, shape = MODELS[kind]
    with torch.device("meta"):
        net, sample = make(), torch.randn(2, *shape)
    return advise_model(net, [sample], batch // world, request(1, world))


def measured(kind, batch, config):
    """Return the most bytes that this rank had in three steps."""
    make, shape = MODELS[kind]
    rt = msrun.init(config)
    torch.manual_seed(0)
    count, share = rt.layout.axes.get("dp", 1), rt.coordinate.get("dp", 0)
    parts = [torch.randn(batch, *shape).chunk(count)[share].clone() for _ in range(3)]
    net = rt.shard(make(), sample=(parts[0],))
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), foreach=False))
    held = Held()
    while parts:
        part = parts.pop()
        held.know([*net.parameters(), *net.buffers(), part])
        with held.counted():
            rt.step(net, optimizer, None, part)
    return held.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world", "batch", "name"),
    [
        ("rows", 4, 512, "grid 2d x 2 x y 2"),
        ("images", 2, 4, "parts of images h 2"),
        ("images", 4, 4, "parts of images h 2"),
    ],
)
def test_ranks_take_no_more_than_the_estimate(kind, world, batch, name):
    found = {row.name: row for row in advised(kind, world, batch).rows}
    for peak in run_ranks(measured, world, kind, batch, found[name].config):
        assert 0.7 * found[name].nbytes <= peak <= 1.05 * found[name].nbytes


def test_a_grid_costs_what_the_formula_says_and_takes_less_than_one_rank():
    world, rows = 4, 512
    advice = advised("rows", world, rows)
    found = {row.name: row for row in advice.rows}
    grid = found["grid 2d x 2 x y 2"]
    assert grid.config["mesh"] == {"dp": -1, "x": 2, "y": 2}
    assert {rule["style"] for rule in grid.config["plan"]} == {"2d"}
    # docs/parallel.md, Grids of ranks: both products of a block, forward and backward; the input
    # of the first product needs no gradient, and the output is gathered once.
    received = 2 * 2 * BLOCKS * rows * (INNER + WIDTH) / world * 4
    assert received <= grid.sent <= 1.3 * received
    assert grid.nbytes < found["data parallel"].nbytes * world
    assert advice.refused["parts of images"] == "no input has the dims of an image"


def test_parts_of_images_are_shown_and_grids_are_refused_where_there_are_no_products():
    advice = advised("images", 2, 2)
    (row,) = [row for row in advice.rows if row.name == "parts of images h 2"]
    assert row.config == {
        "mesh": {"dp": -1, "h": 2},
        "data": {"image": ["dp", None, "h", None]},
    }
    assert row.cost == "ranks exchange rows at their borders"
    assert advice.refused["grids"] == "no mesh of 2 ranks has two axes or three"


def test_many_ranks_are_not_looked_at():
    refused = advised("rows", 128, 128).refused
    assert refused["grids"] == "advise looks at meshes of up to 64 ranks, and there are 128"
