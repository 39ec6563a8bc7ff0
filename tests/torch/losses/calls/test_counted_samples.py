"""Models that count the samples of their batches: a warning, unless they count those of all."""

import warnings

import pytest
import torch
from ranks import run_warm
from test_counted_losses import Net, data
from torch.nn import functional

import msrun
from msrun.parallel.collectives import all_reduce

pytestmark = pytest.mark.torch


class Buffer(Net):
    """Anneals its output by the samples that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("calls", torch.tensor(0))

    def counted(self, x):
        return len(x)

    def forward(self, x):
        self.seen += self.counted(x)
        self.calls += 1
        return super().forward(x) / (1 + self.seen / 100)


class OfAll(Buffer):
    def counted(self, x):
        count = torch.tensor(len(x))
        return all_reduce(count, "dp") if torch.distributed.is_initialized() else count


class Attribute(Net):
    seen = 0  # until the first forward, of the class

    def forward(self, x):
        self.seen += x.size(0)
        return super().forward(x) / (1 + self.seen / 100)


def trained(kind, *, in_step):
    """Return what the model counted, its weights after two steps, and the warnings."""
    rt = msrun.init({})
    torch.manual_seed(1)
    model = rt.shard(kind().double())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in data(ignored=False)[:2]:
            x, y = (tensor.chunk(rt.world_size)[rt.rank] for tensor in batch)
            if in_step:
                rt.step(model, update, functional.cross_entropy, x, y)
            else:
                update.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                update.step()
    said = [str(each.message) for each in caught if "msrun" in str(each.message)]
    return [int(model.seen), *(param.detach() for param in model.parameters())], said


def step(kind):
    return trained(kind, in_step=True)


def loop(kind):
    return trained(kind, in_step=False)


@pytest.mark.parametrize("train", [step, loop])
@pytest.mark.parametrize("kind", [Buffer, Attribute])
def test_a_count_of_samples_of_a_part_is_a_warning(train, kind):
    for _, said in run_warm(train, 2, kind):
        assert said[0].startswith("msrun: forward adds 4 to seen, the size of this rank's part")
        # An attribute is followed to where it scales the outputs, too.
        assert all("the number of samples" in text for text in said[1:]), said


@pytest.mark.parametrize("train", [step, loop])
def test_a_count_of_all_samples_is_right(train):
    expected, _ = run_warm(train, 1, OfAll)[0]

    for found, said in run_warm(train, 2, OfAll):
        assert said == []
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
