"""Tables whose rows ranks divide unevenly: what one process computes, and the collectives."""

import copy
import pickle

import pytest
import torch
from field_models import (
    HALVES,
    MODELS,
    ROWS,
    RULE,
    WIDTH,
    batches,
    build,
    counts,
    each_worst,
    first_step,
    later_steps,
)
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ConfigError, ModelError, UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

TP4 = {"mesh": {"tp": 4}, "plan": [RULE]}
TP2 = {"mesh": {"tp": 2}, "plan": [HALVES]}
DP_TP = {"mesh": {"dp": 2, "tp": 2}, "plan": [HALVES]}
LAYERS = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]
PIPELINE = {"stages": {"table": 0, "up": 0, "down": 1}, "microbatches": 2}


def zero(level, **options):
    return {"optimizer": {"zero": level, **options}}


QUICK = {
    "alone": (TP4, "fields", 0.1),
    "sum": (TP4, "sum"),
    "mean, padding": (TP4, "mean, padding"),
    "dp, zero3, accumulate": (DP_TP | zero(3) | {"accumulate": 2}, "sparse"),
}
GRID = {
    **{f"alone, {name}": (TP4, name) for name in MODELS},
    **{f"dp, {name}": (DP_TP, name) for name in MODELS if name != "by frequency"},
    "clipping": (DP_TP, "fields", 0.1),
    "zero1": (DP_TP | zero(1), "padding"),
    "zero2, clipping": (DP_TP | zero(2), "fields", 0.1),
    "zero3": (DP_TP | zero(3), "fields"),
    "zero3, offload": (DP_TP | zero(3, offload=True), "fields"),
    "zero3, accumulate, sparse": (DP_TP | zero(3) | {"accumulate": 2}, "sparse"),
    "accumulate, padding": (DP_TP | {"accumulate": 2}, "padding"),
    "layers": (DP_TP | {"plan": [HALVES, *LAYERS]}, "fields"),
    "layers, zero1": (DP_TP | {"plan": [HALVES, *LAYERS]} | zero(1), "fields"),
    "whole": (DP_TP | {"plan": [HALVES | {"out": ["..."]}]}, "fields"),
    "whole bags": (TP4 | {"plan": [RULE | {"out": ["..."]}]}, "mean, padding"),
    "by field": (TP4 | {"plan": [RULE | {"out": [None, "tp", None]}]}, "fields"),
    "recompute": (DP_TP | {"recompute": {"modules": ["table"]}}, "fields"),
    "pipeline": (DP_TP | {"mesh": {"pp": 2, "tp": 2}, "pipeline": PIPELINE}, "fields"),
    "fused": (DP_TP | {"reduce": {"fuse": "module"}}, "fields"),
    "MindSpore's word": (
        {"mesh": {"tp": 4}, "plan": [{"match": "table", "manual_split": list(ROWS)}]},
        "fields",
    ),
}


def assert_small(found):
    assert all(gap <= 1e-6 for of_rank in found for gap in of_rank.values()), found


def test_models_learn_what_one_process_does():
    assert_small(run_warm(each_worst, 4, QUICK))


@pytest.mark.slow
def test_models_learn_what_one_process_does_under_everything_else():
    assert_small(run_warm(each_worst, 4, GRID, timeout=300))


def test_a_lookup_has_one_all_to_all_and_each_rank_its_rows():
    found = run_warm(counts, 4, TP4)

    for rank, (by_field, forward, rows, shape) in enumerate(found):
        assert by_field == {}
        assert forward == {"all_to_all_single": 1, "all_gather_into_tensor": 1}  # of the output
        assert (rows, shape) == (ROWS[rank], (8, 3))


LAYOUTS = {
    "one": (1, {}),
    "tp4": (4, TP4),
    "dp x tp, zero": (4, DP_TP | zero(3)),
    "colwise": (2, {"mesh": {"tp": 2}, "plan": [{"match": "table", "style": "embedding"}]}),
    "zero": (2, zero(2)),
}


@pytest.mark.slow
def test_checkpoints_go_to_one_table_and_back(tmp_path):
    found = {}
    for saver, (ranks, config) in LAYOUTS.items():
        path = str(tmp_path / saver)
        run_warm(first_step, ranks, config, path)
        for loader, (readers, other) in LAYOUTS.items():
            if "tp4" in (saver, loader) or "dp x tp, zero" in (saver, loader):
                found[saver, loader] = run_warm(later_steps, readers, other, path)[0]
    expected = run_warm(later_steps, 1, {}, str(tmp_path / "one"))[0]

    assert found == dict.fromkeys(found, pytest.approx(expected, abs=2e-6))


PARTS = (
    "Fields.state_dict() has the parts of this rank alone, and a file of it would lack those of "
    "the others"
)
KINDS = (
    "Adafactor has table.weight, of which this rank has some rows alone (choose ASGD, Adadelta, "
    "Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD, SparseAdam, or a class made "
    "of one)"
)


def weights(config, folder):
    """Save, load and copy what `rt` and torch save; return what was refused and what differed."""
    rt = msrun.init(config)
    model = rt.shard(build("fields"))
    before = model.table.weight.detach().clone()
    rt.save_pretrained(model, folder)
    whole = rt.state_dict(model)
    with torch.no_grad():
        model.table.weight.zero_()
    rt.load_pretrained(model, folder)
    is_same = [torch.equal(model.table.weight.detach(), before)]
    with torch.no_grad():
        model.table.weight.zero_()
    model.load_state_dict(build("fields").state_dict())
    is_same.append(torch.equal(model.table.weight.detach(), before))
    model.load_state_dict(model.state_dict())
    is_same.append(torch.equal(model.table.weight.detach(), before))
    if rt.is_main:
        is_same.append(torch.equal(whole["table.weight"], build("fields").table.weight))
    said = []
    for refused in (
        lambda: pickle.dumps(model.state_dict()),
        lambda: copy.deepcopy(model),
        lambda: model.table.weight @ torch.ones(WIDTH),
        lambda: model.table.weight.T,
        lambda: model.table.weight.norm().item(),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: rt.optimizer(torch.optim.Adafactor(model.parameters())),
        lambda: rt.step(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda y, t: functional.cross_entropy(y, t) + model.table.weight.square().sum(),
            *batches()[0],
        ),
    ):
        for param in model.parameters():
            param.grad = torch.ones_like(param.detach())
        try:
            refused()
            said.append("done")
        except (ModelError, UsageError) as error:
            said.append(error.message)
    return is_same, said


def test_weights_are_those_of_one_table_and_parts_are_refused(tmp_path):
    found = run_warm(weights, 2, TP2, str(tmp_path / "weights"))

    for is_same, said in found:
        assert all(is_same)
        assert [text.partition(":")[0] for text in said] == [
            PARTS,
            "a model of rt.shard cannot be copied under parallel.plan",
            "table.weight",
            "table.weight",
            "table.weight",
            "table.weight",
            KINDS,
            "table.weight",
        ]


def refusals():
    """Return what each configuration and model is refused with, in `rt.shard` or its first call."""
    found = {}
    for name, (config, make, ids) in REFUSED.items():
        try:
            rt = msrun.init(config)
            model = rt.shard(make())
            model(ids)
            found[name] = "done"
        except UsageError as error:
            found[name] = error.message
        msrun.init().close()
    return found


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


def fields():
    return build("fields")


def limited():
    return nn.ModuleDict({"table": nn.Embedding(64, 5, max_norm=1.0)})


def counted_bags():
    bags = nn.EmbeddingBag(64, 5, mode="sum", scale_grad_by_freq=True)
    return nn.ModuleDict({"table": bags})


def shifted():
    model = build("fields")
    model.table = Shifted(64, WIDTH)
    return model


IDS = batches()[0][0]
REFUSED = {
    "numbers": (TP2 | {"plan": [RULE]}, fields, IDS),
    "sum": (TP2 | {"plan": [HALVES | {"rows": [30, 30]}]}, fields, IDS),
    "kind": (TP2 | {"plan": [HALVES | {"match": "up"}]}, fields, IDS),
    "tied": (TP2, Tied, IDS),
    "forward": (TP2, shifted, IDS),
    "excluded": (TP2 | {"reduce": {"exclude": ["table.weight"]}}, fields, IDS),
    "strategy": (
        TP2 | {"checkpoint": {"dir": "d", "strategy": "s.json"}},
        fields,
        IDS,
    ),
    "verify": (TP2 | {"verify": 1}, fields, IDS),
    "max norm": (TP2, limited, IDS),
    "counted bags": (TP2, counted_bags, IDS),
    "id": (TP2, fields, IDS.flip(1)),
    "fields": (TP2, fields, IDS[:, :3]),
}


SAID = {
    "numbers": "parallel.plan[0].rows: [10, 20, 30, 4] has 4 numbers, and tp has 2 ranks "
    "(choose one number for each rank)",
    "sum": "parallel.plan[0].rows: 30 + 30 is 60, and table.weight has 64 rows",
    "kind": "parallel.plan[0].rows: are for Embedding or EmbeddingBag, not up (Linear)",
    "tied": "parallel.plan[0].rows: table.weight is head.weight too, which needs the whole table",
    "forward": "parallel.plan[0].rows: table (Shifted) has a forward of its own, and rows are "
    "for those of nn.Embedding and nn.EmbeddingBag",
    "excluded": "parallel.reduce.exclude: each rank has others of the rows of table "
    "(parallel.plan[0].rows)",
    "strategy": "parallel.checkpoint.strategy: a strategy file has no words for the rows of "
    "table (parallel.plan[0].rows)",
    "verify": "parallel.verify: one process has no part of the rows of table "
    "(parallel.plan[0].rows)",
    "max norm": "table: max_norm writes the rows that a rank reads, and other ranks keep them",
    "counted bags": "parallel.plan[0].rows: table scales gradients of bags by how often a row is "
    "read, for which torch has other counts than ranks with rows",
    "id": "table: id 60 of field 0 is not of its rows, 0 to 29",
    "fields": "table: ids of shape (8, 3) have no number of fields, in their last dim, that 2 "
    "ranks divide",
}


def test_what_rows_cannot_be_is_refused_by_name():
    found, other = run_warm(refusals, 2)

    assert found == other == SAID


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"rows": [0, 64]}, "rows: [0, 64] must have a number from 1 for each rank of axis"),
        ({"rows": [64], "style": "embedding"}, "style: cannot be combined with rows"),
        ({"manual_split": "all"}, "manual_split: all is no list of numbers of rows"),
        ({"manual_split": [64], "rows": [64]}, "manual_split: is rows, which the rule has too"),
    ],
)
def test_rules_with_rows_are_checked(rule, said):
    with pytest.raises(ConfigError) as refused:
        msrun.init({"plan": [{"match": "table", **rule}]})

    assert refused.value.message == f"parallel.plan[0].{said}"


def test_one_rank_has_the_table_itself():
    rt = msrun.init({"mesh": {"tp": -1}, "plan": [RULE]})
    model = build("fields")

    assert rt.shard(model).table.weight.shape == (64, WIDTH)
    assert type(model.table.weight) is nn.Parameter
    rt.close()
