"""Zero-bubble schedules compute gradients of divided weights apart, too, and all are complete."""

import pytest
import torch.distributed.pipelining.stage as torch_stage
from ranks import assert_equal_curves, oracle, run_ranks, train
from test_grid import COMM_SAVED, LAYERS, MATMUL_SAVED, RECOMPUTE, TURNS, V, pp, zero

pytestmark = pytest.mark.torch

PP_TP = {"mesh": {"pp": 2, "tp": 2}, "plan": LAYERS}
# Gradients of the norm are sums over ranks until somebody adds them up.
SEQUENCE = [
    {"match": "layers.*.norm2", "params": {}, "in": [None, "tp", None], "out": [None, "tp", None]},
    *(rule for rule in LAYERS if rule["match"].endswith(("up", "down"))),
]


def apart(config, monkeypatch):
    """Train; return the losses, and how often gradients of weights came apart."""
    calls = []
    compute = torch_stage.stage_backward_weight

    def counted(*args, **kwargs):
        calls.append(1)
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch_stage, "stage_backward_weight", counted)
    return train(config, "transformer", "adamw"), len(calls)


@pytest.mark.parametrize(
    ("ranks", "config", "is_apart"),
    [
        (4, pp(V, "zbv") | PP_TP, True),
        (4, pp(V, "zbv") | PP_TP | {"plan": SEQUENCE}, True),
        (4, pp(TURNS, "interleaved_zb") | PP_TP, True),
        (4, pp(V, "zbv") | zero(1), True),
        (4, pp(V, "zbv") | zero(1, threshold=512), True),
        (4, pp(TURNS, "interleaved_zb") | zero(1) | RECOMPUTE, True),
        (8, pp(V, "zbv") | PP_TP | {"mesh": {"pp": 2, "dp": 2, "tp": 2}} | zero(1), True),
        # These reduce, or divide again, in the middle of a step.
        (4, pp(V, "zbv") | zero(2), False),
        (4, pp(V, "zbv") | zero(3), False),
        # What a recomputation keeps can be asked for once.
        (2, pp(V, "zbv") | MATMUL_SAVED, False),
        (2, pp(V, "dualpipev") | MATMUL_SAVED, False),
        (4, pp(TURNS, "interleaved_zb") | PP_TP | COMM_SAVED, False),
    ],
)
def test_divided_weights(ranks, config, is_apart, monkeypatch):
    found = run_ranks(apart, ranks, config, monkeypatch)

    assert_equal_curves([losses for losses, _ in found], oracle("transformer", "adamw"))
    # Five steps of four micro-batches, in a chunk at least.
    assert {count >= 20 for _, count in found} == {is_apart}
