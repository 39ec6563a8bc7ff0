"""`compile`: modules that are compiled train as before, and nothing of ours breaks their graph."""

import functools

import pytest
import torch
from ranks import BATCH, MODELS, OPTIMIZERS, batches, build, oracle, run_warm
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of torch, while it compiles.
    pytest.mark.filterwarnings("ignore"),
]

LAYERS = {"compile": {"modules": ["layers.*"]}}
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
LAYOUTS = {
    "dp": LAYERS,
    "zero 3": {**LAYERS, "optimizer": {"zero": 3}},
    "zero 1 accumulate recompute": {
        **LAYERS,
        "optimizer": {"zero": 1},
        "accumulate": 2,
        "recompute": {"modules": ["layers.*"]},
    },
    "recompute bf16": {
        **LAYERS,
        "precision": "bf16",
        "recompute": {"modules": ["layers.*"]},
    },
    "zero 3 recompute bf16": {
        **LAYERS,
        "optimizer": {"zero": 3},
        "precision": "bf16",
        "recompute": {"modules": ["layers.*"]},
    },
    "offload": {**LAYERS, "offload": {"activations": ["layers.*"], "threshold": 0}},
    "pp": {
        **LAYERS,
        "mesh": {"dp": 1, "pp": 2},
        "pipeline": {"stages": STAGES, "microbatches": 2},
    },
    "tp": {
        "compile": {"modules": ["layers.*.norm?", "norm"]},
        "mesh": {"tp": 2},
        "plan": [
            {"match": "layers.*.up", "style": "colwise"},
            {"match": "layers.*.down", "style": "rowwise"},
        ],
    },
}
LAYOUTS["2d"] = {
    # `norm` gets a shard, and runs as it is written.
    "compile": {"modules": ["embed", "norm"]},
    "mesh": {"x": 2, "y": 1},
    "plan": [
        {"match": "layers.*.up", "style": "2d", "axes": ["x", "y"]},
        {"match": "layers.*.down", "style": "2d", "axes": ["y", "x"]},
        {"match": "layers.*.norm?", "style": "2d", "axes": ["x", "y"]},
    ],
}
PLAN = [
    *({"match": f"layers.*.{name}", "style": "colwise"} for name in ("q", "k", "v", "up")),
    *({"match": f"layers.*.{name}", "style": "rowwise"} for name in ("o", "down")),
]
LAYOUTS["tp layers"] = {**LAYERS, "mesh": {"tp": 2}, "plan": PLAN}
LAYOUTS["tp layers sequence accumulate recompute"] = {
    **LAYOUTS["tp layers"],
    "plan": [*PLAN, {"match": "layers.*.norm?", "style": "sequence"}],
    "accumulate": 2,
    "recompute": {"modules": ["layers.*"]},
}
LAYOUTS["tp layers bf16"] = {**LAYOUTS["tp layers"], "precision": "bf16"}
OF_FOUR = {
    "dp tp zero 3 accumulate recompute": {
        **LAYOUTS["tp layers"],
        "mesh": {"dp": 2, "tp": 2},
        "optimizer": {"zero": 3},
        "accumulate": 2,
        "recompute": {"modules": ["layers.*"]},
    },
    "pp tp": {
        **LAYOUTS["tp layers"],
        "mesh": {"pp": 2, "tp": 2},
        "pipeline": {"stages": STAGES, "microbatches": 2},
    },
}
# Of the compiler's own order of sums, and of bfloat16.
TOLERANCE = {"recompute bf16": 0.02, "zero 3 recompute bf16": 0.02, "tp layers bf16": 0.02}


def curves(layouts):
    """Return of each layout the losses, how many graphs were made, and breaks of graphs."""
    found = {}
    for name, config in layouts.items():
        torch._dynamo.reset()
        counters.clear()
        rt = msrun.init(config)
        model = rt.shard(build("transformer"))
        update = rt.optimizer(OPTIMIZERS["sgd"](model.parameters()))
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        losses = []
        for x, y in batches("transformer"):
            part = [t.chunk(count)[share] for t in (x, y)]
            losses.append(rt.step(model, update, MODELS["transformer"][1], *part).item())
        graphs = counters["stats"]["unique_graphs"]
        found[name] = losses, graphs, dict(counters["graph_break"])
        rt.close()
    return found


@functools.cache
def found():
    return run_warm(curves, 2, LAYOUTS, timeout=500)


@functools.cache
def found_of_four():
    return run_warm(curves, 4, OF_FOUR, timeout=500)


@pytest.mark.timeout(600)  # the compiler takes a minute, and more beside others
@pytest.mark.parametrize("name", [*LAYOUTS, *OF_FOUR])
def test_compiled_modules_train_as_before(name):
    for of_rank in found_of_four() if name in OF_FOUR else found():
        losses, graphs, breaks = of_rank[name]
        assert losses == pytest.approx(oracle("transformer"), abs=TOLERANCE.get(name, 2e-5))
        assert graphs > 0
        assert breaks == {}


class Own(nn.Module):
    """Returns its loss."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x):
        return functional.mse_loss(self.part(x), torch.zeros(len(x), 4))


def graphs_of_own_loss():
    rt = msrun.init({"compile": {"modules": ["part"]}})
    torch._dynamo.reset()
    counters.clear()
    model = rt.shard(Own())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        rt.step(model, update, torch.ones(BATCH, 4))
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_a_model_that_returns_its_loss_is_compiled_too():
    assert run_warm(graphs_of_own_loss, 2) == 2 * [(1, {})]


def refused(config, kind):
    rt = msrun.init(config)
    with pytest.raises(UsageError) as caught:
        rt.shard(build(kind))
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "kind", "sentence"),
    [
        (
            {
                "mesh": {"tp": 2},
                "plan": [{"match": "layers.*.up", "params": {}, "out": [[None, None, "tp"]]}],
                **LAYERS,
            },
            "transformer",
            (
                "parallel.compile.modules: layers.0 contains layers.0.up, which has a rule for "
                "several inputs or outputs, and the compiler does not follow that"
            ),
        ),
        (
            {**LAYERS, "recompute": {"modules": ["layers.*"], "save": ["matmul"]}},
            "transformer",
            (
                "parallel.compile.modules: layers.0 recomputes without what recompute.save names, "
                "which the compiler hides"
            ),
        ),
        (
            {**LAYERS, "recompute": {"modules": ["layers.*.up"]}},
            "transformer",
            "parallel.compile.modules: layers.0 contains layers.0.up, which recomputes",
        ),
        (
            {"compile": {"modules": ["layers"]}},
            "transformer",
            "parallel.compile.modules: layers is a ModuleList, which has no forward",
        ),
        (
            {"compile": {"modules": ["*"]}},
            "transformer",
            "parallel.compile.modules: matches the whole model, around which a step has hooks",
        ),
        (
            {"compile": {"modules": ["norm1"]}},
            "conv",
            (
                "parallel.compile.modules: norm1 exchanges its statistics with other ranks, which "
                "the compiler does not follow"
            ),
        ),
    ],
)
def test_what_the_compiler_cannot_follow_is_refused(config, kind, sentence):
    assert run_warm(refused, 2, config, kind) == 2 * [sentence]


class Wide(nn.Module):
    """A layer whose last product no gradient needs again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, *, scale=1):
        return self.down(functional.dropout(functional.gelu(self.up(x)), 0.5)) * scale


class Keeping(Wide):
    def forward(self, x, *, scale=1):
        self.last = x.detach()
        return super().forward(x, scale=scale)


class Buffered(Wide):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=1):
        self.calls += 1
        return super().forward(x, scale=scale)


def recomputed(kind):
    """Return the products of a step, the calls, and the gradient beside that of the same mask."""
    torch._dynamo.reset()
    rt = msrun.init({"compile": {"modules": ["layer"]}, "recompute": {"modules": ["layer"]}})
    torch.manual_seed(0)
    model = rt.shard(nn.ModuleDict({"layer": kind()}))
    x = torch.ones(BATCH, 4)
    for _ in range(2):  # compiles
        model["layer"](x, scale=2).sum().backward()
    with torch.profiler.profile() as profile:
        model.zero_grad()
        out = model["layer"](x, scale=2)
        out.sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    layer = model["layer"]
    # The sum is linear in the last weight: what the gradient sees is the mask of the output.
    of_output = (out / 2 - layer.down.bias).sum()
    of_gradient = (layer.down.weight * layer.down.weight.grad).sum() / 2
    torch.testing.assert_close(of_output, of_gradient)
    return counts["aten::addmm"], int(getattr(layer, "calls", 0))


@pytest.mark.parametrize(
    ("kind", "products", "calls"), [(Wide, 3, 0), (Keeping, 4, 0), (Buffered, 4, 3)]
)
def test_a_compiled_module_recomputes_what_its_gradients_need(kind, products, calls):
    assert run_warm(recomputed, 1, kind) == [(products, calls)]
