"""Functions of which no rule says where samples go: these are followed by sizes and by graphs."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

SAMPLES, WIDTH = 4, 6
PAIR = torch.tensor([0, 1])


def noticed(between, *, samples=SAMPLES):
    """Return the sentence on a loss with the spread of samples behind a function, and without."""
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(samples, WIDTH)
    found = []
    for loss_of in (lambda h: h.var(0).mean(), lambda h: h.square().mean()):
        with SampleWatch((x,), samples, names=("x",), parts=2) as watch:
            loss = loss_of(between(layer(x)))
        error = watch.read(loss, is_cut=True)
        found.append(error.message if error else "")
    return tuple(found)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, grad):
        return 2 * grad


def gated(x):
    return torch.relu(x) * 2


def by_indices(x):
    x = x.clone()
    x[(x < 0).nonzero(as_tuple=True)] = 0.1
    return x


def by_view(x):
    x = x.clone()
    x.select(1, 0).mul_(2)
    return x


def column_of(x):
    x = x.clone()
    x[:, PAIR] = x[:, 2:4]
    return x


def chosen(x):
    result, places = torch.zeros_like(x), (x > 0).nonzero(as_tuple=True)
    result[places] = x[places]
    return result


def routed(x):
    result, own = torch.zeros_like(x), nn.Linear(WIDTH, WIDTH)
    places = torch.where(x[:, 0] < 0)[0]
    return result.index_add(0, places, own(x[places]).relu())


def unpadded(x):
    result, kept = torch.zeros_like(x), x[:, 0] < 0
    result[kept] = gated(x[kept])
    return result


def recurrent(x):
    return nn.LSTM(WIDTH, WIDTH, batch_first=True)(x[:, None])[0][:, 0]


def packed(x):
    steps, lengths = x[:, None].expand(-1, 3, -1), torch.tensor([3, 2, 2, 1])
    found, _ = nn.LSTM(WIDTH, WIDTH, batch_first=True)(
        pack_padded_sequence(steps, lengths, batch_first=True)
    )
    return pad_packed_sequence(found, batch_first=True)[0][:, 0]


def attention(x):
    layer = nn.MultiheadAttention(WIDTH, 2)
    return layer(x[None].expand(3, -1, -1), x[None], x[None])[0][0]


def scripted(x):
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.script(gated)(x)


# On (samples, WIDTH), as all of them.
KEEPING = {
    "attention": attention,
    "autograd function": Doubled.apply,
    "baddbmm": lambda x: torch.baddbmm(x[:, None], x[:, None], x.new_ones(len(x), WIDTH, WIDTH))[
        :, 0
    ],
    "bilinear": lambda x: functional.bilinear(x, x, torch.ones(WIDTH, WIDTH, WIDTH)),
    "checkpoint": lambda x: checkpoint(gated, x, use_reentrant=True),
    "chosen": chosen,
    "column of others": column_of,
    "copies of rows": lambda x: x.repeat_interleave(2, 0)[::2],
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=WIDTH, dim=1),
    "fold": lambda x: functional.fold(x[:, :, None], (1, 1), (1, 1)).flatten(1),
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "index add": lambda x: x.index_add(1, PAIR, x[:, 2:4]),
    "index copy": lambda x: x.index_copy(1, PAIR, x[:, 2:4]),
    "index fill": lambda x: x.index_fill(1, PAIR, 0.5),
    "interpolate": lambda x: functional.interpolate(x[:, None], scale_factor=2)[:, 0],
    "joined rows": lambda x: torch.stack([row * 2 for row in x]),
    "kron": lambda x: torch.kron(x, torch.ones(1, 1)),
    "masked scatter": lambda x: x.masked_scatter(x < 0, x.detach()),
    "movedim": lambda x: x.movedim(0, 1).movedim(1, 0),
    "packed sequences": packed,
    "padded sequence": lambda x: pad_sequence(list(x), batch_first=True),
    "recurrent": recurrent,
    "routed": routed,
    "scatter": lambda x: x.scatter(1, x.argmax(1, keepdim=True), 1.0),
    "scatter reduce": lambda x: x.scatter_reduce(1, x.argsort(1), x, "sum"),
    "scripted": scripted,
    "slice scatter": lambda x: x.slice_scatter(2 * x[:, :2], 1, 0, 2),
    "solved": lambda x: torch.linalg.solve(torch.eye(WIDTH).expand(len(x), -1, -1), x),
    "strided": lambda x: x.as_strided(x.shape, x.stride()),
    "tile": lambda x: x.tile(1, 2),
    "top of columns": lambda x: x.topk(2, dim=1).values,
    "two batches": lambda x: torch.cat([x, 2 * x]).chunk(2)[1],
    "unpadded": unpadded,
    "unfold": lambda x: x.unfold(1, 2, 1).mean(-1),
    "vmap": torch.func.vmap(gated),
    "written by a view": by_view,
    "written by indices": by_indices,
}


@pytest.mark.parametrize("keeps", KEEPING.values(), ids=KEEPING)
def test_samples_are_known_behind_it(keeps):
    behind, alone = noticed(keeps)

    assert behind.startswith("the loss depends on a var over samples (")
    assert alone == ""


def test_a_statistic_that_it_gets_is_refused():
    def of_statistic(x):
        return x * scripted(x.mean(0))

    behind, alone = noticed(of_statistic)

    assert behind == alone
    assert alone.startswith("the loss depends on a mean over samples (")


def test_a_size_that_samples_have_by_chance_says_nothing_of_a_row():
    _, alone = noticed(lambda x: torch.stack([row - row.std() for row in x]), samples=WIDTH)

    assert alone == ""


def test_shuffled_samples_that_are_put_back_are_right():
    def shuffled(x):
        order = torch.randperm(len(x))
        return torch.relu(x[order])[order.argsort()] + x

    assert noticed(shuffled)[1] == ""


def test_statistics_of_all_ranks_are_no_mixture():
    class Reduced(torch.autograd.Function):
        """As of a module of ours."""

        __module__ = "msrun.parallel.layers"

        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, grad):
            return grad

    def by_ranks(x):
        sums = Reduced.apply(torch.cat([x.sum(0), x.new_ones(1)]))
        return x * (sums[:-1] / sums[-1])

    assert noticed(by_ranks)[1] == ""


def test_a_tensor_that_is_returned_as_it_was_keeps_what_is_known():
    def by_position(x):
        x = x.detach().clone().requires_grad_()
        return torch.cdist(x, x[:1])

    assert noticed(by_position)[1].startswith("the loss depends on samples by their position (")


def test_copies_of_a_batch_are_none_of_its_samples_until_they_are_added_up():
    def by_experts(x):  # as Llama 4 has them
        copies = x.repeat(SAMPLES, 1) * 2
        return x + copies.reshape(SAMPLES, len(x), WIDTH).sum(0).relu()

    assert noticed(by_experts) == (noticed(lambda x: x)[0], "")
