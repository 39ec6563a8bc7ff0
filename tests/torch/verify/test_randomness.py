"""Rates of dropout, which a comparison sets to 0."""

from types import SimpleNamespace

import pytest
from torch import nn

from msrun.parallel.verify.randomness import rates_of_dropout, without_dropout

pytestmark = pytest.mark.torch


class StochasticDepth(nn.Module):
    """As that of torchvision."""

    def __init__(self, p):
        super().__init__()
        self.p = p


class Attending(nn.Module):
    """Has rates in many places, and numbers that are none."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.attention_dropout, self.p, self.dropped = 0.2, 0.3, 4.0
        self.module_dropout = {"default": 0.4, "other": 0.0}
        self.drop, self.depth = nn.Dropout(0.5), StochasticDepth(0.6)


def model():
    config = SimpleNamespace(layerdrop=0.1, scale=0.7)
    return nn.Sequential(Attending(config), Attending(config))


def test_rates_are_found_wherever_models_have_them():
    of_one = {
        "Attending.attention_dropout": 0.2,
        "Attending.module_dropout": 0.4,
        "Dropout.p": 0.5,
        "StochasticDepth.p": 0.6,
    }
    found = rates_of_dropout(model())
    assert sorted((rate.label, rate.value) for rate in found) == sorted(
        [*of_one.items(), *of_one.items(), ("SimpleNamespace.layerdrop", 0.1)]
    )


def test_rates_are_0_inside_and_come_back():
    both = model()
    before = rates_of_dropout(both)
    with without_dropout(both) as quiet:
        assert rates_of_dropout(both) == []
        assert both[0].config == SimpleNamespace(layerdrop=0.0, scale=0.7)
        assert "StochasticDepth.p" in quiet
    assert rates_of_dropout(both) == before
