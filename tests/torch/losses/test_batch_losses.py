"""Losses over a whole batch, by `rt.gather`; and each sentence about a loss that is refused."""

import functools

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun
from msrun.errors import ModelError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

SAMPLES, STEPS = 8, 3
PLAN = [{"match": "image", "style": "colwise"}, {"match": "join", "style": "rowwise"}]
CONFIGS = {
    "dp 2": (2, {}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "dp 4, zero 3": (4, {"optimizer": {"zero": 3}}),
    "dp 2 x tp 2": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}),
    "pp 2 x dp 2": (
        4,
        {
            "mesh": {"pp": 2, "dp": 2},
            "pipeline": {
                "stages": {"image": 0, "join": 0, "text": 1, "scale": 1},
                "microbatches": 1,
                "schedule": "gpipe",
            },
        },
    ),
}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.log.exp()


class Towers(nn.Module):
    """Two towers, as of CLIP."""

    def __init__(self):
        super().__init__()
        self.image, self.join, self.text = nn.Linear(6, 12), nn.Linear(12, 5), nn.Linear(4, 5)
        self.scale = Scale()

    def forward(self, images, texts):
        images = functional.normalize(self.join(functional.relu(self.image(images))), dim=1)
        return self.scale(images), functional.normalize(self.text(texts), dim=1)


def contrastive(output, target, gather=lambda x: x, first=0):
    """Return the loss of all samples; with `gather` that of this rank's against all others."""
    del target
    images, texts = output
    labels = torch.arange(len(images), device=images.device) + first
    ways = (images @ gather(texts).T, texts @ gather(images).T)
    return (
        functional.cross_entropy(ways[0], labels) + functional.cross_entropy(ways[1], labels)
    ) / 2


def of_all(output, target, gather=lambda x: x, first=0):
    """Return the loss of all samples against all, on every rank."""
    del target, first
    images, texts = (gather(x) for x in output)
    return functional.cross_entropy(images @ texts.T, torch.arange(len(images)))


def root(output, target, gather=lambda x: x, first=0):
    """Return the root of a mean over the batch."""
    del target, first
    return gather(output[0].square().sum(1)).mean().sqrt()


LOSSES = {"own against all": contrastive, "all against all": of_all, "root": root}


def data():
    draw = torch.Generator().manual_seed(5)
    shapes = (STEPS, SAMPLES, 6), (STEPS, SAMPLES, 4)
    return list(zip(*(torch.randn(s, generator=draw).double() for s in shapes), strict=True))


def build():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Towers().double()


def one_process(loss_fn, batches):
    model = build()
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for images, texts in batches:
        update.zero_grad()
        loss = loss_fn(model(images, texts), None)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def difference(rt, loss_fn, batches, parts):
    """Return by how much losses and weights differ from one process.

    Args:
        batches: Of all ranks.
        parts: This rank's part of each, and the number of its first sample.
    """
    losses, weights = one_process(loss_fn, batches)
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    worst = 0.0
    for (part, first), expected in zip(parts, losses, strict=True):
        compute = functools.partial(loss_fn, gather=rt.gather, first=first)
        loss = rt.step(model, update, compute, *part, torch.zeros(len(part[0])))
        worst = max(worst, abs(loss.item() - expected))
    for name, param in model.named_parameters():
        worst = max(worst, (full_tensor(param.detach()) - weights[name]).abs().max().item())
    return worst


def contrastive_differences(config):
    found = {}
    for name, loss_fn in LOSSES.items():
        rt = msrun.init(config)
        count, share = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        cut = [([t.chunk(count)[share] for t in b], share * SAMPLES // count) for b in data()]
        found[name] = difference(rt, loss_fn, data(), cut)
        rt.close()
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.few(3)
def test_losses_over_the_batch_are_those_of_one_process(name):
    ranks, config = CONFIGS[name]
    found = run_warm(contrastive_differences, ranks, {"mesh": {"dp": -1}, **config})

    assert found == [dict.fromkeys(LOSSES, pytest.approx(0, abs=1e-12))] * ranks


def uneven(name):
    """Train on an epoch whose last batch is uneven."""
    rt = msrun.init()
    images, texts = (torch.cat([b[i] for b in data()])[:22] for i in (0, 1))
    loader = rt.loader(TensorDataset(images, texts, torch.arange(22)), batch_size=4)
    batches = [(images[i : i + 16], texts[i : i + 16]) for i in (0, 16)]

    def parts():
        for i, (own, others, numbers) in zip((0, 16), loader, strict=True):
            yield (own, others), int(numbers[0]) - i

    return difference(rt, LOSSES[name], batches, parts())


@pytest.mark.parametrize("name", LOSSES)
def test_an_uneven_batch_is_gathered(name):
    assert run_warm(uneven, 4, name) == [pytest.approx(0, abs=1e-12)] * 4


def gathered():
    rt = msrun.init()
    x = torch.full((2, 3), float(rt.rank))
    return rt.gather(x).tolist(), rt.gather(x, dim=1).shape, rt.gather(x.long()).dtype


def test_gather_joins_parts_in_order():
    rows = [[float(rank)] * 3 for rank in (0, 0, 1, 1)]

    assert run_warm(gathered, 2) == [(rows, (2, 6), torch.int64)] * 2
    assert run_warm(gathered, 1) == [(rows[:2], (2, 3), torch.int64)]


def refusal(config, *names):
    """Return the sentence of a step, and whether the weights are as before.

    Args:
        config: The configuration.
        names: The loss of each rank; the last one is that of all others.
    """
    rt = msrun.init(config)
    model = rt.shard(nn.Sequential(nn.Linear(3, 4)))
    before = [full_tensor(p.detach()).clone() for p in model.parameters()]
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_fn = LOSSES_OF_ONE_PART[names[min(rt.rank, len(names) - 1)]]
    with pytest.raises(ModelError) as caught:
        rt.step(model, update, loss_fn, torch.ones(4, 3), torch.full((4,), -100))
    after = [full_tensor(p.detach()) for p in model.parameters()]
    return caught.value.message, all(map(torch.equal, before, after))


def root_of_mean(output, target):
    del target
    return functional.mse_loss(output, torch.zeros_like(output)).sqrt()


def product_of_means(output, target):
    del target
    return output.mean() * output.square().mean()


def of_norm(output, target):
    del target
    return output.norm()


def over_unknown_count(output, target):
    mask = (target < 0).to(output.dtype)
    return (output.sum(1) * mask / mask.sum()).sum()


def square(output, target):
    del target
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def no_gradient(output, target):
    del target
    return output.sum(), output.mean()


def ranked(output, target):
    del target
    return output.square().mean()


def ranked_sum(output, target):
    del target
    return output.square().sum()


NOT_LINEAR = (
    "the loss is no linear function of {} over the batch, so losses of parts of the batch do not "
    "make the loss of the batch"
)
OTHER_NUMBER = (
    "the loss depends on {} of a part of the batch, which is another number for the whole batch"
)
NOTHING_COUNTS = (
    "no target of the whole batch counts: the loss would be a sum divided by 0; "
    "no weight was changed"
)
REFUSED = {
    "root of a mean": (root_of_mean, NOT_LINEAR.format("mse_loss")),
    "product of means": (product_of_means, NOT_LINEAR.format("mean")),
    "norm": (of_norm, OTHER_NUMBER.format("norm")),
    "unknown count": (over_unknown_count, OTHER_NUMBER.format("sum")),
    "contrastive": (square, ("the loss compares the {} samples of this part of the batch with each"
                    " other, and not with those of other ranks and micro-batches")),
    "count with a gradient": (
        no_gradient, "the count of the loss needs a gradient, and must be a plain number"
    ),
    "not one number": (
        lambda o, t: functional.cross_entropy(o, t, reduction="none"),
        "the loss has shape ({},), and must be one number",
    ),
    "a pair of vectors": (
        lambda o, t: (o.sum(1), len(t)),
        "the sum of the loss has shape ({},), and must be one number"
    ),
    "no tensor": (
        lambda o, t: (o - t[:, None]).mean().item(),
        "the loss is float, and must be a tensor of one number",
    ),
    "another device": (
        lambda o, _: o.mean().to("meta"), "the loss is on meta, and the model on cpu"
    ),
    "nothing counts": (
        functional.cross_entropy,
        NOTHING_COUNTS,
    ),
    "a count of 0": (
        lambda o, t: (o.sum(), (t > 0).sum()),
        NOTHING_COUNTS,
    ),
}  # fmt: skip


LOSSES_OF_ONE_PART = {name: loss_fn for name, (loss_fn, _) in REFUSED.items()} | {
    "mean": ranked,
    "sum": ranked_sum,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "config", [{}, {"accumulate": 2}, {"optimizer": {"zero": 1}}], ids=["dp", "parts", "zero"]
)
def test_refused_losses_change_no_weight(name, config):
    sentence = REFUSED[name][1].format(2 if "accumulate" in config else 4)

    assert run_warm(refusal, 2, config, name) == [(sentence, True)] * 2


def test_ranks_with_losses_of_different_kinds_are_refused():
    sentence = (
        "the loss is counted in some micro-batches or ranks and summed in others, so they do not "
        "make one loss; no weight was changed"
    )

    assert run_warm(refusal, 2, {}, "mean", "sum") == [(sentence, True)] * 2


def balanced(output, target):
    """Weigh a second loss so that it is as large as the first."""
    first, second = functional.cross_entropy(output, target), output.square().mean()
    return first + second * (first.detach() / second.detach())


def by_confidence(output, target):
    return functional.cross_entropy(output, target) * output.softmax(-1).amax(-1).mean().item()


def by_the_mean_of_all(output, target):
    first, second = functional.cross_entropy(output, target), output.square().mean()
    runtime = msrun.init()
    factors = [runtime.mean_over_data(loss.detach()) for loss in (first, second)]
    return first + second * (factors[0] / factors[1])


def weighed(config, *losses):
    """Return the sentence of each loss; or the loss and weights that it comes to."""
    found = []
    for loss_fn in losses:
        rt = msrun.init(config)
        torch.manual_seed(1)
        batch = torch.randn(8, 3, dtype=torch.float64)
        model = rt.shard(nn.Linear(3, 4).double())
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        share, count = (rt.rank, 2) if config is not None else (0, 1)
        x = batch.chunk(count)[share]
        y = torch.arange(8).remainder(4).chunk(count)[share]
        try:
            loss = rt.step(model, rt.optimizer(update), loss_fn, x, y)
        except ModelError as error:
            found.append(error.message)
        else:
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            found.append([loss.item(), *weights.tolist()])
    return found


def test_factors_that_parts_have_others_of_are_refused():
    sentence = (
        "the loss multiplies a mean by a number that other parts of the batch have another of, "
        "such as the value of a loss without its gradient, so the losses of parts do not make that "
        "of the batch; no weight was changed"
    )
    for config in ({}, {"accumulate": 2}, {"optimizer": {"zero": 3}}):
        found = run_warm(weighed, 2, config, balanced, by_confidence)
        assert found == [[sentence] * 2] * 2


def test_factors_that_all_ranks_have_are_right():
    expected = run_warm(weighed, 1, None, balanced)[0]
    for found in run_warm(weighed, 2, {}, by_the_mean_of_all):
        assert found[0] == pytest.approx(expected[0])


def within_parts():
    rt = msrun.init({"accumulate": 2})
    model = rt.shard(nn.Linear(3, 4))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ModelError) as caught:
        rt.step(model, update, lambda o, _: rt.gather(o).mean(), torch.ones(4, 3), torch.ones(4))
    rt.gather(torch.ones(2))  # outside of a step there are no micro-batches
    return caught.value.message, caught.value.hint


def test_gather_needs_the_whole_batch():
    sentence = "rt.gather: a step of 2 micro-batches never has the whole batch"
    hint = "set parallel.accumulate or parallel.pipeline.microbatches to 1"

    assert run_warm(within_parts, 2) == [(sentence, hint)] * 2
