"""The grid: under every configuration a model learns what it learns in one process."""

import itertools
from collections import Counter

import pytest
from ranks import MODELS, Curves, assert_equal_curves, oracle, run_warm, train_built_on_meta
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

DP = {"mesh": {"dp": -1}}
MLP = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
MLP_BY_DIMS = [
    {"match": "fc1", "params": {"weight": ["tp", None], "bias": ["tp"]}, "out": [None, "tp"]},
    {"match": "fc2", "params": {"weight": [None, "tp"]}, "in": [None, "tp"], "out": [None, None]},
]
LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
VOCABULARY = [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}]
ALL = LAYERS + VOCABULARY
TP = {"mesh": {"tp": -1}}
DP_TP = {"mesh": {"dp": -1, "tp": 2}, "plan": ALL}
RECOMPUTE = {"recompute": {"modules": ["layers.*"]}}
COMM_SAVED = {"recompute": {"modules": ["layers.*"], "save": ["comm"]}}
MATMUL_SAVED = {"recompute": {"modules": ["layers.*"], "save": ["matmul"]}}
# The output stays divided by channel as far as the batch norm behind it.
CONV = [{"match": "conv1", "params": {"weight": ["tp", None, None, None], "bias": ["tp"]},
         "out": [None, "tp", "..."]}]  # fmt: skip
CONV_STAGES = {"conv1": 0, "norm1": 0, "conv2": 1, "norm2": 1, "head": 1}
BOTH = ("sgd", "adamw")
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
TURNS = {"embed": [0, 0], "position": [0, 0], "layers.0": [1, 0], "layers.1": [0, 1]} | {
    "norm": [1, 1],
    "head": [1, 1],
}
V = TURNS | {"layers.1": [1, 1], "norm": [0, 1], "head": [0, 1]}


class Dropping(nn.Module):
    """The MLP, in which half of what a plan divides and some of what it does not is dropped."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.drop, self.last = nn.Dropout(0.5), nn.Dropout(0.2)

    def forward(self, x):
        x = self.fc2(self.drop(functional.relu(self.fc1(x))))
        return self.fc3(self.last(functional.relu(x)))


MODELS["dropping"] = (Dropping, functional.cross_entropy)
# The seed with which the rank of the oracle begins.
# Cases that CI has at least.
PROMISED = 60
EXACT = {"seed": 1000, "dropout": "exact"}


def pp(stages=STAGES, schedule="1f1b", microbatches=4):
    pipeline = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    return {"mesh": {"pp": 2, "dp": -1}, "pipeline": pipeline}


def zero(level, **options):
    return {"optimizer": {"zero": level, **options}}


def cases():
    """Yield a name for each configuration, its ranks, itself, the model, optimizer, clipping."""
    for model in ("mlp", "conv", "transformer"):
        for optimizer in BOTH:
            for ranks in (1, 2, 4, 8):
                yield f"dp {model} {optimizer}", ranks, DP, model, optimizer
            for level in (1, 2, 3):
                yield f"zero{level} {model} {optimizer}", 2, zero(level), model, optimizer
    for optimizer in BOTH:
        for ranks, config in ((2, TP | {"plan": MLP}), (4, TP | {"plan": MLP_BY_DIMS})):
            yield f"tp mlp {optimizer}", ranks, config, "mlp", optimizer
        for ranks, plan in ((2, LAYERS), (4, LAYERS), (4, ALL)):
            name = f"tp {len(plan)} rules transformer {optimizer}"
            yield name, ranks, TP | {"plan": plan}, "transformer", optimizer
        yield f"dp x tp mlp {optimizer}", 4, DP_TP | {"plan": MLP}, "mlp", optimizer
        for level in (1, 3):
            config = DP_TP | {"plan": MLP} | zero(level)
            yield f"dp x tp, zero{level} mlp {optimizer}", 4, config, "mlp", optimizer
        yield f"dp x tp {optimizer}", 4, DP_TP, "transformer", optimizer
        yield f"dp x tp {optimizer}", 8, DP_TP, "transformer", optimizer


def others():
    """Yield the same for what one model and optimizer are enough for."""
    for ranks, name, config in (
        (2, "accumulate", {"accumulate": 4}),
        (2, "recompute", RECOMPUTE),
        (2, "recompute, matmul saved", MATMUL_SAVED),
        (4, "fused by module, accumulate", {"reduce": {"fuse": "module"}, "accumulate": 2}),
        (4, "zero1, accumulate", zero(1) | {"accumulate": 2}),
        (4, "zero2 in copies, accumulate", zero(2, shard_size=2) | {"accumulate": 2}),
        (4, "zero3 in copies", zero(3, shard_size=2)),
        (4, "zero3 in copies of one", zero(3, shard_size=1)),
        (4, "zero3, threshold", zero(3, threshold=512) | {"accumulate": 2}),
        (4, "zero1, all below the threshold", zero(1, threshold="1GiB")),
        (4, "zero3, one unit", zero(3, modules=["layers.1"])),
        (4, "zero3, offload", zero(3, offload=True)),
        (4, "zero3, recompute", zero(3) | RECOMPUTE),
        (4, "dp x tp, accumulate", DP_TP | {"accumulate": 2}),
        (4, "dp x tp, zero1", DP_TP | zero(1)),
        (4, "dp x tp, zero3, accumulate", DP_TP | zero(3) | {"accumulate": 2}),
        (4, "dp x tp, zero2, threshold", DP_TP | zero(2, threshold=600)),
        (4, "dp x tp, recompute", DP_TP | RECOMPUTE),
        (4, "dp x tp, comm saved", DP_TP | COMM_SAVED),
        (2, "pp 1f1b", pp()),
        (2, "pp gpipe", pp(schedule="gpipe")),
        (2, "pp, many micro-batches", pp(microbatches=8)),
        (2, "pp auto", pp(stages="auto")),
        (2, "pp interleaved", pp(TURNS, "interleaved")),
        (2, "pp looped_bfs", pp(TURNS, "looped_bfs")),
        (2, "pp interleaved_zb", pp(TURNS, "interleaved_zb")),
        (2, "pp zbv", pp(V, "zbv")),
        (2, "pp dualpipev", pp(V, "dualpipev")),
        (4, "pp x dp", pp()),
        (4, "pp x dp, zero1", pp() | zero(1)),
        (4, "pp x dp, zero2", pp() | zero(2)),
        (4, "pp x dp, zero3", pp() | zero(3)),
        (4, "pp x dp, zero1, threshold", pp() | zero(1, threshold=512)),
        (4, "pp x dp interleaved, zero1", pp(TURNS, "interleaved") | zero(1)),
        (4, "pp x dp zbv", pp(V, "zbv")),
        (4, "pp x dp, recompute", pp() | RECOMPUTE),
        (4, "pp x tp", pp() | {"mesh": {"pp": 2, "tp": 2}, "plan": LAYERS}),
        (8, "pp x dp x tp, zero1, recompute",
         pp() | {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "plan": LAYERS} | zero(1) | RECOMPUTE),
        (8, "dp x tp, zero3 in copies", DP_TP | zero(3, shard_size=2)),
        (4, "dp x tp, zero1, recompute, accumulate",
         DP_TP | zero(1) | RECOMPUTE | {"accumulate": 2}),
        (8, "dp x tp, zero1, recompute, accumulate",
         DP_TP | zero(1) | RECOMPUTE | {"accumulate": 2}),
    ):  # fmt: skip
        yield name, ranks, config, "transformer", "adamw"
    for ranks, name, config in (
        (2, "tp conv", TP | {"plan": CONV}),
        (4, "dp x tp conv", DP_TP | {"plan": CONV}),
        (4, "pp x dp conv", pp(CONV_STAGES, "gpipe", microbatches=1)),
    ):
        yield name, ranks, config, "conv", "sgd"
    for ranks, name, config, model in (
        (4, "clipped dp", DP, "mlp"),
        (4, "clipped zero3", zero(3), "mlp"),
        (4, "clipped dp x tp, zero1", DP_TP | zero(1), "transformer"),
        (4, "clipped pp x dp", pp(), "transformer"),
        (4, "clipped pp x dp, zero1", pp() | zero(1), "transformer"),
    ):
        yield name, ranks, config, model, "sgd", 0.1


def dropping():
    """Yield the same where `dropout: exact` promises the masks of one process."""
    for ranks, name, config in (
        (1, "dp", {}),
        (2, "dp", {}),
        (4, "dp", {}),
        (8, "dp", {}),
        (2, "zero1", zero(1)),
        (2, "zero2", zero(2)),
        (4, "zero3", zero(3)),
        (4, "zero3 in copies", zero(3, shard_size=2)),
        (2, "recompute", {"recompute": {"modules": ["drop", "fc2"]}}),
        (2, "tp", TP | {"plan": MLP}),
        (4, "tp", TP | {"plan": MLP}),
        (4, "dp x tp", DP_TP | {"plan": MLP}),
        (4, "dp x tp, zero1", DP_TP | {"plan": MLP} | zero(1)),
        (8, "dp x tp, zero3, recompute",
         DP_TP | {"plan": MLP} | zero(3) | {"recompute": {"modules": ["drop"]}}),
    ):  # fmt: skip
        for optimizer in BOTH:
            yield f"{name} dropping {optimizer}", ranks, EXACT | config, "dropping", optimizer
    # Over tp alone nobody need ask for it.
    config = {"seed": 1000, "plan": MLP} | TP
    yield "tp, dropping local", 2, config, "dropping", "sgd"


def test_dropping_matters():
    assert abs(oracle("dropping")[-1] - oracle("mlp")[-1]) > 1e-2


CASES = {
    f"{name} on {ranks}": (ranks, *rest)
    for name, ranks, *rest in (*cases(), *others(), *dropping())
}


# Trained in CI where the model is built without memory.
META = (
    "dp conv adamw on 2",
    "zero3 transformer adamw on 2",
    "dp x tp, zero3, accumulate on 4",
    "tp 6 rules transformer adamw on 4",
    "pp x dp, zero1 on 4",
    "zero3 in copies on 4",
)


def traits(config, model, optimizer, max_norm=None):
    """Return what a case has that may go wrong together with another such thing."""
    given = {name: value for name, value in config.items() if name not in ("mesh", "plan", "seed")}
    found = {model, optimizer, *config.get("mesh", ["dp"]), *given}
    found |= {f"{key} {value}" for key, value in config.get("optimizer", {}).items()}
    found |= {f"{key} {value}" for key, value in config.get("pipeline", {}).items()}
    found |= {str(rule.get("style", "dims")) for rule in config.get("plan", [])}
    found |= {f"saved {what}" for what in config.get("recompute", {}).get("save", [])}
    return found | ({"clipped"} if max_norm else set())


def pairs(name):
    """Return the ranks, the axes and the pairs of traits that a case has."""
    ranks, config, *rest = CASES[name]
    axes = tuple(config.get("mesh", ["dp"]))
    return {ranks, axes, *itertools.combinations(sorted(traits(config, *rest)), 2)}


def at_night():
    """Return the cases that CI need not have: each pair they have is in others.

    Those with most ranks are left out first, until there are no more than were promised.
    """
    left = Counter(itertools.chain(*(pairs(name) for name in CASES if name not in META)))
    found = [*META]
    for name in sorted(CASES.keys() - META, key=lambda name: (-CASES[name][0], name)):
        if len(CASES) - len(found) > PROMISED and all(left[pair] > 1 for pair in pairs(name)):
            left -= Counter(pairs(name))
            found.append(name)
    return found


AT_NIGHT = frozenset(at_night())
ROWS = [pytest.param(n, marks=[pytest.mark.slow] * (n in AT_NIGHT)) for n in CASES]


def test_every_pair_is_in_ci():
    assert set().union(*map(pairs, CASES.keys() - AT_NIGHT)) == set().union(*map(pairs, CASES))


@pytest.fixture(scope="module")
def curves():
    return Curves(CASES, apart=AT_NIGHT)


@pytest.mark.timeout(600)  # the first of them trains all for its number of ranks
@pytest.mark.parametrize("name", ROWS)
def test_equals_one_process(curves, name):
    assert_equal_curves(curves[name], oracle(*CASES[name][2:]))


@pytest.mark.parametrize("name", META)
@pytest.mark.few(3)
def test_a_model_built_without_memory_equals_it_too(name):
    ranks, *arguments = CASES[name]
    found = run_warm(train_built_on_meta, ranks, *arguments)

    assert_equal_curves(found, oracle(*arguments[1:]))


def test_there_are_as_many_as_promised():
    in_ci = CASES.keys() - AT_NIGHT
    assert CASES.keys() > AT_NIGHT
    assert len(in_ci) >= PROMISED
    assert {CASES[name][0] for name in in_ci} == {1, 2, 4, 8}


def test_clipping_matters():
    assert abs(oracle("mlp", "sgd", 0.1)[1] - oracle("mlp", "sgd")[1]) > 1e-3
