"""Wrappers of others that reduce gradients are refused around and inside of a model."""

import functools

import pytest
import torch
from ranks import build, run_ranks, run_warm
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import msrun

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

PLAN = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
CONFIGS = (
    {},
    {"optimizer": {"zero": 1}},
    {"optimizer": {"zero": 3}},
    {"mesh": {"tp": 2}, "plan": PLAN},
    {"mesh": {"pp": 2}, "pipeline": {"stages": {"fc1": 0, "*": 1}, "microbatches": 2}},
)
SENTENCE = "{} got a model of rt.shard, whose gradients are reduced already"


class Module(nn.Module):
    """As those of Lightning: the model is an attribute."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.other = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)


def refusal(make, *args):
    """Return what `make` is refused with."""
    try:
        make(*args)
    except msrun.ModelError as error:
        return error.message
    return ""


def around(config):
    model = msrun.init(config).shard(build("mlp"))
    found = [refusal(DistributedDataParallel, each) for each in (model, Module(model))]
    before = build("mlp")
    DistributedDataParallel(before)  # one of its own is no business of ours
    return found


def in_units():
    """As Lightning's strategy `fsdp`."""
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    return refusal(wrap, msrun.init().shard(build("mlp")))


def inside():
    wrapped = DistributedDataParallel(build("mlp"))
    return [refusal(msrun.init().shard, model) for model in (wrapped, Module(wrapped))]


def sharded_before():
    model = build("mlp")
    fully_shard(model.fc2, mesh=init_device_mesh("cpu", (2,)))
    return refusal(msrun.init().shard, model)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_of_shard_in_ddp_is_refused(config):
    sentence = SENTENCE.format("DistributedDataParallel")
    assert run_warm(around, 2, config) == [[sentence] * 2] * 2


@pytest.mark.filterwarnings("ignore")  # FSDP is deprecated
def test_a_model_of_shard_in_fsdp_is_refused():
    sentence = SENTENCE.format("FullyShardedDataParallel")
    assert run_ranks(in_units, 2) == [sentence] * 2


def test_a_model_that_is_in_ddp_already_is_refused_by_shard():
    sentence = "rt.shard got {}a DistributedDataParallel, which reduces gradients by itself"
    assert run_warm(inside, 2) == [[sentence.format(""), sentence.format("net, ")]] * 2


def test_a_model_that_fully_shard_has_sharded_is_refused_by_shard():
    sentence = "rt.shard got fc2.weight as a DTensor, which something else has sharded already"
    assert run_warm(sharded_before, 2) == [sentence] * 2
