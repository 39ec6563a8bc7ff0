"""Models whose forward mixes samples: noticed in the first step, and only those."""

import warnings
from functools import partial

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError
from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

SAMPLES, WIDTH = 4, 8


def normal(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def normal_in_place(x):
    x = x.clone()
    return x.sub_(x.mean(0, keepdim=True)).mul_(2)


def variance(x):
    return x / (x.square().mean(0) - x.mean(0).square() + 1).sqrt()


def pair_of_statistics(x):
    variance, mean = torch.var_mean(x, 0)
    return (x - mean) / (variance + 1)


def centred_by_constants(x):
    return torch.relu(x - x.detach().mean(0))


def by_one_number(x):
    return x / x.std()


def of_images(x):
    image = x.view(len(x), 2, 2, 2)
    mean = image.mean((0, 2, 3), keepdim=True)
    return (image - mean).square().flatten(1)


def of_tokens(x):
    tokens = x.reshape(-1, 2)
    return (tokens.softmax(-1).mean(0).square() + tokens).view_as(x)


def covariance(x):
    return x * (x.T @ x / len(x)).square().diagonal()


def across(x):
    return x.softmax(0)


def shifted(x):
    return x + x.roll(1, 0)


def reversed_samples(x):
    return x + torch.flip(x, [0])


MIXING = {
    normal: "a std over samples (test_mixing_models.py, line 22)",
    normal_in_place: "a mean over samples",
    variance: "a mean over samples",
    pair_of_statistics: "a var_mean over samples",
    centred_by_constants: "a mean over samples",
    by_one_number: "a std over samples",
    of_images: "a mean over samples",
    of_tokens: "a mean over samples",
    covariance: "a matmul over samples",
    across: "a softmax over samples",
    shifted: "a roll over samples",
    reversed_samples: "a flip over samples",
}


def each(x):
    return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)


def layer_norm(x):
    return functional.layer_norm(x.view(len(x), 2, 4).transpose(0, 1), (4,)).transpose(0, 1)


def sequence_first(x):
    tokens = x.view(len(x), 4, 2).permute(1, 0, 2)
    return (tokens - tokens.mean(0)).square().transpose(0, 1)


def attention(x):
    tokens = x.view(len(x), 4, 2)
    return (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens


def instance_norm(x):
    return functional.instance_norm(x.view(len(x), 2, 4))


def batch_norm(x):
    return functional.batch_norm(x, None, None, training=True)


def rows(x):
    return torch.stack([torch.relu(row) for row in x])


def sorted_and_back(x):
    order = x.detach().sum(1).argsort()
    return torch.relu(x[order])[order.argsort()]


def weights(x):
    weight = torch.nn.Parameter(torch.eye(WIDTH))
    return x @ (weight - weight.mean(0))


def constants(x):
    table = torch.ones(len(x), WIDTH)
    return x + table.mean(0).square()


def to_a_metric(x):
    metric = x.var(0).mean()
    return x if metric > -1 else -x


def to_a_buffer(x):
    buffer = torch.zeros(WIDTH)
    with torch.no_grad():
        buffer.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x


def by_a_buffer_of_all(x):
    with torch.no_grad():
        mean = x.mean(0)
        mean.copy_(torch.zeros(WIDTH))  # as of a collective
    return torch.relu(x - mean)


def cropped(x):
    longest = int((x > 0).long().sum(1).max())
    return torch.relu(x[:, : max(longest, WIDTH)])


def diagonal_of_pairs(x):
    return torch.relu((x @ x.T).diagonal()[:, None] * x)


RIGHT = [each, layer_norm, sequence_first, attention, instance_norm, batch_norm, rows]
RIGHT += [sorted_and_back, weights, constants, to_a_metric, to_a_buffer, by_a_buffer_of_all]
RIGHT += [cropped, diagonal_of_pairs]


class Network(nn.Module):
    """Two layers with a function between; it returns its loss if it gets a target."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.between = between

    def forward(self, x, target=None):
        output = self.last(self.between(self.first(x)).reshape(len(x), WIDTH))
        return output if target is None else functional.cross_entropy(output, target)


def batch(samples=SAMPLES):
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH), torch.arange(samples) % 5


def noticed(between, *, is_cut=True):
    torch.manual_seed(0)
    x, target = batch()
    model = Network(between)
    with SampleWatch((x, target), SAMPLES) as watch:
        loss = model(x, target)
    return watch.read(loss, is_cut=is_cut)


@pytest.mark.parametrize("between", MIXING, ids=lambda function: function.__name__)
def test_a_model_that_mixes_samples_is_noticed(between):
    error = noticed(between)

    assert error is not None
    assert MIXING[between] in error.message
    assert "verify: first_step" in error.hint


@pytest.mark.parametrize("between", RIGHT, ids=lambda function: function.__name__)
def test_a_model_that_does_not_is_right(between):
    assert noticed(between) is None


def test_a_penalty_that_is_linear_in_a_mean_is_right():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        output = layer(x)
        loss = functional.cross_entropy(output, target) + 0.1 * output.square().mean(0).sum()
    assert watch.read(loss, is_cut=True) is None


@pytest.mark.parametrize("places", [torch.vmap, torch.func.functional_call])
def test_transformed_functions_are_run_as_they_are(places):
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        if places is torch.vmap:
            output = torch.vmap(lambda row: layer(row - row.mean(0)).relu())(x)
        else:
            output = torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
        loss = functional.cross_entropy(output, target)
    assert watch.read(loss, is_cut=True) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_tensors_are_not_followed():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch:
        texts = [row.expand(2 + index, -1) for index, row in enumerate(x)]
        output = layer(torch.nested.as_nested_tensor(texts).relu().transpose(1, 2).transpose(1, 2))
        means = torch.stack([text.mean(0) for text in output.unbind()])
        loss = functional.cross_entropy(means, target)
    assert watch.read(loss, is_cut=True) is None


def test_inputs_by_their_own_statistics_are_noticed():
    x, target = batch()
    layer = nn.Linear(WIDTH, 5)
    with SampleWatch((x, target), SAMPLES) as watch, torch.no_grad():
        x = normal(x)
    with watch:
        loss = functional.cross_entropy(layer(x), target)
    assert "a std over samples" in watch.read(loss, is_cut=True).message


def test_without_micro_batches_it_is_a_warning():
    with pytest.warns(UserWarning, match=r"a std over samples .*verify: first_step"):
        assert noticed(normal, is_cut=False) is None


def trained(config, between, *, has_loss=True):
    """Return the refusal or the warnings of two steps, and whether weights changed."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    model = rt.shard(Network(between))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                share = rt.coordinate.get("dp", 0)
                x, target = (part.chunk(2)[share] for part in batch(4 * SAMPLES))
                if has_loss:
                    rt.step(model, optimizer, functional.cross_entropy, x, target)
                else:
                    rt.step(model, optimizer, {"x": x, "target": target})
        except ModelError as error:
            said.append(error.message)
    said += [str(item.message) for item in caught if "over samples" in str(item.message)]
    is_same = all(
        torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )
    rt.close()
    return said, is_same


@pytest.mark.parametrize("has_loss", [True, False], ids=["loss function", "own loss"])
@pytest.mark.parametrize(
    "config",
    [{"accumulate": 2}, {"accumulate": 2, "optimizer": {"zero": 3}}],
    ids=["dp", "zero 3"],
)
def test_all_ranks_refuse_before_weights_change(config, has_loss):
    found = run_warm(partial(trained, has_loss=has_loss), 2, config, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert "a std over samples (test_mixing_models.py" in said[0]
        assert is_same


@pytest.mark.parametrize("config", [{}, {"optimizer": {"zero": 3}}], ids=["dp", "zero 3"])
def test_data_parallel_ranks_warn_once(config):
    found = run_warm(trained, 2, config, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert said[0].startswith("msrun: the loss depends on a std over samples")
        assert not is_same


@pytest.mark.parametrize("accumulate", [1, 2])
def test_statistics_of_parts_are_accepted_if_they_are_meant(accumulate):
    config = {"batch_norm": "local", "accumulate": accumulate}

    assert run_warm(trained, 2, config, normal) == [([], False)] * 2


def test_verify_compares_instead():
    found = run_warm(trained, 2, {"verify": "first_step"}, normal)

    for said, is_same in found:
        assert len(said) == 1
        assert "one process" in said[0]
        assert "over samples" not in said[0]
        assert is_same
