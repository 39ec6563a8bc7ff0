"""Each kind of error is caught by its name, on every rank."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch


class Experts(nn.Module):
    """Uses another of its layers on every second rank."""

    def __init__(self, rank):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        self.rank = rank

    def forward(self, x):
        return self.experts[self.rank % 2](x)


def caught(call):
    """Return the kind of error that `call` raises."""
    with pytest.raises(msrun.MsrunError) as error:
        call()
    assert isinstance(error.value, msrun.UsageError)
    assert error.value.exit_code == msrun.ExitCode.USAGE
    return error.type.__name__


def every_kind(folder):
    kinds = [caught(lambda: msrun.init({"mesh": {"dp": 3}}))]
    rt = msrun.init({"optimizer": {"zero": 1}})
    model = rt.shard(Experts(rt.rank))
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    return [
        *kinds,
        caught(lambda: msrun.init({"optimizer": {"zero": 2}})),
        caught(lambda: rt.load(model, optimizer, path=folder)),
        caught(lambda: rt.step(model, optimizer, functional.cross_entropy, x, y)),
        caught(lambda: rt.step(model, optimizer, functional.cross_entropy, x[:0], y[:0])),
        caught(lambda: rt.loader([1, 2, 3, 4], batch_size=0)),
    ]


def test_every_kind_on_every_rank(tmp_path):
    assert (
        run_warm(every_kind, 2, str(tmp_path))
        == [
            [
                "ConfigError",
                "ConfigError",
                "CheckpointError",
                "RanksDisagreeError",
                "ModelError",
                "UsageError",
            ]
        ]
        * 2
    )
