"""`compile` beside axes of experts, sequences and images: modules that these axes do not touch."""

import functools

import lists  # noqa: F401 - adds models of lists
import mixtures
import pytest
import torch
from context_models import Block, Text
from context_models import batches as of_tokens
from context_models import build as build_text
from image_models import CLASSES
from ranks import run_warm
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    # Of torch, while it compiles.
    pytest.mark.filterwarnings("ignore"),
]

CONTEXT = {"match": "*", "style": "context"}
IMAGES = {"image": ["dp", None, "h", None], "label": ["dp"]}


class Inner(nn.Module):
    """Computes on each token by itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        left, right = self.up(self.norm(x)).view(*x.shape[:2], 2, 16).unbind(2)
        return self.down(torch.cat([functional.gelu(left), right[..., :16]], -1))


class InnerBlock(Block):
    def __init__(self, *options, **named):
        super().__init__(*options, **named)
        self.mlp = Inner()

    def forward(self, x, mask=None):
        return x + self.mlp(x + self.attend(self.norm(x), mask))


class Layered(Text):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([InnerBlock(4, 4, is_causal=True) for _ in range(2)])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, CLASSES))

    def forward(self, image):
        return self.head(functional.gelu(self.conv(image)).mean((2, 3)))


def images():
    draw = torch.Generator().manual_seed(5)
    pairs = [(torch.randn(4, 3, 8, 8, generator=draw), i % CLASSES) for i in range(3)]
    return [(x, torch.full((4,), y)) for x, y in pairs]


def pooled():
    torch.manual_seed(0)
    return Pooled()


def seen(output, target):
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


# Name -> model, batches and loss function.
TASKS = {
    "sequences": (lambda: build_text(Layered).float(), of_tokens, seen),
    "experts": (lambda: mixtures.build("top 2"), lambda: mixtures.texts(3), seen),
    "list": (lambda: mixtures.build("list, after"), lambda: mixtures.texts(3), seen),
    "images": (pooled, images, seen),
}
MLPS = {"compile": {"modules": ["blocks.*.mlp"]}}
SHARED = {"compile": {"modules": ["*.shared", "*.norm", "head"]}}
EP = {"mesh": {"ep": 2}, "plan": [mixtures.RULE]}
CP = {"mesh": {"cp": 2}, "plan": [CONTEXT]}
LAYOUTS = {
    "cp": ("sequences", {**MLPS, **CP}),
    "cp, a ring, recompute": (
        "sequences",
        {
            **MLPS,
            "mesh": {"cp": 2},
            "plan": [{**CONTEXT, "kind": "ring"}],
            "recompute": {"modules": ["blocks.?"]},
        },
    ),
    "cp, zero 3, bf16": (
        "sequences",
        {**MLPS, **CP, "optimizer": {"zero": 3}, "precision": "bf16"},
    ),
    "ep": ("experts", {**SHARED, **EP}),
    "ep, zero 2, bf16": (
        "experts",
        {**SHARED, **EP, "optimizer": {"zero": 2}, "precision": "bf16"},
    ),
    "ep, a list": ("list", {**SHARED, **EP}),
    "images": (
        "images",
        {"compile": {"modules": ["head"]}, "mesh": {"h": 2}, "data": IMAGES},
    ),
}


def trained(config, task):
    make, batches, loss_fn = TASKS[task]
    with msrun.init(config) as rt:
        model = rt.shard(make())
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        parts = [[tensor.chunk(ranks)[rank] for tensor in batch] for batch in batches()]
        return [rt.step(model, update, loss_fn, *part).item() for part in parts]


def curves(names):
    """Return of each layout the losses, how many graphs were made, and breaks of graphs."""
    found = {}
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        task, config = LAYOUTS[name]
        losses = trained(config, task)
        found[name] = losses, counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return found


@functools.cache
def found():
    return run_warm(curves, 2, list(LAYOUTS), timeout=500)


@functools.cache
def alone(task):
    return run_warm(trained, 1, {}, task)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # the compiler takes a minute, and more beside others
@pytest.mark.parametrize("name", LAYOUTS)
def test_modules_that_axes_do_not_touch_are_compiled(name):
    task, config = LAYOUTS[name]
    for of_rank in found():
        losses, graphs, breaks = of_rank[name]
        assert losses == pytest.approx(alone(task), abs=0.02 if "precision" in config else 2e-5)
        assert graphs > 0
        assert breaks == {}


class Counting(Inner):
    """Adds something for the place of each token."""

    def forward(self, x):
        return super().forward(x) + torch.arange(x.shape[1])[:, None]


class Late(Inner):
    """Does so from the third step on."""

    steps = 0

    def forward(self, x):
        if self.steps > 1:
            x = x + torch.arange(x.shape[1])[:, None]
        return super().forward(x)


class Breaking(Inner):
    """Prints, which the compiler leaves to Python."""

    def forward(self, x):
        if self.training:
            torch._dynamo.graph_break()
        return super().forward(x)


KINDS = {"counting": Counting, "late": Late, "breaking": Breaking}


def said(config, task, kind=None):
    """Return what is said of a compiled module, in which step, and whether weights changed."""
    make, batches, loss_fn = TASKS[task]
    torch._dynamo.reset()
    with msrun.init(config) as rt:
        model = make()
        if kind:
            model.blocks[1].mlp = KINDS[kind]()
        try:
            model = rt.shard(model)
        except UsageError as error:
            return error.message, 0, True
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step, batch in enumerate(batches(), 1):
            before = model.head.weight.detach().clone() if hasattr(model.head, "weight") else None
            if kind:
                model.blocks[1].mlp.steps = step - 1
            try:
                rt.step(model, update, loss_fn, *batch)
            except UsageError as error:
                is_same = before is None or torch.equal(before, model.head.weight)
                return error.message, step, is_same
    return "", 0, True


REFUSED = {
    "attention": (
        ({**CP, "compile": {"modules": ["blocks.*"]}}, "sequences"),
        1,
        (
            "parallel.compile.modules: blocks.0 has attention, which is that of the tokens of all "
            "ranks, and the compiler does not follow it"
        ),
    ),
    "positions": (
        ({**CP, **MLPS}, "sequences", "counting"),
        1,
        (
            "parallel.compile.modules: blocks.1.mlp has torch.arange, which is that of the tokens "
            "of all ranks, and the compiler does not follow it"
        ),
    ),
    "positions in a later step": (
        ({**CP, **MLPS}, "sequences", "late"),
        3,
        (
            "parallel.compile.modules: blocks.1.mlp has torch.arange, which is that of the tokens "
            "of all ranks, and the compiler does not follow it"
        ),
    ),
    "several graphs": (
        ({**CP, **MLPS}, "sequences", "breaking"),
        2,
        (
            "parallel.compile.modules: the compiler makes no single graph of blocks.1.mlp, which "
            "has parts of sequences: "
        ),
    ),
    "experts": (
        ({**EP, "compile": {"modules": ["layers.*"]}}, "experts"),
        0,
        (
            "parallel.compile.modules: layers.0 contains layers.0.mlp.experts, which has experts "
            "that ranks share, and the compiler does not follow that"
        ),
    ),
    "an expert of a list": (
        ({**EP, "compile": {"modules": ["*.experts.*.up"]}}, "list"),
        0,
        (
            "parallel.compile.modules: layers.0.mlp.experts.0.up is of the experts "
            "layers.0.mlp.experts that ranks share"
        ),
    ),
    "parts of images": (
        ({"compile": {"modules": ["conv"]}, "mesh": {"h": 2}, "data": IMAGES}, "images"),
        1,
        (
            "parallel.compile.modules: conv gets images of which ranks have parts, and the "
            "compiler does not follow these"
        ),
    ),
}
EARLY = [name for name, (_, step, _) in REFUSED.items() if step < 2]


def all_said(names):
    return {name: said(*REFUSED[name][0]) for name in names}


def check(names):
    for of_rank in run_warm(all_said, 2, names, timeout=300):
        for name, (sentence, step, is_unchanged) in of_rank.items():
            assert sentence.startswith(REFUSED[name][2]), name
            assert step == REFUSED[name][1], name
            assert is_unchanged, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modules_that_axes_touch_are_refused_by_name():
    check(EARLY)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_only_a_later_graph_has_is_refused_too():
    check([name for name in REFUSED if name not in EARLY])
