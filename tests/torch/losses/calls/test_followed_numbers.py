"""Sizes and numbers of samples that a script hands to functions, keeps, and computes with."""

import functools
import math
import warnings

import pytest
import torch
from torch import nn

from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

SAMPLES = 4


def times(h, number):
    return h * number


def times_root(h, *, number=2):
    root = number**-0.5
    return times(h, root)


def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


@wrapped
def times_behind_a_wrapper(h, number):
    return times(h, number)


class Scale(nn.Module):
    """Gets the number by its call."""

    def forward(self, h, number):
        return h * number


class LastScale(Scale):
    """Calls the method of its class, to which it hands itself."""

    def forward(self, h):
        return Scale.forward(self, h, len(h))


class Keeper(nn.Module):
    """Keeps the number of samples for another of its methods."""

    scale = 3.0

    def forward(self, h):
        self.count = len(h)
        return self.scaled(h)

    def scaled(self, h):
        return h / math.sqrt(self.count)


class ShapeKeeper(Keeper):
    def forward(self, h):
        self.count, self.width = h.shape
        return self.scaled(h)

    def scaled(self, h):
        return h * self.count


class Careful(Keeper):
    """Keeps a number of samples that nothing multiplies by."""

    def scaled(self, h):
        return h * self.scale


def in_closure(h):
    count = len(h)

    def scaled(x):
        return x * count

    return scaled(h)


def in_comprehension(h, count):
    return torch.stack([column * count for column in h.unbind(1)], 1)


def number_of(x):
    return len(x)


def root_of(x):
    count = number_of(x)
    return 1 / math.sqrt(count)


def with_number(x):
    return x.tanh(), {"samples": len(x), "width": x.shape[1]}


def by_returned_values(h):
    h, sizes = with_number(h)
    return h / sizes["samples"]


class Counter(nn.Module):
    """Its method returns the number, which a list keeps."""

    def count(self, h):
        return h.shape[0]

    def forward(self, h):
        self.last = [h, self.count(h)]
        return h * self.last[1]


class Measured(Counter):
    """Has the number as a property."""

    def forward(self, h):
        self.last = h
        return h * self.size

    @property
    def size(self):
        return self.count(self.last)


def by_list(h):
    sizes = [h.shape[1]]
    sizes.append(len(h))
    return h / sum(sizes)


def by_item(h):
    sizes = {}
    sizes["samples"] = len(h)
    return times_of(h, sizes)


def times_of(h, sizes):
    return h * sizes["samples"]


def by_object(h):
    known = Known()
    known.count = len(h)
    return h * known.count


class Known:
    """Whatever a script keeps there."""


def spread_of(h):
    return h.detach().std().item()


def by_all_sizes(h):
    sizes = list(h.shape)
    return h * sizes[0]


halves = lambda x: len(x) / 2  # noqa: E731 - as scripts have it


def by_own_number(h):
    spread = h.detach().std().item()
    return h / (spread + 1e-5)


def by_given_number(h):
    return times(h, 1 / h.detach().abs().mean().item())


def by_own_float(h):
    return h / max(float(h.detach().std()), 1e-5)


FOLLOWED = {
    "the number of samples": {
        "an argument": lambda h: times(h, len(h)),
        "an argument by name": lambda h: times(number=len(h), h=h),
        "through two functions": lambda h: times_root(h, number=h.shape[0]),
        "behind a wrapper": lambda h: times_behind_a_wrapper(h, h.size(0)),
        "of a module": lambda h: Scale()(h, len(h)),
        "of a method": LastScale(),
        "an attribute": Keeper(),
        "an attribute of several": ShapeKeeper(),
        "a closure": in_closure,
        "running ones": lambda h: h * torch.ones(len(h)).cumsum(0)[:, None],
        "running rows": lambda h: h * torch.full((len(h), 1), 0.5).to(h).cumprod(0),
        "running ones of its kind": lambda h: h * h.new_ones((h.shape[0], 1)).cumsum(dim=0),
        "returned": lambda h: h / number_of(h),
        "returned by several": lambda h: h * root_of(h),
        "returned with others": by_returned_values,
        "a method and an attribute": Counter(),
        "a property": Measured(),
        "a lambda": lambda h: h * halves(h),
        "a list": by_list,
        "a dict as an argument": by_item,
        "an object": by_object,
        "all sizes": by_all_sizes,
        "in a comprehension": lambda h: in_comprehension(h, len(h)),
    },
    "std over samples": {
        "item returned": lambda h: h / (spread_of(h) + 1),
        "item": by_own_number,
        "float": by_own_float,
    },
    "mean over samples": {"item as an argument": by_given_number},
}
CASES = {(text, name): run for text, runs in FOLLOWED.items() for name, run in runs.items()}


def shadowed(h):
    count = len(h)

    def scaled(x, count):
        return x * count

    return scaled(h, 2).view(count, -1)


def to_a_metric(h):
    times(h.detach().sum(), len(h))
    return times(h, 2)


def of_another_size(h):
    count, width = h.shape
    return times(h.view(count, width), width)


def by_another_returned_value(h):
    h, sizes = with_number(h)
    return h / sizes["width"]


def halved(h):
    """Return a tensor, whatever was read for it."""
    return h.view(len(h), -1) * 0.5


def by_another_item(h):
    sizes = [len(h), h.shape[1]]
    other = [*h.shape][-1]
    return h / sizes[1] + halved(h) * other


RIGHT = {
    "another value that is returned": by_another_returned_value,
    "another item": by_another_item,
    "another number": lambda h: times(h, 2),
    "a default": times_root,
    "another attribute": Careful(),
    "an argument of the same name": shadowed,
    "a metric": to_a_metric,
    "positions in each sample": lambda h: h * torch.ones(len(h), 6).cumsum(1),
    "running ones of features": lambda h: h * torch.ones(h.shape[1]).cumsum(0),
    "ones": lambda h: h * torch.ones(len(h)).float()[:, None],
    "places as an index": lambda h: h + h[torch.ones(len(h), dtype=torch.long).cumsum(0) - 1],
    "another size": of_another_size,
}


def mixture(run):
    """Return what data-parallel ranks are told of a loss of what `run` computes."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6)
    with warnings.catch_warnings(record=True) as caught, SampleWatch([x], SAMPLES) as watch:
        warnings.simplefilter("always")
        loss = run(nn.Linear(6, 6)(x)).square().mean()
        assert watch.read(loss, is_cut=False) is None
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(("text", "name"), CASES)
def test_numbers_are_followed(text, name):
    (said,) = mixture(CASES[text, name])

    assert text in said
    assert "(test_followed_numbers.py, line" in said


@pytest.mark.parametrize("run", RIGHT.values(), ids=RIGHT)
def test_others_are_right(run):
    assert mixture(run) == []
