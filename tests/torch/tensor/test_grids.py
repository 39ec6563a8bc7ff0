"""High-dimension tensor parallel: a grid equals one process and sends what its formula says."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Block, Curves, assert_equal_curves, build, oracle, run_warm
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import msrun
from msrun.errors import UsageError
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

FLOAT = 4
FIRST = ("layers.*.[qkv]", "layers.*.up", "fc1")
SECOND = ("layers.*.o", "layers.*.down", "fc2")
BETWEEN = ("*norm*",)
RECOMPUTE = {"recompute": {"modules": ["layers.*"]}}
COMM_SAVED = {"recompute": {"modules": ["layers.*"], "save": ["comm"]}}
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}


def turned(style, axes):
    """Return the axes of the product that follows."""
    first, second, *others = axes
    return (
        [second, first, *others] if style != "2.5d" else [first, *turned("2d", [second, *others])]
    )


def plan(style, axes, only=None):
    rules = [
        *({"match": match, "style": style, "axes": list(axes)} for match in (*FIRST, *BETWEEN)),
        *({"match": match, "style": style, "axes": turned(style, axes)} for match in SECOND),
    ]
    return [rule for rule in rules if only is None or rule["match"] in only]


def config(style, model, mesh, **others):
    axes = [name for name in mesh if name not in ("dp", "pp")]
    rules = (*FIRST, *SECOND, *BETWEEN)
    only = [rule for rule in rules if rule.startswith("fc") == (model == "mlp")]
    return {"mesh": mesh, "plan": plan(style, axes, only), **others}


def cases():
    """Yield ranks, style, model, mesh and what else there is."""
    square, cube = {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}
    deep = {"d": 2, "x": 2, "y": 2}
    pipeline = {"pipeline": {"stages": STAGES, "microbatches": 2}}
    yield 4, "2d", "transformer", square, COMM_SAVED | {"accumulate": 2}
    yield 8, "3d", "mlp", cube, {"accumulate": 2}
    yield 8, "3d", "transformer", cube, RECOMPUTE | {"accumulate": 2}
    yield 8, "2.5d", "transformer", deep, {}
    yield 8, "2d", "mlp", {"dp": 2} | square, {"optimizer": {"zero": 3}}
    yield 4, "2d", "transformer", square, {}
    yield 4, "2d", "mlp", {"y": 2, "x": 2}, {}
    yield 4, "2d", "mlp", {"x": 1, "y": 4}, {}
    yield 4, "2d", "mlp", {"x": 4, "y": 1}, {}
    yield 8, "2d", "transformer", {"x": 4, "y": 2}, {}
    yield 8, "2d", "transformer", {"dp": 2} | square, {"optimizer": {"zero": 1}, "accumulate": 2}
    yield 8, "2d", "transformer", {"dp": 2} | square, {"optimizer": {"zero": 2}} | RECOMPUTE
    yield 8, "2d", "transformer", {"dp": 2} | square, {"optimizer": {"zero": 3}} | COMM_SAVED
    yield 8, "2d", "transformer", {"pp": 2} | square, pipeline
    yield 8, "2d", "transformer", {"pp": 2} | square, pipeline | RECOMPUTE
    yield 8, "2.5d", "transformer", deep, COMM_SAVED | {"accumulate": 2}
    yield 8, "3d", "transformer", cube, {}
    yield 8, "3d", "mlp", cube, {}


CASES = {
    f"{style} {model} on {mesh} with {others}": (ranks, config(style, model, mesh, **others), model)
    for ranks, style, model, mesh, others in cases()
}
IN_CI = [*CASES][:2]
ROWS = [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_CI)) for name in CASES]


@pytest.fixture(scope="module")
def curves():
    return Curves(CASES, apart=CASES.keys() - IN_CI)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.few(1)
def test_a_grid_learns_what_one_process_learns(curves, name):
    assert_equal_curves(curves[name], oracle(CASES[name][2]))


class ByHand(nn.Module):
    """Attention without the function of torch."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        heads = [f(x).unflatten(2, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        q, k, v = heads
        found = (q @ k.mT).softmax(-1) @ v
        return self.o(found.transpose(1, 2).flatten(2))


def learned_by_hand(config):
    """Return losses of steps with batches of several sizes."""
    with msrun.init(config) as rt:
        torch.manual_seed(0)
        model = rt.shard(ByHand())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        draw = torch.Generator().manual_seed(1)
        losses = []
        for samples in (2, 3):
            x, y = torch.randn(2, samples, 5, 16, generator=draw)
            losses.append(rt.step(model, optimizer, functional.mse_loss, x, y).item())
        return losses


def test_attention_by_hand_with_heads_over_two_axes_is_that_of_one_process():
    (expected,) = run_warm(learned_by_hand, 1, {})
    rules = [{"match": name, "style": "2d", "axes": ["x", "y"]} for name in "qkv"]
    rules.append({"match": "o", "style": "2d", "axes": ["y", "x"]})
    for found in run_warm(learned_by_hand, 4, {"mesh": {"x": 2, "y": 2}, "plan": rules}):
        assert found == pytest.approx(expected, abs=1e-5)


class Received(TorchDispatchMode):
    """Counts the bytes that a rank receives of activations and weights.

    It collects reductions, and gathers of a number or two a row.
    """

    def __init__(self):
        super().__init__()
        self.bytes = {GATHER: 0, SCATTER: 0}
        self.reductions, self.of_rows = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        name = func.name().partition("::")[2].partition(".")[0]
        if name == GATHER and args[0].shape[-1] == 1:
            self.of_rows.append((args[1], tuple(args[0].shape)))
        elif name == GATHER:
            self.bytes[name] += args[0].nbytes * (args[1] - 1)
        elif name == SCATTER:
            self.bytes[name] += args[0].nbytes // args[2] * (args[2] - 1)
        elif name == REDUCE:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self.reductions.append((group.size(), tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))

    def of_grid(self):
        return sum(self.bytes.values())


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
BATCH, LENGTH, WIDTH, INNER = 16, 4, 16, 32


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm1(x)
        return self.norm2(self.fc2(functional.relu(self.fc1(x))))


def received(rows):
    """Return what a forward and the backward after it receive, for each of `rows`."""
    found = []
    for style, mesh in rows:
        rules = plan(style, list(mesh), ("fc1", "fc2", "*norm*"))
        runtime = msrun.init({"mesh": mesh, "plan": rules})
        network = runtime.shard(Feed())
        x = torch.randn(BATCH, LENGTH, WIDTH)
        with runtime.sharded(network).computing():
            with Received() as forward:
                output = network(x)
            loss = full_tensor(output).square().sum()
            with Received() as backward:
                loss.backward()
        counts = [(one.of_grid(), one.of_rows, one.reductions) for one in (forward, backward)]
        found.append(counts)
        runtime.close()
    return found


def formula(style, mesh):
    """Return the bytes of two products, forward; backward has as many."""
    sizes = [*mesh.values()]
    x, y = sizes[:2] if style == "3d" else sizes[-2:]
    last = sizes[2] if style == "3d" else 1
    rows = BATCH * LENGTH // (sizes[0] if style == "2.5d" else 1)
    activations = rows * (INNER * (x - 1) + WIDTH * (y - 1))
    weights = INNER * WIDTH * (last - 1)
    return 2 * FLOAT * (activations + weights) // (x * y * last)


def test_a_rank_receives_what_the_formula_says():
    grids = [
        ("2d", {"x": 2, "y": 4}),
        ("2d", {"x": 4, "y": 2}),
        ("2.5d", {"d": 2, "x": 2, "y": 2}),
        ("3d", {"x": 2, "y": 2, "z": 2}),
    ]
    for found in run_warm(received, 8, grids):
        for (style, mesh), (first, second) in zip(grids, found, strict=True):
            (forward, norms, before), (backward, after, sums) = first, second
            assert forward == backward == formula(style, mesh), style
            # A mean and a variance of each row; the first input has no gradient.
            columns = math.prod(mesh.values()) // (mesh.get("d", 1) * mesh.get("z", 1))
            columns = mesh["x"] if style == "3d" else columns
            rows = BATCH * columns // 8, LENGTH
            assert (norms, before) == (2 * [(columns, (1, 2, *rows, 1))], [])
            rows = *rows, 2
            assert after == []
            assert [one for one in sums if one[1] == rows] == [(columns, rows)]
            # Layers of 2.5d add up their gradients; those of 3d only of what has one dim.
            assert (len(sums) > 1) == (style != "2d")
            if style == "3d":
                assert all(len(shape) == 1 for _, shape in sums if shape != rows)


class Normed(Feed):
    """Has norms of both kinds, and rows whose mean is far from zero."""

    def __init__(self):
        super().__init__()
        self.norm2 = nn.RMSNorm(WIDTH)

    def forward(self, x):
        return super().forward(x) + self.norm1(x + 1000.0)


def smoothness(network, x):
    """Return an output, and gradients of the length of the gradient of `x`."""
    output = network(x)
    (slope,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
    slope.square().sum().backward()
    found = [output, slope, *(param.grad for param in network.parameters())]
    return [full_tensor(each.detach()) for each in found]


def seeded(dtype):
    torch.manual_seed(0)
    return Normed().to(dtype), torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)


def smoothed(style, mesh, dtype):
    """Return the largest difference from one process, with gradients of gradients."""
    runtime = msrun.init({"mesh": mesh, "plan": plan(style, list(mesh), ("fc1", "fc2", "*norm*"))})
    expected = smoothness(*seeded(dtype))
    network, x = seeded(dtype)
    network = runtime.shard(network)
    with runtime.sharded(network).computing():
        found = smoothness(network, x)
    runtime.close()
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.parametrize(
    ("ranks", "style", "mesh"),
    [
        (4, "2d", {"x": 2, "y": 2}),
        pytest.param(8, "3d", {"x": 2, "y": 2, "z": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_gradients_of_gradients_equal_one_process(ranks, style, mesh, dtype, tolerance):
    assert max(run_warm(smoothed, ranks, style, mesh, dtype)) < tolerance


def layer(style, mesh):
    """Return the collectives of a transformer's layer, and warnings."""
    runtime = msrun.init(config(style, "transformer", mesh))
    network = nn.ModuleDict({"layers": nn.ModuleList([Block(16, 4)])})
    network.forward = network.layers[0].forward
    network = runtime.shard(network)
    with warnings.catch_warnings(record=True) as caught, Received() as counted:
        warnings.simplefilter("always")
        with runtime.sharded(network).computing():
            network(torch.randn(BATCH, LENGTH, WIDTH))
    runtime.close()
    return counted.bytes, [str(warning.message) for warning in caught]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"y": 2, "x": 2}])
def test_a_layer_gathers_nothing_else(mesh):
    one = FLOAT * BATCH * LENGTH * WIDTH // 4
    for counted, said in run_warm(layer, 4, "2d", mesh):
        # Query, key and value share an input; `up` has four times as many columns.
        assert counted == {GATHER: one + one + one + 4 * one, SCATTER: (3 + 1 + 4 + 1) * one}
        assert said == []


def trained(folder, source, target):
    """Train and save under one configuration; return the losses of what another goes on with."""
    x, y = torch.randn(16, 16, generator=torch.Generator().manual_seed(2)), torch.arange(16) % 10
    runtime = msrun.init(source | {"checkpoint": {"dir": str(folder)}})
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(torch.optim.AdamW(network.parameters(), lr=0.01))
    runtime.step(network, update, functional.cross_entropy, x, y)
    runtime.save(network, update, step=1)
    expected = runtime.step(network, update, functional.cross_entropy, x, y).item()
    runtime.close()
    runtime = msrun.init(target | {"checkpoint": {"dir": str(folder)}})
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(torch.optim.AdamW(network.parameters(), lr=0.01))
    runtime.load(network, update)
    found = runtime.step(network, update, functional.cross_entropy, x, y).item()
    runtime.close()
    return abs(found - expected)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), [("3d", "2d"), ("2.5d", "3d"), ("2d", "tp")])
def test_checkpoints_move_between_grids(tmp_path, source, target):
    of = {
        "2d": config("2d", "mlp", {"x": 4, "y": 2}),
        "2.5d": config("2.5d", "mlp", {"d": 2, "x": 2, "y": 2}),
        "3d": config("3d", "mlp", {"x": 2, "y": 2, "z": 2}),
        "tp": {"mesh": {"tp": 8}, "plan": [{"match": "fc1", "style": "colwise"}]},
    }

    assert max(run_warm(trained, 8, tmp_path / "saved", of[source], of[target])) < 1e-6


def by_layout(style, mesh):
    """Return the layouts of MindSpore's `enable_nd_tp` for the products of a grid."""
    layouts = {
        "2d": [
            ("fc1", ["y", "x"], ["None", ["x", "y"]]),
            ("fc2", ["x", "y"], ["None", ["y", "x"]]),
        ],
        "3d": [
            ("fc1", ["y", ["x", "z"]], [["z", "y"], "x"]),
            ("fc2", ["x", ["y", "z"]], [["z", "x"], "y"]),
        ],
    }[style]
    device = {"device_matrix": [*mesh.values()], "alias_name": [*mesh]}
    return [
        {"match": match, "layout": {
            **device, "enable_nd_tp": True, "params": {"weight": weight}, "in": inputs,
        }}
        for match, weight, inputs in layouts
    ]  # fmt: skip


def planned(mesh, rules):
    runtime = msrun.init({"mesh": mesh, "plan": rules})
    network = runtime.shard(build("mlp"))
    own = [*network.fc1.parameters(), *network.fc2.parameters()]
    runtime.close()
    return [param.to_local().shape for param in own], type(network.fc1.forward).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "mesh"), [("2d", {"x": 4, "y": 2}), ("3d", {"x": 2, "y": 2, "z": 2})]
)
def test_layouts_of_mindspore_are_grids(style, mesh):
    theirs = run_warm(planned, 8, mesh, by_layout(style, mesh))

    assert theirs == run_warm(planned, 8, mesh, config(style, "mlp", mesh)["plan"])
    assert theirs[0][1] == "GridProduct"


SQUARE, FLAT = {"x": 2, "y": 2}, {"dp": 2, "x": 2, "y": 1, "z": 1}
LAYOUT = {"device_matrix": [2, 2], "alias_name": ["x", "y"], "enable_nd_tp": True}


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def nets():
    odd = nn.Sequential(nn.Linear(16, 18))
    return {
        "mlp": build("mlp"),
        "odd": odd,
        "scaled": nn.Sequential(Scaled(16, 16)),
        "embedding": nn.Sequential(nn.Embedding(16, 16)),
        "normed": nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    }


REFUSED = [
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "2d"}]}, "mlp",
     "parallel.plan[0].axes: style 2d takes 2 axes, and none are given"),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "3d", "axes": ["x", "y"]}]}, "mlp",
     "parallel.plan[0].axes: style 3d takes 3 axes, and [x, y] are given"),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "2d", "axis": "x"}]}, "mlp",
     "parallel.plan[0].axis: style 2d takes 2 axes (write `axes`)"),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "colwise", "axes": ["x", "y"]}]}, "mlp",
     "parallel.plan[0].axes: belongs to style 2d, 2.5d, 3d"),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "2d", "axes": ["x", "z"]}]}, "mlp",
     "parallel.plan[0].axes: axis 'z' is not in mesh (x, y)"),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "style": "2d", "axes": ["x", "x"]}]}, "mlp",
     "parallel.plan[0].axes: axis 'x' stands there twice"),
    ({"mesh": {"dp": 2, "x": 2}, "plan": [{"match": "fc1", "style": "2d", "axes": ["dp", "x"]}]},
     "mlp",
     "parallel.plan[0].axes: dp divides the batch or the layers, not an operator (choose x)"),
    ({"mesh": SQUARE, "mode": "auto",
      "plan": [{"match": "fc1", "style": "2d", "axes": ["x", "y"]}]}, "mlp",
     ("parallel.plan[0].style: 2d: mode auto finds layouts of whole products and even tables "
      "(choose semi_auto)")),
    ({"mesh": FLAT, "optimizer": {"zero": 1},
      "plan": [{"match": "fc1", "style": "3d", "axes": ["x", "y", "z"]}]}, "mlp",
     ("parallel.optimizer.zero: 1 beside a plan over 3 axes (x, y, z): zero can shard what a plan "
     "shards over at most 2")),
    ({"mesh": SQUARE, "plan": [{"match": "0", "style": "2d", "axes": ["x", "y"]}]}, "odd",
     "parallel.plan[0]: 0.bias [18] can not be split by strategy: dim 0 of 18 in 4 parts (y x x)"),
    ({"mesh": SQUARE, "plan": [{"match": "0", "style": "2d", "axes": ["x", "y"]}]}, "scaled",
     "parallel.plan[0].style: 2d is for products, and 0 (Scaled) has a forward of its own"),
    ({"mesh": SQUARE, "plan": [{"match": "0", "style": "2d", "axes": ["x", "y"]}]}, "embedding",
     ("parallel.plan[0].style: 2d is for Linear, Conv1D and norms over the last dim, and 0 "
     "(Embedding) has weight [16, 16]")),
    ({"mesh": SQUARE, "plan": [{"match": "0", "style": "2d", "axes": ["x", "y"]}]}, "normed",
     ("parallel.plan[0].style: 2d of 0 (ParametrizedLinear), which computes its weight from other "
     "parameters")),
    ({"mesh": SQUARE, "plan": [{"match": "fc1", "layout": {
        **LAYOUT, "params": {"weight": ["x", "y"]}, "in": ["None", ["x", "y"]]}}]}, "mlp",
     "parallel.plan[0].layout.enable_nd_tp: weight [x, y] and in [null, [x, y]] are no grid"),
]  # fmt: skip


def refusals():
    """Return what each of `REFUSED` says on this rank."""
    found = []
    for given, model, _ in REFUSED:
        try:
            runtime = msrun.init(given)
            runtime.shard(nets()[model])
        except UsageError as error:
            found.append(error.message)
        else:
            found.append("nothing")
        if msrun.parallel.runtime._current is not None:
            msrun.init().close()
    return found


def test_what_is_no_grid_is_refused():
    assert run_warm(refusals, 4) == 4 * [[sentence for *_, sentence in REFUSED]]
