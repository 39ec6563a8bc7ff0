"""MindSpore's layouts and strategies on meshes with `dp`: equal to one process, piece by piece."""

import pytest
import torch
from ranks import Counted, Curves, assert_equal_curves, build, oracle, run_warm

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    # Of a batch that ranks divide further than `dp` does.
    pytest.mark.filterwarnings("ignore:msrun. cross_entropy is computed whole on every rank"),
]

GRID = {"dp": 2, "tp": 2}
TWO_HALVES = {"device_matrix": [2, 2, 2], "alias_name": ["dp", "sp", "interleaved_parallel"]}


def halves(match, params, inputs, out, **changes):
    """Return a rule whose module computes its part of the batch in two halves."""
    return {
        "match": match,
        "layout": {**TWO_HALVES, "params": params, "in": inputs, "out": out, **changes},
    }


BATCH_HALF = ["dp", "interleaved_parallel"]
UP = halves(
    "fc1", {"weight": ["sp", "None"], "bias": ["sp"]}, [BATCH_HALF, "None"], [BATCH_HALF, "sp"]
)
DOWN = halves("fc2", {"weight": ["None", "sp"]}, [BATCH_HALF, "sp"], [BATCH_HALF, "None"])

# As MindSpore's documents print them: strategies that divide the batch too.
CASES = {
    "rows of the batch and columns": (
        4,
        {
            "mesh": GRID,
            "plan": [
                {"match": "fc1", "strategy": [[2, 1], [2, 1]]},
                {"match": "fc2", "strategy": [[2, 2], [1, 2]]},
                {"match": "fc3", "strategy": [[4, 1], [1, 1]]},
            ],
        },
    ),
    "the batch alone": (4, {"plan": [{"match": "fc*", "strategy": [[4, 1], [1, 1]]}]}),
    "dp named": (
        4,
        {
            "mesh": GRID,
            "plan": [
                {
                    "match": "fc1",
                    "params": {"weight": ["tp", None], "bias": ["tp"]},
                    "in": ["dp", None],
                    "out": ["dp", "tp"],
                },
                {
                    "match": "fc2",
                    "params": {"weight": [None, "tp"]},
                    "in": ["dp", "tp"],
                    "out": ["dp", None],
                },
            ],
        },
    ),
    "halves": (4, {"mesh": {"dp": 2, "sp": 2}, "plan": [UP, DOWN]}),
    "halves of micro-batches with ZeRO": (
        4,
        {
            "mesh": {"dp": 2, "sp": 2},
            "plan": [UP, DOWN],
            "optimizer": {"zero": 3},
            "accumulate": 2,
            "recompute": {"modules": ["fc2"]},
        },
    ),
    "halves of a shard of the batch": (
        4,
        {
            "mesh": {"sp": 2, "mp": 2},
            "plan": [
                {
                    "match": "fc2",
                    "layout": {
                        "device_matrix": [2, 2, 2],
                        "alias_name": ["a", "b", "interleaved_parallel"],
                        "rank_list": [0, 2, 1, 3],
                        "in": [["b", "interleaved_parallel"], "a"],
                        "params": {"weight": ["None", "a"]},
                        "out": [["b", "interleaved_parallel"], "None"],
                    },
                }
            ],
        },
    ),
}
# Others have what they show.
AT_NIGHT = ("the batch alone", "halves")
CURVES = Curves(CASES, apart=AT_NIGHT)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in AT_NIGHT)) for name in CASES]
)
def test_training_equals_one_process(name):
    assert_equal_curves(CURVES[name], oracle("mlp"))


def exchanged(rule):
    """Return the collectives of a forward and a backward, and the bytes of one."""
    rt = msrun.init({"mesh": {"dp": 1, "sp": 2}, "plan": [rule]})
    model = rt.shard(build("mlp"))
    with Counted() as counted:
        model(torch.ones(8, 16)).sum().backward()
    return counted.calls["all_reduce"], counted.bytes["all_reduce"]


def test_halves_send_twice_as_often_half_as_much():
    whole = {"match": "fc2", "params": {"weight": [None, "sp"]}, "in": [None, "sp"], "out": ["..."]}
    cut = halves(
        "fc2",
        {"weight": ["None", "sp"]},
        ["interleaved_parallel", "sp"],
        ["interleaved_parallel", "None"],
        device_matrix=[2, 2],
        alias_name=["sp", "interleaved_parallel"],
    )

    (count, size), *_ = run_warm(exchanged, 2, whole)
    assert run_warm(exchanged, 2, cut) == 2 * [(2 * count, size)]


def parts(orders):
    """Return the rows of a column that this rank holds under each list of ranks."""
    found = []
    for ranks in orders:
        layout = {
            "device_matrix": [2, 2],
            "alias_name": ["a", "b"],
            "rank_list": ranks,
            "params": {"weight": [["a", "b"], "None"]},
        }
        rt = msrun.init({"mesh": {"x": 2, "y": 2}, "plan": [{"match": "0", "layout": layout}]})
        model = torch.nn.Sequential(torch.nn.Linear(1, 4, bias=False))
        model[0].weight.data.copy_(torch.arange(4.0).reshape(4, 1))
        try:
            found.append(rt.shard(model)[0].weight.to_local().item())
        finally:
            rt.close()
    return found


def test_a_list_of_ranks_says_who_has_which_part():
    orders = [[0, 1, 2, 3], [0, 2, 1, 3]]

    for rank, found in enumerate(run_warm(parts, 4, orders)):
        assert found == [ranks.index(rank) for ranks in orders]


class Centered(torch.nn.Linear):
    """Computes over all samples."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class ReLU(torch.nn.Module):
    """Has the name of an activation of torch, and computes over all samples."""

    def forward(self, x):
        return (x - x.mean(0)).relu()


def changed(name):
    """Return a model whose module `name` is none that computes each sample alone."""
    if "conv" in name:
        return build("conv")
    model = build("mlp")
    model.centered, model.act = Centered(16, 16), ReLU()
    model.spectral = torch.nn.utils.spectral_norm(torch.nn.Linear(16, 16))
    model.put = torch.nn.Linear(16, 16)
    model.put.forward = lambda x: x - x.mean(0)
    return model


def refused(rule):
    rt = msrun.init({"mesh": {"sp": 2}, "plan": [rule]})
    with pytest.raises(UsageError) as caught:
        rt.shard(changed(rule["match"]))(torch.ones(3, 16))
    return caught.value.message


PIECES = (
    "parallel.plan[0].layout.in: interleaved_parallel runs a module on pieces of its input, and"
)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (
            halves("conv1", {}, ["interleaved_parallel", "None", "None", "None"], None),
            "parallel.plan[0].layout.in: interleaved_parallel is for Linear, Conv1D, LayerNorm, ",
        ),
        (
            halves("fc2", {}, ["interleaved_parallel", "None"], None),
            "parallel.plan[0].layout.in of fc2: dim 0 of 3 on a rank can not be split in 2 pieces",
        ),
        *(
            (halves(name, {}, ["interleaved_parallel", "None"], None), f"{PIECES} {kind} {has}")
            for name, kind, has in (
                ("centered", "Centered", "has a forward of its own"),
                ("act", "ReLU", "has a forward of its own"),
                ("spectral", "Linear", "computes its weight again"),
                ("put", "Linear", "has a forward of its own"),
            )
        ),
    ],
)
def test_what_has_no_halves_is_refused(rule, sentence):
    rule["layout"] |= {"device_matrix": [2, 2], "alias_name": ["sp", "interleaved_parallel"]}

    for found in run_warm(refused, 2, rule):
        assert found.startswith(sentence)
