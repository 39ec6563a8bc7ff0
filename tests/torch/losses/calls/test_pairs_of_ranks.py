"""Pairs of samples in a model or a loop that data-parallel ranks alone divide."""

import functools
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

SAMPLES = WIDTH = 4  # equal, so that no size tells which dim has samples


def attention_by_hand(h, _):
    return (h @ h.T / 2).softmax(1) @ h


def by_differences(h, _):
    return h + (h[:, None] - h[None]).square().sum(-1).neg().exp().sum(1, keepdim=True)


def by_distances(h, _):
    return h * torch.cdist(h, h.detach()).softmax(1).sum(1, keepdim=True)


def by_letters(h, _):
    return torch.einsum("id,jd->ij", h, h).relu() @ h


PAIRS = [attention_by_hand, by_differences, by_distances, by_letters]


def one_sequence(h, _):
    return functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]


def in_heads(h, _):
    parts = h.view(1, len(h), 2, -1).transpose(1, 2)
    found = functional.scaled_dot_product_attention(parts, parts, parts)
    return found.transpose(1, 2).reshape(h.shape)


def pooled(h, _):
    query = torch.ones(1, 1, WIDTH)
    return h + functional.scaled_dot_product_attention(query, h[None], h[None])[0]


ATTENDING = [one_sequence, in_heads, pooled]


def tokens(h, _):
    """Attention in each sample, whose tokens are as many as samples."""
    x = h[:, :, None] * h[:, None]
    return ((x @ x.transpose(1, 2)).softmax(-1) @ x).sum(-1)


def diagonal(h, _):
    return h * (h @ h.T).diagonal()[:, None]


def another_input(h, beside):
    """Prototypes, which the script hands to every rank, as many as samples."""
    return (h @ beside.T).softmax(1) @ beside


def of_features(h, _):
    return h @ torch.eye(WIDTH).softmax(1)


def packed(h, _):
    """All samples in one sequence, with a mask that keeps them apart."""
    own = torch.eye(len(h), dtype=torch.bool)
    return functional.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=own)[0]


def causal(h, _):
    """A batch whose dim 0 has the sequence."""
    x = h[None]
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)[0]


RIGHT = [packed, causal, tokens, diagonal, another_input, of_features]


def said(between):
    torch.manual_seed(0)
    x, beside = torch.randn(2, SAMPLES, WIDTH)
    with (
        warnings.catch_warnings(record=True) as caught,
        SampleWatch([x, beside], SAMPLES) as watch,
    ):
        warnings.simplefilter("always")
        loss = between(nn.Linear(WIDTH, WIDTH)(x), beside).square().mean()
        assert watch.read(loss, is_cut=False) is None
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("between", PAIRS, ids=lambda function: function.__name__)
def test_pairs_of_samples_are_told(between):
    (text,) = said(between)

    assert "the loss depends on pairs of samples (test_pairs_of_ranks.py, line" in text


@pytest.mark.parametrize("between", ATTENDING, ids=lambda function: function.__name__)
def test_attention_over_samples_is_told(between):
    (text,) = said(between)

    assert "the loss depends on an attention over samples (test_pairs_of_ranks.py, line" in text
    assert "rt.gather(x) has them" in text


@pytest.mark.parametrize("between", RIGHT, ids=lambda function: function.__name__)
def test_others_are_right(between):
    assert said(between) == []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return attention_by_hand(self.layer(x), x)


def similar(output):
    """Push samples away from each other; the output is as wide as there are samples."""
    return (output @ output.T).exp().mean()


def of_a_step():
    def train(rt, model, optimizer, x):
        rt.step(model, optimizer, mean, x, None)

    return msrun_warnings(Model(), train)


def of_a_loop():
    def train(_, model, optimizer, x):
        similar(model(x)).backward()
        optimizer.step()

    return msrun_warnings(nn.Linear(WIDTH, WIDTH), train)


def mean(output, _):
    return output.square().mean()


def msrun_warnings(model, train):
    rt = msrun.init({})
    torch.manual_seed(0)
    model = rt.shard(model)
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(rt, model, optimizer, torch.randn(SAMPLES, WIDTH))
    rt.close()
    return [str(each.message) for each in caught if "msrun: the loss" in str(each.message)]


@pytest.mark.parametrize("run", [of_a_step, of_a_loop])
def test_ranks_warn_of_pairs(run):
    for (text,) in run_warm(run, 2):
        assert "the loss depends on pairs of samples" in text


class Towers(nn.Module):
    """Compares the samples of two inputs."""

    def __init__(self, compare):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.compare = compare

    def forward(self, x, z):
        return self.compare(self.first(x), self.second(z))


def distances(p, q):
    return p * torch.cdist(p, q).mean(1, keepdim=True)


def norms(p, q):
    return p * (p[:, None] - q[None]).norm(dim=-1).mean(1, keepdim=True)


def similarities(p, q):
    return (p @ q.T).softmax(1) @ q


def between(p, q):
    return functional.scaled_dot_product_attention(p[None], q[None], q[None])[0]


def with_its_own(p, q):
    return p * (p @ q.T).diagonal()[:, None] + q


TOWERS = [distances, norms, similarities, between]


def of_towers(how, *, are_alike):
    """Return what a rank is told of each comparison, where the second input may be alike."""
    found = []
    for compare in (*TOWERS, with_its_own):
        rt = msrun.init({})
        torch.manual_seed(0)
        x, z = torch.randn(2, 2 * SAMPLES, WIDTH)
        model = rt.shard(Towers(compare))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, z = x.chunk(2)[rt.rank], z.chunk(2)[0 if are_alike else rt.rank]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if how == "step":
                rt.step(model, optimizer, mean, {"x": x, "z": z}, None)
            else:
                mean(model(x, z), None).backward()
                optimizer.step()
        rt.close()
        found.append([str(each.message) for each in caught if "msrun: " in str(each.message)])
    return found


@pytest.mark.parametrize("how", ["step", "loop"])
def test_ranks_warn_of_pairs_of_two_inputs(how):
    for *told, right in run_warm(functools.partial(of_towers, how, are_alike=False), 2):
        for (text,) in told:
            assert "the loss depends on pairs of rows of input 0 with rows of input 1" in text
            assert "ranks have other rows of both" in text
        assert right == []


@pytest.mark.parametrize("how", ["step", "loop"])
def test_samples_may_meet_all_rows_that_ranks_have_alike(how):
    alike = functools.partial(of_towers, how, are_alike=True)
    assert run_warm(alike, 2) == [[[]] * (len(TOWERS) + 1)] * 2
