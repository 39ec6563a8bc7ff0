"""Zero-bubble schedules compute gradients of divided weights apart, too, and all are complete."""

import pytest
import torch.distributed.pipelining.stage as torch_stage
from ranks import STEPS, assert_equal_curves, oracle, run_warm, train
from test_grid import COMM_SAVED, LAYERS, MATMUL_SAVED, RECOMPUTE, TURNS, V, pp, zero

pytestmark = pytest.mark.torch

PP_TP = {"mesh": {"pp": 2, "tp": 2}, "plan": LAYERS}
# Gradients of the norm are sums over ranks until somebody adds them up.
SEQUENCE = [
    {"match": "layers.*.norm2", "params": {}, "in": [None, "tp", None], "out": [None, "tp", None]},
    *(rule for rule in LAYERS if rule["match"].endswith(("up", "down"))),
]


def apart(config):
    """Train; return the losses, and how often gradients of weights came apart."""
    calls = []
    compute = torch_stage.stage_backward_weight

    def counted(*args, **kwargs):
        calls.append(1)
        return compute(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_stage, "stage_backward_weight", counted)
        return train(config, "transformer", "sgd"), len(calls)


@pytest.mark.parametrize(
    ("ranks", "config", "is_apart"),
    [
        (4, pp(V, "zbv") | PP_TP, True),
        (4, pp(V, "zbv") | PP_TP | {"plan": SEQUENCE}, True),
        (4, pp(TURNS, "interleaved_zb") | PP_TP, True),
        pytest.param(4, pp(V, "zbv") | zero(1), True, marks=pytest.mark.slow),
        (4, pp(V, "zbv") | zero(1, threshold=512), True),
        (4, pp(TURNS, "interleaved_zb") | zero(1) | RECOMPUTE, True),
        pytest.param(
            *(8, pp(V, "zbv") | PP_TP | {"mesh": {"pp": 2, "dp": 2, "tp": 2}} | zero(1), True),
            marks=pytest.mark.slow,
        ),
        # These reduce, or divide again, in the middle of a step.
        pytest.param(4, pp(V, "zbv") | zero(2), False, marks=pytest.mark.slow),
        (4, pp(V, "zbv") | zero(3), False),
        # What a recomputation keeps can be asked for once.
        (2, pp(V, "zbv") | MATMUL_SAVED, False),
        pytest.param(2, pp(V, "dualpipev") | MATMUL_SAVED, False, marks=pytest.mark.slow),
        (4, pp(TURNS, "interleaved_zb") | PP_TP | COMM_SAVED, False),
    ],
)
def test_divided_weights(ranks, config, is_apart):
    found = run_warm(apart, ranks, config)

    assert_equal_curves([losses for losses, _ in found], oracle("transformer", "sgd"))
    # Four micro-batches in each step, in a chunk at least.
    assert {count >= 4 * STEPS for _, count in found} == {is_apart}
