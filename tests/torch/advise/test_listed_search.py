"""A search gives experts of a list ranks of their own, whose loop no trace can follow."""

import pytest
import torch
from ranks import run_ranks
from test_whole_modules import AUTO, check, refused, searched, train
from whole_models import MODELS, batch

from msrun.errors import UsageError
from msrun.parallel.advise.estimate import Estimator
from msrun.parallel.advise.techniques import Technique
from msrun.parallel.auto.outlines import outline_of, trace_outline

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

LISTED = ("listed", 8, 16)
RULE = {"match": "*.experts", "style": "experts", "axis": "ep"}
BESIDE = (
    "parallel.{}: the experts layers.0.experts are a list, and the search places no operators "
    "around a loop that picks rows by their values"
)


def outline(samples=8):
    with torch.device("meta"):
        net, sample = MODELS["listed"](), batch(samples, 16)
    sample = [x.to("meta") for x in sample]
    return outline_of(net, sample), sample


@pytest.mark.slow
def test_a_search_offers_ranks_for_the_experts_of_a_list(tmp_path):
    plan = searched(LISTED, tmp_path, 4)
    assert plan.config == {"mesh": {"dp": 1, "ep": 4}, "plan": [RULE]}
    assert sum(plan.costs.values()) == pytest.approx(plan.seconds)
    assert plan.costs["tokens over ep"] > 0
    (other,) = [line for line in plan.rejected if line.startswith("zero 1")]
    assert other.endswith(" s, slower")


@pytest.mark.slow
def test_experts_that_fit_only_with_zero_get_it(tmp_path):
    plan = searched(LISTED, tmp_path, 4, memory=5.0 * 2**20)
    assert plan.memory <= 5 * 2**20
    assert plan.config["mesh"] == {"dp": 1, "ep": 4}


def test_an_outline_computes_two_experts_of_each_row():
    net, sample = outline()
    program = trace_outline(net, sample).program
    products = 0
    for step in program.steps:
        if (
            step.packet == "linear"
            and 256 in (weight := program.values[step.inputs["weight"]]).shape
        ):
            products += weight.count * program.values[step.outputs[0]].count // weight.shape[0]
    assert products == 3 * 2 * (8 * 16) * 2 * (64 * 256)  # layers, experts, rows, linear layers


@pytest.mark.slow
@pytest.mark.parametrize("config", [AUTO, {**AUTO, "mesh": {"dp": 1, "ep": 2}}])
def test_a_found_technique_learns_what_one_process_does(config):
    check(LISTED, config, 2, ({"dp": 2}, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (AUTO, ({"dp": 4}, 4)),
        ({**AUTO, "mesh": {"dp": 2, "ep": 2}}, ({"dp": 4}, 2)),
        ({**AUTO, "mesh": {"dp": 4}, "memory": "20MiB"}, ({"dp": 4}, 0)),
        (
            {**AUTO, "mesh": {"dp": 2, "ep": 2}, "accumulate": 2, "optimizer": {"zero": 3}},
            ({"dp": 4}, 2),
        ),
    ],
)
def test_found_techniques_of_four_ranks_learn_what_one_process_does(config, mesh):
    check(LISTED, config, 4, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "world"),
    [
        (Technique(ep=4), 4),
        (Technique(ep=2, zero=1), 4),
        (Technique(), 2),
        (Technique(zero=1), 2),
    ],
)
def test_ranks_take_no_more_than_predicted(one, world):
    net, sample = outline()
    estimator = Estimator(net, sample, batch=8, world=world, states=2, is_host=True)
    predicted, _ = estimator.nbytes(one)
    for _, _, _, peak in run_ranks(train, world, LISTED, estimator.config(one), torch.float32):
        assert 0.5 * predicted <= peak <= 1.05 * predicted, (peak, predicted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("plan", {"plan": [{"match": "head", "out": ["dp", None, None]}]}),
        ("search", {"search": "propagation"}),
    ],
)
def test_what_asks_for_a_plan_of_operators_is_refused_in_one_sentence(key, config):
    config = {**AUTO, "mesh": {"dp": 2}, **config}
    sentence = BESIDE.format(key)
    assert run_ranks(refused, 2, LISTED, config) == [sentence] * 2


def test_a_mesh_without_an_axis_for_them_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"finds no technique: ep: not looked at, the mesh"):
        searched(LISTED, tmp_path, 4, mesh={"dp": 2, "tp": 2})
