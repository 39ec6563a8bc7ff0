"""Losses that mix the samples of a batch: right over its parts, or one sentence."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun
from msrun.errors import ModelError
from msrun.parallel.losses.watch import LossWatch

pytestmark = pytest.mark.torch

SAMPLES, CLASSES = 4, 6


def entropy(output, target):
    return functional.cross_entropy(output, target)


def differences(output, target):
    del target
    return (output[:, None] - output[None]).square().mean()


def similarities(output, target):
    same = (target[:, None] == target[None]).to(output.dtype)
    return functional.binary_cross_entropy_with_logits(output @ output.T, same)


def angles(output, target):
    del target
    return functional.cosine_similarity(output[:, None], output[None], dim=-1).mean()


def traced(output, target):
    return entropy(output, target) + torch.einsum("ic,jc->ij", output, output).mean()


def broadcast(output, target):
    return functional.mse_loss(output[:, :1], target.to(output.dtype))


def balanced(output, target):
    return entropy(output, target) + output.softmax(-1).mean(0).square().sum()


def balanced_tokens(output, target):
    tokens = output.view(-1, 2, 3).flatten(0, 1)
    return entropy(output, target) + tokens.softmax(-1).mean(0).square().sum()


def spread(output, target):
    return entropy(output, target) + torch.relu(1 - output.var(0)).mean()


def spread_in_a_pair(output, target):
    variance, mean = torch.var_mean(output, 0)
    return entropy(output, target) + variance.mean() + mean.square().mean()


def over_samples(output, target):
    return entropy(output.log_softmax(0), target)


def rolled(output, target):
    return entropy(output, target) + (output * output.roll(1, 0)).mean()


def shuffled(output, target):
    order = torch.randperm(len(output))
    return entropy(output, target) + (output * output[order]).mean()


def covariance(output, target):
    return entropy(output, target) + torch.cov(output.T).square().sum()


def sums_of_columns(output, target):
    return entropy(output, target) + output.sum(0).square().sum()


def mean_of_sums(output, target):
    del target
    return output.square().sum(0).mean()


def centred(output, target):
    return entropy(output - output.detach().mean(0), target)


def of_the_first(output, target):
    return entropy(output[:1], target[:1]) + 0 * entropy(output, target)


def distances(output, target):
    return entropy(output, target) + 0.1 * torch.cdist(output, output[:1]).mean()


def of_halves(output, target):
    del target
    first, second = output.chunk(2)
    return functional.mse_loss(first, second)


def of_slices(output, target):
    half = len(output) // 2
    return entropy(output, target) + (output[:half] - output[half:]).square().mean()


def labelled_and_not(output, target):
    half = len(output) // 2
    return entropy(output[:half], target[:half]) + output[half:].square().mean()


def neighbours(output, target):
    pairs = [output[i] * output[i - 1] for i in range(1, len(output))]
    return entropy(output, target) + torch.stack(pairs).mean()


def in_slots(output, target):
    """Collect losses in a tensor, as losses of several names are."""
    losses = output.new_zeros(2)
    losses[0] = entropy(output, target)
    losses[1] = torch.cdist(output, output).mean()
    return losses.sum()


def in_a_view(output, target):
    losses = output.new_zeros(2)
    losses[:1].add_(torch.cdist(output, output).mean())
    return entropy(output, target) + losses.sum()


def of_no_pair(output, target):
    """Is 0, since this part has no pair that counts; the whole batch may have some."""
    first, second = torch.where(target[:, None] == target[None] + 7)
    return (output[first] - output[second]).square().sum() if len(first) else (output * 0).sum()


def of_no_nonzero_pair(output, target):
    pairs = (target[:, None] == target[None] + 7).nonzero()
    return entropy(output, target) + (output[pairs[:, 0]].mean() if len(pairs) else 0.0)


REFUSED = {
    of_the_first: "samples by their position",
    distances: "samples by their position",
    of_halves: "samples by their position",
    of_slices: "samples by their position",
    labelled_and_not: "samples by their position",
    neighbours: "samples by their position",
    differences: "pairs of samples (sub)",
    similarities: "pairs of samples",
    angles: "pairs of samples (cosine_similarity)",
    traced: "pairs of samples (einsum)",
    broadcast: "pairs of samples (mse_loss of (4, 1) and (4,))",
    balanced: "a mean over samples",
    balanced_tokens: "a mean over samples",
    spread: "a var over samples",
    spread_in_a_pair: "a var_mean over samples",
    over_samples: "a log_softmax over samples",
    rolled: "a roll over samples",
    shuffled: "samples in a random order",
    covariance: "a cov over samples",
    sums_of_columns: "a sum over samples",
    mean_of_sums: "a sum over samples",
    centred: "a mean over samples",
    in_slots: "pairs of samples (cdist)",
    in_a_view: "pairs of samples (cdist)",
    of_no_pair: "pairs of samples (__eq__)",
    of_no_nonzero_pair: "pairs of samples (__eq__)",
}


def read(loss_fn, samples=SAMPLES):
    torch.manual_seed(0)
    output = torch.randn(samples, CLASSES, requires_grad=True)
    target = torch.tensor([0, 3, 3, 5])[:samples]
    watch = LossWatch(samples, [output, target])
    with watch:
        loss = loss_fn(output, target)
    return watch.read(loss)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss_fn", REFUSED, ids=lambda loss_fn: loss_fn.__name__)
def test_a_loss_that_mixes_samples_is_refused(loss_fn):
    with pytest.raises(ModelError) as caught:
        read(loss_fn)

    assert REFUSED[loss_fn] in caught.value.message
    assert "rt.gather" in caught.value.hint


@pytest.mark.parametrize("loss_fn", [differences, similarities, angles, traced, of_no_pair])
def test_pairs_of_one_sample_with_itself_are_refused(loss_fn):
    with pytest.raises(ModelError, match="pairs of samples"):
        read(loss_fn, samples=1)


@pytest.mark.parametrize("loss_fn", [differences, angles, similarities])
def test_pairs_in_a_model_that_returns_its_loss_are_refused(loss_fn):
    torch.manual_seed(0)
    output = torch.randn(SAMPLES, CLASSES, requires_grad=True)
    watch = LossWatch(SAMPLES)
    with watch:
        loss = loss_fn(output, torch.tensor([0, 3, 3, 5]))
    with pytest.raises(ModelError, match="pairs of samples"):
        watch.read(loss)


def test_positions_in_a_model_are_no_pairs():
    places = torch.arange(SAMPLES)
    scale = nn.Parameter(torch.ones(SAMPLES, 1))
    x = torch.randn(SAMPLES, SAMPLES, CLASSES, requires_grad=True)
    watch = LossWatch(SAMPLES)
    with watch:
        bias = (places[:, None] - places[None]).to(x.dtype) * scale
        loss = (torch.einsum("btc,bsc->bts", x, x) + bias).mean()
    assert watch.read(loss).kind == "counted"


def means_of_columns(output, target):
    one = functional.one_hot(target, CLASSES)
    return (output - one).square().mean(0).mean()


def sum_of_means(output, target):
    one = functional.one_hot(target, CLASSES)
    return (output - one).square().mean(0).sum()


def mean_of_one_column(output, target):
    return (output[:, :1] - target[:, None]).square().mean(0)


def beside_a_mean(output, target):
    return entropy(output, target) + output.square().mean(0).sum()


def sum_of_sums(output, target):
    one = functional.one_hot(target, CLASSES)
    return (output - one).square().sum(0).sum()


def sum_of_chunks(output, target):
    mean, _ = output.chunk(2, 1)
    return (mean - target[:, None]).square().sum()


def sum_of_maxima(output, target):
    del target
    return output.max(1).values.square().sum()


def each_sample(output, target):
    losses = functional.cross_entropy(output, target, reduction="none")
    return torch.stack([losses[index] for index in range(len(losses))]).mean()


def in_chunks(output, target):
    losses = [
        functional.cross_entropy(output[i : i + 3], target[i : i + 3], reduction="none")
        for i in range(0, len(output), 3)
    ]
    return torch.cat(losses).mean()


def in_split_chunks(output, target):
    pairs = zip(output.split(2), target.split(2), strict=True)
    losses = [functional.cross_entropy(x, y, reduction="none") for x, y in pairs]
    return torch.cat(losses).mean()


def each_by_number(output, target):
    return torch.stack([entropy(x, y) for x, y in zip(output, target, strict=True)]).mean()


def with_a_shown_first(output, target):
    float(output[0].detach().max())
    return entropy(output, target)


def with_unused_pairs(output, target):
    (output @ output.T).argmax(1)
    return entropy(output, target)


RIGHT = [
    means_of_columns,
    sum_of_means,
    mean_of_one_column,
    beside_a_mean,
    sum_of_sums,
    sum_of_chunks,
    sum_of_maxima,
    each_sample,
    in_chunks,
    in_split_chunks,
    each_by_number,
    with_a_shown_first,
    with_unused_pairs,
]


def batches():
    torch.manual_seed(1)
    return [(torch.randn(2 * SAMPLES, 8), torch.arange(2 * SAMPLES) % CLASSES) for _ in range(2)]


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def trained(config, names):
    """Return the greatest difference to one process, or the refusal, for each loss."""
    found = {}
    for loss_fn in RIGHT:
        if loss_fn.__name__ not in names:
            continue
        rt = msrun.init(config)
        alone, model = network(), rt.shard(network(), (batches()[0][0].double(),))
        plain = torch.optim.SGD(alone.parameters(), lr=0.01)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        worst = 0.0
        for x, y in batches():
            plain.zero_grad()
            expected = loss_fn(alone(x.double()), y)
            expected.backward()
            plain.step()
            part = [tensor.chunk(count)[share] for tensor in (x.double(), y)]
            loss = rt.step(model, update, loss_fn, *part)
            worst = max(worst, abs(loss.item() - expected.item()))
        weights = dict(alone.named_parameters())
        for name, param in model.named_parameters():
            worst = max(worst, (param - weights[name]).abs().max().item())
        found[loss_fn.__name__] = worst
        rt.close()
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"accumulate": 2},
        {"mesh": {"pp": 2}, "pipeline": {"stages": {"0": 0, "2": 1}, "microbatches": 2}},
    ],
    ids=["dp", "dp, accumulate", "pp"],
)
def test_losses_of_columns_and_parts_are_those_of_one_process(config):
    names = [loss_fn.__name__ for loss_fn in RIGHT]
    found = run_warm(trained, 2, config, names)

    assert found == [dict.fromkeys(names, pytest.approx(0, abs=1e-12))] * 2


def over_the_sequence(output, target):
    losses = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view_as(target).sum(0).mean()


def sequence_first(samples):
    """Return the losses of steps on batches that `rt.loader` makes with the sequence first."""
    rt = msrun.init({})
    torch.manual_seed(1)
    data = TensorDataset(
        torch.randn(samples, 7, 8), torch.arange(7 * samples).view(-1, 7) % CLASSES
    )

    def collate(items):
        return [torch.stack(parts, 1) for parts in zip(*items, strict=True)]

    torch.manual_seed(2)
    model = rt.shard(nn.Linear(8, CLASSES))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    size = 8 // rt.layout.size("dp")
    return [
        rt.step(model, update, over_the_sequence, x, y).item()
        for x, y in rt.loader(data, size, collate_fn=collate)
    ]


@pytest.mark.parametrize("samples", [16, 13])
def test_a_sum_over_the_sequence_is_none_over_samples(samples):
    [alone] = run_warm(sequence_first, 1, samples)
    assert run_warm(sequence_first, 2, samples) == [pytest.approx(alone, rel=1e-6)] * 2


def test_a_length_that_decides_shapes_alone_is_no_part_of_the_loss():
    x, lengths = torch.randn(SAMPLES, CLASSES, requires_grad=True), torch.tensor([3, 6, 2, 4])
    with LossWatch(SAMPLES) as watch:
        mask = torch.arange(lengths.max()) < lengths[:, None]
        loss = (x * mask).sum() / mask.sum()
    assert watch.read(loss).kind == "counted"

    with LossWatch(SAMPLES) as watch, pytest.raises(ModelError, match="depends on max"):
        watch.read((x / lengths.max()).sum(1).mean())
