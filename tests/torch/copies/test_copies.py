"""Multiple copies: slices of a batch take turns, and learn what one process learns."""

import contextlib
import datetime as dt
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import (
    MODELS,
    OPTIMIZERS,
    Counted,
    Curves,
    assert_equal_curves,
    batches,
    build,
    oracle,
    run_warm,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

LAYERS = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
VOCABULARY = [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}]
TP = {"mesh": {"tp": 2}, "plan": LAYERS}
DP_TP = {"mesh": {"dp": 2, "tp": 2}, "plan": LAYERS + VOCABULARY}
RECOMPUTE = {"recompute": {"modules": ["layers.*"]}}
COMM_SAVED = {"recompute": {"modules": ["layers.*"], "save": ["comm"]}}
GRID = [
    {"match": "layers.*.[qkv]", "style": "2d", "axes": ["x", "y"]},
    {"match": "layers.*.o", "style": "2d", "axes": ["y", "x"]},
    {"match": "layers.*.up", "style": "2d", "axes": ["x", "y"]},
    {"match": "layers.*.down", "style": "2d", "axes": ["y", "x"]},
    {"match": "*norm*", "style": "2d", "axes": ["x", "y"]},
]
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
VIRTUAL = {"embed": [0, 0], "position": [0, 0], "layers.0": [1, 0], "layers.1": [0, 1]} | {
    "norm": [1, 1],
    "head": [1, 1],
}
PP_TP = {
    "mesh": {"pp": 2, "tp": 2},
    "plan": LAYERS,
    "pipeline": {"stages": STAGES, "microbatches": 2},
}


def staged(**pipeline):
    return PP_TP | {"pipeline": PP_TP["pipeline"] | pipeline}


def cases():
    """Yield ranks, copies and a configuration."""
    yield 2, 2, TP
    yield 4, 2, DP_TP | RECOMPUTE | {"accumulate": 2}
    yield 4, 3, DP_TP | {"optimizer": {"zero": 1}}
    yield 2, 3, TP | {"plan": LAYERS + VOCABULARY}
    yield 2, 2, TP | COMM_SAVED
    yield 2, 4, TP | {"accumulate": 2}
    yield 4, 2, DP_TP
    yield 4, 2, DP_TP | {"optimizer": {"zero": 1}}
    yield 4, 2, DP_TP | {"optimizer": {"zero": 2}} | RECOMPUTE
    yield 4, 2, DP_TP | {"optimizer": {"zero": 2}, "accumulate": 2}
    yield 4, 2, {"mesh": {"x": 2, "y": 2}, "plan": GRID}
    yield 1, 2, {"mesh": {"tp": 1}, "plan": LAYERS}
    yield 4, 2, PP_TP
    yield 4, 2, PP_TP | RECOMPUTE
    yield 4, 2, PP_TP | COMM_SAVED
    yield 4, 3, staged(microbatches=1, schedule="gpipe")
    yield 4, 4, staged(microbatches=4, schedule="gpipe")
    for schedule in ("interleaved", "looped_bfs", "interleaved_zb"):
        yield 4, 2, staged(stages=VIRTUAL, schedule=schedule)
    for schedule in ("zbv", "dualpipev"):
        v = VIRTUAL | {"layers.1": [1, 1], "norm": [0, 1], "head": [0, 1]}
        yield 4, 2, staged(stages=v, schedule=schedule, microbatches=4)
    for options in ({}, {"optimizer": {"zero": 1}}, {"optimizer": {"zero": 2}}, RECOMPUTE):
        yield 8, 2, PP_TP | {"mesh": {"pp": 2, "dp": 2, "tp": 2}} | options
    yield 2, 2, {"mesh": {"pp": 2, "tp": 1}, "plan": LAYERS, "pipeline": PP_TP["pipeline"]}


CASES = {
    f"{copies} copies, {config}": (ranks, config | {"copies": copies}, "transformer", "adamw")
    for ranks, copies, config in cases()
}
IN_CI = [*CASES][:3]
ROWS = [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_CI)) for name in CASES]


@pytest.fixture(scope="module")
def curves():
    return Curves(CASES, apart=CASES.keys() - IN_CI)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROWS)
def test_copies_learn_what_one_process_learns(curves, name):
    assert_equal_curves(curves[name], oracle(*CASES[name][2:]))


# Of each of two layers and two copies: of two row-wise products forward, of two inputs backward.
REDUCTIONS = 16


class Delayed(TorchDispatchMode):
    """Lets a reduction end only after the other rank has multiplied something meanwhile.

    Args:
        store: What both ranks see.
        ranks: The one that computes, and the one that waits for it.
        last: Each so many reductions are those of one backward pass and what comes before it.
    """

    def __init__(self, store, ranks=(0, 1), last=REDUCTIONS):
        super().__init__()
        self.store, self.last = store, last
        self.quick, self.slow = ranks
        self.begun = self.multiplied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        name = func.name().partition("::")[2].partition(".")[0]
        if name == "all_reduce":
            self.begun += 1
            # Behind the last one of backward nothing is left to multiply.
            if dist.get_rank() == self.slow and self.begun % self.last:
                self.store.wait([str(self.begun)], dt.timedelta(seconds=30))
        elif name in ("mm", "addmm", "bmm") and self.begun > self.multiplied:
            self.multiplied = self.begun
            if dist.get_rank() == self.quick:
                self.store.set(str(self.begun), "")
        return func(*args, **(kwargs or {}))


def overlapped(path, copies):
    """Return how many reductions there were in a step in which each waits for the other copy."""
    runtime = msrun.init(TP | {"copies": copies})
    network = runtime.shard(build("transformer"))
    update = OPTIMIZERS["sgd"](network.parameters())
    first, second = batches("transformer", steps=2)
    runtime.step(network, update, MODELS["transformer"][1], *first)
    with Delayed(dist.FileStore(path, 2)) as delayed:
        runtime.step(network, update, MODELS["transformer"][1], *second)
    return delayed.begun, threading.active_count()


def test_a_collective_is_on_its_way_while_another_copy_computes(tmp_path):
    """Rank 1 begins its part of each reduction only once rank 0 computes meanwhile."""
    found = run_warm(overlapped, 2, str(tmp_path / "store"), 2)

    assert [count for count, _ in found] == [REDUCTIONS, REDUCTIONS]


def moved(config, copies):
    """Return bytes and number of the collectives of a step, by name."""
    runtime = msrun.init(config | {"copies": copies})
    network = runtime.shard(build("transformer"))
    update = OPTIMIZERS["sgd"](network.parameters())
    first, second = batches("transformer", steps=2)
    count = runtime.layout.size("dp")
    first, second = (
        [x.chunk(count)[runtime.coordinate.get("dp", 0)] for x in b] for b in (first, second)
    )
    loss_fn = MODELS["transformer"][1]
    runtime.step(network, update, loss_fn, *first)
    with Counted() as counted:
        runtime.step(network, update, loss_fn, *second)
    return counted.bytes, counted.calls


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "config"), [(2, TP), (4, DP_TP | {"optimizer": {"zero": 1}})], ids=["tp", "zero 1"]
)
def test_copies_send_as_many_bytes_in_more_collectives(ranks, config):
    (one, few), (two, more), (four, most) = (
        run_warm(moved, ranks, config, copies)[0] for copies in (1, 2, 4)
    )

    assert one == two == four
    assert sum(few.values()) < sum(more.values()) < sum(most.values())


def overlapped_in_stage(path):
    """Return the same of the last of two stages, of two micro-batches of two copies."""
    runtime = msrun.init(PP_TP | {"copies": 2})
    network = runtime.shard(build("transformer"))
    update = OPTIMIZERS["sgd"](network.parameters())
    first, second = batches("transformer", steps=2)
    runtime.step(network, update, MODELS["transformer"][1], *first)
    is_last = runtime.coordinate["pp"] == 1
    # Two forward and two backward, of one layer, of each of two copies.
    delayed = Delayed(dist.FileStore(path, 2), ranks=(2, 3), last=8)
    with delayed if is_last else contextlib.nullcontext():
        runtime.step(network, update, MODELS["transformer"][1], *second)
    return delayed.begun


@pytest.mark.slow
def test_copies_overlap_in_a_stage(tmp_path):
    found = run_warm(overlapped_in_stage, 4, str(tmp_path / "store"))

    assert found[2:] == [16, 16]


def dropped(config):
    """Return the losses of a model that drops activations under a plan."""
    runtime = msrun.init({"seed": 5, "copies": 2, **config})
    network = runtime.shard(build("transformer", dropout=0.3))
    update = OPTIMIZERS["sgd"](network.parameters())
    return [
        runtime.step(network, update, MODELS["transformer"][1], *batch).item()
        for batch in batches("transformer")
    ]


@pytest.mark.slow
def test_a_recomputation_drops_what_its_copy_dropped():
    expected = run_warm(dropped, 2, TP)

    assert_equal_curves(run_warm(dropped, 2, TP | RECOMPUTE), expected[0])
    assert_equal_curves(expected, expected[0], tolerance=0)


class Leaving(nn.Module):
    """Leaves its activation in an attribute, which another copy overwrites in a collective."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(16, 32), nn.Linear(32, 10), None

    def forward(self, x):
        self.kept = x.mean(-1, keepdim=True)
        return self.down(functional.relu(self.up(x))) * self.kept


class Failing(Leaving):
    """Fails in the second of two copies, from the third step on."""

    calls = 0

    def forward(self, x):
        Failing.calls += 1
        x = self.down(functional.relu(self.up(x)))
        if Failing.calls >= 5 and threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("the second copy")
        return self.down(functional.relu(self.up(x.sum(1, keepdim=True) + torch.zeros(len(x), 16))))


def failing(model, count):
    """Return what the last of so many steps raises, and the threads before and after it."""
    rules = [{"match": "up", "style": "colwise"}, {"match": "down", "style": "rowwise"}]
    runtime = msrun.init({"mesh": {"tp": 2}, "plan": rules, "copies": 2})
    Failing.calls = 0
    network = runtime.shard(model())
    update = OPTIMIZERS["sgd"](network.parameters())
    before = threading.active_count()
    try:
        for x, y in batches("mlp", steps=count):
            runtime.step(network, update, functional.cross_entropy, x, y)
    except (UsageError, ZeroDivisionError) as error:
        # No part of a model any more, whose batch norms copies refuse.
        functional.batch_norm(x, None, None, training=True)
        return str(error).partition("\n")[0], threading.active_count() - before
    return "nothing", 0


STAGED = {
    "mesh": {"pp": 2},
    "pipeline": {"stages": {"first": 0, "second": 1}, "microbatches": 2},
    "plan": [{"match": "*up", "style": "colwise"}, {"match": "*down", "style": "rowwise"}],
}


class Two(nn.Module):
    """Has two stages, of which the second leaves an activation in an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), Leaving()

    def forward(self, x):
        return self.second(self.first(x))


def failing_in_stage():
    """Return what the first step raises."""
    runtime = msrun.init(STAGED | {"mesh": {"pp": 2, "tp": 2}, "copies": 2})
    network = runtime.shard(Two())
    update = OPTIMIZERS["sgd"](network.parameters())
    try:
        runtime.step(network, update, functional.cross_entropy, *batches("mlp")[0])
    except UsageError as error:
        return error.message
    return "nothing"


@pytest.mark.slow
def test_what_copies_would_mix_up_in_a_stage_is_refused_on_all_ranks():
    said = "parallel.copies: each copy sets second.kept in its forward, and copies take turns "

    assert run_warm(failing_in_stage, 4) == 4 * [said + "inside of it"]


def test_what_copies_would_mix_up_is_refused_in_the_first_step():
    said = "parallel.copies: each copy sets kept in its forward, and copies take turns inside of it"

    assert run_warm(failing, 2, Leaving, 1) == 2 * [(said, 0)]


def test_an_error_in_one_copy_leaves_no_thread():
    assert run_warm(failing, 2, Failing, 3) == 2 * [("the second copy", 0)]
