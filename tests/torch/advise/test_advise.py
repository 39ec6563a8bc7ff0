"""What `msrun advise` recommends takes no more memory than it says, and is the first that fits."""

from __future__ import annotations

import pytest
import torch
from advise_models import LOCAL, SAMPLES, Held, advice, model
from ranks import run_ranks
from torch import nn
from torch.nn import functional

import msrun
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


def measured(name, config):
    """Return the most bytes that this rank had in three steps."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = rt.shard(model(name))
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), foreach=False))
    held = Held()
    for _ in range(3):
        batch = SAMPLES[name](LOCAL)
        held.know([*net.parameters(), *net.buffers(), *batch.values()])
        with held.counted():
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return held.peak


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_ranks_take_no_more_than_the_estimate_of_what_is_recommended(name):
    pytest.importorskip("transformers")
    rows = {row.name: row for row in advice(name, 1).rows}
    seen = set()
    for wanted in rows.values():
        if "accumulate" in wanted.name:
            continue
        found = advice(name, wanted.nbytes)
        if found.chosen in seen:
            continue
        seen.add(found.chosen)
        row = next(row for row in found.rows if row.name == found.chosen)
        for peak in run_ranks(measured, 2, name, found.config):
            assert 0.6 * row.nbytes < peak <= 1.05 * row.nbytes, found.chosen
    assert seen


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
