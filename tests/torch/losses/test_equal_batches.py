"""Ranks that share samples and got different batches are refused before a weight changes."""

import pytest
import torch
from ranks import OPTIMIZERS, build, run_warm
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import msrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

STAGES = {"mesh": {"pp": 2}, "pipeline": {"stages": {"fc1": 0, "*": 1}, "microbatches": 2}}
PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
SHARDED = {"mesh": {"tp": 2}, "plan": PLAN}
BOTH = {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}
PIPELINES = {**STAGES, "mesh": {"dp": 2, "pp": 2}}
MESSAGE = "the batch of rank {} is not that of rank {} ({}), but ranks with the same dp coordinate "
NOISE = torch.linspace(0, 1, 16)


def samples():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 16, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (64,), generator=generator))


def shuffled(_):
    """As scripts for one process do: the generator is that of dropout."""
    return DataLoader(samples(), batch_size=8, shuffle=True)


def by_rank(_):
    """As Lightning and accelerate do."""
    return DataLoader(samples(), batch_size=8, sampler=DistributedSampler(samples()))


def by_coordinate(rt):
    count, index = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
    sampler = DistributedSampler(samples(), num_replicas=count, rank=index)
    return DataLoader(samples(), batch_size=8, sampler=sampler)


def one_seed(_):
    return DataLoader(samples(), batch_size=8, shuffle=True, generator=torch.Generator())


def augmented(rt):
    for x, y in by_coordinate(rt):
        yield x + torch.randn(16), y


def noisy(rt):
    for x, y in by_coordinate(rt):
        yield x + rt.rank * NOISE, y


def steps(config, load):
    """Return what was said of the first steps, before which weights stayed as they were."""
    rt = msrun.init(config)
    model = rt.shard(build("mlp"))
    update = OPTIMIZERS["adamw"](model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        for _, (x, y) in zip(range(3), load(rt), strict=False):
            rt.step(model, update, functional.cross_entropy, x, y)
    except msrun.RanksDisagreeError as error:
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(old, new) for old, new in pairs)
        return error.message
    return ""


@pytest.mark.parametrize(
    ("config", "load", "place"),
    [
        (STAGES, shuffled, (1, 0, "target")),
        (STAGES, by_rank, (1, 0, "target")),
        (SHARDED, by_rank, (1, 0, "input 0, target")),
        (SHARDED, noisy, (1, 0, "input 0")),
        (BOTH, by_rank, (1, 0, "input 0, target")),
        (PIPELINES, by_rank, (1, 0, "target")),
    ],
)
def test_other_batches_on_ranks_that_share_samples_are_refused(config, load, place):
    ranks = 4 if "dp" in config["mesh"] else 2
    found = run_warm(steps, ranks, config, load)

    expected = MESSAGE.format(*place) + "train on one batch"
    assert found == [expected] * ranks


def loop(config, load):
    """As `steps`, in a plain loop."""
    rt = msrun.init(config)
    model = rt.shard(build("mlp"))
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    try:
        for _, (x, y) in zip(range(3), load(rt), strict=False):
            update.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            update.step()
            with torch.no_grad():
                model(x + rt.rank * NOISE)  # what is not trained on is not compared
    except msrun.RanksDisagreeError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("config", "load", "names"),
    [
        (SHARDED, by_rank, "input 0"),
        (BOTH, noisy, "input 0"),
        (SHARDED, shuffled, ""),
        (BOTH, by_coordinate, ""),
    ],
)
def test_calls_of_a_plain_loop_are_compared(config, load, names):
    ranks = 4 if "dp" in config["mesh"] else 2
    found = run_warm(loop, ranks, config, load)

    places = [(1, 0), (1, 0), (3, 2), (3, 2)]
    sentences = [MESSAGE.format(*place, names) + "train on one batch" for place in places]
    assert found == [sentence if names else "" for sentence in sentences][:ranks]


@pytest.mark.parametrize(
    ("config", "load"),
    [
        (STAGES, one_seed),
        (STAGES, augmented),  # the first stage alone reads the inputs
        (SHARDED, shuffled),  # ranks of tp draw the same numbers
        (BOTH, by_coordinate),
        (PIPELINES, by_coordinate),
    ],
)
def test_equal_batches_train(config, load):
    ranks = 4 if "dp" in config["mesh"] else 2
    assert run_warm(steps, ranks, config, load) == [""] * ranks


def call_on_a_grid(config):
    """Call a model in which one rank of a grid has another batch."""
    rt = msrun.init(config)
    model = rt.shard(build("mlp"))
    x = samples().tensors[0][:8]
    try:
        model(x + (rt.rank == 3))
    except msrun.RanksDisagreeError as error:
        return error.message
    return ""


def test_ranks_of_several_axes_refuse_together_the_batch_of_one():
    config = {
        "mesh": {"rows": 2, "columns": 2},
        "plan": [{"match": "fc1", "style": "2d", "axes": ["rows", "columns"]}],
    }
    expected = MESSAGE.format(3, 0, "input 0") + "train on one batch"
    assert run_warm(call_on_a_grid, 4, config) == [expected] * 4


def constant_first(rt):
    """Samples begin with a constant, as those of linear models do."""
    x = torch.randn(32768, 16, generator=torch.Generator().manual_seed(rt.rank))
    x[:, 0] = 1
    yield x, torch.zeros(len(x), dtype=torch.long)


def test_batches_that_differ_behind_a_constant_are_refused():
    expected = MESSAGE.format(1, 0, "input 0") + "train on one batch"
    assert run_warm(steps, 2, SHARDED, constant_first) == [expected] * 2


class Spectra(nn.Module):
    """Reads complex numbers."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc2(self.fc1(x.real).relu())


def conjugated(_):
    rt = msrun.init(SHARDED)
    model = rt.shard(Spectra())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples().tensors
    x = torch.complex(x, x).conj()[:8]
    return rt.step(model, update, functional.cross_entropy, x, y[:8]).item()


def test_conjugates_that_torch_has_yet_to_compute_train():
    first, second = run_warm(conjugated, 2, None)
    assert first == second


class Beside(nn.Module):
    """Computes with a layer that no rule divides."""

    def __init__(self):
        super().__init__()
        self.planned, self.own = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.own(x)


def of_each_sample(config):
    """Return whether gradients of each sample add up to those of the batch."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Beside())
    weights = {f"own.{name}": param.detach() for name, param in model.own.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    x = torch.ones(4, 8)
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    whole = torch.func.grad(loss)(weights, x)
    return all(torch.allclose(each[name].sum(0), whole[name]) for name in whole)


def test_calls_inside_of_a_transform_are_not_compared():
    config = {"mesh": {"tp": 2}, "plan": [{"match": "planned", "style": "colwise"}]}

    assert run_warm(of_each_sample, 2, config) == [True, True]
