"""`msrun.shard`: functions on shards give what one process computes."""

from types import SimpleNamespace

import pytest
import torch
from ranks import Counted, run_warm
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
    pytest.mark.filterwarnings("ignore:msrun. torch gathers what is divided"),
]

MANUAL = {"mode": "manual", "mesh": {"dp": 1, "tp": -1}}
DP_TP = {"mode": "manual", "mesh": {"dp": 2, "tp": 2}}


def dense_relu(x, w, b):
    return functional.relu(x @ w + b)


def attend(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).softmax(-1)


def statistics(x):
    return {"mean": x.mean(0), "sum": x.cumsum(-1), "most": x.amax(1)}


def at_places(x, w):
    y = x @ w
    return y[torch.where(y > 1)]


def by_vmap(x, w):
    return torch.vmap(lambda row: torch.sin(row).cumsum(-1))(x) @ w


def by_grad(x, w):
    slope = torch.func.grad(lambda y: (y @ w[:, :1]).square().sum())(x)
    return slope * torch.func.jacrev(torch.sin)(x[0]).diagonal() + x


@torch.compile(backend="eager")
def scaled(x):
    return x.cumsum(-1) * 2


def by_compiled(x, w):
    return scaled(x @ w)


X, W, B = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12)
HEADS = torch.randn(3, 2, 4, 8, 4)
FUNCTIONS = {
    "columns": (dense_relu, (X, W, B), {"in_": [None, [None, "tp"], ["tp"]]}),
    "rows and columns": (dense_relu, (X, W, B), {"in_": [["tp", None], None]}),
    "contraction": (dense_relu, (X, W, B), {"in_": [[None, "tp"], ["tp", None]]}),
    "by name": (dense_relu, (X, W, B), {"params": {"w": [None, "tp"], "b": ["tp"]}}),
    "batch of dp": (dense_relu, (X, W, B), {"in_": [["dp", "tp"]]}),
    "heads": (attend, tuple(HEADS), {"in_": [[None, "tp", None, None]] * 3}),
    "mapping": (statistics, (X,), {"in_": [[None, "tp"]]}),
    "where": (at_places, (X, W), {"in_": [None, [None, "tp"]]}),
    "vmap": (by_vmap, (X, W), {"in_": [["tp", None], [None, "tp"]]}),
    "grad": (by_grad, (X, W), {"in_": [["tp", None], ["tp", None]]}),
    "compiled": (by_compiled, (X, W), {"in_": [["tp", None], [None, "tp"]]}),
}


def leaves(value):
    found = list(value.values()) if isinstance(value, dict) else [value]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def with_gradients(function, args):
    """Return the outputs of `function` and the gradients of its arguments."""
    given = [arg.clone().requires_grad_() for arg in args]
    found = leaves(function(*given))
    sum(
        (each * torch.linspace(0, 1, each.numel()).view_as(each)).sum() for each in found
    ).backward()
    return [*found, *(arg.grad for arg in given)]


def each_gap(config, names):
    msrun.init(config)
    gaps = {}
    for name, (function, args, options) in FUNCTIONS.items():
        if name not in names:
            continue
        expected = with_gradients(function, args)
        found = with_gradients(msrun.shard(function, **options), args)
        pairs = zip(found, expected, strict=True)
        gaps[name] = max(
            0.0 if a is b is None else ((a - b).abs().max() / b.abs().max()).item()
            for a, b in pairs
        )
    return gaps


def assert_no_gaps(ranks, config, names):
    for gaps in run_warm(each_gap, ranks, config, names):
        assert list(gaps) == names
        assert all(gap <= 2e-6 for gap in gaps.values()), gaps


def test_functions_and_their_gradients_are_those_of_one_process():
    assert_no_gaps(2, MANUAL, [name for name in FUNCTIONS if name != "compiled"])


@pytest.mark.slow
# Of the compiler, which looks at everything.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_functions_are_those_of_one_process_with_dp_and_compiled_inside():
    assert_no_gaps(4, DP_TP, list(FUNCTIONS))


def layouts():
    """Return layouts of outputs, and the collectives of a product that is divided by columns."""
    rt = msrun.init(MANUAL)
    kept = msrun.shard(dense_relu, [None, [None, "tp"], ["tp"]], [None, "tp"])
    again = msrun.shard(lambda h, w: h @ w, [[None, "tp"], ["tp", None]], ["tp", None])
    with Counted() as counted:
        hidden = kept(X, W, B)
        y = again(hidden, W.T.contiguous())
    pair = msrun.shard(lambda x: (x * 2, x + 1), [["tp", None]], (["tp", None], None))
    double, more = pair(X)
    close = torch.allclose(y.full_tensor(), dense_relu(X, W, B) @ W.T, atol=1e-4)
    assert torch.equal(more, X + 1)
    assert torch.equal(double.full_tensor(), X * 2)
    assert rt.world_size == 2
    return hidden.placements, y.to_local().shape, dict(counted.calls), close


def test_outputs_have_the_layout_of_out():
    for found in run_warm(layouts, 2):
        assert found == ((Shard(1),), (4, 16), {"reduce_scatter_tensor": 1}, True)


def trained():
    """Return the gaps of a sharded module after steps, and of its weight in memory."""
    msrun.init(MANUAL)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 12))
    plan = {"0.weight": ["tp", None], "0.bias": ["tp"], "2.weight": [None, "tp"]}
    call = msrun.shard(model, params=plan)
    losses = []
    for each, forward in ((model, call), (plain, plain)):
        update = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            update.zero_grad()
            loss = forward(X).square().mean()
            loss.backward()
            update.step()
            losses.append(loss.item())
    return losses[:3], losses[3:], model[0].weight.to_local().shape


def test_a_module_trains_with_sharded_parameters():
    for found, expected, shape in run_warm(trained, 2):
        assert found == pytest.approx(expected, abs=1e-6)
        assert shape == (16, 16)


def hidden(x):
    kept = SimpleNamespace(x=x)
    return torch.vmap(lambda row: row * kept.x[0])(torch.ones(3, 16))


def updated(cache, x):
    cache.mul_(0.9).add_(x)
    return x - cache


def set_rows(x, cache):
    cache[:, 2:4] = x[:, :2]
    return x


def written_replicated():
    """Return how far an argument is from one process that every rank has whole."""
    msrun.init(MANUAL)
    caches = [torch.ones(4, 6) for _ in range(2)]
    updated(caches[0], X[:4, :6])
    msrun.shard(updated, [[None, None], [None, "tp"]])(caches[1], X[:4, :6])
    return (caches[0] - caches[1]).abs().max().item()


def test_a_write_to_an_argument_that_ranks_have_whole_is_seen():
    assert run_warm(written_replicated, 2) == [0, 0]


def detached(x, w):
    y = x @ w
    y.detach()[:, 2:5].zero_()
    return y * 2


def data_viewed(x, w):
    y = x @ w
    y.data.view(-1, 3, 4)[:, 1].zero_()
    return y * 2


@torch.inference_mode()
def inferred(in_):
    return msrun.shard(updated, in_)(torch.ones(8, 16), X)


def refusals():
    msrun.init(MANUAL)
    called = msrun.shard(dense_relu, [["tp", None]])
    cases = {
        "axis": lambda: msrun.shard(dense_relu, [["pq"]]),
        "dp": lambda: msrun.shard(dense_relu, [[None, "dp"]]),
        "twice": lambda: msrun.shard(dense_relu, [["tp", "tp"]]),
        "no list": lambda: msrun.shard(dense_relu, ["tp"]),
        "no function": lambda: msrun.shard(X),
        "uneven": lambda: called(torch.randn(7, 16), W, B),
        "dims": lambda: called(torch.randn(8), W, B),
        "count": lambda: called(x=X, w=W, b=B),
        "number": lambda: called(1.0, W, B),
        "outputs": lambda: msrun.shard(dense_relu, out=(None, None))(X, W, B),
        "outside": lambda: torch.vmap(called, in_dims=(0, None, None))(HEADS[0, 0], W[:4], B),
        "hidden": lambda: msrun.shard(hidden, [[None, "tp"]])(X),
        "written": lambda: msrun.shard(updated, [[None, "tp"]])(torch.ones(8, 16), X),
        "inference": lambda: inferred([[None, "tp"]]),
        "inference of rows": lambda: inferred([["tp", None]]),
        "set": lambda: msrun.shard(set_rows, params={"cache": ["tp", None]})(X, cache=X.clone()),
        "detached": lambda: msrun.shard(detached, [None, [None, "tp"]])(X, W),
        "data": lambda: msrun.shard(data_viewed, [None, [None, "tp"]])(X, W),
    }
    found = {}
    for name, call in cases.items():
        try:
            call()
            found[name] = "done"
        except UsageError as error:
            found[name] = error.message
    with pytest.warns(UserWarning, match="dense_relu has no argument or parameter weight"):
        msrun.shard(dense_relu, params={"weight": ["tp", None]})
    return found


SAID = {
    "axis": "msrun.shard: in_[0]: axis 'pq' shards no operator (choose tp)",
    "dp": "msrun.shard: in_[0]: dp divides the batch, which is dim 0, and not dim 1",
    "twice": "msrun.shard: in_[0]: axis 'tp' stands there twice",
    "no list": "msrun.shard: in_[0]: 'tp' is no list of axes, one for each dim",
    "no function": "msrun.shard: Tensor is no function",
    "uneven": "msrun.shard: in_[0] of dense_relu: dim 0 of 7 can not be split in 2 parts",
    "written": "msrun.shard: updated writes its argument cache in place, and the caller's tensor, "
    "of which ranks have shards there, would not have it",
}


def test_what_cannot_be_is_refused():
    for found in run_warm(refusals, 2):
        assert {name: found[name] for name in SAID} == SAID
        assert "done" not in found.values(), found


def test_one_rank_gets_the_function_itself():
    with msrun.init():
        assert msrun.shard(dense_relu, [["tp", None]]) is dense_relu
