"""Lists of experts that ranks cannot share, and what knows no experts of a list: refused."""

import itertools

import pytest
import torch
from lists import Expert, Loop
from mixtures import (
    EXPERTS,
    RULE,
    WIDTH,
    Language,
    build,
    texts,
    token_loss,
)
from ranks import run_warm
from torch import nn

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

EP = {"mesh": {"dp": 2, "ep": 2}, "plan": [RULE]}


def too_few():
    rt = msrun.init({"mesh": {"ep": 4}, "plan": [RULE]})
    with pytest.raises(UsageError) as caught:
        rt.shard(build("three"))
    return caught.value.message


def test_fewer_experts_than_ranks_are_refused():
    sentence = (
        "parallel.plan[0].style: layers.0.mlp.experts has 3 experts, fewer than the 4 ranks of "
        "ep (choose ep 3 or less)"
    )
    assert run_warm(too_few, 4) == [sentence] * 4


class Buffered(Expert):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))


class Across(Expert):
    """Normalises over the rows that it gets."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Pair(Expert):
    def forward(self, x):
        return super().forward(x), x


class Scaled(Expert):
    def forward(self, x, factor=1):
        return super().forward(x) * factor


class Chain(Loop):
    """The second expert of a token gets what the first one returned."""

    def mix(self, rows, _, index):
        for place in range(index.size(1)):
            found = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                row = torch.where(index[:, place] == number)[0]
                found[row] = expert(rows[row])
            rows = rows + found
        return rows


class Reading(Loop):
    """Computes with a parameter of an expert itself."""

    def mix(self, rows, weights, index):
        return super().mix(rows, weights, index) + self.experts[0].down.bias


class Moody(Loop):
    """Calls fewer experts from call to call, by a count outside of its module."""

    numbers = itertools.count(1)

    def mix(self, rows, weights, index):
        last = -next(self.numbers)
        return super().mix(rows[:last], weights, index[:last]).sum(0)


class Scaling(Loop):
    kind = Scaled

    def mix(self, rows, *_):
        return sum(expert(rows, factor=0.5) for expert in self.experts)


class Normed(Loop):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Unlike(Loop):
    def __init__(self):
        super().__init__()
        self.experts[1] = nn.Linear(WIDTH, WIDTH)


class Shared(Loop):
    def __init__(self):
        super().__init__()
        self.experts[1] = self.experts[0]


class Tied(Loop):
    """Has one weight in two experts."""

    def __init__(self):
        super().__init__()
        self.experts[1].down.weight = self.experts[0].down.weight


def of_kind(one):
    return type("OfKind", (Loop,), {"kind": one})


OF = "layers.0.mlp.experts of style experts over ep"
MIXTURE = (
    "layers.0.mlp: its forward ran twice, since its experts are a list of which ranks have parts, "
    "and called its modules otherwise the second time"
)
SHARING = f"{OF}: members have no parameters, or share them with each other or other modules"
CASES = {
    "buffered": (
        of_kind(Buffered),
        f"{OF}: 0 has the buffer scale, which one rank alone would change",
    ),
    "across": (
        of_kind(Across),
        (
            f"{OF}: what an expert computes of a row depends on other rows, some of which come "
            "from other ranks"
        ),
    ),
    "pair": (
        of_kind(Pair),
        f"{OF}: an expert returns a tuple for 1 rows: it has to return one tensor with as many",
    ),
    "scaling": (
        Scaling,
        (
            f"{OF}: an expert was called with (24, 8), float; it takes up to 3 tensors (rows, ..., "
            "width) with as many rows each"
        ),
    ),
    "chain": (
        Chain,
        (
            f"{OF}: what expert {{}} gets depends on what another one returned, or differs when "
            "the forward around them runs again"
        ),
    ),
    "reading": (
        Reading,
        (
            "layers.0.mlp.experts.0.down.bias is of an expert of a list, which one rank of ep has: "
            "add of it would be another on each rank"
        ),
    ),
    "moody": (Moody, MIXTURE),
    "normed": (
        Normed,
        (
            f"{OF}: norm is a batch norm beside the experts, and ranks without rows for experts "
            "would meet there at another time"
        ),
    ),
    "unlike": (
        Unlike,
        (
            f"{OF}: 1 (Linear) has other parameters than 0 (Expert), and ranks have experts of one "
            "kind"
        ),
    ),
    "shared": (Shared, SHARING),
    "tied": (Tied, SHARING),
}


def evaluate(rt, model):
    tokens, target = (tensor.chunk(2)[rt.rank] for tensor in texts(1)[0])
    model = rt.shard(model)
    with torch.no_grad():
        token_loss(model(tokens), target)


def said(names):
    """Return what is said of each model, on this rank."""
    found = {}
    for name in names:
        rt = msrun.init({"mesh": {"ep": 2}, "plan": [RULE]})
        torch.manual_seed(3)
        model = Language(CASES[name][0])
        with pytest.raises(UsageError) as caught:
            evaluate(rt, model)
        found[name] = caught.value.message
    return found


def test_lists_that_ranks_cannot_share_are_refused():
    for found in run_warm(said, 2, list(CASES)):
        for name, (_, sentence) in CASES.items():
            assert found[name] in {sentence.format(number) for number in range(EXPERTS)}


LIST = "the experts of the list layers.0.mlp.experts (parallel.plan[0])"
# Keys beside a list, and how each is refused.
BESIDE = {
    "verify": ({"verify": {"steps": 1}}, f"verify: one process has no part of {LIST}"),
    "dtype": (
        {"optimizer": {"zero": 1, "dtype": "bfloat16"}},
        f"optimizer.dtype: casts what is gathered, and not {LIST}",
    ),
    "offload": (
        {"optimizer": {"zero": 1, "offload": True}},
        f"optimizer.offload: keeps on the host what is gathered, and not {LIST}",
    ),
    "dropout": ({"dropout": "exact"}, f"dropout: exact draws masks of samples, and not of {LIST}"),
    "compile": (
        {"compile": {"modules": ["layers.*"]}},
        (
            "compile.modules: layers.0 contains layers.0.mlp.experts, which has experts that ranks "
            "share, and the compiler does not follow that"
        ),
    ),
}


def said_beside():
    """Return what is said of each key, on this rank."""
    found = {}
    for name, (options, _) in BESIDE.items():
        with pytest.raises(UsageError) as caught:
            begin(options)
        found[name] = caught.value.message.removeprefix("parallel: ")
    return found


def begin(options):
    rt = msrun.init({**EP, **options})
    try:
        rt.shard(build("list"))
    finally:
        rt.close()


def test_what_knows_no_experts_of_a_list_is_refused():
    expected = {name: sentence for name, (_, sentence) in BESIDE.items()}
    for found in run_warm(said_beside, 4):
        assert {name: x.removeprefix("parallel.") for name, x in found.items()} == expected
