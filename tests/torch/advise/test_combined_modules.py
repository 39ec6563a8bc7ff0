"""A search divides operators beside experts or sequences, and they train as one process."""

import pytest
import torch
from ranks import run_ranks
from test_whole_modules import AUTO, check, searched, train
from whole_models import MODELS, batch

from msrun.parallel.advise.combined import combined_pass, whole_work
from msrun.parallel.advise.estimate import Estimator
from msrun.parallel.advise.techniques import Technique
from msrun.parallel.search.cost.topology import preset

pytestmark = [
    pytest.mark.torch,
    pytest.mark.own_process,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

BOTH, LONG = ("both", 4, 16), ("long", 2, 32)
EXPERTS = {"match": "*.experts", "style": "experts", "axis": "ep"}
CONTEXT = {"match": "*", "style": "context", "kind": "all_to_all"}
MIB = 2.0**20


def test_experts_of_a_named_mesh_are_shared_beside_the_operators(tmp_path):
    plan = searched(BOTH, tmp_path, 4, mesh={"dp": 1, "ep": 2, "tp": 2})
    assert plan.config == {
        "mesh": {"dp": 1, "ep": 2, "tp": 2},
        "plan": [EXPERTS, "auto_tp"],
    }
    assert plan.runs_on == "ep 2 + tp 2"
    assert sum(plan.costs.values()) == pytest.approx(plan.seconds)
    assert plan.costs["activations over tp"] > 0


@pytest.mark.slow
def test_sequences_too_large_for_either_alone_are_shared_beside_the_operators(tmp_path):
    plan = searched(("long", 1, 2048), tmp_path, 4, memory=18.2 * MIB)
    assert plan.memory <= 18.2 * MIB
    assert plan.config["mesh"] == {"dp": 1, "cp": 2, "tp": 2}
    assert plan.config["plan"] == ["auto_tp", CONTEXT]
    (alone,) = [line for line in plan.rejected if line.startswith("cp 4 ")]
    assert alone.endswith(", too large")
    assert plan.rejected[0].startswith("plan of operators on tp 4: ")


def test_a_model_whose_operators_no_plan_divides_is_refused_in_the_report(tmp_path):
    plan = searched(("text of 3 heads", 1, 64), tmp_path, 4, mesh={"dp": 1, "cp": 2, "tp": 2})
    assert not plan.config
    (line,) = [line for line in plan.rejected if line.startswith("cp 2 + tp 2: ")]
    assert line == ("cp 2 + tp 2: parallel.plan: auto_tp finds nothing in Text to shard over tp 2")


@pytest.mark.slow
def test_a_combination_computes_and_sends_what_its_shards_do():
    """Two layers of a pair: a sum of the tokens of a rank, forward and backward; half the work."""
    with torch.device("meta"):
        net = MODELS["long"]()
    sample = [x.to("meta") for x in batch(1, 256)]
    one = Technique(cp=2, tp=2, kind="ring")
    run, again = (combined_pass(net, sample, [], one, ()) for _ in range(2))
    cpu = preset("cpu")
    assert run.peaks[:2] == again.peaks[:2]  # whatever DTensor knew before
    (wire,) = cpu.wires((2,))
    sums = 2 * 2 * 3  # attention and pair, forward and backward, in three blocks
    nbytes = 128 * 64 * 4
    assert run.work.sent(wire) == pytest.approx(sums * (2 * 1.5e-4 + nbytes / 1e9))
    share = run.work.computed(cpu) / whole_work(net, sample, []).computed(cpu)
    assert 0.25 < share < 0.5  # parts of tokens, and of most operators


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "mesh", "found"),
    [
        (BOTH, {"dp": 1, "ep": 2, "tp": 2}, ({"dp": 2, "tp": 2}, 2)),
        (LONG, {"dp": 1, "cp": 2, "tp": 2}, ({"dp": 1, "cp": 2, "tp": 2}, 0)),
    ],
)
def test_combinations_learn_what_one_process_does(case, mesh, found):
    memory = {"ep": "64MiB", "cp": "12MiB"}[[*mesh][1]]
    check(case, {**AUTO, "mesh": mesh, "memory": memory}, 4, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config", "found"),
    [
        (
            BOTH,
            {
                "mesh": {"dp": 1, "ep": 2, "tp": 2},
                "optimizer": {"zero": 3},
                "recompute": {"modules": ["layers.*", "wide.*"]},
                "accumulate": 2,
            },
            ({"dp": 2, "tp": 2}, 2),
        ),
        (("long", 1, 2048), {"memory": "37273KiB"}, ({"dp": 1, "cp": 2, "tp": 2}, 0)),
    ],
)
def test_found_combinations_learn_what_one_process_does(case, config, found):
    check(case, {**AUTO, **config}, 4, found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_to_all", "ring"])
def test_blocks_recompute_their_attention_of_all_tokens_on_shards_of_heads(kind):
    """The recomputation gave attention the tensors of all ranks of tp."""
    config = {
        "mesh": {"dp": 1, "cp": 2, "tp": 2},
        "plan": ["auto_tp", {**CONTEXT, "kind": kind}],
        "recompute": {"modules": ["blocks.*"]},
    }
    ((want, _, _, _),) = run_ranks(train, 1, LONG, {"mesh": {"dp": 1}})
    for losses, *_ in run_ranks(train, 4, LONG, config):
        assert losses == pytest.approx(want, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "one"),
    [
        (BOTH, Technique(ep=2, tp=2)),
        (BOTH, Technique(ep=2, tp=2, zero=1)),
        (("long", 1, 1024), Technique(cp=2, tp=2, kind="all_to_all")),
        (("long", 1, 1024), Technique(cp=2, tp=2, kind="ring", zero=1)),
        (("long", 1, 1024), Technique(cp=2, tp=2, kind="all_to_all", recompute=True)),
    ],
)
def test_ranks_of_combinations_take_no_more_than_predicted(case, one):
    name, samples, tokens = case
    with torch.device("meta"):
        net = MODELS[name]()
    sample = [x.to("meta") for x in batch(samples, tokens)]
    estimator = Estimator(net, sample, batch=samples, world=4, states=2, is_host=True)
    predicted, _ = estimator.nbytes(one)
    for *_, peak in run_ranks(train, 4, case, estimator.config(one), torch.float32):
        assert 0.5 * predicted <= peak <= 1.05 * predicted, (peak, predicted)
