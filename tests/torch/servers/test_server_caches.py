"""Rows that ranks keep: training with a cache is training without one, to the bit."""

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from test_remote_parameters import LOSS, PARAMS, Clicks

import msrun
from msrun.parallel.servers.caching.ahead import one_ahead
from msrun.parallel.servers.caching.cache import RowCache
from msrun.parallel.servers.caching.cached_tables import CachedTables
from msrun.parallel.servers.client import PulledRows
from msrun.parallel.servers.recipe import Recipe
from msrun.parallel.servers.remote import RemoteParameter
from msrun.parallel.servers.rows import RowGradients, ServerRows, WorkerPush, cut

pytestmark = pytest.mark.torch

ROWS, WIDTH, SLICES = 97, 5, 3
OPTIMIZERS = {
    "SGD": ({"lr": 0.3}, False),
    "SGD sparse": ({"lr": 0.3}, True),
    "SGD momentum": ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, False),
    "AdamW": ({"lr": 0.01, "weight_decay": 0.1}, False),
    "Adagrad": ({"lr": 0.1, "initial_accumulator_value": 0.2}, False),
    "SparseAdam": ({"lr": 0.02}, True),
    "RMSprop": ({"lr": 0.01, "centered": True, "momentum": 0.5}, False),
}


def gradients(draw, ids, *, is_sparse):
    values = torch.randn(len(ids), WIDTH, generator=draw)
    return RowGradients(ids=ids, values=values, is_sparse=is_sparse)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_of_a_cache_are_those_of_the_server_to_the_bit(name):
    options, is_sparse = OPTIMIZERS[name]
    draw = torch.Generator().manual_seed(1)
    recipe = Recipe(kind=name.split()[0], options={"t": options})
    server = ServerRows({"t": SLICES}, recipe)
    server.replace(cut(torch.randn(ROWS, WIDTH, generator=draw), "t", SLICES))
    caches = [
        RowCache(
            40, (WIDTH,), torch.float32, kind=recipe.kind, options=options, is_sparse=is_sparse
        )
        for _ in range(2)
    ]
    kept = 0
    for version in range(14):
        used = [torch.randint(0, ROWS, (12,), generator=draw).unique() for _ in caches]
        if version == 9:  # contents that another server sent
            server.replace(server.contents())
        for rank, (cache, ids) in enumerate(zip(caches, used, strict=True)):
            versions = cache.versions(ids)
            fresh = server.are_fresh("t", rank, ids, versions, version)
            here = server.read("t", ids)
            assert torch.equal(cache.rows(ids)[fresh], here[fresh])
            assert not (fresh & (versions < 0)).any()
            kept += int(fresh.sum())
            cache.take(ids[~fresh], here[~fresh], *server.read_state("t", ids[~fresh]), version)
        pushed = [gradients(draw, ids, is_sparse=is_sparse) for ids in used]
        given = [None if (version, n) == (5, 1) else each for n, each in enumerate(pushed)]
        pushes = [WorkerPush(gradients={"t": each} if each else {}) for each in given]
        server.apply(pushes)
        for rank, push in enumerate(pushes):
            server.note(rank, push, version)
            caches[rank].step(given[rank], options)
    assert kept > 10


def test_batches_are_drawn_ahead_but_not_past_random_numbers():
    told = []
    ahead = one_ahead(lambda *pair: told.append(pair), iter(range(4)))
    assert [next(ahead), *told] == [0, (0, 1)]
    assert list(ahead) == [1, 2, 3]
    assert told == [(0, 1), (1, 2), (2, 3)]

    drawing = (torch.rand(()).item() for _ in range(3))
    torch.manual_seed(0)
    told.clear()
    mixed = [(torch.rand(()).item(), each) for each in one_ahead(told.append, drawing)]
    torch.manual_seed(0)
    expected = [torch.rand(()).item() for _ in range(6)]
    assert [each[::-1] for each in mixed] == list(zip(expected[::2], expected[1::2], strict=True))
    assert not told


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"cache": {"rows": 0}}, "rows: 0 must be at least 1"),
        ({"cache": {"rows": 9}, "sync": {"staleness": 2}}, "cache: with a staleness"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(servers, message):
    with pytest.raises(msrun.errors.ConfigError, match=message):
        msrun.init({"servers": {"params": ["*"], **servers}})


def samples():
    draw = torch.Generator().manual_seed(5)
    items = torch.randint(0, 400, (96, 6), generator=draw)
    users = torch.randint(0, 300, (96, 2), generator=draw)
    labels = torch.randint(0, 2, (96,), generator=draw).float()
    return list(zip(items, users, labels, strict=True))


class Columns(Clicks):
    """Takes the ids of both users in one tensor."""

    def forward(self, items, users):
        return super().forward(items, users[:, 0], users[:, 1])


def train(optimizers, caches):
    """Train with each optimizer and each cache; return curves and weights."""
    found = {}
    for name, make in optimizers.items():
        for cache in caches:
            torch.manual_seed(2)
            rt = msrun.init({"servers": {"params": PARAMS, "cache": cache}})
            loader = rt.loader(samples(), 16 // rt.world_size, shuffle=True)
            model = rt.shard(Columns())
            update = rt.optimizer(make(model.parameters()))
            curve = [
                rt.step(model, update, LOSS, *batch).item() for _ in range(2) for batch in loader
            ]
            found[name, str(cache)] = curve, rt.state_dict(model)
            rt.close()
    return found


CACHES = [None, {"rows": 1000}, {"rows": 50}, {"rows": 200, "prefetch": False}]


def check_same(found, names, caches):
    for of_rank in found:
        for name in names:
            curve, weights = of_rank[name, "None"]
            for cache in caches:
                own, state = of_rank[name, str(cache)]
                assert own == curve
                for each, weight in weights.items():
                    assert torch.equal(state[each], weight)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def test_a_cache_changes_no_bit_of_losses_and_weights(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch, 2, 2):
        found = run_warm(train, 2, {"adamw": adamw}, CACHES[:2])

    check_same(found, ["adamw"], CACHES[:2])


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "ranks"), [(1, 1), (3, 2), (2, 4)])
def test_caches_of_all_sizes_change_no_bit(servers, ranks, tmp_path, monkeypatch):
    optimizers = {"sgd": sgd, "adamw": adamw}
    with serving(tmp_path, monkeypatch, servers, ranks):
        found = run_warm(train, ranks, optimizers, CACHES, timeout=200)

    check_same(found, optimizers, CACHES)


class AnsweringClient:
    """Answers from one server's rows, and notes what is asked for."""

    def __init__(self, server):
        self.server = server
        self.asked = []

    def ask(self, ask):
        self.asked.append({name: ids.tolist() for name, (ids, _) in ask.items()})
        self._ask = ask

    def answer(self):
        parts = {}
        for name, (ids, versions) in self._ask.items():
            fresh = self.server.are_fresh(name, 0, ids, versions, 0)
            changed = ids[~fresh]
            state = self.server.read_state(name, changed)
            parts[name] = [0, fresh, self.server.read(name, changed), *state]
        return PulledRows({name: [0] * SLICES for name in parts}, {0: parts})

    def pull(self, ask):
        self.ask(ask)
        return self.answer()


def test_rows_of_the_next_batch_are_asked_for_after_the_last_lookup_of_a_step():
    options = {"t": {"lr": 0.1}, "u": {"lr": 0.1}}
    recipe = Recipe(kind="SGD", options=options)
    server = ServerRows({"t": SLICES, "u": SLICES}, recipe)
    server.replace(cut(torch.ones(ROWS, 2), "t", SLICES) | cut(torch.ones(ROWS, 2), "u", SLICES))
    tables = []
    for name in options:
        weight = torch.nn.Embedding(ROWS, 2)
        tables.append(RemoteParameter(name, weight.weight, [weight]))
    cached, client = CachedTables(50, tables), AnsweringClient(server)
    cached.begin(recipe)
    batches = [
        [torch.tensor([[n, n + 1], [n + 2, n + 1]]), torch.rand(2), torch.tensor([n + 20, n + 30])]
        for n in range(3)
    ]

    for n in (0, 1):
        cached.announce(batches[n], batches[n + 1])
        cached.pull(client, "t", batches[n][0][:, 0].unique())
        cached.pull(client, "u", batches[n][2].unique())
        cached.settle(client)
        cached.step({}, options)

    first = [{"t": [0, 2]}, {"u": [20, 30]}]
    second = [{"t": [1, 3]}, {"u": [21, 31]}, {"t": [2, 4], "u": [22, 32]}]
    assert client.asked == first + second
