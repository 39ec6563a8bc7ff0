"""Tables on the host in stages of a pipeline: curves, checkpoints, weights of several stages."""

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

ROWS, WIDTH, IDS, SAMPLES, STEPS = 24, 6, 4, 8, 4
PLACE = {"place": {"*table": "cpu"}}


class Words(nn.Module):
    """A table for the first layer, and another one for the last."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **options)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.late_table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.table(ids).mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x * self.late_table(ids))


class Twice(nn.Module):
    """Looks rows of one table up in the first stage and in the last."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **options)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.table(ids).mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x * self.table(ids).sum(1))


class Same(Twice):
    """Has the table under a name of its own in the last stage."""

    def __init__(self):
        super().__init__()
        self.late_table = nn.Embedding(ROWS, WIDTH)
        self.late_table.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids).mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x * self.late_table(ids).sum(1))


class Scores(Twice):
    """Multiplies with the whole table in the last stage."""

    def forward(self, ids):
        x = self.table(ids).mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return functional.linear(x, self.table.weight)


MODELS = {
    "words": Words,
    "sparse": lambda: Words(sparse=True),
    "twice": Twice,
    "twice, sparse": lambda: Twice(sparse=True),
    "same": Same,
    "scores": Scores,
}
STAGES = {"table": 0, "layers.[01]": 0, "layers.[23]": 1, "late_table": 1, "head": 1}
SEGMENTS = {
    "table": [0, 0],
    "layers.0": [0, 0],
    "layers.1": [1, 0],
    "layers.2": [0, 1],
    "layers.3": [1, 1],
    "late_table": [1, 1],
    "head": [1, 1],
}


def pipeline(schedule="1f1b", stages=STAGES, **axes):
    named = {"stages": stages, "schedule": schedule, "microbatches": 2}
    return {"mesh": {"pp": 2, **axes}, "pipeline": named}


PP, EVEN = pipeline(), pipeline(stages="auto")
CASES = {
    "pp": (2, PP, "words", None),
    "pp x dp, zero 1": (
        4,
        pipeline(dp=2) | {"optimizer": {"zero": 1}},
        "words",
        0.1,
    ),
    "sparse, zero 2": (4, pipeline(dp=2) | {"optimizer": {"zero": 2}}, "sparse", None),
    "interleaved": (2, pipeline("interleaved", SEGMENTS), "words", None),
    "zero bubble": (2, pipeline("interleaved_zb", SEGMENTS), "words", 0.1),
    "recompute": (2, PP | {"recompute": {"modules": ["table", "late_table"]}}, "words", None),
    "pp x tp": (
        4,
        pipeline(tp=2)
        | {
            "plan": [
                {"match": "layers.[02]", "params": {"weight": ["tp", None]}, "out": [None, None]}
            ]
        },
        "words",
        None,
    ),
    "twice": (2, EVEN, "twice", 0.1),
    "same": (2, PP, "same", 0.1),
    "twice, dp": (4, pipeline(stages="auto", dp=2), "twice", None),
}
QUICK = ("pp x dp, zero 1", "same")


def build(name, seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def batches():
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS, (SAMPLES, IDS), generator=draw)
        yield ids, ids[:, 0] % 3


def optimizer_of(name, model):
    if "sparse" in name:
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def learned(config, name, max_norm=None):
    """Return losses, and what the whole model ends with on the first rank."""
    rt = msrun.init(config)
    model = rt.shard(build(name), sample=[next(batches())[0]])
    update = rt.optimizer(optimizer_of(name, model))
    losses = [step(rt, model, update, pair, max_norm) for pair in batches()]
    return losses, rt.state_dict(model)


def step(rt, model, update, pair, max_norm=None):
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    part = [tensor.chunk(count)[share] for tensor in pair]
    return rt.step(model, update, functional.cross_entropy, *part, max_norm=max_norm).item()


def alone(name, max_norm=None):
    """Return losses and model of plain torch."""
    model = build(name)
    update, losses = optimizer_of(name, model), []
    for ids, target in batches():
        update.zero_grad()
        loss = functional.cross_entropy(model(ids), target)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_tables_of_stages_learn_what_one_process_does(case):
    ranks, config, name, max_norm = CASES[case]
    losses, model = alone(name, max_norm)

    found = run_warm(learned, ranks, PLACE | config, name, max_norm)

    for each, _ in found:
        assert each == pytest.approx(losses, abs=1e-6)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(found[0][1][key], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        (
            EVEN,
            "twice, sparse",
            (
                "parallel.pipeline.stages: table.weight has sparse gradients, and is a weight of "
                "several stages"
            ),
        ),
        (
            pipeline(stages={key: at for key, at in STAGES.items() if key != "late_table"}),
            "scores",
            (
                "parallel.place: table.weight is used by stage 1 without table, which computes "
                "with the whole table"
            ),
        ),
    ],
)
def test_tables_that_stages_cannot_share_are_refused(config, name, said):
    assert run_warm(refused, 2, PLACE | config, name) == [said] * 2


def refused(config, name):
    rt = msrun.init(config)
    with pytest.raises(ModelError) as found:
        rt.shard(build(name), sample=[next(batches())[0]])
    return found.value.message


# What a checkpoint is saved under, and what goes on from it.
LAYOUTS = {
    "one": (1, {}),
    "one, place": (1, PLACE),
    "dp, zero 3": (2, {"optimizer": {"zero": 3}}),
    "dp, place, zero 1": (2, PLACE | {"optimizer": {"zero": 1}}),
    "pp": (2, PP),
    "pp, place": (2, PLACE | PP),
    "pp x dp, place, zero 2": (4, PLACE | pipeline(dp=2) | {"optimizer": {"zero": 2}}),
}


def first_steps(config, path):
    rt = msrun.init(config)
    model = rt.shard(build("words"), sample=[next(batches())[0]])
    update = rt.optimizer(optimizer_of("words", model))
    for pair in [*batches()][:2]:
        step(rt, model, update, pair)
    rt.save(model, update, step=2, path=path)


def later_steps(config, path):
    rt = msrun.init(config)
    model = rt.shard(build("words", seed=4), sample=[next(batches())[0]])
    update = rt.optimizer(optimizer_of("words", model))
    assert rt.load(model, update, path=path) == 2
    return [step(rt, model, update, pair) for pair in [*batches()][2:]]


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("pp, place", ["one", "pp", "dp, zero 3", "pp x dp, place, zero 2"]),
        ("pp x dp, place, zero 2", ["one, place", "dp, place, zero 1"]),
        pytest.param("pp", ["pp, place"], marks=pytest.mark.slow),
        pytest.param("dp, place, zero 1", ["pp, place"], marks=pytest.mark.slow),
        pytest.param("one", ["pp x dp, place, zero 2"], marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_tables_elsewhere(tmp_path, source, targets):
    expected = alone("words")[0][2:]
    run_warm(first_steps, *LAYOUTS[source], tmp_path)

    for target in targets:
        for losses in run_warm(later_steps, *LAYOUTS[target], tmp_path):
            assert losses == pytest.approx(expected, abs=1e-6), target
