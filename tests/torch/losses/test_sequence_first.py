"""Batches with the sequence first: right on data-parallel ranks, refused in micro-batches."""

import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun
from msrun.errors import ModelError
from msrun.parallel.losses.sample_watch import SampleWatch

pytestmark = pytest.mark.torch

WORDS, WIDTH, TOKENS, SAMPLES = 10, 8, 6, 8
STAGES = {"embed": 0, "cells": 0, "head": 1}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}}


class Cells(nn.Module):
    """Attention among the tokens of a sequence, as recurrent cells are called."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)


class NamedCells(Cells):
    """Gets its tokens by name."""

    def forward(self, x):
        return self.attention(query=x, key=x, value=x, need_weights=False)


class SearchingCells(Cells):
    """Asks for tokens with a weight, and computes with what it finds."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self, x):
        found, _ = self.attention(self.query.expand(1, x.shape[1], -1), x, x, need_weights=False)
        return x + found, None


class NamedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.cells(input=x)


class LanguageModel(nn.Module):
    """Takes (tokens, samples), or (samples, tokens) and turns them."""

    def __init__(self, cells, *, turns):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cells = cells
        self.head = nn.Linear(WIDTH, WORDS)
        self.turns = turns

    def forward(self, x):
        h = self.embed(x)
        if self.turns:
            h = h.transpose(0, 1)
        h = self.head(self.cells(h)[0])
        return h.transpose(0, 1) if self.turns else h


CELLS = {
    "RNN": lambda: nn.RNN(WIDTH, WIDTH),
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH),
    "MultiheadAttention": Cells,
    "named LSTM": NamedLSTM,
    "named MultiheadAttention": NamedCells,
    "searching MultiheadAttention": SearchingCells,
}


def entropy(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sequence_first(rows):
    return tuple(torch.stack(each, 1) for each in zip(*rows, strict=True))


def trained(config, cells, *, turns=False, has_loader=False, has_sample=True, tokens=TOKENS):
    """Return the losses of two steps, or what refuses them."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    x, y = torch.randint(WORDS, (2, SAMPLES, tokens))
    model = LanguageModel(CELLS[cells](), turns=turns)
    sample = (x if turns else x.T,) if has_sample else None
    model = rt.shard(model, sample)
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    share, parts = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    try:
        if has_loader:
            data = rt.loader(TensorDataset(x, y), SAMPLES, collate_fn=sequence_first)
            return [rt.step(model, optimizer, entropy, *b).item() for _ in range(2) for b in data]
        own = [part.chunk(parts)[share] for part in (x, y)]
        batch = own if turns else [part.T for part in own]
        return [rt.step(model, optimizer, entropy, *batch).item() for _ in range(2)]
    except ModelError as error:
        return error.message
    finally:
        rt.close()


def run(ranks, config, cells, **options):
    """Return what the first rank returned; all returned the same."""
    found = run_warm(_trained, ranks, config, cells, options)
    assert all(each == found[0] for each in found)
    return found[0]


def _trained(config, cells, options):
    return trained(config, cells, **options)


CUT = {"accumulate": (1, {"accumulate": 2}), "dp": (2, {"accumulate": 2}), "pp": (2, PIPELINE)}


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "config"), CUT.values(), ids=CUT)
@pytest.mark.parametrize("cells", CELLS)
def test_layers_whose_sequence_micro_batches_cut_are_refused(cells, ranks, config):
    assert run(ranks, config, cells) == (
        f"{cells.split()[-1]} has sequences in dim 0 of its input (batch_first=False), which "
        "micro-batches cut"
    )


def test_a_stage_that_was_traced_without_a_sample_is_refused_too():
    assert "has sequences in dim 0" in run(2, PIPELINE, "LSTM", has_sample=False)


@pytest.mark.parametrize(("ranks", "config"), CUT.values(), ids=CUT)
def test_as_many_tokens_as_samples_are_refused_too(ranks, config):
    assert "has sequences in dim 0" in run(ranks, config, "LSTM", tokens=SAMPLES)


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "config"), CUT.values(), ids=CUT)
@pytest.mark.parametrize("cells", CELLS)
def test_models_that_turn_their_batch_train_as_one_process(cells, ranks, config):
    alone = run(1, {}, cells, turns=True)
    assert run(ranks, config, cells, turns=True) == pytest.approx(alone, rel=1e-6)


def _warned(cells):
    with pytest.warns(UserWarning, match="right if dim 0 of the batch has the sequence"):
        return trained({}, cells)


@pytest.mark.parametrize("cells", CELLS)
def test_data_parallel_ranks_take_the_sequence_first_and_say_so(cells):
    alone = run(1, {}, cells)
    assert run_warm(_warned, 2, cells) == [pytest.approx(alone, rel=1e-6)] * 2


def test_one_micro_batch_of_a_pipeline_takes_the_sequence_first():
    stages = {"stages": STAGES, "microbatches": 1, "schedule": "gpipe"}
    whole = {"mesh": {"pp": 2}, "pipeline": stages}
    assert run(2, whole, "RNN") == pytest.approx(run(1, {}, "RNN"), rel=1e-6)


@pytest.mark.parametrize(("ranks", "config"), CUT.values(), ids=CUT)
def test_a_loader_knows_where_the_samples_are(ranks, config):
    count = SAMPLES // (ranks if "pp" not in config.get("mesh", {}) else 1)
    assert run(ranks, config, "RNN", has_loader=True) == (
        f"the batch has its {count} samples in dim 1, and 2 micro-batches cut dim 0"
    )


def test_verify_joins_the_samples_of_a_loader():
    config = {"verify": "first_step"}
    found = run(2, config, "RNN", has_loader=True)
    assert found == pytest.approx(run(1, {}, "RNN", has_loader=True), rel=1e-6)


def mixture(run, x):
    """Return what data-parallel ranks are told of a loss of what `run` computes of `x`."""
    with warnings.catch_warnings(record=True) as caught, SampleWatch([x], len(x)) as watch:
        warnings.simplefilter("always")
        loss = run(x.clone().requires_grad_()).square().mean()
        assert watch.read(loss, is_cut=False) is None
    return [str(each.message) for each in caught]


def attend(x, **options):
    return nn.MultiheadAttention(WIDTH, 2)(x, x, x, need_weights=False, **options)[0]


SAMPLE_ROWS = torch.ones(5, 3, WIDTH)
OVER_SAMPLES = {
    "a recurrence over samples": {
        "lstm": lambda x: nn.LSTM(WIDTH, WIDTH)(x)[0],
        "gru": lambda x: nn.GRU(WIDTH, WIDTH)(x)[0],
        "last state": lambda x: nn.LSTM(WIDTH, WIDTH)(x)[1][0],
        "rnn of one sequence": lambda x: nn.RNN(WIDTH, WIDTH)(x[:, 0])[0],
        "transposed once too often": lambda x: nn.GRU(WIDTH, WIDTH, batch_first=True)(
            x.transpose(0, 1)
        )[0],
    },
    "an attention over samples": {
        "attention": attend,
        "of one sequence": lambda x: attend(x[:, 0]),
        "encoder layer": nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0),
    },
}
OF_EACH_SAMPLE = {
    "lstm": lambda x: nn.LSTM(WIDTH, WIDTH, batch_first=True)(x)[0],
    "turned": lambda x: nn.GRU(WIDTH, WIDTH)(x.transpose(0, 1))[0].transpose(0, 1),
    "packed": lambda x: (
        nn.LSTM(WIDTH, WIDTH, batch_first=True)(
            nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3] * len(x)), batch_first=True)
        )[0].data
    ),
    "attention": lambda x: attend(x.transpose(0, 1)),
    "encoder layer": nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "a causal mask": lambda x: attend(x, attn_mask=torch.ones(len(x), len(x)).triu(1).bool()),
}
KINDS = {(said, name): run for said, runs in OVER_SAMPLES.items() for name, run in runs.items()}


@pytest.mark.parametrize(("said", "name"), KINDS)
def test_layers_that_run_over_samples_are_told(said, name):
    (text,) = mixture(KINDS[said, name], SAMPLE_ROWS)

    assert f"the loss depends on {said} (test_sequence_first.py, line" in text
    assert "right if dim 0 of the batch has the sequence" in text


@pytest.mark.parametrize("run", OF_EACH_SAMPLE.values(), ids=OF_EACH_SAMPLE)
def test_layers_that_run_over_tokens_are_not(run):
    assert mixture(run, SAMPLE_ROWS) == []


class Sentences(nn.Module):
    """Classifies sentences of a batch with samples first, by a layer with the sequence first."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


def said_of_sentences(how):
    rt = msrun.init({})
    torch.manual_seed(0)
    model = rt.shard(Sentences())
    optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(4, TOKENS, WIDTH), torch.arange(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "step":
            rt.step(model, optimizer, functional.cross_entropy, x, y)
        else:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    rt.close()
    return [str(each.message) for each in caught if "msrun: the loss" in str(each.message)]


@pytest.mark.parametrize("how", ["step", "loop"])
def test_ranks_warn_of_a_layer_that_runs_over_samples(how):
    for (text,) in run_warm(said_of_sentences, 2, how):
        assert "the loss depends on a recurrence over samples (test_sequence_first.py" in text


def said_with_a_loader():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained({}, "LSTM", has_loader=True)
    return [str(each.message) for each in caught if "msrun: the loss" in str(each.message)]


def test_a_loader_says_that_the_sequence_is_first():
    assert run_warm(said_with_a_loader, 2) == [[], []]
