"""Writes in place to views of sharded parameters, such as `embedding.weight[pad].zero_()`."""

import pytest
import torch
from ranks import run_ranks, run_warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

CONFIGS = {
    "dp": {},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 3": {"optimizer": {"zero": 3}},
    "tp": {
        "mesh": {"tp": 2},
        "plan": [{"match": "0", "style": "colwise"}, {"match": "1", "style": "rowwise"}],
    },
}


def _set(p, place, value):
    p[place] = value


# What a script writes, each under torch.no_grad().
WRITES = {
    "row": lambda p: p[0].zero_(),
    "row of data": lambda p: p.data[3].fill_(2.0),
    "rows": lambda p: p[1:3].mul_(3),
    "column": lambda p: p[:, 1].zero_(),
    "columns": lambda p: p.narrow(1, 1, 2).add_(1),
    "element": lambda p: p[1, 2].fill_(4.0),
    "part of a row": lambda p: p[3][1:3].neg_(),
    "split": lambda p: p.split(2)[1].zero_(),
    "flat": lambda p: p.view(-1)[:3].zero_(),
    "heads": lambda p: p.unflatten(0, (2, -1))[1].mul_(2),
    "transposed": lambda p: p.t()[0].mul_(2),
    "diagonal": lambda p: p.diagonal().zero_(),
    "number": lambda p: _set(p, 0, 1.0),
    "rows of another": lambda p: _set(p, slice(0, 2), p[2:4] * 2),
    "unit length": lambda p: p[2].div_(p[2].norm()),
    "out": lambda p: torch.mul(p[1], 2, out=p[1]),
    "list": lambda p: torch._foreach_mul_([p[0], p[1]], 2.0),
    "drawn": lambda p: nn.init.normal_(p[1]),
    "gradient": lambda p: p.grad[0].zero_(),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def written(config):
    """Return of each write both weights and their gradients."""
    rt = msrun.init(config)
    found = {}
    for name, write in WRITES.items():
        model = rt.shard(build())
        torch.manual_seed(3)
        output = model(torch.arange(12.0).view(2, 6))
        full_tensor(output).square().mean().backward()
        weights = [model[0].weight, model[1].weight]
        torch.manual_seed(3)
        with torch.no_grad():
            for weight in weights:
                write(weight)
        values = [*weights, *(weight.grad for weight in weights)]
        found[name] = [full_tensor(value.detach()).clone() for value in values]
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.few(1)
def test_what_is_written_to_a_view_is_that_of_one_process(config):
    expected = run_warm(written, 1, {})[0]

    for found in run_warm(written, 2, config):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, msg=lambda text, name=name: name + text)


def written_after_a_dtensor():
    """Return the same of a script that has written a DTensor before `rt.shard`."""
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).mul_(2)
    return written(CONFIGS["tp"])


def test_a_script_may_have_written_a_dtensor_before():
    expected = run_warm(written, 1, {})[0]

    for found in run_ranks(written_after_a_dtensor, 2):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, msg=lambda text, name=name: name + text)
