"""Garbage collections that run while a forward is recorded."""

import gc
from types import SimpleNamespace

import pytest
import torch
from pipelines import pipeline
from torch import nn

from msrun.parallel.pipeline.plan import plan_split

pytestmark = pytest.mark.torch

COUNTS = SimpleNamespace(collections=0)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x).relu())


def _count(*_):
    COUNTS.collections += 1


def test_what_a_collection_calls_is_not_the_forwards():
    """A profiler of collections counts in a global while one of the ranks records."""
    thresholds = gc.get_threshold()
    gc.callbacks.append(_count)
    gc.set_threshold(1)
    try:
        plan_split(Two(), pipeline({"a": 0, "b": 1}), 2, (torch.zeros(2, 8),))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(_count)

    assert COUNTS.collections
    assert gc.isenabled()
