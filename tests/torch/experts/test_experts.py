"""Experts over an axis of their own train as in one process, and tokens travel by all-to-all."""

import pytest
import torch
from mixtures import RULE, build, difference, texts, token_loss
from ranks import run_warm

import msrun
from msrun.parallel.torch_compat import active_modes

pytestmark = [
    pytest.mark.torch,
    # Of torch, for outputs that are views; nothing writes them.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

STAGES = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
TP = [
    RULE,
    {"match": "*.inner", "style": "colwise", "axis": "tp"},
    {"match": "*.outer", "style": "rowwise", "axis": "tp"},
]
CONFIGS = {
    "ep 2": (2, {"mesh": {"ep": 2}}),
    "ep 4": (4, {"mesh": {"ep": 4}}),
    "dp and ep": (4, {"mesh": {"dp": 2, "ep": 2}}),
    "accumulate and recompute": (
        4,
        {"mesh": {"dp": 2, "ep": 2}, "accumulate": 2, "recompute": {"modules": ["layers.*"]}},
    ),
    "recompute, results of collectives kept": (
        2,
        {"mesh": {"ep": 2}, "recompute": {"modules": ["layers.*"], "save": ["comm"]}},
    ),
    "zero 1": (4, {"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 1}}),
    "zero 2": (4, {"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 2}, "accumulate": 2}),
    "zero 3": (4, {"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 3}}),
    "zero 3, one copy": (2, {"mesh": {"ep": 2}, "optimizer": {"zero": 3}}),
    "zero with a threshold": (
        4,
        {"mesh": {"dp": 2, "ep": 2}, "optimizer": {"zero": 3, "threshold": "2KiB"}},
    ),
    "ep and tp": (4, {"mesh": {"ep": 2, "tp": 2}, "plan": TP}),
    "zero, ep and tp": (4, {"mesh": {"ep": 2, "tp": 2}, "plan": TP, "optimizer": {"zero": 3}}),
    "pp": (
        4,
        {"mesh": {"pp": 2, "ep": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}},
    ),
}
QUICK = ("dp and ep", "accumulate and recompute", "zero 3")


def worst_of(name, config):
    ranks, options = CONFIGS[config]
    found = run_warm(difference, ranks, name, {"plan": [RULE], **options})
    return max(worst for worst, _, _ in found)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", QUICK)
def test_experts_train_as_in_one_process(config):
    assert worst_of("top 2", config) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["top 2", "crowded", "capacity"])
def test_experts_of_all_kinds_train_as_in_one_process(name, config):
    assert worst_of(name, config) < 2e-6


def watched_steps(name, steps):
    """Return the numbers of steps in whose forward something looks at functions of torch."""
    found = []
    with msrun.init({"mesh": {"ep": 2}, "plan": [RULE]}) as rt:
        model = rt.shard(build(name))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model.head.register_forward_pre_hook(lambda *_: found.append(bool(active_modes())))
        for batch in texts(steps):
            part = [tensor.chunk(2)[rt.coordinate["dp"]] for tensor in batch]
            rt.step(model, optimizer, token_loss, *part)
    return [number for number, is_watched in enumerate(found, 1) if is_watched]


def test_no_later_step_is_watched_for_what_the_runtime_itself_reads():
    assert run_warm(watched_steps, 2, "top 2", 5) == [[1, 2, 3]] * 2
