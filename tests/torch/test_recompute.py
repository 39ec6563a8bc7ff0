"""Recomputation: a module that runs again leaves its buffers as if it had run once."""

import functools
import random
import warnings

import numpy as np
import pytest
import torch
from ranks import batches, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

STEPS = 3


class Counter(nn.Module):
    """Computes with what it counts: its calls, in place and anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("same", self.calls)
        self.register_buffer("replaced", torch.ones(()), persistent=False)
        self.register_buffer("uncounted", torch.ones(2, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls += 1
        self.replaced = self.replaced * 2
        self.uncounted.data.add_(1)  # torch does not know that it was written
        return x * self.scale * self.same.clone() / self.replaced / self.uncounted.mean()


class Net(nn.Module):
    def __init__(self, *, counting):
        super().__init__()
        middle = Counter() if counting else nn.BatchNorm1d(32)
        self.body = nn.Sequential(nn.Linear(16, 32), middle, nn.Tanh())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


def trained(config, kind):
    """Return the losses, and buffers and parameters after the last step."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(Net(counting=kind == "counter"))
    update = torch.optim.SGD(model.parameters(), lr=0.5)
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in batches("mlp", steps=STEPS):
        part = [tensor.chunk(count)[share] for tensor in batch]
        losses.append(runtime.step(model, update, functional.cross_entropy, *part))
    last = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    return torch.stack(losses).tolist(), {name: value.tolist() for name, value in last.items()}


def assert_near(found, expected):
    for losses, last in found:
        torch.testing.assert_close(losses, expected[0], atol=1e-6, rtol=0)
        assert last.keys() == expected[1].keys()
        for name, value in last.items():
            own, one = torch.tensor(value), torch.tensor(expected[1][name])
            torch.testing.assert_close(own, one, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["batch norm", "counter"])
@pytest.mark.parametrize("save", [[], ["comm"], ["matmul"]])
@pytest.mark.parametrize("ranks", [1, 2])  # on two, batch norms are ours
def test_buffers_are_those_of_one_run(ranks, save, kind):
    expected = run_warm(trained, 1, {}, kind)[0]
    found = run_warm(trained, ranks, {"recompute": {"modules": ["body"], "save": save}}, kind)

    assert_near(found, expected)
    if kind == "counter":
        assert expected[1]["body.1.calls"] == STEPS
    else:
        assert expected[1]["body.1.num_batches_tracked"] == STEPS


def twice():
    """Return the gradient where two runs come before their backwards, with and without rerun."""
    found = []
    for config in ({}, {"recompute": {"modules": ["body"]}}):
        runtime = msrun.init(config)
        torch.manual_seed(0)
        model = runtime.shard(Net(counting=True))
        x = batches("mlp", steps=1)[0][0]
        first, second = model(x), model(2 * x)
        second.sum().backward()
        first.sum().backward()
        found.append([param.grad.tolist() for param in model.parameters()])
        found.append(model.body[1].calls.item())
        runtime.close()
    return found


def test_each_run_computes_again_with_the_buffers_it_had():
    plain, calls, again, calls_then = run_warm(twice, 1)[0]

    assert (calls, calls_then) == (2, 2)
    assert again == plain


def pair():
    runtime = msrun.init({"recompute": {"modules": ["body"]}})
    model = runtime.shard(Net(counting=True))
    kept = model.body[1].calls
    loss = model(batches("mlp", steps=1)[0][0]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return kept is model.body[1].calls is model.body[1].same, kept.item()


def test_buffers_stay_the_same_objects_however_often_they_are_computed_with():
    assert run_warm(pair, 1)[0] == (True, 1)


class Plain(nn.Module):
    """Counts its calls in an attribute, and draws numbers of Python and numpy."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        self.calls += 1
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 - as people write it
        return torch.tanh(self.linear(x)) * noise / self.calls


def plain(config):
    runtime = msrun.init(config)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = runtime.shard(nn.Sequential(Plain(), nn.Linear(16, 10)).double())
    update = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = [
        runtime.step(model, update, functional.cross_entropy, x.double(), y).item()
        for x, y in batches("mlp", steps=STEPS)
    ]
    return losses, model[0].calls, random.random(), float(np.random.rand())  # noqa: NPY002


def test_plain_values_and_drawn_numbers_are_those_of_one_run():
    (expected,) = run_warm(plain, 1, {})
    (found,) = run_warm(plain, 1, {"recompute": {"modules": ["0"]}})

    assert found[0] == pytest.approx(expected[0], abs=1e-12)
    assert found[1:] == expected[1:]
    assert expected[1] == STEPS


class WritesInput(nn.Module):
    def forward(self, x):
        x *= 2
        return torch.tanh(x)


def written(kind):
    runtime = msrun.init({"recompute": {"modules": ["1"]}})
    model = runtime.shard(nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4)))
    with pytest.raises(msrun.ModelError) as caught:
        model(torch.ones(2, 4))
    return caught.value.message


def test_an_input_that_a_recomputed_module_writes_is_refused():
    (message,) = run_warm(written, 1, WritesInput)
    assert message == (
        "parallel.recompute: 1 writes its input in place, and a second run would begin with what "
        "it wrote"
    )


class Decoder(nn.Module):
    """Joins its keys with those in a cache, by position or by name, as decoders do by default."""

    def __init__(self, *, is_named):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.is_named = is_named

    def forward(self, x):
        cache = {}
        for layer in self.layers:
            x = (
                layer(x, past_key_values=cache, use_cache=True)
                if self.is_named
                else layer(x, cache)
            )
        return x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(16, 16)

    def forward(self, x, past_key_values=None, *, use_cache=False):
        keys = self.key(x)
        if past_key_values is not None:
            keys = torch.cat([*past_key_values.get(self, []), keys])
            past_key_values[self] = [keys]
        assert not (use_cache and past_key_values is None)
        return functional.scaled_dot_product_attention(x, keys, keys)


def decoded(config, is_named):
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(Decoder(is_named=is_named))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    return [runtime.step(model, update, functional.mse_loss, x, y).item() for _ in range(STEPS)]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_cache_is_not_filled_twice(is_named):
    config = {"recompute": {"modules": ["layers.*"]}}
    expected = run_warm(decoded, 1, {}, is_named)

    assert run_warm(decoded, 1, config, is_named) == expected


class Keys(dict):
    """A cache as of transformers, which calls the argument `cache` since 5.24."""

    def get_seq_length(self, layer):
        return len(self.get(layer, []))


class Newer(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(16, 16)

    def forward(self, x, cache=None, seen=None):
        keys = self.key(x)
        if cache is not None:
            keys = torch.cat([*cache.get(self, []), keys])
            cache[self] = [keys]
        return functional.scaled_dot_product_attention(x + seen["one"], keys, keys)


class NewerDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Newer(), Newer()])

    def forward(self, x):
        cache = Keys()
        for layer in self.layers:
            x = layer(x, cache=cache, seen={"one": 1.0})
        return x


def newer(config):
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(NewerDecoder())
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(4, 16), torch.randn(4, 16)
    return [runtime.step(model, update, functional.mse_loss, x, y).item() for _ in range(STEPS)]


def test_a_cache_of_a_newer_name_is_not_filled_twice():
    expected = run_warm(newer, 1, {})

    assert run_warm(newer, 1, {"recompute": {"modules": ["layers.*"]}}) == expected


class Memo(nn.Module):
    """Its cache is its own, and is left to it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, cache):
        return self.layer(x) * cache["factor"]


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Memo()

    def forward(self, x):
        return self.part(x, {"factor": 2.0}) + self.part(x, cache={"factor": 3.0})


def remembered(config):
    runtime = msrun.init(config)
    torch.manual_seed(0)
    return runtime.shard(Remembering())(torch.ones(2, 4)).tolist()


def test_another_argument_of_that_name_is_the_models():
    expected = run_warm(remembered, 1, {})

    assert run_warm(remembered, 1, {"recompute": {"modules": ["part"]}}) == expected


class Prefix(list):
    """A cache that begins with keys, as those of transformers may."""

    def get_seq_length(self, layer):
        return len(self[layer])


class Prefixed(nn.Module):
    """Its second layer gets keys that it did not compute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        for index, layer in enumerate(self.layers):
            layer.layer_idx = index

    def forward(self, x):
        cache = Prefix([[], [torch.ones(1, 16)]])
        for layer in self.layers:
            x = layer(x, past_key_values=cache if layer.layer_idx else None)
        return x


def prefixed(modules):
    runtime = msrun.init({"recompute": {"modules": modules}})
    model = runtime.shard(Prefixed())
    with pytest.raises(ModelError) as caught:
        model(torch.ones(4, 16))
    return caught.value.message


def test_a_cache_that_has_keys_is_refused():
    [message] = run_warm(prefixed, 1, ["layers.*"])
    assert message == (
        "parallel.recompute: layers.1 gets a cache that already has keys and values, such as a "
        "prefix, and a second run would add to it again"
    )


class Scripted(nn.Module):
    """Has a function of TorchScript that nothing has called before."""

    def __init__(self, *more):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and in many models
            scripted = torch.jit.script(Activated())
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), scripted, *more)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x))


class Activated(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.tanh(0.8 * x * (1 + 0.04 * x * x)))


def gradients_of(config, *more):
    with msrun.init(config) as runtime:
        torch.manual_seed(0)
        model = runtime.shard(Scripted(*more))
        functional.cross_entropy(model(torch.ones(4, 16)), torch.arange(4)).backward()
        return [param.grad for param in model.parameters()]


def scripted():
    recomputed = {"recompute": {"modules": ["body"]}}
    pairs = zip(gradients_of(recomputed, nn.Tanh()), gradients_of({}, nn.Tanh()), strict=True)
    with pytest.raises(ModelError) as refused:
        gradients_of(recomputed)
    return [(found - expected).abs().max().item() for found, expected in pairs], str(refused.value)


def test_functions_of_torchscript_compute_the_same_again():
    """Torch optimizes them after a first call, so that a second one saves other tensors."""
    gaps, sentence = run_warm(scripted, 1)[0]
    assert max(gaps) < 1e-6
    assert sentence == (
        "parallel.recompute: a function of TorchScript is the last of body that saves a tensor, "
        "and torch cannot run it again"
    )


def called_with_others(config, *, is_transformed):
    """Train by calls with other weights than the model's; return its gradients."""
    runtime = msrun.init(config)
    torch.manual_seed(0)
    model = runtime.shard(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)))
    halves = {name: param * 0.5 for name, param in model.named_parameters()}
    x, y = batches("mlp", steps=1)[0]
    if is_transformed:
        try:
            torch.vmap(lambda x: torch.func.functional_call(model, halves, (x,)))(x)
        except ModelError as error:
            return error.message
        return ""
    functional.cross_entropy(torch.func.functional_call(model, halves, (x,)), y).backward()
    return [param.grad.tolist() for param in model.parameters()]


def test_a_call_with_other_weights_computes_with_them_again():
    # The layer that recomputes saves for its gradient what its weights lead to.
    config = {"recompute": {"modules": [""]}}
    assert called(config) == called({})


def called(config):
    return run_warm(functools.partial(called_with_others, config, is_transformed=False), 1)[0]


def test_a_module_inside_of_a_transform_is_refused():
    config = {"recompute": {"modules": ["0"]}}
    call = functools.partial(called_with_others, config, is_transformed=True)
    [said] = run_warm(call, 1)
    assert said == (
        "parallel.recompute: 0 runs inside of a transform of torch.func such as vmap or grad, "
        "which cannot run it a second time"
    )
