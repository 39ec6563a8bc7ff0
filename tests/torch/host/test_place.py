"""Tables on the host: the curves of one process, and what has no place there."""

import pytest
from field_models import MODELS, batches, build, one_process, optimizer_of
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

PLACE = {"place": {"tab*": "cpu"}}
LAYERS = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]


def zero(level, **options):
    return {"optimizer": {"zero": level, **options}}


CASES = {
    "alone": (1, PLACE, "fields", 0.1),
    "dp": (2, PLACE, "fields", 0.1),
    "dp, bags": (2, PLACE, "mean, padding", None),
    "zero3, sparse, accumulate": (2, PLACE | zero(3) | {"accumulate": 2}, "sparse", None),
    "zero1, offload": (2, PLACE | zero(1, offload=True), "padding", None),
    "dp x tp": (
        4,
        PLACE | {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS},
        "fields",
        0.1,
    ),
    "recompute": (2, PLACE | {"recompute": {"modules": ["table"]}}, "fields", None),
}


def train(config, name, max_norm):
    rt = msrun.init(config)
    model = rt.shard(build(name))
    update = rt.optimizer(optimizer_of(name, model))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    losses = []
    for pair in batches():
        part = [t.chunk(count)[share] for t in pair]
        loss = rt.step(model, update, functional.cross_entropy, *part, max_norm=max_norm)
        losses.append(loss.item())
    return losses, type(model.table.weight) is nn.Parameter


@pytest.mark.parametrize("case", ["zero3, sparse, accumulate"])
def test_a_table_on_the_host_learns_what_one_process_does(case):
    ranks, config, name, max_norm = CASES[case]

    for losses, is_plain in run_warm(train, ranks, config, name, max_norm):
        assert losses == pytest.approx(one_process(name, max_norm)[0], abs=1e-6)
        assert is_plain


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tables_on_the_host_learn_it_under_everything_else(case):
    ranks, config, name, max_norm = CASES[case]

    for losses, _ in run_warm(train, ranks, config, name, max_norm):
        assert losses == pytest.approx(one_process(name, max_norm)[0], abs=1e-6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 5), nn.Linear(5, 64, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("config", "model", "said"),
    [
        (
            {"place": {"up": "cpu"}},
            MODELS["fields"],
            (
                "parallel.place: up is a Linear, and only tables (Embedding, EmbeddingBag) have a "
                "place on the host"
            ),
        ),
        ({"place": {"none": "cpu"}}, MODELS["fields"], "parallel.place: 'none' matches nothing"),
        (
            PLACE,
            Tied,
            "parallel.place: table.weight is head.weight too, which computes with the whole table",
        ),
        (
            PLACE
            | {
                "mesh": {"dp": 1, "tp": 1},
                "plan": [{"match": "table", "style": "embedding", "axis": "tp"}],
            },
            MODELS["fields"],
            "parallel.place: table has a rule of parallel.plan, whose ranks exchange its rows",
        ),
        (
            PLACE | zero(3, dtype="bfloat16"),
            MODELS["fields"],
            (
                "parallel.place: table stays whole and in its own type, and "
                "parallel.optimizer.dtype is bfloat16 (leave out one of the two)"
            ),
        ),
    ],
)
def test_what_has_no_place_on_the_host_is_refused(config, model, said):
    with msrun.init(config) as rt, pytest.raises(UsageError) as refused:
        rt.shard(model())

    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"verify": 1}, "place: verify compares what is on the device (leave out one of the two)"),
        (
            {"precision": "fp16"},
            "place: precision fp16 looks at gradients on the device (leave out one of the two)",
        ),
    ],
)
def test_what_knows_one_device_alone_is_refused(other, said):
    with pytest.raises(ConfigError) as refused:
        msrun.init(PLACE | other)

    assert refused.value.message == f"parallel.{said}"
