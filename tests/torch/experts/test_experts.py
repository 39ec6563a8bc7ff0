"""Experts over an axis of their own train as in one process, and tokens travel by all-to-all."""

import pytest
from mixtures import RULE, difference
from ranks import run_warm

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
