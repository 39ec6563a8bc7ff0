"""A trace follows modules that are alike once, and finds what following all of them does."""

from __future__ import annotations

import copy
import warnings
from typing import ClassVar

import pytest
import torch
from auto_models import GPT, Llama, tokens
from torch import nn
from torch.nn import functional

from msrun.parallel.auto.tracing import export
from msrun.parallel.auto.tracing.trace import Traced, trace

pytestmark = pytest.mark.torch


def followed(model, sample):
    """Return the program that is found when every call is followed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = export.followed(model, [x.clone() for x in sample])
    return Traced(found, model, sample).program


class Block(nn.Module):
    """Counts its calls where no trace looks: in a list of its class."""

    calls: ClassVar[list[int]] = []

    def __init__(self, act=functional.relu):
        super().__init__()
        self.linear, self.act, self.scale, self.kept = nn.Linear(8, 8), act, 1.0, None
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, *_):
        Block.calls.append(1)
        return self.act(self.linear(x)) * self.scale + self.shift


class Net(nn.Module):
    def __init__(self, block=Block, count=4):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def traced(model, *sample):
    """Return the program, and how many blocks were followed for it."""
    sample = sample or (torch.ones(4, 8),)
    before = dict(vars(model)), [dict(vars(one)) for one in model.modules()]
    Block.calls.clear()
    program = trace(model, sample).program
    calls = len(Block.calls)
    assert (dict(vars(model)), [dict(vars(one)) for one in model.modules()]) == before
    wanted = followed(model, sample)
    assert program == wanted
    assert list(program.values) == list(wanted.values)
    return program, calls


def test_blocks_that_are_alike_are_followed_once():
    program, calls = traced(Net(count=5))
    assert calls == 1
    assert [step.module for step in program.steps if step.target == "aten.linear.default"] == [
        f"blocks.{number}.linear" for number in range(5)
    ]
    assert program.params["p_blocks_4_linear_weight"] == "blocks.4.linear.weight"


@pytest.mark.parametrize(
    "model", [GPT(4), GPT(4, dropout=0.5), Llama(4)], ids=["gpt", "dropout", "llama"]
)
def test_the_program_of_a_transformer_is_that_of_following_all(model):
    traced(model, *tokens())


def test_modules_that_are_alike_in_several_places():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = Net(count=3), nn.Sequential(*(Block(torch.tanh) for _ in "abc"))

        def forward(self, x):
            return self.low(x) + self.high(x).sum()

    assert traced(Two())[1] == 2


def test_a_parameter_of_all_blocks_stays_one():
    net = Net()
    for block in net.blocks:
        block.linear.weight = net.blocks[0].linear.weight
    program, calls = traced(net)
    assert calls == 1
    assert [full for full in program.params.values() if full.endswith("weight")] == [
        "blocks.0.linear.weight"
    ]


def test_the_graph_computes_what_the_model_does():
    net, x = Net(), torch.randn(4, 8)
    found = trace(net, (x,))
    values = found.bind((x,), {})
    tensors = dict(net.named_parameters())
    values |= {name: tensors[full] for name, full in found.program.params.items()}
    values |= {name: found.buffer(net, full) for name, full in found.buffers.items()}
    for step in found.program.steps:
        read = {slot: values[name] for slot, name in step.inputs.items()}
        args, kwargs = found.arguments(step.name, read)
        (name,) = step.outputs
        values[name] = found.nodes[step.name].target(*args, **kwargs)
    assert torch.equal(values[found.program.outputs[0]], net(x))


class Numbered(Block):
    count = 0

    def __init__(self):
        super().__init__()
        type(self).count += 1
        self.scale = float(self.count)


class InPlace(Block):
    def forward(self, x):
        x.add_(1.0)
        return super().forward(x)


class Keeping(Block):
    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Telling(Block):
    told: ClassVar[list] = []

    def forward(self, x):
        self.told.append(super().forward(x))
        return self.told[-1]


class Told(Net):
    def forward(self, x):
        Telling.told.clear()
        return super().forward(x) + sum(y.mean() for y in Telling.told)


class Backwards(Net):
    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x)
        return x.sum()


class Reaching(Net):
    def forward(self, x):
        return super().forward(x) + sum(block.linear.weight.sum() for block in self.blocks)


class Twice(Net):
    def forward(self, x):
        return super().forward(self.blocks[0](x))


class Growing(Net):
    def forward(self, x):
        for block in self.blocks:
            x = torch.cat([x, block(x)])
        return x.sum()


class Named(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, block)
        return x.sum()


def test_a_block_that_differs_is_followed_by_itself():
    net = Net()
    net.blocks[2].register_forward_hook(lambda *given: given[-1] * 2)
    assert traced(net)[1] == 2


@pytest.mark.parametrize(
    ("net", "block"),
    [
        (Net, Numbered),
        (Net, InPlace),
        (Net, Keeping),
        (Told, Telling),
        (Backwards, Block),
        (Reaching, Block),
        (Twice, Block),
        (Growing, Block),
        (Named, Block),
    ],
)
def test_blocks_that_do_more_than_return_a_value_or_differ_are_all_followed(net, block):
    program, calls = traced(net(block))
    assert calls >= 4
    assert sum(step.target == "aten.linear.default" for step in program.steps) >= 4


class Layer(Block):
    """Has a number and a part with a name, which change nothing, and a factor of two values."""

    def __init__(self, number):
        super().__init__()
        self.layer_idx, self.factor = number, 1 + number % 2
        self.act = Part(f"layers.{number}")

    def forward(self, x, *_):
        return super().forward(x)


class Part(nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix

    def forward(self, x):
        return functional.relu(x)


class Scaled(Layer):
    def forward(self, x, *_):
        return super().forward(x) * self.factor


class Cached(Layer):
    def forward(self, x, cache=None):
        if cache is None:
            return super().forward(x)
        return super().forward(x) * (1 + self.layer_idx)


class Caching(Net):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, {})
        return x.sum()


class Guarded(Layer):
    def forward(self, x, *_):
        try:
            return super().forward(x) * self.layer_idx
        except Exception:  # noqa: BLE001 - as some models do
            return super().forward(x)


class Counting(Layer):
    def forward(self, x, *_):
        self.layer_idx += 1
        return super().forward(x)


class Peeking(Layer):
    def forward(self, x, *_):
        return super().forward(x) * vars(self)["layer_idx"]


def numbered(kind):
    """Return what makes layers with numbers from 0 on."""
    numbers = iter(range(100))
    return lambda: kind(next(numbers))


def test_layers_with_numbers_and_names_that_nobody_reads_are_followed_once():
    assert traced(Net(numbered(Layer), 8))[1] == 1
    assert traced(Net(numbered(Cached), 8))[1] == 1


def test_what_a_layer_reads_divides_the_layers_and_the_rest_does_not():
    # Once up to where it is read, then one of each value.
    assert traced(Net(numbered(Scaled), 8))[1] == 3


@pytest.mark.parametrize(
    ("net", "layer"), [(Caching, Cached), (Net, Guarded), (Net, Counting), (Net, Peeking)]
)
def test_layers_that_use_their_number_are_all_followed(net, layer):
    program, calls = traced(net(numbered(layer), 4))
    assert calls >= 4
    assert sum(step.target == "aten.linear.default" for step in program.steps) == 4


def test_two_stacks_of_one_class_hide_their_numbers_both():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = Net(numbered(Layer), 6), Net(numbered(Scaled), 6)

        def forward(self, x):
            return self.low(x) + self.high(x)

    assert traced(Two())[1] == 2 + 4


def test_an_error_in_the_forward_is_told_once_and_leaves_the_model_as_it_was():
    class Broken(Block):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    net = Net(Broken)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(Exception, match="the forward of Net cannot be traced"):
        trace(net, (torch.ones(4, 8),))
    assert net.state_dict().keys() == before.keys()
    assert all("forward" not in vars(one) for one in net.modules())
