"""Functions of sharded parameters for which torch has no rule, such as `param.data[index] = 0`."""

import pytest
import torch
from ranks import run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import RanksDisagreeError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

PLAN = [{"match": "0", "style": "colwise"}, {"match": "1", "style": "rowwise"}]
CONFIGS = {"zero 3": zero(3), "tp": {"mesh": {"tp": 2}, "plan": PLAN}}
ROWS = torch.tensor([3, 0, 2])
FIRST = torch.zeros(1, 4, dtype=torch.long)


def _set(p, place, value):
    p[place] = value


def _each(rows):
    for number, row in enumerate(rows):
        row.mul_(number)


def _low(p):
    return (p < 0).reshape(-1).nonzero().flatten()


def _from_vector(p):
    vector = nn.utils.parameters_to_vector([p])
    nn.utils.vector_to_parameters(vector * torch.linspace(0, 1, len(vector)), [p])


# What a script writes, each under torch.no_grad().
WRITES = {
    "rows by index": lambda p: _set(p, ROWS, 1.0),
    "rows by list": lambda p: _set(p, [0, 2], p[[2, 0]]),
    "rows to rows": lambda p: _set(p, ROWS, torch.ones(3, p.shape[1])),
    "columns by index": lambda p: _set(p, (slice(None), ROWS), 0.0),
    "by a mask of rows": lambda p: _set(p, p.sum(1) < 0, 0.0),
    "by a mask": lambda p: _set(p.data, p.data < 0, 0.0),
    "by a plain mask": lambda p: p.masked_fill_(torch.eye(*p.shape) > 0, 0.5),
    "plain row": lambda p: _set(p, 1, torch.arange(1.0 * p.shape[1])),
    "each row": lambda p: _each(p.data),
    "unbound": lambda p: _each(p.data.unbind(1)),
    "rows of a part": lambda p: p[:, 1:].index_fill_(0, ROWS, 2.0),
    "norm of rows": lambda p: p.renorm_(2, 0, 0.3),
    "fill": lambda p: p.index_fill_(1, ROWS, 0.3),
    "add": lambda p: p.index_add_(0, ROWS, torch.ones(3, p.shape[1])),
    "scatter": lambda p: p.scatter_(0, FIRST, 1.5),
    "by places of its own": lambda p: p.view(-1).index_copy_(0, _low(p), p.view(-1)[_low(p)] * 2),
    "add by places of its own": lambda p: p.view(-1).index_add_(0, _low(p), p.view(-1)[_low(p)]),
    "triangle": lambda p: p.triu_(),
    "scale of columns": lambda p: p.mul_(torch.arange(1.0 * p.shape[1])),
    "scale of rows": lambda p: p.data.div_(torch.arange(1.0, p.shape[0] + 1)[:, None]),
    "product": lambda p: p.addmm_(torch.ones(p.shape[0], 2), torch.ones(2, p.shape[1])),
    "vector": _from_vector,
    "rows of a gradient": lambda p: _set(p.grad, ROWS, 0.0),
    "to a plain one": lambda p: p.copy_(torch.zeros(p.shape).copy_(p * 2)),
}
# What it reads.
READS = {
    "rows by index": lambda p: p[ROWS],
    "rows": lambda p: torch.stack([row * 2 for row in p]),
    "by a mask": lambda p: p[p > 0],
    "by a plain mask": lambda p: p[torch.eye(*p.shape) > 0],
    "gathered": lambda p: p.gather(1, ROWS[:, None]),
    "beside a plain one": lambda p: torch.cat([p, torch.ones(1, p.shape[1])]),
    "places": lambda p: (p > 0).nonzero(),
    "product": lambda p: p @ torch.ones(p.shape[1]),
    "above": lambda p: p > torch.linspace(-0.3, 0.3, p.shape[0])[:, None],
    "distance": lambda p: functional.mse_loss(p, torch.ones(p.shape)),
    "norm": lambda p: p.norm(),
    "close": lambda p: torch.tensor(torch.allclose(p, p + 1e-9)),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def computed(config):
    """Return a weight and its gradient after each write, and what is read."""
    rt = msrun.init(config)
    model = rt.shard(build())
    output = model(torch.arange(12.0).view(2, 6))
    full_tensor(output).square().mean().backward()
    weight = model[1].weight
    held = [weight, weight.grad]
    found = {}
    with torch.no_grad():
        for name, read in READS.items():
            found[f"read {name}"] = [full_tensor(read(weight))]
        before = [value.clone() for value in held]
        for name, write in WRITES.items():
            write(weight)
            found[f"write {name}"] = [full_tensor(value.detach()).clone() for value in held]
            for value, old in zip(held, before, strict=True):
                value.copy_(old)
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_result_is_that_of_one_process(config):
    expected = run_warm(computed, 1, {})[0]

    for found in run_warm(computed, 2, config):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, msg=lambda text, name=name: name + text)


def differing():
    """Write other rows on each rank, and train."""
    rt = msrun.init(CONFIGS["zero 3"])
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[0].weight[ROWS + rt.rank] = 1.0
    x = torch.arange(12.0).view(2, 6)
    with pytest.raises(RanksDisagreeError) as caught:
        rt.step(model, update, lambda output, _: output.square().mean(), x, x)
    return caught.value.message


def test_ranks_that_write_by_other_indices_are_refused():
    for said in run_warm(differing, 2):
        assert "ranks have other values of the plain tensors" in said
