"""Embedding tables whose gradients are rows, and options that mean other things on parts."""

import pytest
import torch
from ranks import Counted, run_warm
from test_grid import zero
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

WORDS, WIDTH, CLASSES, LENGTH, SAMPLES = 32, 16, 8, 4, 16
KINDS = ["Embedding", "EmbeddingBag"]
SPARSE = {"sparse": True}
ROWS = {"match": "embed", "params": {"weight": ["tp", None]}}
COLUMNS = {"match": "embed", "params": {"weight": [None, "tp"]}}
STAGES = {"embed": 0, "up": 0, "head": 1}


class Bag(nn.Module):
    """The mean of some rows of a table, told apart."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embed = getattr(nn, kind)(WORDS, WIDTH, **options)
        self.is_bag = kind == "EmbeddingBag"
        self.up = nn.Linear(WIDTH, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        found = self.embed(x)
        found = found if self.is_bag else found.mean(1)
        return self.head(functional.relu(self.up(found)))


def samples(steps=5):
    """Return batches whose words are read by some ranks and not by others."""
    draw = torch.Generator().manual_seed(7)
    for _ in range(steps):
        words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=draw)
        yield words, words[:, 0] % CLASSES


def build(kind, options):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Bag(kind, **options)


def optimizer_of(network, name):
    if name == "sgd":
        return torch.optim.SGD(network.parameters(), lr=0.5)
    # It leaves rows alone that nobody read: what takes all rows would move them.
    return torch.optim.SparseAdam(network.embed.parameters(), lr=0.05)


def learned(config, kind, options, name="sgd", max_norm=None):
    """Return the losses, and whether the gradient of the table is one of rows."""
    runtime = msrun.init(config)
    network = runtime.shard(build(kind, options))
    update = runtime.optimizer(optimizer_of(network, name))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    losses = []
    for batch in samples():
        part = [tensor.chunk(count)[share] for tensor in batch]
        loss = runtime.step(network, update, functional.cross_entropy, *part, max_norm=max_norm)
        losses.append(loss.item())
    table = dict(network.named_parameters()).get("embed.weight")  # of the first stage
    return losses, table is None or table.grad.is_sparse


def alone(kind, options, name="sgd", max_norm=None):
    """Return the losses of plain torch in one process."""
    network = build(kind, options)
    update = optimizer_of(network, name)
    losses = []
    for x, y in samples():
        network.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses


DIVIDED = {
    "dp": (2, {}),
    "dp on 4": (4, {}),
    "fused by module": (2, {"reduce": {"fuse": "module"}}),
    "accumulated": (2, {"accumulate": 2}),
    # The table and the head stay whole.
    "zero2, threshold": (2, zero(2, threshold=3000)),
    "zero3, threshold": (2, zero(3, threshold=3000) | {"accumulate": 2}),
    "beside tp": (2, {"mesh": {"tp": 2}, "plan": [{"match": "head", "style": "colwise"}]}),
    "dp x pp": (
        4,
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"stages": STAGES, "microbatches": 2}},
    ),
}


def assert_learns(found, expected):
    for losses, _ in found:
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert worst <= 1e-6, (losses, expected)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIVIDED)
def test_rows_are_learned_as_in_one_process(name, kind):
    ranks, config = DIVIDED[name]
    found = run_warm(learned, ranks, config, kind, SPARSE)

    assert_learns(found, run_warm(alone, 1, kind, SPARSE)[0])
    assert all(is_sparse for _, is_sparse in found)


def test_an_optimizer_of_rows_moves_those_that_some_rank_read():
    expected = run_warm(alone, 1, "Embedding", SPARSE, "adam")[0]

    for ranks in (2, 4):
        assert_learns(run_warm(learned, ranks, {}, "Embedding", SPARSE, "adam"), expected)


def test_rows_count_in_the_norm_of_clipping():
    expected = run_warm(alone, 1, "Embedding", {}, "sgd", 0.05)[0]  # torch clips no rows

    assert_learns(run_warm(learned, 2, {}, "Embedding", SPARSE, "sgd", 0.05), expected)
    assert abs(expected[-1] - run_warm(alone, 1, "Embedding", {})[0][-1]) > 1e-3


def test_a_short_type_on_the_wire_is_near():
    exact = run_warm(alone, 1, "Embedding", SPARSE)[0]
    for near, _ in run_warm(learned, 2, {"reduce": {"dtype": "bfloat16"}}, "Embedding", SPARSE):
        assert 0 < max(abs(a - b) for a, b in zip(near, exact, strict=True)) < 1e-2


class Tied(nn.Module):
    """Uses its table for nothing, for rows, or for all of them too, as told."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, use):
        found = self.embed(x).mean(1) if use else torch.ones(len(x), WIDTH)
        found = found @ self.embed.weight.t() if use == 2 else found
        return found.square().sum() * self.scale


def used(uses):
    runtime = msrun.init()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = runtime.shard(Tied())
    x = next(samples())[0].chunk(3)[runtime.rank]
    network(x, uses[runtime.rank]).backward()
    gradient = network.embed.weight.grad
    return None if gradient is None else (gradient.is_sparse, gradient.to_dense())


@pytest.mark.parametrize("uses", [(0, 0, 0), (0, 1, 0), (1, 0, 1), (0, 1, 2), (2, 2, 2)])
def test_ranks_may_have_no_rows_some_or_all(uses):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Tied()
    parts = next(samples())[0].chunk(3)
    (sum(map(network, parts, uses)) / 3).backward()
    expected = network.embed.weight.grad

    for found in run_warm(used, 3, uses):
        if not any(uses):
            assert found is None
            continue
        is_sparse, gradient = found
        assert is_sparse == (2 not in uses)
        torch.testing.assert_close(gradient, expected.to_dense())


def sent():
    runtime = msrun.init()
    network = runtime.shard(build("Embedding", SPARSE))
    update = torch.optim.SGD(network.parameters(), lr=0.1)
    x, y = (part.chunk(2)[runtime.rank] for part in next(samples()))
    runtime.step(network, update, functional.cross_entropy, x, y)  # it also compares replicas
    with Counted() as counted:
        runtime.step(network, update, functional.cross_entropy, x, y)
    return dict(counted.calls), dict(counted.bytes), len(x.unique())


def test_ranks_send_the_rows_they_have():
    found = run_warm(sent, 2)
    most = max(rows for *_, rows in found)

    for calls, size, _ in found:
        # How much there is; which rows; what they are.
        assert calls == {"allgather_": 3, "allreduce_": 2}
        assert size["allgather_"] == 2 * 8 + most * 8 + most * WIDTH * 4
    assert most < WORDS


class Undeclared(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(WORDS, WIDTH))

    def forward(self, x):
        return functional.embedding(x, self.table, sparse=True).sum()


def undeclared(config, is_added):
    runtime = msrun.init(config)
    network = runtime.shard(Undeclared())
    x = next(samples())[0]

    def learn():
        if is_added:
            with runtime.no_sync(network):
                network(x).backward()
        network(x).backward()

    with pytest.raises(UsageError) as caught:
        learn()
    return caught.value.message


@pytest.mark.sampled
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_rows_that_nobody_announced_are_refused(level, is_added):
    sentence = "table has a sparse gradient, which no nn.Embedding(sparse=True) announced"
    if level:
        sentence = f"parallel.optimizer.zero: table has a sparse gradient, {FOR_WHOLE}"
    assert run_warm(undeclared, 2, zero(level), is_added) == 2 * [sentence]


def refused(config, options):
    network = build("Embedding", options)
    before = [id(param) for param in network.parameters()]
    with pytest.raises(UsageError) as caught:
        msrun.init(config).shard(network)
    assert before == [id(param) for param in network.parameters()]
    return caught.value.message


WHOLE = "has sparse gradients, and only a replicated table can"
FOR_WHOLE = "and only a replicated table can"
NORM = "embed: max_norm writes the rows that a rank reads, and other ranks keep them"
COUNTS = (
    "embed: scale_grad_by_freq counts words of a whole batch, "
    "and {} parts of it are looked up apart"
)


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (zero(1), SPARSE, f"parallel.optimizer.zero: embed {WHOLE}"),
        (zero(3, threshold=2048), SPARSE, f"parallel.optimizer.zero: embed {WHOLE}"),
        ({"mesh": {"tp": 2}, "plan": [ROWS]}, SPARSE, f"parallel.plan[0]: embed {WHOLE}"),
        ({"mesh": {"tp": 2}, "plan": [COLUMNS]}, SPARSE, f"parallel.plan[0]: embed {WHOLE}"),
        ({}, {"max_norm": 1.0}, NORM),
        (zero(2), {"max_norm": 1.0}, NORM),
        ({"mesh": {"tp": 2}, "plan": [ROWS]}, {"max_norm": 1.0}, NORM),
        ({}, {"scale_grad_by_freq": True}, COUNTS.format(2)),
        ({"accumulate": 4}, {"scale_grad_by_freq": True}, COUNTS.format(8)),
        (
            {"mesh": {"pp": 2}, "pipeline": {"stages": STAGES, "microbatches": 4}},
            {"scale_grad_by_freq": True},
            COUNTS.format(4),
        ),
    ],
)
def test_what_would_mean_something_else_is_refused_before_anything_changes(
    config, options, sentence
):
    assert run_warm(refused, 2, config, options) == 2 * [sentence]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"padding_idx": 20},
                                     {"scale_grad_by_freq": True}])  # fmt: skip
@pytest.mark.parametrize("rule", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_other_options_hold_on_parts(rule, options, kind):
    found = run_warm(learned, 2, {"mesh": {"tp": 2}, "plan": [rule]}, kind, options)

    assert_learns(found, run_warm(alone, 1, kind, options)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_scaled_where_every_rank_reads_them(kind):
    config = {"mesh": {"tp": 2}, "plan": [{"match": "head", "style": "colwise"}]}
    found = run_warm(learned, 2, config, kind, {"max_norm": 1.0})

    assert_learns(found, run_warm(alone, 1, kind, {"max_norm": 1.0})[0])
