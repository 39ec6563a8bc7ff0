"""Models built without memory get, part by part, the bits that they would have had."""

import gc
import weakref

import pytest
import torch
from deferred_models import (
    BUFFERS,
    CPU,
    MODELS,
    OUTSIDE,
    Holder,
    assert_equal_bits,
    deferred,
    filled,
    plain,
    tensors,
)
from ranks import MLP, ConvNet, Transformer
from torch import nn
from torch.nn import init
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.parallel.deferred.fill import find
from msrun.parallel.deferred.init import DeferredInit, materialize
from msrun.parallel.deferred.log import tensors_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", MODELS)
def test_bits_and_generator_are_those_of_plain_construction(name):
    expected, after = plain(MODELS[name])
    model = deferred(MODELS[name])
    assert all(tensor.is_meta for tensor in tensors(model).values())

    filled(model)

    assert_equal_bits(model, expected)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_is_computed_as_ever(name):
    expected, after = plain(lambda: Holder(BUFFERS[name]))

    model = filled(deferred(lambda: Holder(BUFFERS[name])))

    assert_equal_bits(model, expected)
    assert torch.equal(torch.get_rng_state(), after)


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.linear.weight.decays = False
        self.table = torch.rand(4)
        self.more = {"list": [torch.rand(2), (torch.rand(1), 7)], "scale": self.scale}


def test_tensors_that_are_no_buffers_are_filled():
    expected, _ = plain(Attributes)

    model = filled(deferred(Attributes))

    assert torch.equal(model.table, expected.table)
    assert torch.equal(model.more["list"][0], expected.more["list"][0])
    assert model.more["list"][1] == expected.more["list"][1]
    assert model.more["scale"] is model.scale
    assert model.linear.weight.decays is False


def test_tied_parameters_stay_one():
    model = filled(deferred(Transformer))

    assert model.head.weight is model.embed.weight


def test_parameters_from_outside_keep_their_values():
    model = filled(deferred(lambda: nn.ModuleList([nn.Embedding.from_pretrained(OUTSIDE), MLP()])))

    assert torch.equal(model[0].weight, OUTSIDE)


def test_a_model_on_meta_of_its_own_is_none_of_ours():
    def make():
        nn.Linear(3, 3, device="meta")
        return nn.ModuleList([MLP(), nn.utils.skip_init(nn.Linear, 3, 3), MLP()])

    expected, after = plain(make)
    init.zeros_(expected[1].weight)
    init.zeros_(expected[1].bias)  # memory that nobody wrote

    assert_equal_bits(filled(deferred(make)), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_generator_waits_between_block_and_values():
    _, after = plain(MLP)
    torch.manual_seed(3)
    block = DeferredInit()
    assert not block.is_pending()
    with block:
        model = MLP()
    assert block.is_pending()

    filled(model)

    assert not block.is_pending()
    assert torch.equal(torch.get_rng_state(), after)


def test_blocks_and_models_follow_each_other():
    expected, after = plain(lambda: nn.ModuleList([MLP(), ConvNet(), Transformer()]))
    torch.manual_seed(3)
    block = DeferredInit()
    with block:
        first, second = MLP(), ConvNet()
    with block:
        third = Transformer()

    assert_equal_bits(filled(second), expected[1])
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal_bits(filled(nn.ModuleList([first, third])), expected[::2])
    assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_that_was_seeded_in_between_is_left_alone():
    model = deferred(MLP)
    torch.manual_seed(8)
    wanted = torch.get_rng_state()

    filled(model)

    assert torch.equal(torch.get_rng_state(), wanted)


def test_own_generators_go_on():
    def make(one, other):
        return lambda: Holder(lambda: torch.rand(3, generator=one) + torch.rand(3, generator=other))

    generators = [torch.Generator().manual_seed(4) for _ in range(4)]
    after = torch.Generator().manual_seed(4)
    torch.rand(3, generator=after)

    filled(deferred(make(*generators[:2])))
    plain(make(*generators[2:]))

    assert all(torch.equal(own.get_state(), after.get_state()) for own in generators)


def test_a_failed_constructor_leaves_the_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), DeferredInit():
        nn.ModuleList([MLP(), 1 / 0])

    assert torch.equal(torch.get_rng_state(), before)


def test_the_log_dies_with_the_model():
    model = deferred(MLP)
    logs = [weakref.ref(log) for log in find(model).views]
    (reference,) = logs
    del logs, model
    gc.collect()

    assert reference() is None


def test_optimizers_keep_their_parameters():
    model = deferred(MLP)
    optimizer = torch.optim.SGD(model.parameters())

    filled(model)

    held = optimizer.param_groups[0]["params"]
    assert [id(param) for param in held] == [id(param) for param in model.parameters()]
    assert not any(param.is_meta for param in held)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors on the CPU, and the most that there were."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage.device == CPU and storage.data_ptr() not in self._seen:
                self._seen[storage.data_ptr()] = storage.nbytes()
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.data_ptr())
        return result

    def _free(self, pointer):
        self.now -= self._seen.pop(pointer)


SIDE = 400


def stack(change=None, cast=None):
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(6)])
    if change:
        model.apply(lambda module: change(module.weight) if isinstance(module, nn.Linear) else None)
    return model.to(cast) if cast else model


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (stack, 1),
        (lambda: stack(lambda weight: init.normal_(weight, std=0.02)), 1),
        (lambda: stack(lambda weight: weight.data.mul_(0.5)), 1),
        (lambda: stack(cast=torch.float64), 3),  # both types of one
        (lambda: stack(init.orthogonal_), 6),  # what one decomposition takes
    ],
)
def test_one_parameter_at_a_time(make, most):
    weights = find(deferred(make))
    alive = Alive()
    taken = []
    with alive:
        for log, views in weights.views.items():
            materialize(log, views, lambda name, tensor: taken.append((name, tensor.shape)))

    whole = SIDE * SIDE * 4
    assert taken == [(f"{index}.weight", (SIDE, SIDE)) for index in range(6)]
    assert alive.most <= (most + 0.2) * whole
    assert alive.now <= 0.2 * whole  # states of the generator


def test_a_model_with_memory_has_nothing_to_fill():
    assert find(MLP()) is None
