"""Divisions of whole models that `mode: auto` finds: grids, and parts of images."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.auto.offline.search import SearchRequest, search_model
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.collectives import all_reduce
from msrun.parallel.search.alternatives.chosen import AlternativeJob, Alternatives
from msrun.parallel.search.cost.topology import find_topology, parse_topology
from msrun.parallel.search.plan.plan import write_plan

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

WIDTH, STEPS = 64, 3
# Links without latency, so that bytes decide.
LINKS = """\
preset: cpu
collective: 0
launch: 0
inside: {bandwidth: 1.0e+8, latency: 0}
across: {bandwidth: 1.0e+8, latency: 0}
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.relu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Norms keep plans from sharding columns; three samples keep them from sharding rows."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(rate)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(self.drop(self.norm(x)), y)


class Pixels(nn.Module):
    """Channels that ranks do not divide, and one image."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.inner, self.down = nn.Conv2d(7, 7, 3, padding=1), nn.Conv2d(7, 7, 3, stride=2)
        self.head = nn.Linear(7, 5)

    def forward(self, image, y):
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(image))), 2)
        x = self.down(x + functional.relu(self.inner(x)))
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


def rows(samples):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, STEPS, samples, WIDTH, generator=generator).double()


def pictures(samples):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(STEPS, samples, 3, 33, 40, generator=generator).double()
    return images, torch.randint(0, 5, (STEPS, samples), generator=generator)


MODELS = {"rows": (Residual, rows), "images": (Pixels, pictures)}


def train(kind, samples, config):
    """Return losses, whole tensors, what an evaluation gives, the mesh, and what is divided."""
    make, batches = MODELS[kind]
    torch.manual_seed(0)
    net, rt = make().double(), msrun.init(config)
    data = list(zip(*batches(samples), strict=True))
    is_found = config["mesh"] == "auto"
    first = data[0] if is_found else [part(rt, x) for x in data[0]]
    net = rt.shard(net, sample=tuple(first))
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    losses = [rt.step(net, optimizer, None, *(part(rt, x) for x in batch)).item() for batch in data]
    net.eval()
    with torch.no_grad():
        said = net(*(part(rt, x) for x in data[0]))
        said = all_reduce(said, "dp", "mean").item() if "dp" in rt.layout.axes else said.item()
    tensors = [*net.parameters(), *net.buffers()]
    whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
    shared = sum(hasattr(x, "full_tensor") for x in tensors), rt.context.images is not None
    mesh = dict(rt.layout.axes)
    rt.close()
    return losses, [x.detach() for x in whole], said, mesh, shared


def part(rt, x):
    return x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)]


def assert_equal(found, expected):
    losses, tensors, said, *_ = expected
    assert found[0] == pytest.approx(losses, rel=1e-9)
    assert found[2] == pytest.approx(said, rel=1e-9)
    for ours, theirs in zip(found[1], tensors, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)


class Slow:
    """A plan that takes longer than any grid."""

    seconds = 1.0


@pytest.mark.parametrize(("overlap", "style"), [(0.0, "grid 3d"), (0.9, "grid 2.5d")])
def test_gradients_that_hide_make_the_first_axis_of_a_cube_divide_samples(tmp_path, overlap, style):
    """2.5d averages gradients where 3d gathers weights, and only gradients hide."""
    links = tmp_path / "links.yaml"
    links.write_text(f"{LINKS}overlap: {overlap}\n")
    with torch.device("meta"):
        net, sample = Residual(), [torch.randn(4, WIDTH)] * 2
    traced = trace(net, sample)
    job = AlternativeJob(
        topology=find_topology(str(links)),
        world=8,
        batch=4,
        mesh={"x": 2, "y": 2, "z": 2},
        microbatches=1,
    )
    others = Alternatives(job, lambda: (traced.modules, ""), lambda _: traced.program)
    assert others.fastest(Slow).name == style


class Layers(nn.Module):
    """Blocks of a vision transformer without attention."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(4))

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=False):
            x = x + down(functional.gelu(up(norm(x))))
        return self.norms[-1](x).pow(2).mean()


def made_wide(tokens):
    return Layers(16384), (torch.randn(1, tokens, 16384),)


def made_257():
    return made_wide(257)


def made_256():
    return made_wide(256)


# Sixteen devices behind switches of PCIe 4.0.
PCIE = {"preset": "a100", "per_node": 16, "inside": {"bandwidth": 25e9, "latency": 1e-6}}


@pytest.mark.parametrize(("tokens", "is_grid"), [(257, True), (256, False)])
def test_tokens_that_ranks_do_not_divide_take_a_grid_on_many_ranks(tokens, is_grid):
    """257 is 16 x 16 patches and a class; of 256 rows plans shard norms, so they are faster."""
    request = SearchRequest(
        target=f"{__file__}:made_{tokens}",
        world=16,
        batch=None,
        memory=None,
        topology=parse_topology(PCIE),
    )
    plan = search_model(request, clock=time.monotonic, report=lambda _: None)
    assert (plan.runs_on == "grid 2d") == is_grid, plan


CASES = {
    "a grid on a named mesh": ("rows", 3, 4, {"mesh": {"x": 2, "y": 2}}),
    "a grid on any mesh": ("rows", 3, 4, {"mesh": "auto"}),
    "images on a named mesh": ("images", 1, 2, {"mesh": {"h": 2}, "memory": "200KiB"}),
    "images on two axes": ("images", 1, 4, {"mesh": {"h": 2, "w": 2}, "memory": "150KiB"}),
    "images on any mesh": ("images", 1, 4, {"mesh": "auto", "memory": "150KiB"}),
    "images beside dp": ("images", 2, 4, {"mesh": {"dp": 2, "h": 2}, "memory": "200KiB"}),
}
IN_CI = ("a grid on a named mesh", "images on a named mesh")
ROWS = [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_CI)) for name in CASES]


@pytest.mark.parametrize("name", ROWS)
def test_mode_auto_divides_a_model_that_learns_what_one_process_learns(tmp_path, name):
    kind, samples, ranks, config = CASES[name]
    links = tmp_path / "links.yaml"
    links.write_text(LINKS)
    ((expected),) = run_warm(train, 1, kind, samples, {"mesh": {"dp": 1}})
    config = {"mode": "auto", "topology": str(links), **config}
    for found in run_warm(train, ranks, kind, samples, config):
        divided, has_parts = found[4]
        assert (divided > 0, has_parts) == (kind == "rows", kind == "images")
        assert_equal(found, expected)


def made_rows():
    return Residual().double(), (torch.randn(3, WIDTH).double(), torch.randn(3, WIDTH).double())


def made_images():
    return Pixels().double(), (torch.randn(1, 3, 33, 40).double(), torch.zeros(1).long())


SAVED = {
    "grid": ("rows", 3, 4, {"x": 2, "y": 2}, None, "grid 2d"),
    "images": ("images", 1, 2, {"h": 2}, 200 * 2**10, "parts of images"),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_division_trains_as_one_process(tmp_path, name):
    kind, samples, ranks, mesh, memory, what = SAVED[name]
    links = tmp_path / "links.yaml"
    links.write_text(LINKS)
    request = SearchRequest(
        target=f"{__file__}:made_{kind}",
        world=ranks,
        batch=None,
        memory=memory,
        topology=find_topology(str(links)),
        mesh=mesh,
    )
    plan = search_model(request, clock=time.monotonic, report=lambda _: None)
    assert plan.runs_on == what
    write_plan(plan, tmp_path / "plan.json")
    ((expected),) = run_warm(train, 1, kind, samples, {"mesh": {"dp": 1}})
    config = {"mode": "auto", "plan": str(tmp_path / "plan.json"), "mesh": mesh}
    for found in run_warm(train, ranks, kind, samples, config):
        divided, has_parts = found[4]
        assert (divided > 0, has_parts) == (kind == "rows", kind == "images")
        assert_equal(found, expected)
