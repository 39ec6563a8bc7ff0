"""What `msrun advise` recommends takes no more memory than it says, and is the first that fits."""

from __future__ import annotations

import pytest
import torch
from advise_models import RANKS, SAMPLES, advice, measured
from ranks import run_ranks
from torch import nn
from torch.nn import functional

from msrun.errors import UsageError
from msrun.parallel.advise.simulate import LiveBytes, Peaks, simulate
from msrun.parallel.advise.techniques import ModelBytes, rank_bytes, techniques

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

GIB = 2**30


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x.pow(2).mean()


@pytest.mark.slow
@pytest.mark.timeout(600)
# The blocks of T5 return views, which nothing writes.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", SAMPLES)
def test_ranks_take_no_more_than_the_estimate_of_each_technique(name):
    pytest.importorskip("transformers")
    rows = advice(name, 1).rows
    assert advice(name, rows[0].nbytes).chosen == rows[0].name
    assert any("accumulate" in row.name for row in rows) == (name != "resnet")
    for row in rows:
        for peak in run_ranks(measured, RANKS, name, row.config):
            assert peak <= 1.05 * row.nbytes, (row.name, peak, row.nbytes)


def test_one_pass_takes_what_it_says():
    with torch.device("meta"):
        net, x = Net(), torch.randn(8, 64)
    peaks = simulate(net, [x])
    torch.manual_seed(0)
    real = Net()
    live = LiveBytes()
    live.know([*real.parameters()])
    x = torch.randn(8, 64)
    live.know([x])
    with live.counted():
        real(x).backward()
    assert peaks.total == live.peak
    assert peaks.activations < peaks.total
    assert all(param.is_meta for param in net.parameters())


def test_a_forward_that_needs_values_is_refused():
    class Branching(Net):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    with torch.device("meta"):
        net, x = Branching(), torch.randn(8, 64)
    with pytest.raises(UsageError, match="advise: Branching cannot run without values"):
        simulate(net, [x])


@pytest.mark.parametrize(
    ("memory", "name"),
    [(24, "data parallel"), (8, "zero 1"), (3, "zero 3"), (1, "")],
)
def test_the_first_that_fits_is_the_cheapest(memory, name):
    sizes = ModelBytes(
        params=4 * GIB,
        fixed=0,
        state=8 * GIB,
        largest=GIB // 16,
        unit=GIB // 16,
        root=GIB // 16,
        padding=0,
    )
    peaks = Peaks(4 * GIB, GIB // 8)
    found = (
        one.name
        for one in techniques(1, can_recompute=True, world=8)
        if rank_bytes(one, sizes, peaks, 0, world=8, is_host=False) <= memory * GIB
    )
    assert next(found, "") == name
