"""Parameters on real servers: losses and weights are those of one process."""

import functools

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.checkpoint.convert import convert

pytestmark = pytest.mark.torch

STEPS = 5
BATCH = 12
TOLERANCE = 1e-6
PARAMS = ["items.weight", "users.weight", "wide.*"]


class Clicks(nn.Module):
    """Bags of items, two users whose table is used twice, a dense layer on servers and one not."""

    def __init__(self, mode="sum", *, sparse=False):
        super().__init__()
        self.items = nn.EmbeddingBag(400, 4, mode=mode, sparse=sparse, padding_idx=1)
        self.users = nn.Embedding(300, 4, sparse=sparse, padding_idx=2)
        self.wide = nn.Linear(8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, items, users, friends):
        both = self.users(users) * self.users(friends)
        return self.out(torch.tanh(self.wide(torch.cat([self.items(items), both], 1)))).sum(1)


def build(mode="sum", *, sparse=False):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Clicks(mode, sparse=sparse)


def batch(step):
    """Return a batch with duplicates, padding, and bags of nothing but padding."""
    draw = torch.Generator().manual_seed(step)
    items = torch.randint(0, 40, (BATCH, 6), generator=draw)
    items[:, 3:] = torch.where(items[:, 3:] < 20, 1, items[:, :3])
    items[step % BATCH] = 1
    users, friends = torch.randint(0, 30, (2, BATCH), generator=draw)
    return items, users, friends, torch.randint(0, 2, (BATCH,), generator=draw).float()


def part(step, rank, ranks):
    return [each.chunk(ranks)[rank] for each in batch(step)]


def groups(model, **second):
    return [
        {"params": [*model.items.parameters(), *model.out.parameters()]},
        {"params": [*model.users.parameters(), *model.wide.parameters()], **second},
    ]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(groups(m, lr=0.1), lr=0.3),
    "momentum": lambda m: torch.optim.SGD(
        groups(m, nesterov=True), lr=0.2, momentum=0.9, weight_decay=0.01
    ),
    "adamw": lambda m: torch.optim.AdamW(groups(m, weight_decay=0.2), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m, lr_decay=0.1), lr=0.05),
}
LOSS = functional.binary_cross_entropy_with_logits


def single(optimizer, **options):
    model = build(**options)
    update = OPTIMIZERS[optimizer](model)
    losses = []
    for step in range(STEPS):
        *inputs, labels = batch(step)
        update.zero_grad()
        loss = LOSS(model(*inputs), labels)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(optimizer, config, options, begin=0, end=STEPS):
    """Train on servers; return losses and whole weights."""
    rt = msrun.init({"servers": {"params": PARAMS}, **config})
    model = rt.shard(build(**options))
    update = rt.optimizer(OPTIMIZERS[optimizer](model))
    losses = [
        rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item()
        for step in range(begin, end)
    ]
    weights = rt.state_dict(model)
    rt.close()
    return losses, weights


def check(found, expected):
    losses, weights = expected
    for rank, (own, state) in enumerate(found):
        assert own == pytest.approx(losses, abs=TOLERANCE)
        assert rank or state.keys() == weights.keys()
        for name, weight in weights.items() if state else ():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=TOLERANCE)


def run_each(cases):
    """Train every case in one go of ranks."""
    return {name: train(*words) for name, words in cases.items()}


CASES = {
    "sgd": ("sgd", {}, {}),
    "sgd mean": ("sgd", {}, {"mode": "mean"}),
    "sgd sparse": ("sgd", {}, {"sparse": True}),
    "momentum": ("momentum", {}, {}),
    "adamw": ("adamw", {}, {}),
    "adagrad": ("adagrad", {}, {}),
    "adagrad sum of ranks": ("adagrad", {"accumulate": 2}, {}),
    "zero": ("adamw", {"optimizer": {"zero": 2, "threshold": 0}}, {}),
}


@functools.cache
def expected(optimizer, **options):
    return single(optimizer, **options)


def check_all(found, cases):
    for name, (optimizer, _, options) in cases.items():
        check([each[name] for each in found], expected(optimizer, **options))


def test_losses_and_weights_are_those_of_one_process(tmp_path, monkeypatch):
    """And those of a table that has an optimizer of its own, SparseAdam."""
    cases = {name: CASES[name] for name in ("sgd sparse", "momentum", "adamw", "adagrad", "zero")}
    with serving(tmp_path, monkeypatch, 3, 2):
        found = run_warm(run_each, 2, cases)
        of_two_optimizers = run_warm(two_optimizers, 2)

    check_all(found, cases)
    check_two_optimizers(of_two_optimizers)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_grid(servers, ranks, tmp_path, monkeypatch):
    cases = (
        CASES
        if (servers, ranks) in {(3, 2), (2, 4)}
        else {k: CASES[k] for k in ("momentum", "adamw")}
    )
    with serving(tmp_path, monkeypatch, servers, ranks):
        found = run_warm(run_each, ranks, cases, timeout=200)

    check_all(found, cases)


def plain_loop(config):
    """Train in a loop of torch, with an evaluation on one rank only; return weights."""
    rt = msrun.init({"servers": {"params": PARAMS}, **config})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["momentum"](model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(update, 0.8)
    for step in range(STEPS):
        *inputs, labels = part(step, rt.rank, rt.world_size)
        update.zero_grad()
        LOSS(model(*inputs), labels).backward()
        update.step()
        schedule.step()
        if rt.is_main:
            with torch.no_grad():
                model(*batch(step)[:3])
    if rt.is_main:
        with torch.no_grad():
            model(*batch(0)[:3])
    rt.barrier()
    weights = rt.state_dict(model)
    rt.close()
    return weights


def plain_single():
    model = build()
    update = OPTIMIZERS["momentum"](model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(update, 0.8)
    for step in range(STEPS):
        *inputs, labels = batch(step)
        update.zero_grad()
        LOSS(model(*inputs), labels).backward()
        update.step()
        schedule.step()
    return model.state_dict()


def test_plain_loop_with_a_scheduler_and_an_evaluation(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        first, _ = run_warm(plain_loop, 2, {})

    for name, weight in plain_single().items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=TOLERANCE)


def two_optimizers():
    """Train tables by SparseAdam on servers, and the rest by AdamW; return whole weights."""
    rt = msrun.init({"servers": {"params": ["items.weight", "users.weight"]}})
    model = rt.shard(build(sparse=True))
    sparse, dense = (rt.optimizer(each) for each in apart(model))
    for step in range(STEPS):
        *inputs, labels = part(step, rt.rank, rt.world_size)
        for each in (sparse, dense):
            each.zero_grad()
        LOSS(model(*inputs), labels).backward()
        for each in (sparse, dense):
            each.step()
    weights = model.state_dict()
    rt.close()
    return weights


def apart(model):
    tables = [model.items.weight, model.users.weight]
    rest = [*model.wide.parameters(), *model.out.parameters()]
    return torch.optim.SparseAdam(tables, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


def check_two_optimizers(found):
    model = build(sparse=True)
    both = apart(model)
    for step in range(STEPS):
        *inputs, labels = batch(step)
        model.zero_grad()
        LOSS(model(*inputs), labels).backward()
        for each in both:
            each.step()
    for state in found:
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=TOLERANCE)


class Ragged(nn.Module):
    """Bags of any length, weighted ones among them, and a module with the same table."""

    def __init__(self, mode):
        super().__init__()
        self.bags = nn.EmbeddingBag(60, 4, mode=mode, padding_idx=3, include_last_offset=True)
        self.firsts = nn.Embedding(60, 4, padding_idx=3)
        self.firsts.weight = self.bags.weight
        self.weighted = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.out = nn.Linear(12, 1)

    def forward(self, ids, offsets, firsts):
        weights = 0.5 + ids % 7 / 7
        weighted = self.weighted(ids % 40, offsets[:-1], per_sample_weights=weights)
        found = [self.bags(ids, offsets), self.firsts(firsts), weighted]
        return self.out(torch.cat(found, 1))[:, 0]


def ragged(step, rank, ranks):
    """Return samples of a step; all bags of rank 0 are empty in step 1."""
    draw = torch.Generator().manual_seed(step)
    sizes = torch.randint(0, 4, (8,), generator=draw)
    sizes[step % 8] = 0
    sizes[:4] *= step != 1
    firsts, target = torch.randint(0, 6, (8,), generator=draw), torch.rand(8, generator=draw)
    bags = torch.randint(0, 60, (int(sizes.sum()),), generator=draw).split(sizes.tolist())
    bags = [torch.cat([bag, bag[:1], bag[:1]]) for bag in bags]
    mine = [bags[each] for each in torch.arange(8).chunk(ranks)[rank]]
    offsets = torch.tensor([0, *map(len, mine)]).cumsum(0)
    return torch.cat(mine), offsets, firsts.chunk(ranks)[rank], target.chunk(ranks)[rank]


def in_bags(rt, mode, optimizer):
    """Train in a plain loop; return losses of this rank's samples, and the weights."""
    torch.manual_seed(5)
    model = rt.shard(Ragged(mode)) if rt else Ragged(mode)
    update = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    update = rt.optimizer(update) if rt else update
    losses = []
    for step in range(STEPS):
        *inputs, target = ragged(step, *((rt.rank, rt.world_size) if rt else (0, 1)))
        update.zero_grad()
        loss = functional.mse_loss(model(*inputs), target)
        loss.backward()
        update.step()
        losses.append(loss.item())
    weights = rt.state_dict(model) if rt else model.state_dict()
    return losses, {name: each.clone() for name, each in weights.items()}


MODES = [("sum", "SGD"), ("mean", "Adagrad"), ("max", "SGD")]


def in_all_bags():
    found = []
    for words in MODES:
        rt = msrun.init({"servers": {"params": ["bags.*", "weighted.*"]}})
        found.append(in_bags(rt, *words))
        rt.close()
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
def test_empty_bags_weighted_bags_and_a_table_of_two_modules(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(in_all_bags, 2)

    for words, *of_ranks in zip(MODES, *found, strict=True):
        losses, weights = in_bags(None, *words)
        curves = [own for own, _ in of_ranks]
        mean = [sum(parts) / 2 for parts in zip(*curves, strict=True)]
        assert mean == pytest.approx(losses, abs=TOLERANCE), words
        for _, state in of_ranks:
            for name, weight in weights.items() if state else ():
                torch.testing.assert_close(state[name], weight, rtol=0, atol=TOLERANCE)


def learn(staleness, steps):
    """Train without waiting for each other; return the first and the last loss of all samples."""
    rt = msrun.init({"servers": {"params": ["*"], "sync": {"staleness": staleness}}})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    whole = batch(0)

    def loss():
        with torch.no_grad():
            return LOSS(model(*whole[:3]), whole[3]).item()

    first = loss()
    for _ in range(steps):
        *inputs, labels = part(0, rt.rank, rt.world_size)
        update.zero_grad()
        LOSS(model(*inputs), labels).backward()
        update.step()
    last = loss()
    rt.close()
    return first, last


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [2, float("inf")])
def test_bounded_staleness_learns(staleness, tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(learn, 2, staleness, 60)

    for first, last in found:
        assert last < first / 2


def saved(folder):
    """Train, save in the middle, go on, go back and repeat; return both curves."""
    rt = msrun.init({"servers": {"params": PARAMS}})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["adamw"](model))

    def steps(begin, end):
        return [
            rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item()
            for step in range(begin, end)
        ]

    losses = steps(0, 3)
    rt.save(model, update, step=3, path=folder)
    first = steps(3, STEPS)
    assert rt.load(model, update, path=folder) == 3
    again = steps(3, STEPS)
    rt.close()
    return losses + first, again


def loaded_in_one_process(folder):
    rt = msrun.init()
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["adamw"](model))
    rt.load(model, update, path=folder)
    losses = [rt.step(model, update, LOSS, *batch(step)).item() for step in range(3, STEPS)]
    rt.close()
    return losses


def test_checkpoints_hold_tables_and_their_state(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 2, 2):
        found = run_warm(saved, 2, tmp_path / "checkpoint")
    [alone] = run_warm(loaded_in_one_process, 1, tmp_path / "checkpoint")

    losses, _ = single("adamw")
    for first, again in found:
        assert first == pytest.approx(losses, abs=TOLERANCE)
        assert again == pytest.approx(losses[3:], abs=TOLERANCE)
    assert alone == pytest.approx(losses[3:], abs=TOLERANCE)


def loaded_on_servers(folder):
    rt = msrun.init({"servers": {"params": PARAMS}})
    model = rt.shard(build())
    update = rt.optimizer(OPTIMIZERS["adamw"](model))
    begin = rt.load(model, update, path=folder)
    losses = [
        rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item()
        for step in range(begin, STEPS)
    ]
    rt.close()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("is_converted", [False, True])
def test_a_checkpoint_loads_into_any_number_of_servers_and_ranks(
    is_converted, tmp_path, monkeypatch
):
    with serving(tmp_path / "two", monkeypatch, 2, 2):
        run_warm(saved, 2, tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint"
    if is_converted:
        convert(folder, tmp_path / "all.pt", optimizer=True)
        folder = tmp_path / "again"
        convert(tmp_path / "all.pt", folder, optimizer=True)

    losses, _ = single("adamw")
    for servers, ranks in ((3, 1), (1, 3)):
        with serving(tmp_path / f"{servers}", monkeypatch, servers, ranks):
            found = run_warm(loaded_on_servers, ranks, folder)
        assert found == [pytest.approx(losses[3:], abs=TOLERANCE)] * ranks


def loaded_again(folder):
    """Return the curve of the last steps twice, the second time from weights of a file."""
    rt = msrun.init({"servers": {"params": PARAMS}})
    model = rt.shard(build())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def steps(begin, end):
        return [
            rt.step(model, update, LOSS, *part(step, rt.rank, rt.world_size)).item()
            for step in range(begin, end)
        ]

    steps(0, 3)
    rt.save_pretrained(model, folder)
    first = steps(3, STEPS)
    rt.load_pretrained(model, folder)
    again = steps(3, STEPS)
    rt.close()
    return first, again


def test_weights_of_a_file_replace_those_on_servers(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 2, 2):
        found = run_warm(loaded_again, 2, tmp_path / "weights")

    for first, again in found:
        assert again == pytest.approx(first, abs=TOLERANCE)
