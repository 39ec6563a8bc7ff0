"""Tensors in tuples and mappings of inputs and outputs: as in one process, or refused."""

import dataclasses

import pytest
import torch
from ranks import assert_equal_curves, run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPLinear. returned a view"),
    pytest.mark.filterwarnings("ignore:msrun. torch gathers what is divided"),
]

WIDTH, LENGTH, BATCH = 8, 4, 8
TIGHT = 1e-12  # in float64
SHARDED = ["dp", "tp", None]
TP = {"mesh": {"dp": 1, "tp": 2}}
DP_TP = {"mesh": {"dp": 2, "tp": 2}}


@dataclasses.dataclass
class Fields:
    gate: torch.Tensor
    hidden: torch.Tensor
    cache: object = None


def batches():
    numbers = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(BATCH, LENGTH, WIDTH, generator=numbers).double(),
            torch.randint(0, 3, (BATCH,), generator=numbers),
        )
        for _ in range(2)
    ]


def build(kind="keep"):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AroundNested(kind).double()


class Nested(nn.Module):
    """Takes tensors in tuples and mappings, behind one that is none, and returns such."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, scale, pair, options, gate=None):
        hidden, (first, *others) = pair
        y = self.down(torch.tanh(self.up(hidden))) * options["mask"] * scale
        for each in (first, *others, *options["more"].values()):
            y = y + each.sin()
        if gate is not None:
            y = y * gate.sigmoid()
        return {
            "pair": (y, [first, None]),
            "sums": Fields(hidden.tanh(), y.sum(-1), {"n": (y.cos(),)}),
        }


class AroundNested(nn.Module):
    """Reads all that `Nested` returns, and returns such, too."""

    def __init__(self, kind="keep"):
        super().__init__()
        self.first, self.mix = nn.Linear(WIDTH, WIDTH), Nested()
        self.last, self.kind = nn.Linear(WIDTH, 3), kind

    def forward(self, x):
        hidden = self.first(x)
        options = {"mask": (x.mean(-1, keepdim=True) > 0).to(x), "more": {"a": hidden.cos()}}
        gate = hidden.tanh() if self.kind == "gate" else None
        found = self.mix(0.5, (hidden, (hidden.sin(), x)), options, gate)
        y, (first, _) = found["pair"]
        fields = found["sums"]
        y = y + first + fields.hidden.unsqueeze(-1) + fields.gate + fields.cache["n"][0]
        logits = self.last(y).mean(1)
        return {"logits": (logits, [y]), "fields": Fields(y.square().mean((1, 2)), y, {"n": [y]})}


def loss_of_nested(output, target):
    return functional.cross_entropy(output["logits"][0], target) + output["fields"].gate.mean()


COLUMNS_OF_NESTED = [
    {"match": "mix.up", "style": "colwise"},
    {"match": "mix.down", "params": {"weight": [None, "tp"]}, "out": [None, "tp", None]},
]
NESTED = {
    "layers inside": (2, TP | {"plan": COLUMNS_OF_NESTED}, "keep"),
    "shards around": (
        2,
        TP | {"plan": [*COLUMNS_OF_NESTED, {"match": "first", "out": [None, "tp", None]}]},
        "keep",
    ),
    "an argument beside them": (
        2,
        TP | {"plan": [*COLUMNS_OF_NESTED, {"match": "mix", "in": {"gate": SHARDED}}]},
        "gate",
    ),
    "zero 3, accumulate, recompute": (
        4,
        DP_TP
        | {"plan": [*COLUMNS_OF_NESTED, {"match": "first", "out": ["dp", "tp", None]}]}
        | {"optimizer": {"zero": 3}, "accumulate": 2, "recompute": {"modules": ["mix"]}},
        "keep",
    ),
}


def nested(config, kind):
    """Return losses of steps, and the shapes and types of what a plain call returns."""
    with msrun.init(config) as runtime:
        network = runtime.shard(build(kind))
        update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
        parts = [[t.chunk(count)[share] for t in batch] for batch in batches()]
        losses = [runtime.step(network, update, loss_of_nested, *part).item() for part in parts]
        with torch.no_grad():
            found = network(parts[0][0])
        kinds = [found["logits"][0], *found["logits"][1], found["fields"].cache["n"][0]]
        return losses, {type(each).__name__ for each in kinds}


def nested_alone(kind):
    network, losses = build(kind), []
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    for x, y in batches():
        update.zero_grad()
        loss = loss_of_nested(network(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", NESTED)
def test_tensors_in_tuples_and_mappings_learn_what_one_process_learns(name):
    ranks, config, kind = NESTED[name]
    found = run_warm(nested, ranks, config, kind)
    assert_equal_curves([losses for losses, _ in found], nested_alone(kind), TIGHT)
    assert [kinds for _, kinds in found] == [{"Tensor"}] * ranks


REFUSED_IN_NESTED = {
    "parallel.plan[0].in.pair of mix: is a tuple, and no tensor that ranks could share": (
        {"in": {"pair": SHARDED}}
    ),
    "parallel.plan[0].in[2] of mix: is a dict, and no tensor that ranks could share": (
        {"in": {2: SHARDED}}
    ),
    "parallel.plan[0].in.pair.0: forward of mix has no argument of this name (choose scale, "
    "pair, options, gate)": {"in": {"pair.0": SHARDED}},
    "parallel.plan[0]: mix was called without a tensor among its arguments": {"in": SHARDED},
    "parallel.plan[0].out.pair of mix: is a tuple, and no tensor that ranks could share": (
        {"out": {"pair": SHARDED}}
    ),
    "parallel.plan[0].out of mix: it returns a dict without a tensor that ranks could share": (
        {"out": SHARDED}
    ),
}


def nested_refusals():
    found = []
    for keys in REFUSED_IN_NESTED.values():
        with (
            msrun.init(TP | {"plan": [{"match": "mix", **keys}]}) as runtime,
            pytest.raises(UsageError) as caught,
        ):
            runtime.shard(build())(batches()[0][0])
        found.append(caught.value.message)
    return found


def test_a_rule_for_tensors_in_tuples_and_mappings_is_refused():
    assert run_warm(nested_refusals, 2) == [[*REFUSED_IN_NESTED]] * 2
