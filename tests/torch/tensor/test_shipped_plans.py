"""Plans that ship, on models of transformers: as one process, no head is gathered."""

import copy
import warnings

import pytest
import torch
from plan_models import MODELS, build, data
from ranks import Counted, run_warm

import msrun
from msrun.parallel.local import full_tensor

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

CONFIGS = {
    "tp 2": (2, {"mesh": {"tp": 2}}),
    "recompute": (
        2,
        {
            "mesh": {"tp": 2},
            "recompute": {"modules": []},  # of the layers
        },
    ),
    "dp 2 x tp 2": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "zero 1": (4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"zero": 1}}),
    "zero 3": (4, {"mesh": {"dp": 2, "tp": 2}, "optimizer": {"zero": 3}}),
}
# The layers of the list of blocks that each model has.
BLOCKS = {"bert": "*layer.[01]", "distilbert": "*layer.[01]", "gpt2": "*h.[01]"}
BLOCKS |= {"t5": "*block.[01]"}


def difference(name, config, dropout=0.0):
    """Return how far losses and weights are off, collectives of a step, and warnings of msrun."""
    model = build(name, dropout)
    whole = copy.deepcopy(model)
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    rt = msrun.init(config)
    worst = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rt.shard(model)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
        for batch in data(name):
            torch.manual_seed(11)
            plain.zero_grad()
            expected = whole(**batch).loss
            expected.backward()
            plain.step()
            torch.manual_seed(11)
            part = {key: tensor.chunk(count)[share] for key, tensor in batch.items()}
            with Counted() as counts:
                loss = rt.step(model, update, part)
            worst = max(worst, abs(loss.item() - expected.item()))
    weights = dict(whole.named_parameters())
    for param_name, param in model.named_parameters():
        there = weights[param_name]
        worst = max(worst, (full_tensor(param.detach()) - there).abs().max().item())
    said = sorted({str(w.message) for w in caught if "msrun" in str(w.message)})
    return worst, dict(counts.calls), said


def with_plan(name, config, plan):
    config = {**config, "plan": plan}
    if "recompute" in config:
        config["recompute"] = {"modules": [BLOCKS.get(name, "*layers.[01]")]}
    return config


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_auto_tp_equals_one_process_and_nothing_is_computed_whole(name, config):
    ranks, options = CONFIGS[config]
    for worst, _, said in run_warm(difference, ranks, name, with_plan(name, options, "auto_tp")):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "whisper", "distilbert"])
def test_dropout_of_heads_is_that_of_one_process(name):
    config = {"mesh": {"tp": 2}, "plan": "auto_tp"}
    for worst, calls, said in run_warm(difference, 2, name, config, 0.1):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce"}


# Two layers: of each, two all-reduces forward and two backward.  One of the embedding, three of
# the loss of sharded logits, and one of its value.
LAYERS, VOCABULARY = 2 * 4, 1 + 3 + 1
CALLS = {
    "llama": LAYERS + VOCABULARY,
    "qwen2": LAYERS + VOCABULARY,
    "qwen3": LAYERS + VOCABULARY + 2 * 2,  # gradients of two norms of heads in each layer
    "mistral": LAYERS + VOCABULARY,
    "gemma2": LAYERS + VOCABULARY,
    "mixtral": LAYERS + VOCABULARY + 2,  # gradients of the router in each layer
    "gpt2": LAYERS + VOCABULARY,
    "bert": LAYERS + VOCABULARY,
    "distilbert": LAYERS + VOCABULARY,
    "vit": LAYERS,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_costs_what_megatrons_does(name):
    config = {"mesh": {"tp": 2}, "plan": "auto_tp"}
    for _, calls, _ in run_warm(difference, 2, name, config):
        assert calls == {"all_reduce": CALLS[name]}


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_of_a_family_equals_one_process(name):
    config = {"mesh": {"tp": 2}, "plan": name}
    for worst, calls, said in run_warm(difference, 2, name, config):
        assert worst == pytest.approx(0, abs=1e-6)
        assert said == []
        assert set(calls) == {"all_reduce"}
