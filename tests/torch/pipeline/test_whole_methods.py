"""What a script asks of a whole model, asked of a stage, is refused by name."""

import pytest
import torch
from ranks import run_warm
from torch import nn

import msrun

pytestmark = pytest.mark.torch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.config = {"width": 4}

    def forward(self, x):
        return self.last(self.first(x))

    def generate(self, x):
        return self(x).argmax(-1)


def asked():
    pipeline = {"stages": {"first": 0, "last": 1}, "microbatches": 2}
    rt = msrun.init({"mesh": {"pp": 2}, "pipeline": pipeline})
    x = torch.zeros(2, 4)
    model = rt.shard(Net(), sample=(x,))
    assert not hasattr(model, "generate")
    with pytest.raises(msrun.UsageError) as error:
        model.generate(x)
    with pytest.raises(AttributeError) as plain:
        model.nothing()
    assert not isinstance(plain.value, msrun.UsageError)
    return error.value.message, model.config, model.eval()(x).shape


def test_a_method_of_the_whole_model_is_refused_by_name():
    said = "parallel.pipeline: generate is of Net, of which this rank has one stage"
    assert run_warm(asked, 2) == [(said, {"width": 4}, torch.Size([2, 2]))] * 2
