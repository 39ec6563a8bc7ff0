"""`dropout: exact`: data-parallel ranks drop what one process drops."""

import pytest
import torch
from ranks import OPTIMIZERS, assert_equal_curves, batches, build, run_warm, token_loss
from test_grid import DP_TP, RECOMPUTE
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.config_file import read_config
from msrun.parallel.layout import resolve

pytestmark = pytest.mark.torch

EXACT = {"seed": 5, "dropout": "exact"}


def dropping(config):
    runtime = msrun.init(EXACT | config)
    network = runtime.shard(build("transformer", dropout=0.3))
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    return [
        runtime.step(network, update, token_loss, *(t.chunk(count)[share] for t in batch)).item()
        for batch in batches("transformer")
    ]


@pytest.fixture(scope="module")
def alone():
    return run_warm(dropping, 1, {})[0]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        (2, {"optimizer": {"zero": 3}}),
        pytest.param(4, {"optimizer": {"zero": 1}} | RECOMPUTE, marks=pytest.mark.slow),
        pytest.param(4, DP_TP, marks=pytest.mark.slow),
        (4, DP_TP | RECOMPUTE),
    ],
)
def test_equals_one_process(alone, ranks, config):
    assert_equal_curves(run_warm(dropping, ranks, config), alone)


def test_without_it_ranks_drop_otherwise(alone):
    for losses in run_warm(dropping, 2, {"dropout": "local"}):
        assert abs(losses[-1] - alone[-1]) > 1e-4


def masks():
    """Return what a dropout keeps when trained by hand, and when not training."""
    network = msrun.init(EXACT).shard(nn.Dropout(0.5, inplace=True))
    kept = network(torch.ones(4, 3)).tolist()
    network.eval()
    return kept, network(torch.ones(4, 3)).tolist()


def drawn_alone():
    torch.manual_seed(5)
    return functional.dropout(torch.ones(8, 3), 0.5).tolist()


def test_parts_are_those_of_one_mask():
    (first, whole), (second, _) = run_warm(masks, 2)

    assert first + second == run_warm(drawn_alone, 1)[0]
    assert whole == torch.ones(4, 3).tolist()


class Noisy(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        return self.call(self.linear(x))


def attend(x):
    heads = x.view(1, 1, -1, 4)
    return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)


CALLS = {
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: x + torch.rand(4),
    "scaled_dot_product_attention": attend,
}


def refused(name):
    network = msrun.init(EXACT).shard(Noisy(CALLS[name]))
    with pytest.raises(UsageError) as caught:
        network(torch.ones(6, 4))
    return caught.value.message


@pytest.mark.parametrize("name", CALLS)
def test_what_else_draws_is_refused(name):
    sentence = f"parallel.dropout: exact knows torch.nn.Dropout alone, and the model calls {name}"
    assert run_warm(refused, 2, name) == 2 * [sentence]


def allowed():
    """Run what draws nothing, though it looks like it."""
    network = msrun.init(EXACT).shard(nn.LSTM(4, 4, num_layers=2))
    network(torch.ones(3, 2, 4))
    heads = torch.ones(1, 1, 3, 4)
    noisy = Noisy(lambda _: functional.scaled_dot_product_attention(heads, heads, heads, scale=0.5))
    return list(msrun.init().shard(noisy)(torch.ones(6, 4)).shape)


def test_what_draws_nothing_is_not():
    assert run_warm(allowed, 2)[0] == [1, 1, 3, 4]


def dropping_between_layers():
    network = msrun.init(EXACT).shard(nn.LSTM(4, 4, num_layers=2, dropout=0.1))
    with pytest.raises(UsageError) as caught:
        network(torch.ones(3, 2, 4))
    return caught.value.message


def test_what_drops_inside_is_refused():
    assert run_warm(dropping_between_layers, 2)[0].endswith("the model calls lstm")


def other_shape():
    network = msrun.init(EXACT).shard(Noisy(lambda x: functional.dropout(x.T, 0.5)))
    with pytest.raises(UsageError) as caught:
        network(torch.ones(6, 4))
    return caught.value.message


def test_samples_come_first():
    assert run_warm(other_shape, 2)[0] == (
        "parallel.dropout: exact: a dropout sees a tensor of shape (4, 6), "
        "which does not begin with the 6 samples of the batch"
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"accumulate": 2},
            "exact with 2 micro-batches, which hold other samples than those of one process",
        ),
        (
            {"mesh": {"pp": 4}, "pipeline": {"stages": {"a": 0}, "microbatches": 1}},
            "exact with a pipeline, whose stages draw each for itself",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused_by_arithmetic(config, sentence):
    with pytest.raises(UsageError) as caught:
        resolve(read_config(EXACT | config), 4)

    assert caught.value.message == f"parallel.dropout: {sentence} (choose local)"
