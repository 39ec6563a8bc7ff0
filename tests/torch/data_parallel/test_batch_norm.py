"""Batch norms of every kind: outputs, gradients and buffers of one process."""

import copy
import functools
import pickle

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msrun
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPInstanceNorm2d. returned a view"),
]

SAMPLES = 8


class Activated(nn.BatchNorm2d):
    """As timm's: the forward of torch, copied, and an activation in place."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1
        )
        return functional.relu_(x)


class Shifted(nn.BatchNorm2d):
    """With one more argument, and torch's forward inside."""

    def forward(self, x, shift=0.0, *, scale):
        return super().forward(x + shift) * scale


class CallsShifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Shifted(4)

    def forward(self, x):
        return self.norm(x, 0.5, scale=2.0)


class Frozen(nn.BatchNorm2d):
    """Stays in evaluation mode, as for finetuning."""

    def train(self, *_):
        return super().train(mode=False)


class ByFunction(nn.Module):
    """Calls the function; no module of torch is a batch norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4), persistent=False)

    def forward(self, x):
        x = functional.batch_norm(x, self.mean, self.variance, self.weight, training=True)
        options = {"training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
        return torch.batch_norm(x, None, None, None, None, **options)


def normalize(x):
    return functional.batch_norm(x, None, None, training=True)


class ByHelper(nn.Module):
    def forward(self, x):
        return normalize(x)


class OneValue(nn.Module):
    """One value a channel and sample: with one sample a rank, torch itself would refuse."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return x * self.norm(x.mean((2, 3)))[..., None, None]


class Recomputed(nn.Module):
    """A script's own recomputation, whose second run is outside of the model's forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=0.0))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class CheckpointsFunction(nn.Module):
    """Has a helper normalize where nobody can see it before a recomputation."""

    def forward(self, x):
        return checkpoint(normalize, x, use_reentrant=False)


class CheckpointsItsOwn(nn.Module):
    """Names the function, and has a part of itself recomputed without its module."""

    def inner(self, x):
        return functional.batch_norm(x, None, None, training=True)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def eval_inside():
    norm = nn.BatchNorm2d(4)
    norm.running_mean.fill_(0.3)
    return norm.eval()


class TurnsOff(nn.Module):
    """A batch norm that the model itself puts in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.norm = eval_inside()

    def forward(self, x):
        self.norm.eval()
        return self.norm(x)


def lazy():
    norm = nn.LazyBatchNorm2d()
    norm(torch.zeros(2, 4, 3, 3))
    norm.reset_running_stats()
    return norm


NORMS = {
    "plain": lambda: nn.BatchNorm2d(4),
    "activated": lambda: Activated(4),
    "arguments": CallsShifted,
    "frozen": lambda: Frozen(4).train(),
    "not affine": lambda: nn.BatchNorm2d(4, affine=False),
    "without momentum": lambda: nn.BatchNorm2d(4, momentum=None),
    "untracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "without bias": lambda: nn.BatchNorm2d(4, bias=False),
    "synchronized by torch": lambda: nn.SyncBatchNorm(4),
    "by function": ByFunction,
    "by helper": ByHelper,
    "one value": OneValue,
    "recomputed by the script": Recomputed,
    "turned off": TurnsOff,
    "instances": lambda: nn.InstanceNorm2d(4, affine=True),
    "tracked instances": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "lazy": lazy,
    "evaluating": eval_inside,
    "not yet materialized": nn.LazyBatchNorm2d,
    "recomputed by function": CheckpointsFunction,
    "recomputed by method": CheckpointsItsOwn,
}


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = NORMS[kind]()
        self.head = nn.Linear(4 * 4, 3)

    def forward(self, x):
        return self.head(functional.avg_pool2d(self.norm(self.conv(x)), 3).flatten(1))


def build(kind):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net(kind).double().train()


def batches():
    numbers = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(SAMPLES, 1, 8, 8, generator=numbers, dtype=torch.float64) + 1
        yield x, torch.randint(0, 3, (SAMPLES,), generator=numbers)


def state(network):
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: full_tensor(tensor.detach()).clone() for name, tensor in named.items()}


@functools.cache
def expected(kind):
    network = build(kind)
    update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches():
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    network.eval()
    return losses, state(network), network(next(batches())[0]).detach()


def trained(kinds, config):
    found = {}
    for kind in kinds:
        runtime = msrun.init(config)
        network = runtime.shard(build(kind))
        update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
        losses = [
            runtime.step(
                network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
            ).item()
            for batch in batches()
        ]
        network.eval()
        found[kind] = losses, state(network), network(next(batches())[0]).detach()
        runtime.close()
    return found


# One sample a rank, too.
TP = [{"match": "conv", "params": {"weight": ["tp", None, None, None], "bias": ["tp"]},
       "out": [None, "tp", "..."]}]  # fmt: skip
CONFIGS = {
    "dp 2": (2, {}),
    "dp 4": (4, {}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "recompute": (2, {"recompute": {"modules": ["norm"]}}),
    "dp 2, tp 2": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": TP}),
}


# Over dp 2 beside tp they train in CI.
AT_NIGHT = ("dp 2", "dp 4", "zero 1")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in AT_NIGHT)) for n in CONFIGS]
)
@pytest.mark.few(2)
def test_every_kind_is_that_of_one_process(name):
    ranks, config = CONFIGS[name]
    kinds = NORMS.keys() - {
        "recomputed by function",
        "recomputed by method",
        "not yet materialized",
    }
    if "plan" in config:  # a script's own recomputation of divided tensors is refused
        kinds -= {"recomputed by the script"}
    kinds = sorted(kinds)

    for found in run_warm(trained, ranks, kinds, config):
        for kind in kinds:
            for one, other in zip(found[kind], expected(kind), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=f"{kind}")


def refusal(kind, config, before=None):
    runtime = msrun.init(config)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), NORMS[kind](), nn.Flatten())
    try:
        network = runtime.shard(network)
        if before:
            before(network)
        update = torch.optim.SGD(network.parameters(), lr=0.1)
        runtime.step(
            network, update, functional.mse_loss, torch.ones(4, 1, 5, 5), torch.ones(4, 36)
        )
    except msrun.errors.ModelError as error:
        return error.message
    return None


TWICE = {"accumulate": 2}
SEES = "parallel.accumulate: with 2 micro-batches {} sees one of them at a time"


def test_a_norm_that_sees_a_micro_batch_is_refused_when_it_is_used():
    for ranks in (1, 2):
        assert run_warm(refusal, ranks, "plain", TWICE)[0] == SEES.format("1")
        assert run_warm(refusal, ranks, "tracked instances", TWICE)[0] == SEES.format("1")
        assert run_warm(refusal, ranks, "by helper", TWICE)[0] == SEES.format("Sequential")
        assert run_warm(refusal, ranks, "evaluating", TWICE, nn.Module.train)[0] == SEES.format("1")
        for kind in ("frozen", "turned off", "instances"):
            assert run_warm(refusal, ranks, kind, TWICE)[0] is None
        assert run_warm(refusal, ranks, "by helper", TWICE | {"batch_norm": "local"})[0] is None


def test_a_function_that_a_recomputation_would_run_alone_is_refused():
    for kind, name in (("recomputed by function", "Sequential"), ("recomputed by method", "1")):
        assert run_warm(refusal, 2, kind, {})[0] == (
            f"{name} calls functional.batch_norm inside torch.utils.checkpoint, which would run it "
            "again with the statistics of one rank"
        )


def test_a_lazy_batch_norm_is_refused_before_its_first_batch():
    for ranks in (1, 2):
        assert run_warm(refusal, ranks, "not yet materialized", {})[0] == (
            "1.weight has no shape yet: its module is lazy"
        )


def copies():
    """Return outputs of a model, a copy, a pickled one and a part, and torch's own functions."""
    runtime = msrun.init()
    network = runtime.shard(build("activated"))
    others = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
    x = next(batches())[0].chunk(2)[runtime.rank]
    outputs = [model(x).tolist() for model in (network, others[0])]
    assert not torch.equal(network.norm.running_mean, torch.zeros(4))
    assert torch.equal(network.norm.running_mean, others[0].norm.running_mean)
    outputs.append(others[1](x).tolist())
    network.head(functional.avg_pool2d(network.norm(network.conv(x)), 3).flatten(1))
    assert functional.batch_norm.__code__.co_filename == functional.__file__
    assert isinstance(torch.batch_norm, type(torch.relu))
    return outputs


def test_a_copy_normalizes_with_all_ranks_and_a_pickled_model_alone():
    expected_output = build("activated")(next(batches())[0]).tolist()

    found = run_warm(copies, 2)

    for index in (0, 1):
        torch.testing.assert_close(found[0][index] + found[1][index], expected_output)
    for rank in (0, 1):
        alone = build("activated")(next(batches())[0].chunk(2)[rank]).tolist()
        torch.testing.assert_close(found[rank][2], alone)


class Critic(nn.Module):
    """A part that a script calls by itself, with the function in its own code."""

    def forward(self, x):
        return functional.batch_norm(x, None, None, training=True)


def part():
    runtime = msrun.init()
    network = runtime.shard(nn.ModuleDict({"critic": Critic(), "norm": nn.BatchNorm2d(1).double()}))
    x = next(batches())[0].chunk(2)[runtime.rank]
    return network["critic"](x), network["norm"](x).detach()


def test_a_part_that_the_script_calls_is_right_too():
    first, second = run_warm(part, 2)

    x = next(batches())[0]
    for one, other in zip(first, second, strict=True):
        whole = functional.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(torch.cat([one, other]), whole)


def timm_losses(name, is_sharded):
    """Train a small model of timm; return losses, and buffers after them."""
    timm = pytest.importorskip("timm", exc_type=ImportError)
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=3, in_chans=1).double().train()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    runtime = msrun.init()
    share, count = (runtime.rank, runtime.world_size) if is_sharded else (0, 1)
    network = runtime.shard(network) if is_sharded else network
    update = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for x, y in batches():
        loss_of = functional.cross_entropy
        part = [t.chunk(count)[share] for t in (functional.interpolate(x, 32), y)]
        if is_sharded:
            losses.append(runtime.step(network, update, loss_of, *part).item())
            continue
        update.zero_grad()
        loss = loss_of(network(part[0]), part[1])
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, {n: buffer.double() for n, buffer in network.named_buffers()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "efficientnet_b0", "resnetv2_18"])
def test_timm_models_are_those_of_one_process(name):
    pytest.importorskip("timm", exc_type=ImportError)

    expected_losses = run_warm(timm_losses, 1, name, None)[0]

    for found in run_warm(timm_losses, 2, name, "sharded"):
        torch.testing.assert_close(found, expected_losses, rtol=1e-8, atol=1e-9)


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        raise KeyboardInterrupt(self.norm(x))


def after_an_interrupt():
    """Return a batch norm of this rank's own samples, and what it must be."""
    x = torch.arange(8.0).view(4, 2) * (1 + torch.distributed.get_rank())
    expected = functional.batch_norm(x, None, None, training=True)
    with msrun.init({"mesh": {"dp": 2}}) as rt:
        model = rt.shard(Interrupted())
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(KeyboardInterrupt):
            rt.step(model, optimizer, x)
        return functional.batch_norm(x, None, None, training=True), expected


def test_a_step_that_is_interrupted_leaves_batch_norms_of_others_alone():
    for found, expected in run_warm(after_an_interrupt, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
