"""What a step sends, in bytes: exactly the formulas of each way to train in parallel."""

import math

import pytest
import torch
from pipelines import MODELS, UNITS, stages
from ranks import BATCH, OPTIMIZERS, Counted, batches, build, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

FLOAT = 4
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
# Every step adds its loss up over data-parallel ranks: 43 numbers of eight bytes.
LOSS = 43 * 8
# Optimizer parallel also compares what ranks gathered: a number for each bit of a digest.
COMPARED = LOSS + 33 * FLOAT
# Votes on a change of what is trained, behind the last bucket.
VOTES = 2
LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
VOCABULARY = [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}]
# The transformer of the tests: layers, length, width, vocabulary.
LAYER_COUNT, LENGTH, WIDTH = 2, 8, 16
TOKENS = BATCH * LENGTH
ACTIVATION = FLOAT * TOKENS * WIDTH


def sent(config, model):
    """Return kind -> calls and bytes of one step after the first, of the largest tensor of each."""
    runtime = msrun.init(config)
    network = runtime.shard(build(model))
    update = OPTIMIZERS["adamw"](network.parameters())
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    for batch in batches(model, steps=2):
        part = [tensor.chunk(count)[share] for tensor in batch]
        with Counted() as counted:
            runtime.step(network, update, MODELS[model][1], *part)
    return {kind: (calls, counted.bytes[kind]) for kind, calls in counted.calls.items()}


def shapes(model, stage=None):
    """Return the shape of each parameter of `model`, of one half of its layers if asked."""
    found = {name: tuple(param.shape) for name, param in build(model).named_parameters()}
    if stage is None:
        return found
    names = UNITS[model][4 * stage : 4 * stage + 4]
    return {name: shape for name, shape in found.items() if name.rpartition(".")[0] in names}


def padded(sizes, parts, element=FLOAT):
    """Return the bytes of parameters whose rows are divided evenly, with those that fill up."""
    return element * sum(
        parts * math.ceil(shape[0] / parts) * math.prod(shape[1:]) for shape in sizes
    )


def gathers(zero, accumulate):
    """Return how often a unit is gathered a step: at level 3 also for each backward."""
    return 2 * accumulate if zero == 3 else 1


def scatters(zero, accumulate):
    """Return how often a unit is reduced a step: at level 1 once."""
    return 1 if zero == 1 else accumulate


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_optimizer_parallel_sends_its_units(zero, accumulate):
    units, unit_bytes = 3, padded(shapes("mlp").values(), 4)
    for found in run_warm(sent, 4, {"optimizer": {"zero": zero}, "accumulate": accumulate}, "mlp"):
        again, times = gathers(zero, accumulate), scatters(zero, accumulate)
        assert found == {
            GATHER: (units * again, unit_bytes * again),
            SCATTER: (units * times, unit_bytes * times),
            REDUCE: (2, COMPARED),
        }


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_optimizer_parallel_reduce_their_parts(zero):
    unit_bytes = padded(shapes("mlp").values(), 2)
    for found in run_warm(sent, 4, {"optimizer": {"zero": zero, "shard_size": 2}}, "mlp"):
        assert found == {
            GATHER: (3 * gathers(zero, 1), unit_bytes * gathers(zero, 1)),
            SCATTER: (3, unit_bytes),
            REDUCE: (3 + 2, unit_bytes // 2 + COMPARED),
        }


def test_what_stays_whole_is_reduced_and_not_gathered():
    weights = [shape for name, shape in shapes("mlp").items() if "weight" in name]
    biases = [shape for name, shape in shapes("mlp").items() if "bias" in name]
    for found in run_warm(sent, 2, {"optimizer": {"zero": 3, "threshold": 256}}, "mlp"):
        # Each of them travels with a number that says whether anybody has its gradient.
        small = padded(biases, 1) + FLOAT * (len(biases) + VOTES)
        assert found == {
            GATHER: (6, 2 * padded(weights, 2)),
            SCATTER: (3, padded(weights, 2)),
            REDUCE: (1 + 2, small + COMPARED),
        }


def test_a_short_type_halves_what_is_sent():
    elements = padded(shapes("mlp").values(), 1, element=1) + len(shapes("mlp")) + VOTES
    config = {"reduce": {"dtype": "bfloat16"}}
    assert run_warm(sent, 2, config, "mlp")[0] == {REDUCE: (1 + 1, 2 * elements + LOSS)}

    unit_bytes = padded(shapes("mlp").values(), 2, element=2)
    config = {"optimizer": {"zero": 2, "dtype": "bfloat16"}}
    assert run_warm(sent, 2, config, "mlp")[0] == {
        GATHER: (3, unit_bytes),
        SCATTER: (3, unit_bytes),
        REDUCE: (2, COMPARED),
    }


# Reductions of an activation a layer: two row-wise layers forward; backward the input of q, k and
# v, which they share, and that of `up`.  What recomputation repeats is the first of the two, as
# early stop skips the last operator of a layer.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "reductions"),
    [
        ({}, 4),
        ({"recompute": {"modules": ["layers.*"]}}, 5),
        ({"recompute": {"modules": ["layers.*"], "save": ["comm"]}}, 4),
    ],
)
@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_sends_activations_whatever_its_degree(degree, options, reductions):
    config = {"mesh": {"tp": degree}, "plan": LAYERS, **options}
    count = LAYER_COUNT * reductions
    for found in run_warm(sent, degree, config, "transformer"):
        assert found == {"all_reduce": (count, count * ACTIVATION)}


def test_a_divided_vocabulary_sends_no_logits():
    for found in run_warm(sent, 2, {"mesh": {"tp": 2}, "plan": VOCABULARY}, "transformer"):
        # Rows of the table and the gradient of the head's input; maximum, sum and the logit of
        # the target are one number a token.
        assert found == {"all_reduce": (5, 2 * ACTIVATION + 3 * FLOAT * TOKENS)}


@pytest.mark.parametrize("zero", [0, 1])
def test_data_parallel_beside_tensor_parallel_sends_parts(zero):
    config = {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS}
    config |= {"optimizer": {"zero": 1}} if zero else {}
    own = [
        (shape[0] // 2, *shape[1:])
        if is_cut_in_rows(name)
        else (shape[0], shape[1] // 2)
        if is_cut_in_columns(name)
        else shape
        for name, shape in shapes("transformer").items()
    ]
    for found in run_warm(sent, 4, config, "transformer"):
        # Local batches are half as large.
        count = 4 * LAYER_COUNT
        assert found.pop("all_reduce") == (count, count * ACTIVATION // 2)
        if zero:
            assert found == {
                GATHER: (LAYER_COUNT + 1, padded(own, 2)),
                SCATTER: (LAYER_COUNT + 1, padded(own, 2)),
                REDUCE: (2, COMPARED),
            }
        else:
            assert found == {REDUCE: (1 + 1, padded(own, 1) + FLOAT * (len(own) + VOTES) + LOSS)}


def is_cut_in_rows(name):
    return name.rpartition(".")[0].endswith((".q", ".k", ".v", ".up"))


def is_cut_in_columns(name):
    return name.endswith((".o.weight", ".down.weight"))


OUTPUT = FLOAT * BATCH * 32


@pytest.mark.parametrize(
    ("strategy", "out_strategy", "expected"),
    [
        ([[1, 1], [4, 1]], None, {}),
        ([[4, 1], [1, 1]], None, {}),
        ([[1, 4], [1, 4]], None, {"all_reduce": (1, OUTPUT)}),
        ([[1, 4], [1, 4]], [[4, 1]], {"reduce_scatter_tensor": (1, OUTPUT)}),
        ([[2, 2], [1, 2]], None, {"all_reduce": (1, OUTPUT // 2)}),
        ([[1, 2], [2, 2]], None, {"all_reduce": (1, OUTPUT // 2)}),
    ],
)
def test_a_matrix_product_sends_what_its_strategy_says(strategy, out_strategy, expected):
    """Rows and columns nothing; a divided contraction its output."""
    rule = {"match": "0", "strategy": strategy}
    rule |= {"out_strategy": out_strategy} if out_strategy else {}
    for found in run_warm(product, 4, rule):
        assert found == expected


def product(rule):
    runtime = msrun.init({"mesh": {"x": 2, "y": 2}, "plan": [rule]})
    network = runtime.shard(nn.Sequential(nn.Linear(32, 32)))
    network(torch.ones(BATCH, 32))  # the first call compares the batches of ranks, too
    with runtime.sharded(network).computing(), Counted() as counted:
        network(torch.ones(BATCH, 32))  # stays divided, as the loss could be
    return {kind: (calls, counted.bytes[kind]) for kind, calls in counted.calls.items()}


class Feed(nn.Module):
    """What surrounds two layers when sequences are divided between them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, x):
        return self.last(self.down(functional.relu(self.up(self.norm(x)))))


def feed(plan):
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": plan})
    network = runtime.shard(Feed())
    x = torch.ones(BATCH, LENGTH, WIDTH, requires_grad=True)
    network(x)  # the first call compares the batches of ranks, too
    with runtime.sharded(network).computing(), Counted() as counted:
        full_tensor(network(x)).sum().backward()
    return {kind: (calls, counted.bytes[kind]) for kind, calls in counted.calls.items()}


def test_sequence_parallel_gathers_and_scatters_what_tensor_parallel_reduces():
    plan = [
        {"match": "norm", "style": "sequence"},
        {"match": "up", "style": "colwise"},
        {"match": "down", "params": {"weight": [None, "tp"]}, "in": [None, None, "tp"],
         "out": [None, "tp", None]},
        {"match": "last", "style": "sequence"},
    ]  # fmt: skip
    part, norms = ACTIVATION // 2, FLOAT * 4 * WIDTH
    for found in run_warm(feed, 2, plan):
        assert found == {
            # The input of `up` and the result; backward that of `down` and of the whole.
            "all_gather_into_tensor": (4, 4 * part),
            "reduce_scatter_tensor": (2, 2 * ACTIVATION),
            "all_reduce": (4, norms),
        }


@pytest.mark.parametrize(
    ("schedule", "messages"),
    [
        ("gpipe", [1, 2, 2, 1]),
        ("1f1b", [1, 2, 2, 1]),
        ("interleaved", [3, 4, 4, 3]),
        ("zbv", [2, 4, 4, 2]),
    ],
)
@pytest.mark.few(2)
def test_stages_send_micro_batches_and_their_gradients(schedule, messages):
    count = 8
    config = {
        "mesh": {"pp": 4},
        "pipeline": {
            "stages": stages("deep", schedule, 4),
            "schedule": schedule,
            "microbatches": count,
        },
    }
    one = FLOAT * BATCH // count * 16
    for found, times in zip(run_warm(sent, 4, config, "deep"), messages, strict=True):
        calls = (times * count, times * count * one)
        assert found == {"send": calls, "recv_": calls, REDUCE: (1, LOSS)}


def test_stages_reduce_their_own_parameters_once():
    config = {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": {"stages": stages("deep", "1f1b", 2), "microbatches": 4},
    }
    own = padded(shapes("deep", 0).values(), 2)
    messages = (4, FLOAT * BATCH // 2 * 16)
    # The numbers of the loss are reduced over the copies of a stage, then over the stages.
    common = {"send": messages, "recv_": messages}
    for found in run_warm(sent, 4, config, "deep"):
        assert found == common | {REDUCE: (1 + 2, own + FLOAT * (8 + VOTES) + 2 * LOSS)}
    for zero in (1, 2):
        for found in run_warm(sent, 4, config | {"optimizer": {"zero": zero}}, "deep"):
            times = scatters(zero, 4)
            assert found == common | {
                GATHER: (4, own),
                SCATTER: (4 * times, own * times),
                REDUCE: (3, COMPARED + LOSS),
            }
