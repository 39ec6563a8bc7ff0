"""Rules for several inputs and outputs of a module, by name and by position, equal one process."""

import collections
import dataclasses
import typing

import pytest
import torch
from ranks import assert_equal_curves, run_warm
from torch import nn
from torch.distributed.tensor import DTensor
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


class Pair(typing.NamedTuple):
    hidden: torch.Tensor
    gate: torch.Tensor


@dataclasses.dataclass
class Fields:
    hidden: torch.Tensor
    gate: torch.Tensor
    cache: object = None


RETURNED = {
    "tuple": lambda hidden, gate: (hidden, gate, None),
    "list": lambda hidden, gate: [hidden, gate, 3],
    "named tuple": Pair,
    "mapping": lambda hidden, gate: {"hidden": hidden, "gate": gate},
    "fields": Fields,
    "ordered": lambda hidden, gate: collections.OrderedDict(hidden=hidden, gate=gate),
}


def placed(x):
    """Return the dim of `x` that each axis shards; None where it is whole."""
    if not isinstance(x, DTensor):
        return "plain"
    return [getattr(placement, "dim", None) for placement in x.placements]


class Mix(nn.Module):
    """Takes several tensors and returns several."""

    def __init__(self, returned):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.returned, self.seen = returned, []

    def forward(self, hidden, mask=None, *more, gate=None, **options):
        self.seen[:] = [tuple(map(placed, (hidden, mask, gate, *more)))]
        y = self.down(torch.tanh(self.up(hidden)))
        if mask is not None:
            y = y * mask
        for each in more:
            y = y + each.sin()
        gate = torch.sigmoid(hidden if gate is None else gate) * options.get("scale", 1.0)
        return RETURNED[self.returned](y * gate, gate)


class Model(nn.Module):
    """Calls `Mix` by name or by position, and reads all it returns."""

    def __init__(self, returned="tuple", call="names"):
        super().__init__()
        self.first, self.mix = nn.Linear(WIDTH, WIDTH), Mix(returned)
        self.last = nn.Linear(WIDTH, 3)
        self.call, self.got = call, []

    def check(self, parts):
        self.got[:] = [tuple(map(placed, parts[:2]))]

    def forward(self, x):
        hidden = self.first(x)
        mask = (x.mean(-1, keepdim=True) > 0).to(x)
        gate = hidden.cos()
        if self.call == "names":
            output = self.mix(hidden=hidden, mask=mask, gate=gate, scale=0.5)
        elif self.call == "positions":
            output = self.mix(hidden, mask, gate, gate=gate)
        else:
            output = self.mix(hidden, gate=hidden)
        parts = output if isinstance(output, tuple | list) else None
        if isinstance(output, dict):
            parts = [*output.values()]
        elif parts is None:
            parts = [output.hidden, output.gate]
        self.check(parts)
        return self.last(parts[0] + parts[1].square()).mean(1)


class Plain(Model):
    """Keeps nothing in its forward, as stages of a pipeline may not."""

    def check(self, parts):
        """Leave out what the test alone wants to know."""


def batches():
    numbers = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(BATCH, LENGTH, WIDTH, generator=numbers).double(),
            torch.randint(0, 3, (BATCH,), generator=numbers),
        )
        for _ in range(2)
    ]


def build(model=Model, *arguments):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return model(*arguments).double()


def alone(model=Model, *arguments):
    """Return the losses of one process."""
    network = build(model, *arguments)
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        update.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def trained(config, model=Model, *arguments):
    """Return the losses under `config`, and what the modules saw last."""
    runtime = msrun.init(config)
    network = runtime.shard(build(model, *arguments))
    update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = [
        runtime.step(
            network, update, functional.cross_entropy, *(t.chunk(count)[share] for t in batch)
        ).item()
        for batch in batches()
    ]
    seen = [*getattr(getattr(network, "mix", None), "seen", ())]
    seen += getattr(network, "got", ())
    runtime.close()
    return losses, seen


def each(cases):
    """Train each case of `trained`; return what each returned."""
    return [trained(*case) for case in cases]


SHARDED = ["dp", "tp", None]
TP = {"mesh": {"dp": 1, "tp": 2}}
DP_TP = {"mesh": {"dp": 2, "tp": 2}}
BY_NAME = {"match": "mix", "in": {"hidden": SHARDED, "mask": ["..."], "gate": None}}


def rule(**keys):
    return {"plan": [{"match": "mix", **keys}]}


CASES = {
    "names, as names": (TP | rule(**{"in": BY_NAME["in"]}), "tuple", "names"),
    "names, as positions": (TP | rule(**{"in": BY_NAME["in"]}), "tuple", "positions"),
    "positions, as names": (
        TP | rule(**{"in": [[None, "tp", None], None], "out": [SHARDED, None, None]}),
        "tuple",
        "names",
    ),
    "more than are named": (
        TP | rule(**{"in": {0: SHARDED, 2: SHARDED, "gate": ["..."]}, "out": {1: SHARDED}}),
        "list",
        "positions",
    ),
    "left out": (TP | rule(**{"in": BY_NAME["in"]}), "tuple", "defaults"),
    "the first alone": (TP | rule(out=[None, "tp", None]), "tuple", "names"),
    **{
        f"names of a {kind}": (TP | rule(out={"hidden": SHARDED, "gate": ["..."]}), kind, "names")
        for kind in RETURNED
        if kind not in ("tuple", "list")
    },
}


IN_CI = ["names, as positions", "positions, as names", "names of a fields"]
SEEN = {
    "names, as names": (([1], [None], "plain"), ([1], "plain")),
    "names, as positions": (([1], [None], "plain", "plain"), ([1], "plain")),
    "positions, as names": (([1], "plain", "plain"), ([1], "plain")),
    "more than are named": (([1], "plain", [None], [1]), ([1], [1])),
    "the first alone": (([None], "plain", "plain"), ([1], "plain")),
    "names of a fields": (([None], "plain", "plain"), ([1], "plain")),
}


@pytest.mark.parametrize(
    "names", [IN_CI, pytest.param([*CASES], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_inputs_and_outputs_by_name_learn_what_one_process_learns(names):
    """Placements are those that the rules ask for, too."""
    cases = [(config, Model, *arguments) for config, *arguments in map(CASES.get, names)]
    expected = {tuple(rest): alone(Model, *rest) for _, _, *rest in cases}

    for found in run_warm(each, 2, cases):
        for name, (_, _, *arguments), (losses, seen) in zip(names, cases, found, strict=True):
            assert_equal_curves([losses], expected[tuple(arguments)], TIGHT)
            assert tuple(seen) == SEEN.get(name, tuple(seen))


COLUMNS = [{"match": "mix.up", "style": "colwise"}, {"match": "mix.down", "style": "rowwise"}]
BOTH = rule(**{"in": BY_NAME["in"], "out": [SHARDED, [None, "tp", None], None]})["plan"] + COLUMNS
COMPOSED = {
    "dp": (4, DP_TP | {"plan": BOTH}),
    "recompute": (2, TP | {"plan": BOTH, "recompute": {"modules": ["mix"]}}),
    "recompute below": (2, TP | {"plan": BOTH, "recompute": {"modules": ["mix.up"]}}),
    "accumulate": (2, TP | {"plan": BOTH, "accumulate": 2}),
    "copies": (2, TP | {"plan": BOTH, "copies": 2}),
    "zero 1": (4, DP_TP | {"plan": BOTH, "optimizer": {"zero": 1}}),
    "zero 2": (4, DP_TP | {"plan": BOTH, "optimizer": {"zero": 2}, "accumulate": 2}),
    "zero 3": (4, DP_TP | {"plan": BOTH, "optimizer": {"zero": 3}}),
    "verify": (2, TP | {"plan": BOTH, "verify": 2}),
    "two axes": (
        4,
        {
            "mesh": {"x": 2, "y": 2},
            "plan": rule(
                **{
                    "in": {"hidden": [None, "x", "y"], "gate": [["y", "x"], None, None]},
                    "out": [[["x", "y"], None, None], [None, "y", None], None],
                }
            )["plan"],
        },
    ),
    "pipeline": (
        4,
        {
            "mesh": {"pp": 2, "dp": 1, "tp": 2},
            "plan": BOTH,
            "pipeline": {"stages": {"first": 0, "mix": 1, "last": 1}, "microbatches": 2},
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_several_tensors_compose_with_everything_else(name):
    ranks, config = COMPOSED[name]

    found = run_warm(trained, ranks, config, Plain)
    assert_equal_curves([losses for losses, _ in found], alone(), TIGHT)


class Biased(nn.Linear):
    """Returns its bias beside the product, as layers of Megatron-LM do."""

    def forward(self, x, scale=1.0):
        return functional.linear(x * scale, self.weight), self.bias


class Scaled(nn.Embedding):
    def forward(self, ids, *, scale=1.0):
        return super().forward(ids) * scale


class Standardized(nn.Conv1d):
    """Computes with a weight of mean 0 and variance 1 in each channel of the output."""

    def forward(self, x):
        weight = self.weight.flatten(1)
        mean, deviation = weight.mean(1, keepdim=True), weight.std(1, keepdim=True)
        weight = ((weight - mean) / (deviation + 1e-3)).view_as(self.weight)
        return functional.conv1d(x, weight, self.bias, padding=1)


class Subclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Scaled(16, WIDTH)
        self.conv, self.back = Standardized(WIDTH, 16, 3), Standardized(16, WIDTH, 3)
        self.up, self.down = Biased(WIDTH, 16), Biased(16, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = x + self.table((x[..., 0].abs() * 5).long().clamp(max=15), scale=2.0)
        x = x + self.back(torch.tanh(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        y, bias = self.up(x, scale=0.5)
        y, bias = self.down(torch.tanh(y + bias))
        return self.last(x + y + bias).mean(1)


STYLES = [
    {"match": "table", "style": "rowwise"},
    {"match": "conv", "style": "colwise"},
    {"match": "back", "style": "rowwise"},
    {"match": "up", "style": "colwise"},
    {"match": "down", "style": "rowwise"},
]
NAMED = [
    {"match": "table", "params": {"weight": [None, "tp"]}, "out": [None, None, "tp"]},
    {"match": "conv", "style": "rowwise"},
    {"match": "up", "params": {"weight": ["tp", None], "bias": ["tp"]}, "in": {"x": ["..."]}}
    | {"out": [[None, None, "tp"], ["..."]]},
    {"match": "down", "params": {"weight": [None, "tp"]}, "out": {0: ["..."], 1: None}},
]


@pytest.mark.slow
def test_subclasses_with_a_forward_of_their_own_learn_what_one_process_learns():
    cases = [(TP | {"plan": plan}, Subclasses) for plan in (STYLES, NAMED)]

    for of_rank in run_warm(each, 2, cases):
        assert_equal_curves([losses for losses, _ in of_rank], alone(Subclasses), TIGHT)


REFUSED = {
    "an unknown name": (
        {"in": {"states": SHARDED}},
        (
            "parallel.plan[0].in.states: forward of mix has no argument of this name beside "
            "**options (choose hidden, mask, gate)"
        ),
    ),
    "all others by position": (
        {"in": {"more": SHARDED}},
        (
            "parallel.plan[0].in.more: *more of mix stands for any number of inputs (choose "
            "hidden, mask, gate)"
        ),
    ),
    "all others by name": (
        {"in": {"options": SHARDED}},
        (
            "parallel.plan[0].in.options: **options of mix stands for any number of inputs (choose "
            "hidden, mask, gate)"
        ),
    ),
    "one twice": (
        {"in": {"hidden": ["..."], 0: [None, "tp", None]}},
        "parallel.plan[0].in[0]: is in.hidden, which stands there, too",
    ),
    "another length": (
        {"out": [["..."], [None, "tp", None]]},
        "parallel.plan[0].out of mix: has 2 entries, and it returns 3 outputs",
    ),
    "an unknown output": (
        {"out": {"hidden": SHARDED}},
        "parallel.plan[0].out.hidden of mix: it returns no such output (choose 0, 1, 2)",
    ),
    "more dims": (
        {"in": {"mask": [None, None, None, "tp"]}},
        "parallel.plan[0].in.mask of mix: [null, null, null, tp] does not fit a 3-dim tensor",
    ),
    "no tensor": (
        {"in": {"mask": [None, "tp", None]}, "out": {2: ["..."]}},
        "nothing",
    ),
}


def refusals():
    """Return what each of `REFUSED` raises."""
    found = []
    for rules, _ in REFUSED.values():
        runtime = msrun.init(TP | rule(**rules))
        try:
            network = runtime.shard(build())
            update = runtime.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
            runtime.step(network, update, functional.cross_entropy, *batches()[0])
            found.append("nothing")
        except UsageError as error:
            found.append(error.message)
        runtime.close()
    return found


def test_what_a_module_neither_takes_nor_returns_is_refused_by_name():
    for found in run_warm(refusals, 2):
        assert dict(zip(REFUSED, found, strict=True)) == {
            k: said for k, (_, said) in REFUSED.items()
        }
