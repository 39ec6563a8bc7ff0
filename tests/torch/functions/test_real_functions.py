"""Functions of transformers, and writes in place, on shards: those of one process, or refused."""

import pytest
import torch
from ranks import run_warm
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import msrun
from msrun.errors import ModelError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:msrun. ")]

COLUMNS, ROWS = [None, "tp"], ["tp", None]
PLACES = {"columns": [None, COLUMNS], "rows": [ROWS, None], "sums": [COLUMNS, ROWS]}


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def attend(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rotary(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def swiglu(x, gate, up, down):
    return (functional.silu(x @ gate) * (x @ up)) @ down


def checkpointed(x, gate, up, down):
    return checkpoint(swiglu, x, gate, up, down, use_reentrant=False)


def route(x, w):
    shares = (x @ w).softmax(-1)
    values, chosen = shares.topk(2, -1)
    mask = torch.zeros_like(shares).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
    return mask + (mask.mean(0) * shares.mean(0)).sum()


def mapped(x, w):
    return torch.vmap(lambda row: torch.tanh(w.T @ row))(x)


def differentiated(x, w):
    return torch.func.grad(lambda weight: (x @ weight).sin().sum())(w)


def rows_of(x, w):
    return torch.stack([row @ w for row in x])


def assigned(x, w):
    y = x @ w
    y[:, :2] *= 2
    return y


def written(x, w):
    y = x @ w
    y[:, :2].mul_(2)
    return y


def written_transposed(x, w):
    y = x @ w
    y.t()[:2].mul_(2)
    return y.sin()


def written_base(x, w):
    y = x @ w
    part = y[:, :2]
    y.mul_(2)
    return part + 1


def overlapping(x, w):
    y = x @ w
    first, second = y[:, :2], y[:, 1:3]
    first.mul_(2)
    return first.sin() + second.cos()


def parts(x, w):
    y = x @ w
    first, second = y[:, :2], y[:, 2:]
    return torch.cat([first * 2, second], 1) + y


def written_without_gradient(x, w):
    y = x @ w
    with torch.no_grad():
        y[:, :2].mul_(0)
    return y


HEADS, LENGTH = [None, "tp", None, None], [None, None, "tp", None]
QKV = [draw(2, 4, 6, 8) for _ in range(3)]
ANGLES = [draw(2, 4, 6, 8), draw(6, 8), draw(6, 8)]
FEED = [draw(6, 8), draw(8, 16), draw(8, 16), draw(16, 8)]
EQUAL = {
    "attention by heads": (attend, QKV, [HEADS] * 3),
    "attention by length": (attend, QKV, [LENGTH]),
    "rotary by heads": (rotary, ANGLES, [HEADS]),
    "rotary by length": (rotary, ANGLES, [LENGTH, ROWS, ROWS]),
    "rotary by width": (rotary, ANGLES, [[None, None, None, "tp"]]),
    "swiglu": (swiglu, FEED, [None, COLUMNS, COLUMNS, ROWS]),
    "compiled swiglu": (
        torch.compile(swiglu, backend="eager"),
        FEED,
        [None, COLUMNS, COLUMNS, ROWS],
    ),
    **{
        f"{function.__name__} by {name}": (function, [draw(6, 8), draw(8, 4)], places)
        for function in (route, mapped, differentiated, rows_of, parts)
        for name, places in PLACES.items()
    },
}
REFUSED = {
    f"{function.__name__} by {name}": (function, [draw(6, 8), draw(8, 4)], places)
    for function in (written, written_transposed, written_base, overlapping)
    for name, places in PLACES.items()
} | {"checkpointed": (checkpointed, FEED, [None, COLUMNS, COLUMNS, ROWS])}
# Right, or refused, as torch itself does it.
EITHER = {
    f"{function.__name__} by {name}": (function, [draw(6, 8), draw(8, 4)], places)
    for function in (assigned, written_without_gradient)
    for name, places in PLACES.items()
}
IN_CI = {
    "attention by heads": EQUAL,
    "swiglu": EQUAL,
    "rows_of by sums": EQUAL,
    "written by rows": REFUSED,
    "written_base by columns": REFUSED,
    "checkpointed": REFUSED,
    "assigned by rows": EITHER,
}


def differences(names):
    """Return of each case how far output and gradients are from plain torch's, or the refusal."""
    runtime = msrun.init({"mesh": {"tp": 2}, "mode": "manual"})
    found = []
    for function, given, places in map((EQUAL | REFUSED | EITHER).get, names):
        results = []
        try:
            for call in (function, msrun.shard(function, in_=places)):
                output = call(*given)
                slopes = torch.arange(1.0, 1 + output.numel(), dtype=torch.float64)
                total = (output * slopes.view_as(output)).sum()
                results.append([output, *torch.autograd.grad(total, given)])
        except ModelError as error:
            found.append(error.message)
            continue
        found.append(max((one - other).abs().max().item() for one, other in zip(*results)))  # noqa: B905
    runtime.close()
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*IN_CI], id="some"),
        pytest.param([*EQUAL, *REFUSED, *EITHER], marks=pytest.mark.slow, id="all"),
    ],
)
def test_functions_give_what_one_process_has_or_are_refused(names):
    for found in run_warm(differences, 2, names):
        for name, answer in zip(names, found, strict=True):
            is_refused = isinstance(answer, str)
            assert is_refused if name in REFUSED else name in EITHER or not is_refused, (
                name,
                answer,
            )
            assert is_refused or answer < 1e-9, name
            assert not is_refused or answer.startswith(("msrun.shard: in_: ", "torch.utils.check"))
