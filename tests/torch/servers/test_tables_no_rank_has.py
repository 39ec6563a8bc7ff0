"""Tables on the device meta: servers make them, and no rank ever has one."""

import os
import re
import threading
from pathlib import Path

import pytest
import torch
from ranks import run_warm
from server_jobs import serving
from torch import nn
from torch.nn import functional

import msrun
from msrun.cluster.servers.ownership import Slice
from msrun.errors import ConfigError, MsrunError
from msrun.parallel.checkpoint.convert import convert
from msrun.parallel.config_file import parse_config
from msrun.parallel.servers.contents import joined
from msrun.parallel.servers.first_rows.filling import Filling
from msrun.parallel.servers.first_rows.meta_tables import seed_of
from msrun.parallel.servers.first_rows.sources import Drawn, TableSource

pytestmark = pytest.mark.torch

SEED = 11
STEPS = 3
ROWS, WIDTH = 900, 6
INIT = {"users.weight": {"uniform": 0.5}, "bias.weight": {"constant": 0.25}}
TABLES = ("items.weight", "users.weight", "bias.weight")


class Clicks(nn.Module):
    """Three tables, on meta or not, and a dense part."""

    def __init__(self, device=None, rows=ROWS, *, sparse=False):
        super().__init__()
        self.items = nn.EmbeddingBag(rows, WIDTH, padding_idx=3, device=device, sparse=sparse)
        self.users = nn.Embedding(rows, WIDTH, device=device, sparse=sparse)
        self.bias = nn.Embedding(rows, 1, device=device, sparse=sparse)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.out = nn.Linear(2 * WIDTH, 1)

    def forward(self, items, users):
        both = torch.cat([self.items(items), self.users(users)], 1)
        return self.out(torch.tanh(both)) + self.bias(users)


def draw(name, weight):
    """Fill a whole table as one process does."""
    generator = torch.Generator().manual_seed(seed_of(name, SEED))
    if name == "users.weight":
        nn.init.uniform_(weight, -0.5, 0.5, generator=generator)
    elif name == "bias.weight":
        nn.init.constant_(weight, 0.25)
    else:
        nn.init.normal_(weight, generator=generator)
        with torch.no_grad():
            weight[3] = 0


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (12, 5), generator=generator)
    return ids[:, :4], ids[:, 4], torch.rand(12, 1, generator=generator)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def single(steps):
    """Return losses, weights and the optimizer's state of one process with whole tables."""
    model, losses = Clicks(), []
    for name in TABLES:
        draw(name, model.get_parameter(name).data)
    update = adam(model)
    for step in range(steps):
        update.zero_grad()
        items, users, target = batch(step)
        loss = functional.mse_loss(model(items, users), target)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses, model.state_dict(), update.state[model.items.weight]["exp_avg_sq"]


def train(folder, kind, rest):
    """Train, save in the middle, go on, load, and go on again; return what was found."""
    torch.manual_seed(SEED)
    servers = {"params": list(TABLES), "init": INIT, **kind}
    rt = msrun.init({"servers": servers, "reduce": {"op": "mean"}, **rest})
    model = rt.shard(Clicks("meta"))
    assert not model.items.weight.is_meta
    update = rt.optimizer(adam(model))

    parts = rest.get("mesh", {}).get("dp", rt.world_size)

    def steps(first, count):
        return [
            rt.step(
                model,
                update,
                functional.mse_loss,
                *(each.chunk(parts)[rt.rank % parts] for each in batch(step)),
            ).item()
            for step in range(first, first + count)
        ]

    rt.save(model, update, step=0, path=folder / "start")
    losses = steps(0, STEPS)
    rt.save(model, update, step=STEPS, path=folder / "saved")
    losses += steps(STEPS, 2)
    rt.load(model, update, path=folder / "saved")
    again = steps(STEPS, 2)
    with pytest.raises(MsrunError, match="without its optimizer's state"):
        rt.load(model, path=folder / "saved")
    rt.load(model, update, path=folder / "start")
    first = steps(0, 1)
    state = rt.state_dict(model)
    rt.close()
    return losses, again, first, state


KINDS = {
    "plain": (2, 2, {}, {}),
    "one of each": (1, 1, {}, {}),
    "three ranks": (3, 3, {}, {}),
    "copies": (2, 2, {"replicas": 1}, {}),
    "cache": (2, 2, {"cache": {"rows": 64}}, {}),
    "frames": (2, 2, {"shared_memory": False}, {}),
    "zero 2": (2, 2, {}, {"optimizer": {"zero": 2, "threshold": 0}}),
    "zero 3": (1, 2, {}, {"optimizer": {"zero": 3, "threshold": 0}}),
    "tp": (2, 2, {}, {"mesh": {"dp": 1, "tp": 2}, "plan": [{"match": "out", "style": "rowwise"}]}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow][: kind != "plain"]) for kind in KINDS]
)
def test_made_tables_train_save_and_load_as_one_process(kind, tmp_path, monkeypatch):
    servers, ranks, *config = KINDS[kind]
    with serving(tmp_path / "servers", monkeypatch, servers, ranks):
        found = run_warm(train, ranks, tmp_path, *config)

    losses, _, _ = single(STEPS + 2)
    _, after_one, _ = single(1)
    _, saved, squares = single(STEPS)
    for own, again, first, state in found:
        assert own == pytest.approx(losses, abs=1e-6)
        assert again == own[STEPS:]
        assert first == own[:1]
        for name, weight in after_one.items() if state else ():
            torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-6)
    convert(tmp_path / "saved", tmp_path / "saved.pt", optimizer=True)
    whole = torch.load(tmp_path / "saved.pt")
    for name, weight in saved.items():
        torch.testing.assert_close(whole["model"][name], weight, rtol=0, atol=1e-6)
    kept = whole["optimizer"]["state"]["items.weight"]["exp_avg_sq"]
    torch.testing.assert_close(kept, squares, rtol=0, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [[101, 7], [3, 2], [5, 1], [1000, 9]])
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_slices_are_to_the_bit_those_of_one_whole_table(kind, shape, dtype):
    last = shape[0] - 1
    whole = torch.empty(shape, dtype=getattr(torch, dtype))
    fill = {"normal": (whole.normal_, 0.0, 0.3), "uniform": (whole.uniform_, -0.3, 0.3)}[kind]
    fill[0](*fill[1:], generator=torch.Generator().manual_seed(5))
    whole[last] = 0
    rows = Drawn(kind=kind, value=0.3, seed=5, padding=[last])
    sources = {"t": TableSource(shape=shape, dtype=dtype, rows=rows)}
    count = min(shape[0], 4)

    found = {}
    for owned in ([0, 2], [1, 3]):  # two servers
        wanted = [Slice("t", index) for index in owned if index < count]
        filling = Filling(sources, {"t": count}, wanted, 64)
        while not filling.advance():
            pass
        found |= {piece.index: made.rows for piece, made in filling.slices.items()}

    assert torch.equal(joined(found, count), whole)


class One(nn.Module):
    """A table on meta, and what a script may have done to it."""

    def __init__(self, change=None, **options):
        super().__init__()
        self.table = nn.Embedding(8, 2, device="meta", **options)
        if change:
            change(self)
        self.out = nn.Linear(2, 1)

    def forward(self, ids):
        return self.out(self.table(ids))


def rescaled(model):
    nn.init.uniform_(model.table.weight, -0.1, 0.1)


def given(model):
    model.table.weight = nn.Parameter(torch.empty(8, 2, device="meta"))


def tied(model):
    model.head = nn.Linear(2, 8, bias=False, device="meta")
    model.head.weight = model.table.weight


def nothing(_rt, _model, _update):
    pass


def recorded():
    with msrun.init().init_on_meta():
        model = One()
        model.table = nn.Embedding(8, 2)
        return model


INIT_ALL = {"servers": {"params": ["table.weight"], "init": {"*": {"normal": 1}}}}


def all_on_meta():
    with torch.device("meta"):
        return One()


def rest_recorded():
    with msrun.init().init_on_meta():
        return One()


ASYNC = {"checkpoint": {"dir": "somewhere", "async": True}}
CASES = {
    "what was done to its values is lost": ({}, lambda: One(rescaled), nothing),
    "where what was done to its values": ({}, lambda: One(given), nothing),
    "no table that is looked up only": ({}, lambda: One(tied), nothing),
    "parallel.servers.init: out.bias is no table": (INIT_ALL, One, nothing),
    "'tab' matches nothing": (
        {"servers": {"params": ["table.weight"], "init": {"tab": {"normal": 1}}}},
        One,
        nothing,
    ),
    "as rt.init_on_meta left it": ({}, recorded, nothing),
    "out.weight is on the device meta, and is no table": ({}, all_on_meta, nothing),
    "is on the device meta, and is no table of servers": ({}, rest_recorded, nothing),
    "checkpoint.async: rows of table.weight come from servers": (ASYNC, One, nothing),
    "table.weight has no values on the device meta": (
        {},
        One,
        lambda _rt, model, _update: model(torch.tensor([1])),
    ),
    "has no values on the device meta": ({}, One, lambda _rt, model, _update: model.state_dict()),
    "table.weight has no values": ({}, One, lambda rt, model, _update: rt.state_dict(model)),
    "weight has no values on": (
        {},
        One,
        lambda rt, model, update: rt.save(model, update, step=0, path="nowhere"),
    ),
    "values on the device meta": (
        {},
        One,
        lambda _rt, model, _update: model.load_state_dict({}, strict=False),
    ),
}


def refusals():
    """Return what each case says, on one rank."""
    found = {}
    for name, (keys, build, act) in CASES.items():
        rt = msrun.init({"servers": {"params": ["table.weight"]}, **keys})
        try:
            model = rt.shard(build())
            act(rt, model, torch.optim.SGD(model.parameters(), lr=0.1))
        except MsrunError as error:
            found[name] = str(error)
        msrun.init().close()
    return found


def test_values_that_nobody_knows_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv("MSRUN_SERVER_NUM", "1")

    [found] = run_warm(refusals, 1)

    for name in CASES:
        assert name in found.get(name, "")


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({}, "a table has one initialization (choose normal, uniform or constant)"),
        ({"normal": 1, "uniform": 1}, "a table has one initialization"),
        ({"normal": -1}, "normal: -1.0 must be at least 0"),
    ],
)
def test_wrong_initializations(rule, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_config({"servers": {"params": ["a"], "init": {"a": rule}}})


MIB = 1 << 20
LARGE_ROWS, LARGE_WIDTH = 1_500_000, 32  # 183 MiB, and its state twice as much


def status(pid, name):
    """Return a number of bytes of /proc."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(dict(line.split(":", 1) for line in text.splitlines())[name].split()[0]) << 10


def train_large(folder, pids):
    """Train, save and load; return by how much this rank and servers grew at most."""
    pids = [os.getpid(), *pids]
    cycle(folder / "small", 1000)  # what is imported, and what a session needs
    before = [status(pid, "VmRSS") for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is that from now on
    is_same = cycle(folder / "large", LARGE_ROWS)
    return is_same, [status(pid, "VmHWM") - n for pid, n in zip(pids, before, strict=True)]


def cycle(folder, rows):
    """Train, save, train and load; return whether the rows are those that were saved."""
    rt = msrun.init({"servers": {"params": ["weight"], "snapshot": {"every": 3}}})
    table = nn.Embedding(rows, LARGE_WIDTH, sparse=True, device="meta")
    model = rt.shard(table)
    torch.optim.Adagrad(model.parameters())  # it makes its state at once
    update = rt.optimizer(torch.optim.SparseAdam(model.parameters(), lr=0.1))

    def steps(count):
        for step in range(count):
            update.zero_grad()
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, rows, (256,), generator=generator)
            model(ids).square().sum().backward()
            update.step()

    steps(2)
    probe = torch.arange(rows - 500, rows)
    rt.save(model, update, step=2, path=folder)
    then = model(probe).detach().clone()
    steps(2)
    rt.load(model, update, path=folder)
    is_same = torch.equal(model(probe).detach(), then)
    rt.close()
    return is_same


@pytest.mark.slow
def test_a_table_larger_than_the_memory_of_a_rank(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 2, 1) as job:
        pids = [each.pid for each in job.processes.values()]
        [(is_same, (rank, *grown))] = run_warm(train_large, 1, tmp_path, pids, timeout=100)

    table = LARGE_ROWS * LARGE_WIDTH * 4
    part = 3 * table // 2  # with its state, on each of two servers
    assert is_same
    assert rank < table, rank  # blocks, and what the allocator keeps of them
    for nbytes in grown:
        assert part * 0.95 < nbytes < part * 1.9, grown  # at most; it is less at rest


def train_and_look(folder):
    """Return some rows after two steps, and the same of one process."""
    torch.manual_seed(SEED)
    rt = msrun.init({"servers": {"params": ["weight"]}})
    model = rt.shard(nn.Embedding(LARGE_ROWS, LARGE_WIDTH, sparse=True, device="meta"))
    (folder / "begins").touch()
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(0, LARGE_ROWS, LARGE_ROWS // 100)
    for _ in range(2):
        update.zero_grad()
        model(ids).square().sum().backward()
        update.step()
    found = model(ids).detach().clone()
    rt.close()
    whole = torch.empty(LARGE_ROWS, LARGE_WIDTH)
    draw("weight", whole)
    whole[3] = 0  # as `draw` does, and no row of `ids`
    rows = whole[ids]
    for _ in range(2):
        rows = rows - 0.1 * 2 * rows
    return found, rows, whole[ids]


def kill_while_it_fills(job, folder):
    """Kill a server that has a part of its slices, and start it again."""
    pid = job.processes[1].pid
    before = status(pid, "VmRSS")
    while not (folder / "begins").exists():
        os.sched_yield()
    while status(pid, "VmRSS") < before + 16 * MIB:
        os.sched_yield()
    job.kill(1)
    job.start(1)
    job.over.wait()


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_makes_a_table_makes_it_again(tmp_path, monkeypatch):
    with serving(tmp_path / "servers", monkeypatch, 2, 1) as job:
        words = {"target": kill_while_it_fills, "args": (job, tmp_path), "daemon": True}
        threading.Thread(**words).start()
        first = job.processes[1].pid
        [(found, expected, drawn)] = run_warm(train_and_look, 1, tmp_path, timeout=100)

        assert job.processes[1].pid != first
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert found.abs().sum() > 0.1
    assert not torch.equal(found, drawn)


def go_on(folder, steps):
    """Resume, train some steps, save, and return their losses."""
    torch.manual_seed(SEED)
    servers = {"params": list(TABLES), "init": INIT}
    rt = msrun.init({"servers": servers, "checkpoint": {"dir": str(folder)}})
    model = rt.shard(Clicks("meta"))
    update = rt.optimizer(adam(model))
    start = rt.resume(model, update)
    losses = [
        rt.step(
            model,
            update,
            functional.mse_loss,
            *(each.chunk(rt.world_size)[rt.rank] for each in batch(step)),
        ).item()
        for step in range(start, steps)
    ]
    rt.save(model, update, step=steps)
    rt.close()
    return losses


@pytest.mark.slow
def test_a_job_of_another_size_resumes_with_other_servers(tmp_path, monkeypatch):
    losses = []
    for number, (servers, ranks) in enumerate([(1, 2), (3, 1), (2, 2)], 1):
        with serving(tmp_path / f"servers-{number}", monkeypatch, servers, ranks):
            losses += run_warm(go_on, ranks, tmp_path / "checkpoints", 2 * number)[0]

    assert losses == pytest.approx(single(6)[0], abs=1e-6)
