"""Activations on the host: equal to the last bit, counted, ahead of the backward pass."""

import copy

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, batches, build, oracle, run_warm
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, UsageError
from msrun.parallel.config_file import read_config
from msrun.parallel.local import full_tensor

pytestmark = [
    pytest.mark.own_process,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

HOST = {"offload": {"activations": ["layers.*"], "threshold": 0}}
WIDTH, ROWS = 16, 8


class Layer(nn.Module):
    """Knows the storages of what its activation function saves."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.saved = []

    def forward(self, x):
        hidden = self.up(x)
        self.saved.append(StorageWeakRef(hidden.untyped_storage()))
        return x + self.down(functional.gelu(hidden))


class Net(nn.Module):
    def __init__(self, layers=3, kind=Layer):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([kind() for _ in range(layers)])

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def stepped(config, kind=Layer):
    """Return the loss and the gradients of a step, and the model with what was moved."""
    torch.manual_seed(3)
    with msrun.init(config) as rt:
        model = rt.shard(Net(kind=kind))
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = torch.randn(2, ROWS, WIDTH)
        loss = rt.step(model, update, functional.mse_loss, x, y)
        return loss, [param.grad for param in model.parameters()], model, rt.sharded(model)


def test_saved_tensors_go_to_the_host_and_come_back_to_the_bit():
    loss, gradients, _, _ = stepped({})
    found, others, model, state = stepped(HOST)

    assert torch.equal(found, loss)
    assert all(map(torch.equal, others, gradients))
    moved = state.activations.moved
    # Of each layer its input, and what goes into and comes out of the activation function.
    assert moved.tensors == 3 * 3
    assert moved.bytes == 3 * 4 * ROWS * (WIDTH + 64 + 64)
    assert moved.ahead == 2 * 3  # of the two layers before the last
    assert [ref.expired() for layer in model.layers for ref in layer.saved] == [True] * 3


def test_memory_on_the_device_is_free_between_forward_and_backward():
    torch.manual_seed(3)
    with msrun.init(HOST) as rt:
        model = rt.shard(Net())
        y = model(torch.randn(ROWS, WIDTH))
        assert all(ref.expired() for layer in model.layers for ref in layer.saved)
        y.sum().backward(retain_graph=True)
        once = [param.grad.clone() for param in model.parameters()]
        y.sum().backward()

    pairs = zip(model.parameters(), once, strict=True)
    assert all(torch.equal(param.grad, 2 * gradient) for param, gradient in pairs)


class Order(torch.autograd.Function):
    """Notes when the backward pass comes by, and how many storages were ahead then."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.seen.append(ctx.layer.moved().ahead)
        return gradient, None


class Watched(Layer):
    def forward(self, x):
        self.seen = []
        return Order.apply(super().forward(x), self)


def test_the_next_layer_is_ahead_of_the_backward_pass():
    def seen(prefetch):
        with msrun.init({"offload": HOST["offload"] | {"prefetch": prefetch}}) as rt:
            model = rt.shard(Net(kind=Watched))
            for layer in model.layers:
                layer.moved = lambda: rt.sharded(model).activations.moved
            model(torch.randn(ROWS, WIDTH)).sum().backward()
            return [layer.seen for layer in reversed(model.layers)]

    # On the way into a layer: nothing of the last, all of the others.
    assert seen(0) == [[0], [0], [0]]
    assert seen(1) == [[0], [3], [6]]
    assert seen(2) == [[0], [6], [6]]


def test_a_model_may_be_copied_and_trains_alone():
    with msrun.init(HOST) as rt:
        model = rt.shard(Net())
        x = torch.randn(ROWS, WIDTH)
        model(x).sum().backward()
        other = copy.deepcopy(model)
        other.zero_grad()
        other(x).sum().backward()
        assert rt.sharded(model).activations.moved.tensors == 3 * 3

    grads = [[param.grad for param in each.parameters()] for each in (model, other)]
    assert all(map(torch.equal, *grads))


class Masked(Layer):
    def forward(self, x):
        mask = torch.zeros(WIDTH)  # small, so that it stays
        y = super().forward(x) * mask
        mask += 1
        return y


class Squared(Layer):
    def forward(self, x):
        y = super().forward(x)
        squares = y * y
        y += 1
        return squares


@pytest.mark.parametrize(("layer", "shape"), [(Masked, (WIDTH,)), (Squared, (ROWS, WIDTH))])
def test_a_write_into_a_saved_tensor_is_refused_where_it_stays_and_where_it_moves(layer, shape):
    config = {"offload": {"activations": ["layers.*"], "threshold": 65}}
    with pytest.raises(UsageError) as refused:
        stepped(config, layer)
    assert refused.value.message == (
        f"a tensor of shape {shape} that the backward pass needs was written in place after the "
        "forward pass had used it"
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"offload": {"activations": ["*"]}},
            (
                "parallel.offload.activations: matches the whole model, of which no part could "
                "come back ahead of the backward pass"
            ),
        ),
        (
            {"offload": {"activations": ["layers"]}},
            "parallel.offload.activations: layers is a ModuleList, which has no forward",
        ),
        ({"offload": {"activations": ["x"]}}, "parallel.offload.activations: 'x' matches nothing"),
        (
            {"offload": {"activations": ["layers.0.up"]}, "recompute": {"modules": ["layers.0"]}},
            (
                "parallel.offload.activations: layers.0.up is inside of layers.0, which "
                "recomputes, so it saves nothing"
            ),
        ),
    ],
)
def test_modules_without_activations_of_their_own_are_refused(config, said):
    with msrun.init(config) as rt, pytest.raises(UsageError) as refused:
        rt.shard(Net())
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"offload": {"activations": []}}, "offload.activations: is empty"),
        ({"offload": {"activations": ["x"], "prefetch": -1}}, "prefetch: -1 must be at least 0"),
        (HOST | {"mode": "auto"}, "offload: mode auto runs operators, and no modules"),
        (HOST | {"data": {"x": ["dp", None, "h"]}}, "offload: data has ranks share images"),
    ],
)
def test_configurations_without_a_meaning_are_refused(config, said):
    with pytest.raises(ConfigError) as refused:
        read_config(config)
    assert said in refused.value.message


STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
PLAN = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
TURNS = {"embed": [0, 0], "position": [0, 0], "layers.0": [0, 0], "layers.1": [1, 0]}
V = TURNS | {"norm": [1, 1], "head": [0, 1]}


def pp(schedule, stages=STAGES):
    pipeline = {"stages": stages, "microbatches": 4, "schedule": schedule}
    return {"mesh": {"pp": 2, "dp": 1}, "pipeline": pipeline}


LAYOUTS = {
    "dp": {},
    "accumulate": {"accumulate": 2},
    "zero 1": {"optimizer": {"zero": 1}, "accumulate": 2},
    "zero 2": {"optimizer": {"zero": 2}},
    "zero 3": {"optimizer": {"zero": 3}},
    "zero 3, offload": {"optimizer": {"zero": 3, "offload": True}},
    "zero 3, overlap": {"optimizer": {"zero": 3, "offload": "overlap"}},
    "recompute": {"recompute": {"modules": ["layers.*"]}},
    "recompute inside": {"recompute": {"modules": ["layers.*.down"]}, "optimizer": {"zero": 3}},
    "recompute, matmul saved": {"recompute": {"modules": ["layers.*"], "save": ["matmul"]}},
    "tp": {"mesh": {"tp": 2}, "plan": PLAN},
    "tp, copies": {"mesh": {"tp": 2}, "plan": PLAN, "copies": 2},
    "cp": {"mesh": {"cp": 2}, "plan": [{"match": "*", "style": "context"}]},
    "ring": {"mesh": {"cp": 2}, "plan": [{"match": "*", "style": "context", "kind": "ring"}]},
    "pp 1f1b": pp("1f1b"),
    "pp gpipe": pp("gpipe"),
    "pp zbv": pp("zbv", V),
    "pp recompute": pp("1f1b") | {"recompute": {"modules": ["layers.*"]}},
    "bf16": {"precision": "bf16"},
    "bf16, zero 3": {"precision": "bf16", "optimizer": {"zero": 3}},
    "fp16": {"precision": "fp16"},
    "exact dropout": {"dropout": "exact", "seed": 3},
    "verify": {"verify": 1},
}


def trained(config):
    """Return losses and weights after steps, and what was moved."""
    rt = msrun.init(config)
    model = rt.shard(build("transformer"))
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for batch in batches("transformer"):
        part = [t.chunk(count)[share] for t in batch]
        losses.append(rt.step(model, update, MODELS["transformer"][1], *part, max_norm=0.5).item())
    weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    moved = (found := rt.sharded(model).activations) and found.moved
    rt.close()
    return losses, weights, moved


def both(layouts):
    """Return of each layout whether it is the same with activations on the host, and the bytes."""
    found = {}
    for name, config in layouts.items():
        losses, weights, _ = trained(config)
        others, changed, moved = trained(config | HOST)
        same = all(torch.equal(weight, changed[key]) for key, weight in weights.items())
        found[name] = losses == others and same, moved.bytes, moved.ahead
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_layout_is_the_same_to_the_bit():
    for found in run_warm(both, 2, LAYOUTS, timeout=300):
        assert {name: is_same for name, (is_same, _, _) in found.items()} == dict.fromkeys(
            LAYOUTS, True
        )
        assert all(moved > 0 for _, moved, _ in found.values())
        # A stage has one layer.
        assert all(ahead > 0 for name, (_, _, ahead) in found.items() if "pp" not in name)


def test_two_ranks_learn_what_one_process_does():
    config = HOST | {"optimizer": {"zero": 3}, "accumulate": 2}
    for found, _, moved in run_warm(trained, 2, config):
        assert found == pytest.approx(oracle("transformer", "adamw", 0.5), abs=2e-5)
        assert moved.bytes > 0
