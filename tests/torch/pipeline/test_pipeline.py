"""Pipeline parallel: the losses of one process, and exactly the messages and memory of formulas."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from pipelines import (
    MODELS,
    SCHEDULES,
    begin_step,
    data_of,
    largest_difference,
    pipeline,
    split,
    stages,
    train_stages,
    train_step,
    train_whole,
)
from ranks import (
    OPTIMIZERS,
    STEPS,
    Counted,
    assert_equal_curves,
    batches,
    build,
    run_warm,
    token_loss,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.layers import recompute
from msrun.parallel.local import full_tensor
from msrun.parallel.torch_compat import reduce_sharded

pytestmark = pytest.mark.torch

RUNS = (("deep", "sgd"), ("deep", "adamw"), ("transformer", "sgd"), ("transformer", "adamw"))


def _plan(schedule, degree):
    """Return model, optimizer and micro-batches of each training.

    Every schedule and degree meets every number of micro-batches, both models and both optimizers.
    """
    counts = {degree, 2 * degree, 8}
    counts = sorted(counts - {degree} if schedule == "dualpipev" else counts)
    plan = [("deep", "adamw", count) for count in counts] + [("transformer", "sgd", 8)]
    return plan + [("deep", "sgd", 8), ("transformer", "adamw", 8)] * (schedule == "1f1b")


def _curves(schedule):
    """Return the losses of each training."""
    degree = dist.get_world_size()
    curves = []
    for model, optimizer, count in _plan(schedule, degree):
        part = split(model, pipeline(stages(model, schedule, degree), schedule, count))
        curves.append(train_stages(part, batches(model), MODELS[model][1], optimizer))
    return curves


def _whole_curves():
    return {run: train_whole(run[0], batches(run[0]), run[1])[0] for run in RUNS}


@pytest.fixture(scope="module")
def expected():
    return run_warm(_whole_curves, 1)[0]


# Two stages are in the grid, too.
ROWS = [pytest.param(schedule, 4) for schedule in SCHEDULES] + [
    pytest.param(schedule, 2, marks=pytest.mark.slow) for schedule in SCHEDULES
]


@pytest.mark.parametrize(("schedule", "degree"), ROWS)
@pytest.mark.few(4)
def test_equals_one_process(schedule, degree, expected):
    found = run_warm(_curves, degree, schedule)

    for index, (model, optimizer, _) in enumerate(_plan(schedule, degree)):
        assert_equal_curves([curves[index] for curves in found], expected[model, optimizer])


def _messages(schedule, count):
    """Return what this rank sends and receives in a step that is not the first."""
    degree = dist.get_world_size()
    part = split("deep", pipeline(stages("deep", schedule, degree), schedule, count))
    for x, y in batches("deep", steps=2):
        with Counted() as counted:
            train_step(part, [x], y, functional.cross_entropy)
    return counted.calls["send"], counted.calls["recv_"]


@pytest.mark.parametrize(
    ("schedule", "sent"),
    [
        ("gpipe", [8, 16, 16, 8]),
        ("1f1b", [8, 16, 16, 8]),
        ("interleaved", [24, 32, 32, 24]),
        ("zbv", [16, 32, 32, 16]),
    ],
)
def test_messages_are_those_of_the_formula(schedule, sent):
    assert run_warm(_messages, 4, schedule, 8) == [(count, count) for count in sent]


def _live(schedule):
    """Return how many micro-batches this rank keeps at most."""
    stage = dist.get_rank()
    part = split("deep", pipeline(stages("deep", schedule, 4), schedule, 8))
    live = [0, 0]

    def forward(_module, _inputs, output):
        live[0] += 1
        live[1] = max(live)
        output.register_hook(backward)

    def backward(_gradient):
        live[0] -= 1

    part.get_submodule(f"layers.{2 * stage + 1}").register_forward_hook(forward)
    train_step(part, [batches("deep")[0][0]], batches("deep")[0][1], functional.cross_entropy)
    return live[1]


@pytest.mark.parametrize(("schedule", "live"), [("gpipe", [8] * 4), ("1f1b", [4, 3, 2, 1])])
def test_no_more_micro_batches_live_than_the_formula_says(schedule, live):
    assert run_warm(_live, 4, schedule) == live


def _holdings():
    part = split("deep", pipeline(stages("deep", "zbv", 2), "zbv", 4))
    return list(part.state_dict()), sum(param.numel() for param in part.parameters())


def test_each_rank_holds_its_share_under_the_names_it_had():
    def names(layers):
        return [f"layers.{layer}.{param}" for layer in layers for param in ("weight", "bias")]

    assert run_warm(_holdings, 2) == [
        (names([0, 1, 6, 7]), 4 * (16 * 16 + 16)),
        (names([2, 3, 4, 5]), 4 * (16 * 16 + 16)),
    ]


def _mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh, mesh.get_group("pp"), mesh.get_group("dp")


def _tied():
    """Train two pipelines side by side; return the tied weight of this rank, and the losses."""
    mesh, pp, dp = _mesh()
    part = split("transformer", pipeline(stages("transformer", "1f1b", 2)), pp)
    update = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches("transformer"):
        x, y = (tensor.chunk(2)[mesh.get_local_rank("dp")] for tensor in batch)
        update.zero_grad()
        loss = train_step(part, [x], y, token_loss)
        for param in part.parameters():
            param.grad.mul_(0.5)
            dist.all_reduce(param.grad, group=dp)
        part.reduce_tied()
        update.step()
        dist.all_reduce(loss, group=dp)
        losses.append(loss.item() / 2)
    weights = {n: p.detach().clone() for n, p in part.named_parameters() if n in TIED}
    borrowed = [n for n, p in part.named_parameters() if p in part.borrowed()]
    return losses, weights, borrowed


TIED = ("embed.weight", "head.weight")


def test_tied_weights_stay_equal_to_the_last_bit(expected):
    found = run_warm(_tied, 4)

    assert_equal_curves([losses for losses, _, _ in found], expected["transformer", "sgd"])
    assert [(list(weights), borrowed) for _, weights, borrowed in found] == [
        (["embed.weight"], []),
        (["embed.weight"], []),
        (["head.weight"], ["head.weight"]),
        (["head.weight"], ["head.weight"]),
    ]
    first, *others = [weight for _, weights, _ in found for weight in weights.values()]
    assert all(torch.equal(first, other) for other in others)


def _alike():
    """Return the weight that three stages share, how far one process is, and what is refused."""
    part = split("alike", pipeline({"a": 0, "b": 1, "c": 2}))
    data = [({"x": x}, y) for x, y in batches("alike")]
    losses, network = train_whole("alike", data)
    found = train_stages(part, data, functional.cross_entropy)
    off = max(abs(a - b) for a, b in zip(found, losses, strict=True))
    weight = next(p for n, p in part.named_parameters() if n.endswith("weight")).detach().clone()
    other = split("alike", pipeline({"a": 0, "b": 1, "c": 2}))
    if dist.get_rank() == 2:
        other.c.weight = torch.nn.Parameter(torch.zeros(8, 16))
    with pytest.raises(UsageError) as caught:
        other.reduce_tied()
    return weight, max(off, largest_difference(part, network)) < 1e-6, str(caught.value)


def test_a_weight_of_many_stages():
    sentence = (
        "parallel.plan: a.weight and b.weight and c.weight are one weight of several stages, "
        "and are divided in different ways ((16, 16) whole and (8, 16) whole)"
    )

    (first, *answer), *others = run_warm(_alike, 3)

    assert answer == [True, sentence]
    assert all(torch.equal(first, other) for other, *_ in others)


class Nest(nn.Module):
    """A block in which a block holds what all three nests share: one layer and one weight."""

    def __init__(self, shared, weight):
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.inner = nn.Sequential(nn.Sequential(shared), nn.Linear(16, 16, bias=False))
        self.inner[1].weight = weight

    def forward(self, x):
        return functional.relu(x + self.inner(self.own(x)))


class Nested(nn.Module):
    """Two weights of three stages, under several names in each; the last has a third one's too."""

    def __init__(self):
        super().__init__()
        shared, weight = nn.Linear(16, 16), nn.Parameter(torch.full((16, 16), 0.01))
        self.nests = nn.ModuleList([Nest(shared, weight) for _ in range(3)])
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        for nest in self.nests:
            x = nest(x)
        return self.head(x)


def _nested(config):
    """Return losses and norms of this rank, and its copies of what stages share."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    network = runtime.shard(Nested())
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    found = []
    for batch in batches("mlp"):
        x, y = (part.chunk(count)[share] for part in batch)
        found.append(runtime.step(network, update, functional.cross_entropy, x, y).item())
        found.append(runtime.clip_grad_norm_(network, 1e9).item())
    names = [n for n, _ in network.named_parameters(remove_duplicate=False) if ".inner." in n]
    kept = {
        n.partition(".inner.")[2]: full_tensor(network.get_parameter(n)).tolist() for n in names
    }
    return found, kept


@pytest.mark.parametrize(
    "config", [{}, {"optimizer": {"zero": 1}}, {"recompute": {"modules": ["nests.*.inner"]}}]
)
def test_nested_modules_share_weights_over_three_stages(config):
    torch.manual_seed(0)
    network = Nested()
    update = OPTIMIZERS["adamw"](network.parameters())
    expected = []
    for x, y in batches("mlp"):
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        expected += [loss.item(), nn.utils.clip_grad_norm_(network.parameters(), 1e9).item()]
        update.step()
    stages = {"nests.0": 0, "nests.1": 1, "nests.2": 2, "head": 2}
    config |= {"mesh": {"pp": 3, "dp": 2}, "pipeline": {"stages": stages, "microbatches": 4}}

    found = run_warm(_nested, 6, config)

    assert_equal_curves([numbers for numbers, _ in found], expected)
    kept = found[0][1]
    assert list(kept) == ["0.0.weight", "0.0.bias", "1.weight"]
    assert all(other == kept for _, other in found)


def _sizes(model, where, schedule, sizes, frozen=()):
    """Train and infer on batches of other sizes; return how far one process is, at most."""
    data = data_of(model, sizes)
    network, part_of = build(model), build(model)
    for name in frozen:
        network.get_submodule(name).requires_grad_(requires_grad=False)
        part_of.get_submodule(name).requires_grad_(requires_grad=False)
    part = split(model, pipeline(where, schedule), network=part_of)
    losses, network = train_whole(model, data, network=network)
    found = train_stages(part, data, functional.cross_entropy)
    part.eval()
    off = [abs(a - b) for a, b in zip(found, losses, strict=True)]
    with torch.no_grad():
        off += [float((part(x) - network.eval()(x)).abs().max()) for x, _ in data]
    return max(*off, largest_difference(part, network))


SKIPS = {"a": 0, "b": 1, "c": 2, "d": 3, "head": 3}
SKIPS_V = {"a": (0, 0), "b": (1, 0), "c": (1, 1), "d": (0, 1), "head": (0, 1)}
SKIPS_LOOPED = {"a": (0, 0), "b": (1, 0), "c": (0, 1), "d": (1, 1), "head": (1, 1)}


@pytest.mark.parametrize(
    ("schedule", "where", "degree"),
    [("1f1b", SKIPS, 4), ("zbv", SKIPS_V, 2), ("interleaved_zb", SKIPS_LOOPED, 2)],
)
def test_values_skip_stages_and_batches_have_any_size(schedule, where, degree):
    sizes = (16, 16, 13, 3, 1, 17, 16)

    assert max(run_warm(_sizes, degree, "skips", where, schedule, sizes)) < 1e-6


TRAPS_V = {"a": (0, 0), "total": (1, 0), "own": (1, 0), "e": (1, 1), "head": (0, 1)}
TRAPS_LOOPED = {"a": (0, 0), "total": (1, 0), "own": (1, 0), "e": (0, 1), "head": (1, 1)}


@pytest.mark.sampled
@pytest.mark.parametrize("frozen", [(), ("a",)])
@pytest.mark.parametrize(
    ("schedule", "where"),
    [("zbv", TRAPS_V), ("dualpipev", TRAPS_V), ("interleaved_zb", TRAPS_LOOPED)],
)
def test_separate_gradients_of_weights_are_complete(schedule, where, frozen):
    assert max(run_warm(_sizes, 2, "traps", where, schedule, (16, 16), frozen)) < 1e-6


def _recomputed(schedule):
    part = split("transformer", pipeline(stages("transformer", schedule, 2), schedule))
    called = []
    for name, module in part.named_modules():
        if name.startswith("layers.") and name.count(".") == 1:
            module.register_forward_hook(lambda *_: called.append(1))
            recompute.apply(part, [name], [], contextlib.nullcontext, {})
    return train_stages(part, batches("transformer"), token_loss), len(called)


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", [3, 3]), ("zbv", [2, 4])])
def test_hooks_and_recomputation_work_inside_stages(schedule, layers, expected):
    found = run_warm(_recomputed, 2, schedule)

    assert_equal_curves([losses for losses, _ in found], expected["transformer", "sgd"])
    # Four micro-batches in each step; the recomputation is inside the hooks.
    assert [calls for _, calls in found] == [4 * STEPS * count for count in layers]


def _sharded(schedule, is_resharded):
    """Train with parameters divided over two ranks of each stage."""
    mesh, pp, dp = _mesh()
    part = split("transformer", pipeline(stages("transformer", schedule, 2), schedule), pp)
    for name, module in list(part.named_modules()):
        if name.startswith("layers.") and name.count(".") == 1:
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=is_resharded)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=is_resharded)
    update = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches("transformer"):
        x, y = (tensor.chunk(2)[mesh.get_local_rank("dp")] for tensor in batch)
        update.zero_grad()
        part.set_requires_gradient_sync(is_resharded)
        tally = begin_step(part, [x], y, token_loss)
        reduce_sharded(part)
        part.reduce_tied()
        loss = tally.finish(part.parameters)
        update.step()
        dist.all_reduce(loss, group=dp)
        losses.append(loss.item() / 2)
    return losses


@pytest.mark.parametrize(("schedule", "is_resharded"), [("1f1b", False), ("zbv", True)])
def test_parameters_of_a_stage_can_be_divided(schedule, is_resharded, expected):
    found = run_warm(_sharded, 4, schedule, is_resharded)

    assert_equal_curves(found, expected["transformer", "sgd"])


def _routed():
    """Train and infer where a stage reads values; return how far one process is."""
    where = {"a": 0, "route": 0, "head": 1}
    part = split("routed", pipeline(where))
    part.written_buffers.is_checked = True  # its counter is of calls
    data = data_of("routed", (16, 16, 13, 3))
    losses, network = train_whole("routed", data)
    found = train_stages(part, data, functional.cross_entropy)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(5))
    off = max(abs(a - b) for a, b in zip(found, losses, strict=True))
    calls = float(part.route.calls) if dist.get_rank() == 0 else 16.0
    part.eval()
    with torch.no_grad():
        off = max(off, float((part(x) - network(x)).abs().max()))
    return off < 1e-6, largest_difference(part, network) < 1e-6, calls


def test_a_stage_may_read_values():
    assert run_warm(_routed, 2) == [(True, True, 16.0)] * 2
