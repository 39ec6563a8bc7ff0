"""Zero-bubble schedules compute gradients of divided weights apart, too, and all are complete."""

import pytest
import torch
import torch.distributed.pipelining.stage as torch_stage
from pipelines import pipeline, split, train_step
from ranks import STEPS, assert_equal_curves, oracle, run_warm, train
from test_grid import COMM_SAVED, LAYERS, MATMUL_SAVED, RECOMPUTE, TURNS, V, pp, zero
from torch import nn
from torch.nn import functional

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
@pytest.mark.few(3)
def test_divided_weights(ranks, config, is_apart):
    found = run_warm(apart, ranks, config)

    assert_equal_curves([losses for losses, _ in found], oracle("transformer", "sgd"))
    # Four micro-batches in each step, in a chunk at least.
    assert {count >= 4 * STEPS for _, count in found} == {is_apart}


class ChannelsLast(nn.Module):
    """On a host torch cannot compute the gradients of its norms' weights alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8) for _ in range(4)])
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(4)])

    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = norm(conv(x).contiguous(memory_format=torch.channels_last))
        return x.flatten(1)


def gradients_of_norms():
    """Return how far gradients are from those of one process."""
    places = ([0, 0], [1, 0], [1, 1], [0, 1])
    names = {f"{kind}.{n}": places[n] for n in range(4) for kind in ("norms", "convs")}
    settings = pipeline(names, "zbv", 4)
    whole = ChannelsLast()
    x, target = torch.randn(8, 8, 4, 4), torch.arange(8)
    part = split("", settings, sample=(x,), network=ChannelsLast())
    functional.cross_entropy(whole(x), target).backward()
    train_step(part, [x], target, functional.cross_entropy)
    expected = {name: param.grad for name, param in whole.named_parameters()}
    return max((p.grad - expected[n]).abs().max().item() for n, p in part.named_parameters())


def test_group_norms_with_channels_last():
    assert max(run_warm(gradients_of_norms, 2)) < 1e-6
