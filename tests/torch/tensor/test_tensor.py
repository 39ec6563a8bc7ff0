"""Operator-level parallel: an unmodified model, divided by a plan, equals one process."""

import io
import warnings

import pytest
import torch
from ranks import (
    MODELS,
    OPTIMIZERS,
    Counted,
    assert_equal_curves,
    batches,
    build,
    oracle,
    run_warm,
    token_loss,
    train,
)
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
VOCABULARY = [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}]


def measured(plan, options):
    """Return the collectives of forward and of backward, and local parameter shapes."""
    runtime = msrun.init({"mesh": {"tp": -1}, "plan": plan, **options})
    network = runtime.shard(build("transformer"))
    tokens, target = batches("transformer")[0]
    sharded = runtime.sharded(network)
    network(tokens)  # the first call compares the batches of ranks, too
    with sharded.computing():
        with Counted() as forward:
            loss = token_loss(network(tokens), target)
        with Counted() as backward:
            loss.backward()
    shapes = {
        name: list((param.to_local() if hasattr(param, "to_local") else param).shape)
        for name, param in network.named_parameters()
    }
    return dict(forward.calls), dict(backward.calls), shapes


def test_heads_are_not_gathered():
    for forward, backward, shapes in run_warm(measured, 2, LAYERS, {}):
        # Two row-wise layers in each of two blocks; backward what the column-wise ones take.
        assert forward == {"all_reduce": 4}
        assert backward == {"all_reduce": 4}
        assert shapes["layers.0.q.weight"] == [8, 16]
        assert shapes["layers.0.q.bias"] == [8]
        assert shapes["layers.0.o.weight"] == [16, 8]
        assert shapes["layers.0.o.bias"] == [16]


def test_the_vocabulary_is_not_gathered():
    for forward, _, shapes in run_warm(measured, 2, VOCABULARY, {}):
        # One for the embedding; maximum, sum and the target's logit for the loss.
        assert forward == {"all_reduce": 4}
        assert shapes["embed.weight"] == [16, 16]


@pytest.mark.parametrize(
    ("recompute", "extra"),
    [
        ({}, 0),
        # The last collective of a block is the block's last operator: early stop skips it.
        ({"recompute": {"modules": ["layers.*"]}}, 2),
        ({"recompute": {"modules": ["layers.*"], "save": ["comm"]}}, 0),
    ],
)
def test_recomputation_repeats_communication_unless_it_is_saved(recompute, extra):
    plain = run_warm(measured, 2, LAYERS, {})[0]
    found = run_warm(measured, 2, LAYERS, recompute)[0]

    assert found[0] == plain[0]
    assert found[1]["all_reduce"] == plain[1]["all_reduce"] + extra


def dropping(config):
    """Train with dropout, from the random numbers of rank 0."""
    runtime = msrun.init(config)
    network = runtime.shard(build("transformer", dropout=0.3))
    update = OPTIMIZERS["sgd"](network.parameters())
    return [
        runtime.step(network, update, token_loss, *batch).item() for batch in batches("transformer")
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"plan": LAYERS},
        {"plan": LAYERS + VOCABULARY, "recompute": {"modules": ["layers.*"]}},
        {"plan": LAYERS, "recompute": {"modules": ["layers.*"], "save": ["matmul"]}},
    ],
)
def test_dropout_is_that_of_one_process(config):
    alone = run_warm(dropping, 1, {"seed": 5})[0]
    found = run_warm(dropping, 2, {"seed": 5, "mesh": {"tp": 2}, **config})

    assert_equal_curves(found, alone)


class Hidden(nn.Module):
    """Drops what a plan divides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(32, 10)

    def forward(self, x):
        return self.down(self.drop(functional.relu(self.up(x))))


def dropping_hidden(config):
    runtime = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = Hidden()
    network = runtime.shard(network)
    update = OPTIMIZERS["sgd"](network.parameters())
    return [
        runtime.step(network, update, functional.cross_entropy, *batch).item()
        for batch in batches("mlp")
    ]


@pytest.mark.parametrize("recompute", [{}, {"recompute": {"modules": ["drop"]}}])
def test_dropout_of_divided_activations_is_that_of_one_process(recompute):
    plan = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]
    alone = run_warm(dropping_hidden, 1, {"seed": 5})[0]
    config = {"seed": 5, "mesh": {"tp": 4}, "plan": plan, **recompute}

    assert_equal_curves(run_warm(dropping_hidden, 4, config), alone)


class Stack(nn.Module):
    """A residual block on (batch, sequence, width)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.last = nn.LayerNorm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = x.view(-1, 4, 16)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return self.head(self.last(x).mean(1))


def sequence(config):
    runtime = msrun.init(config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = runtime.shard(Stack())
    update = OPTIMIZERS["adamw"](network.parameters())
    losses, calls = [], {}
    for x, y in batches("conv"):
        with Counted() as counts:
            losses.append(runtime.step(network, update, functional.cross_entropy, x, y).item())
        calls = counts.calls
    return losses, dict(calls)


def test_sequence_parallel():
    plan = [
        {"match": "norm", "style": "sequence"},
        {"match": "up", "style": "colwise"},
        {"match": "down", "params": {"weight": [None, "tp"]}, "in": [None, None, "tp"],
         "out": [None, "tp", None]},
        {"match": "last", "style": "sequence"},
    ]  # fmt: skip
    alone = run_warm(sequence, 1, {})[0][0]
    found = run_warm(sequence, 2, {"mesh": {"tp": 2}, "plan": plan})

    assert_equal_curves([losses for losses, _ in found], alone)
    for _, calls in found:
        assert calls["reduce_scatter_tensor"]


def by_hand(model, plan):
    """Return losses and accuracies of a loop without `rt.step`."""
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": plan})
    network = runtime.shard(build(model))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    losses, right = [], []
    for x, y in batches(model):
        update.zero_grad()
        output = network(x)
        loss = MODELS[model][1](output, y)
        loss.backward()
        runtime.clip_grad_norm_(network, 0.1)
        update.step()
        losses.append(loss.item())
        right.append((output.argmax(-1) == y).float().mean().item())
    return losses, right


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("transformer", VOCABULARY),
        ("transformer", LAYERS + VOCABULARY),
        ("mlp", [{"match": "fc3", "style": "colwise"}]),
    ],
)
def test_a_loop_by_hand_gets_whole_outputs(model, plan):
    found = run_warm(by_hand, 2, model, plan)

    assert_equal_curves([losses for losses, _ in found], oracle(model, "sgd", 0.1))
    assert found[0][1] == found[1][1]


def refused(config):
    runtime = msrun.init(config)
    network = build("transformer")
    before = [id(param) for param in network.parameters()]
    try:
        runtime.shard(network)
    except msrun.errors.UsageError as error:
        assert before == [id(param) for param in network.parameters()]
        return error.message
    with pytest.raises(msrun.errors.UsageError) as caught:
        network(batches("transformer")[0][0])
    return caught.value.message


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            [{"match": "layer.*", "style": "colwise"}],
            "parallel.plan[0].match: 'layer.*' matches nothing (choose such as layers.",
        ),
        (
            [{"match": "norm", "style": "colwise"}],
            (
                "parallel.plan[0].style: colwise is for Linear or Embedding or Conv1D or Conv or "
                "ConvTranspose or GroupedConv, not norm"
            ),
        ),
        (
            [{"match": "norm", "params": {"wait": ["tp"]}}],
            "parallel.plan[0].params.wait: norm has no such parameter (weight, bias)",
        ),
        (
            [{"match": "norm", "params": {"weight": [None, "tp"]}}],
            "parallel.plan[0].params.weight: 2 entries for the 1 dims of norm.weight [16]",
        ),
        (
            [{"match": "head", "style": "vocab"}],
            "parallel.plan[0]: head.weight and embed.weight are one parameter, ",
        ),
        (
            [{"match": "layers.0.q", "params": {}, "in": [None, "tp"]}],
            "parallel.plan[0].in of layers.0.q: ",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, sentence):
    for found in run_warm(refused, 2, {"mesh": {"tp": 2}, "plan": plan}):
        assert found.startswith(sentence)


def test_what_does_not_divide_is_refused():
    plan = [{"match": "layers.*.q", "style": "colwise"}]

    assert run_warm(refused, 3, {"mesh": {"tp": 3}, "plan": plan})[0] == (
        "parallel.plan[0]: layers.0.q.weight [16, 16] can not be split by strategy: "
        "dim 0 of 16 in 3 parts (tp)"
    )


@pytest.mark.parametrize(
    "plan",
    [
        # Columns on all four, then rows on all four: MindSpore's numbers for the same thing.
        [
            {"match": "fc1", "strategy": [[1, 1], [4, 1]]},
            {"match": "fc2", "strategy": [[1, 4], [1, 4]]},
        ],
        # Rows and columns of the weights on two axes of two.
        [{"match": "fc2", "strategy": [[1, 2], [2, 2]]}],
        [
            {
                "match": "fc1",
                "layout": {
                    "device_matrix": [2, 2],
                    "alias_name": ["a", "b"],
                    "params": {"weight": [["b", "a"], "None"], "bias": [["b", "a"]]},
                    "out": ["None", ["b", "a"]],
                },
            },
            {"match": "fc2", "params": {}, "in": ["..."], "out": ["..."]},
        ],
    ],
)
def test_mindspores_notations(plan):
    config = {"mesh": {"x": 2, "y": 2}, "plan": plan}

    assert_equal_curves(run_warm(train, 4, config, "mlp"), oracle("mlp"))


def refused_by_init(rule):
    with pytest.raises(UsageError) as caught:
        msrun.init({"mesh": {"x": 2, "y": 2}, "plan": [rule]})
    return caught.value.message


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (
            {"match": "fc9", "strategy": [[1, 8], [1, 8]]},
            (
                "strategy ((1, 8), (1, 8)) is for no Linear (8 parts in all, and mesh (x 2, y 2) "
                "has 4 ranks) and no Embedding (64 parts in all, and mesh (x 2, y 2) has 4 ranks)"
            ),
        ),
        (
            {"match": "fc9", "layout": {"device_matrix": [8], "alias_name": ["a"], "out": ["a"]}},
            "layout.device_matrix (8,) has 8 devices, and mesh (x 2, y 2) has 4 ranks",
        ),
    ],
)
def test_a_notation_that_no_model_can_have_is_refused_by_init(rule, sentence):
    assert run_warm(refused_by_init, 4, rule) == 4 * [f"parallel.plan[0].{sentence}"]


CHANNELS = [{"match": "conv1", "params": {"weight": ["tp", None, None, None], "bias": ["tp"]},
             "out": [None, "tp", "..."]}]  # fmt: skip


def said_of_channels(mesh):
    """Return what is said in two steps of a model whose first convolution is divided."""
    runtime = msrun.init({"mesh": mesh, "plan": CHANNELS})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = runtime.shard(build("conv"))
        update = OPTIMIZERS["sgd"](network.parameters())
        for x, y in batches("conv", steps=2):
            runtime.step(network, update, functional.cross_entropy, x, y)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("mesh", "name"),
    # Statistics of the batch need all ranks of dp, and of whole tensors.
    [({"tp": 4}, "conv2d"), ({"dp": 2, "tp": 2}, "batch_norm")],
)
def test_channels_stay_divided_until_they_meet(mesh, name):
    said = f"msrun: {name} is computed whole on every rank"

    assert run_warm(said_of_channels, 4, mesh) == 4 * [[said]]


class Twice(nn.Module):
    """Has one module under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def named_twice():
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": [{"match": "first", "style": "colwise"}]})
    torch.manual_seed(0)
    network, x = Twice(), torch.randn(3, 4)
    expected = network(x).detach()
    network = runtime.shard(network)
    wide = torch.randn(3, 5)
    with pytest.raises(RuntimeError):
        network(wide)
    saved = io.BytesIO()
    torch.save(network, saved)
    return torch.allclose(network(x), expected, atol=1e-6), len(saved.getvalue()) > 0


def test_a_module_may_have_two_names_and_the_model_can_be_pickled():
    assert run_warm(named_twice, 2) == 2 * [(True, True)]


def at_once(accumulate):
    """Train with the optimizer that updates lists of tensors; whole and divided do not mix."""
    runtime = msrun.init(
        {
            "mesh": {"dp": 2, "tp": 2},
            "plan": LAYERS,
            "accumulate": accumulate,
            "optimizer": {"zero": 1, "threshold": 200},
        }
    )
    network = runtime.shard(build("transformer"))
    update = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, foreach=True)
    runtime.optimizer(update)
    share = runtime.coordinate["dp"]
    return [
        runtime.step(network, update, token_loss, *(t.chunk(2)[share] for t in batch)).item()
        for batch in batches("transformer")
    ]


def test_an_optimizer_may_update_lists_of_parameters():
    assert_equal_curves(run_warm(at_once, 4, 2), oracle("transformer"))
