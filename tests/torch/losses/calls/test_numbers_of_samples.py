"""What depends on other samples without a gradient: flags, counts, indices, sizes, and numpy."""

import math
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch


class Net(nn.Module):
    """A model with a function of its hidden values in between."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.mix = mix

    def forward(self, x):
        return self.last(self.mix(self.first(x).tanh()))


def best(h):
    return h.detach()[:, :3].argmax(1)


def chosen_mask(h):
    mask = torch.zeros(len(h), 1)
    mask[h.abs().sum(1).topk(2).indices] = 1
    return h * mask


def capacity(h):
    expert = best(h)
    before = functional.one_hot(expert, 3).cumsum(0)
    return h * (before.gather(1, expert[:, None]) <= 2)


def by_counts(h):
    expert = best(h)
    return h * torch.bincount(expert, minlength=3)[expert][:, None]


def by_histogram(h):
    expert = best(h)
    return h * torch.histc(expert.sort()[0].float(), bins=3, min=0, max=2)[expert][:, None]


def by_one_hot(h):
    expert = best(h)
    return h * functional.one_hot(expert, 3).sum(0)[expert][:, None]


def by_unique(h):
    _, inverse, counts = best(h).unique(return_inverse=True, return_counts=True)
    return h / counts[inverse][:, None]


def by_equal(h):
    expert = best(h)
    return h / (expert[:, None] == expert[None, :]).sum(1, keepdim=True)


def by_centres(h):
    chosen = h[h[:, 0] > 0]
    return h - chosen.mean(0) if len(chosen) else h


def by_size(h):
    count, _ = h.shape
    return h * count**-0.5


def by_size_of_size(h):
    scale = 1.0 / max(h.size(0), 1)
    return h * scale


def times(h, number):
    return h * number


def by_list(h):
    return h * torch.tensor(h.detach().mean(0).tolist())


def by_numpy(h):
    return h * torch.from_numpy(h.detach().numpy().mean(0))


# name -> the function, and what the sentence names.
MIXING = {
    "flags by a mean": (lambda h: h * (h > h.mean(0)), "mean over samples"),
    "flags by a median": (lambda h: h * (h > h.median()), "median over samples"),
    "any of the samples": (lambda h: h * (h > 0.5).any(0), "any over samples"),
    "a sum of flags": (lambda h: h * (h > 0).sum(0), "sum over samples"),
    "a mean of flags": (lambda h: h * (h > 0).float().mean(0), "mean over samples"),
    "flags that are counted": (lambda h: h * torch.count_nonzero(h > 0, 0), "count_nonzero over"),
    "ranks of samples": (lambda h: h * h.argsort(0).argsort(0), "argsort over samples"),
    "the first ones of a sort": (lambda h: h * (h.argsort(0) < 2), "argsort over samples"),
    "the best sample": (lambda h: h + h[h.sum(1).argmax()], "argmax over samples"),
    "a mask of the best": (chosen_mask, "topk over samples"),
    "a capacity": (capacity, "cumsum over samples"),
    "bincount": (by_counts, "bincount over samples"),
    "histc": (by_histogram, "over samples"),
    "one_hot": (by_one_hot, "sum over samples"),
    "unique": (by_unique, "over samples"),
    "equal pairs": (by_equal, "pairs of samples"),
    "the mean of chosen ones": (by_centres, "mean of chosen samples"),
    "len": (lambda h: h * len(h), "the number of samples"),
    "shape": (by_size, "the number of samples"),
    "size": (by_size_of_size, "the number of samples"),
    "numel": (lambda h: h / math.sqrt(h.numel()), "the number of samples"),
    "linspace": (lambda h: h * torch.linspace(0, 1, len(h))[:, None], "the number of samples"),
    "places": (lambda h: h * torch.arange(len(h)).float()[:, None], "the number of samples"),
    "an argument": (lambda h: times(h, len(h)), "the number of samples"),
    "a computed item": (lambda h: h / (h.detach().std().item() + 0.1), "std over samples"),
    "an item": (lambda h: h / h.detach().std().item(), "std over samples"),
}
UNSURE = {"a list": by_list, "numpy": by_numpy}


def routed(h):
    expert = best(h)
    result = torch.zeros_like(h)
    for number in range(3):
        index = (expert == number).nonzero()[:, 0]
        result = result.index_add(0, index, h[index] * (number + 1))
    return result


def sorted_by_expert(h):
    order = best(h).argsort(stable=True)
    result = torch.empty_like(h)
    result[order] = h[order] * 2
    return result


def grouped(h):
    """As experts of transformers: on the CPU histc counts real numbers alone."""
    chosen, order = best(h).sort()
    counts = torch.histc(chosen.float(), bins=3, min=0, max=2)
    ends = counts.cumsum(0, dtype=torch.int32)
    weight = torch.stack([torch.eye(8) * (number + 1) for number in range(3)])
    found = functional.grouped_mm(h[order], weight, offs=ends)
    result = torch.empty_like(h)
    result[order] = found
    return result


def per_sample(h):
    flags = h > h.mean(1, keepdim=True)
    ranks = h.argsort(1).argsort(1)
    return h * flags * ranks * flags.sum(1, keepdim=True) / (best(h)[:, None] + 1)


def in_shape(h):
    count, features = h.shape
    return h.view(count, 2, -1).transpose(1, 2).reshape(count, -1) / math.sqrt(features)


# These are right in parts.
RIGHT = {
    "experts": routed,
    "experts in order": sorted_by_expert,
    "experts in groups": grouped,
    "flags of each sample": per_sample,
    "sizes in shapes": in_shape,
    "places as indices": lambda h: h + h[torch.arange(len(h)), 0][:, None],
}


def told(mix, config, loss_fn=functional.cross_entropy, *, how="step"):
    """Return the error of a step, the first warning, or how far its weights are from expected."""
    rt = msrun.init(config)
    try:
        torch.manual_seed(3)
        model, other = Net(mix), Net(mix)
        other.load_state_dict(model.state_dict())
        x, y = torch.randn(8, 6), torch.arange(8) % 4
        loss_fn(other(x), y).backward()
        share = [part.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for part in (x, y)]
        model = rt.shard(model, sample=share[:1])
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if how == "loop":
                loss_fn(model(share[0]), share[1]).backward()
                optimizer.step()
            else:
                rt.step(model, optimizer, loss_fn, *share)
        if said := [str(each.message) for each in warned if "msrun: the loss" in str(each.message)]:
            return said[0]
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max((a - (b - b.grad)).abs().max().item() for a, b in pairs)
    except ModelError as error:
        return error.message
    finally:
        rt.close()


def each(config, kind, how="step"):
    return {name: told(mix, config, how=how) for name, mix in MODELS[kind].items()}


CUT, RANKS = (1, {"accumulate": 2}), (2, {})
MODELS = {
    "mixing": {name: mix for name, (mix, _) in MIXING.items()},
    "unsure": UNSURE,
    "right": RIGHT,
}


def test_micro_batches_refuse_them():
    (found,) = run_warm(each, *CUT, "mixing")
    for name, (_, text) in MIXING.items():
        assert text in str(found[name]), (name, found[name])
        assert "which is another number for the whole batch" in found[name]


@pytest.mark.parametrize("how", ["step", "loop"])
def test_ranks_warn_of_them(how):
    for found in run_warm(each, *RANKS, "mixing", how):
        for name, (_, text) in MIXING.items():
            assert text in str(found[name]), (name, found[name])


@pytest.mark.parametrize(("ranks", "config"), [CUT, RANKS])
def test_values_that_left_torch_are_a_warning(ranks, config):
    for found in run_warm(each, ranks, config, "unsure"):
        for name, text in found.items():
            assert "values that Python or numpy computed of samples" in str(text), name


@pytest.mark.parametrize(("ranks", "config"), [CUT, RANKS])
def test_others_are_right(ranks, config):
    for found in run_warm(each, ranks, config, "right"):
        assert {
            name: gap for name, gap in found.items() if isinstance(gap, str) or gap > 1e-5
        } == {}


def unreduced(output, target):
    return functional.cross_entropy(output, target, reduction="none")


def by_classes(output, target):
    counts = torch.bincount(target, minlength=4)
    return (unreduced(output, target) / counts[target]).mean()


def above_the_mean(output, target):
    losses = unreduced(output, target)
    return (losses * (losses > losses.mean())).mean()


def smoothed(logs, dim=1):
    return 0.3 / logs.size(dim) * logs.sum(dim).mean()


# name -> a loss, and what the sentence names.
LOSSES = {
    "counts of classes": (by_classes, "bincount over samples"),
    "losses above the mean": (above_the_mean, "mean over samples"),
    "a mean times samples": (
        lambda o, y: functional.cross_entropy(o, y) * len(o),
        "the number of samples",
    ),
    "weights by places": (
        lambda o, y: (unreduced(o, y) * torch.linspace(0.5, 1, len(o))).mean(),
        "the number of samples",
    ),
}
RIGHT_LOSSES = {
    "divided elements": lambda o, y: (unreduced(o, y) / len(o)).sum(),
    "divided and weighted": lambda o, y: (unreduced(o, y) / len(o) * 3.0).sum(),
    "a sum divided": lambda o, y: unreduced(o, y).sum() / o.shape[0],
    "divided by classes": lambda o, _: smoothed(o.log_softmax(1)),
}


SUMS = {
    "samples": lambda o, y: sum(
        functional.cross_entropy(o[i : i + 1], y[i : i + 1]) for i in range(len(o))
    ),
    "slices": lambda o, y: sum(
        functional.cross_entropy(a, b) for a, b in zip(o.split(2), y.split(2), strict=True)
    ),
    "a stack of slices": lambda o, y: torch.stack(
        [functional.cross_entropy(a, b) for a, b in zip(o.split(2), y.split(2), strict=True)]
    ).sum(),
}
KINDS = {"mixing": {name: loss for name, (loss, _) in LOSSES.items()}}
KINDS |= {"right": RIGHT_LOSSES, "sums": SUMS}


def each_loss(config, kind, how="step"):
    return {
        name: told(torch.relu, config, loss_fn, how=how) for name, loss_fn in KINDS[kind].items()
    }


@pytest.mark.parametrize(("ranks", "config"), [CUT, RANKS, (2, {"mode": "auto"})])
def test_losses_that_depend_on_other_samples_are_told(ranks, config):
    for found in run_warm(each_loss, ranks, config, "mixing"):
        for name, (_, text) in LOSSES.items():
            assert text in str(found[name]), (name, found[name])


@pytest.mark.parametrize("how", ["step", "loop"])
def test_elements_that_are_divided_by_their_number_make_a_mean(how):
    for found in run_warm(each_loss, 2, {}, "right", how):
        assert {
            name: gap for name, gap in found.items() if isinstance(gap, str) or gap > 1e-6
        } == {}


def test_plain_loops_refuse_sums_over_samples():
    for found in run_warm(each_loss, 2, {}, "sums", "loop"):
        for name, text in found.items():
            assert "is a sum over a part of the batch (losses of samples)" in str(text), name
