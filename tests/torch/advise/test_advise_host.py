"""What `msrun advise` says of memory of the host, and of copies: bytes as measured, and the YAML.

Ranks of these tests have no device, so what would be in its memory is told from what would be on
the host: parameters, gradients and state of an offloaded optimizer by their names, tables by their
size, and saved activations by the copies that the runtime makes of them.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from advise_models import Held
from ranks import run_ranks
from torch import nn
from torch.nn import functional

import msrun
from msrun.parallel.advise.advise import AdviceRequest, advise_model
from msrun.parallel.advise.estimate import Estimator
from msrun.parallel.advise.simulate import is_plain
from msrun.parallel.advise.techniques import Technique
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.local import local_part
from msrun.parallel.search.cost.topology import preset
from msrun.parallel.torch_compat import is_fake

pytestmark = [
    pytest.mark.torch,
    pytest.mark.own_process,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

ROWS, WIDTH, TOKENS, LOCAL, BLOCKS = 4001, 32, 48, 8, 4
MIB = 2**20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


class Words(nn.Module):
    """A large table, and blocks whose activations are large beside their weights."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1)).pow(2).mean()


class Tied(Words):
    """Multiplies with its table."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight


class OnDevice(Held):
    """Counts what a device would hold of a rank that has none."""

    def __init__(self, model, optimizer):
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._sent: dict[int, weakref.ref] = {}
        self.is_hosted = self.has_table = self.is_updating = False

    def _handle(self, func, types, args, kwargs):
        if not is_plain(types):
            return NotImplemented
        output = func(*args, **kwargs)
        for tensor in leaf_tensors([output]):
            if not (is_fake(tensor) or tensor.is_meta or self._leaves(func, args, tensor)):
                self._add(tensor)
        if not (self.is_updating and self.is_hosted):
            held = [storage() for storage in list(self._held.values())]
            there = self._there()
            self.peak = max(
                self.peak, sum(one.nbytes() for one in held if one and id(one) not in there)
            )
        return output

    def _leaves(self, func, args, made):
        """Return whether `made` is a copy that goes to the host."""
        is_copy = func is torch.ops.aten.clone.default and args[0].dtype is torch.uint8
        if not is_copy or id(args[0].untyped_storage()) in self._sent:
            return False
        storage = made.untyped_storage()
        key = id(storage)
        self._sent[key] = weakref.ref(storage, lambda _: self._sent.pop(key, None))
        return True

    def _there(self):
        """Return the storages of what is on the host."""
        found = []
        if self.is_hosted:
            params = list(self._model.parameters())
            found = [*params, *(param.grad for param in params if param.grad is not None)]
            found += [x for state in self._optimizer.state.values() for x in state.values()]
        there = {id(local_part(tensor).untyped_storage()) for tensor in found}
        if self.has_table:
            # A bucket of gradients has some numbers more.
            sizes = range(4 * ROWS * WIDTH, 4 * ROWS * WIDTH + 64)
            every = [storage() for storage in list(self._held.values())]
            there |= {id(one) for one in every if one and one.nbytes() in sizes}
        return there


def measured(config):
    """Return the most bytes that the device of this rank would have had in three steps."""
    torch.manual_seed(0)
    batches = [torch.randint(0, ROWS, (LOCAL, TOKENS)) for _ in range(3)]
    rt = msrun.init(config)
    model = rt.shard(Words(), sample=(batches[0],))
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    held = OnDevice(model, optimizer)
    held.is_hosted = bool(config.get("optimizer", {}).get("offload"))
    held.has_table = "place" in config
    optimizer.register_step_pre_hook(lambda *_: setattr(held, "is_updating", True))
    optimizer.register_step_post_hook(lambda *_: setattr(held, "is_updating", False))
    while batches:
        batch = batches.pop()
        held.know([*model.parameters(), *model.buffers(), batch])
        with held.counted():
            rt.step(model, optimizer, None, batch)
    return held.peak


def estimator(world, kind=Words):
    with torch.device("meta"):
        model, sample = kind(), [torch.zeros(2, TOKENS).long()]
    return Estimator(
        model, sample, batch=LOCAL * world, world=world, states=2, is_host=True, blocks=None
    )


PLACE, ACTIVATIONS, OPTIMIZER = "place", "offload activations", "offload optimizer"


def technique(*on_host, **others):
    return Technique(on_host=on_host, **others)


CASES = {
    "place": (1, technique(PLACE)),
    "place, zero 1": (2, technique(PLACE, zero=1)),
    "place, zero 3": (2, technique(PLACE, zero=3)),
    "activations": (1, technique(ACTIVATIONS)),
    "activations, dp": (2, technique(ACTIVATIONS)),
    "activations, zero 1": (2, technique(ACTIVATIONS, zero=1)),
    "place, activations": (1, technique(PLACE, ACTIVATIONS)),
    "optimizer": (2, technique(OPTIMIZER, zero=3)),
    "optimizer alone": (1, technique(OPTIMIZER, zero=3)),
    "optimizer, recompute": (2, technique(OPTIMIZER, zero=3, recompute=True)),
    "optimizer, activations": (2, technique(ACTIVATIONS, OPTIMIZER, zero=3)),
    "place, optimizer": (2, technique(PLACE, OPTIMIZER, zero=3)),
    "all": (2, technique(PLACE, ACTIVATIONS, OPTIMIZER, zero=3)),
    "copies": (2, technique(tp=2, copies=2)),
    "copies, recompute": (2, technique(tp=2, copies=2, recompute=True)),
}


QUICK = ("place, zero 3", "activations", "optimizer", "copies")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
@pytest.mark.few(2)
def test_devices_hold_no_more_than_the_estimate(case):
    world, one = CASES[case]
    estimate = estimator(world)
    nbytes, _ = estimate.nbytes(one)

    for peak in run_ranks(measured, world, estimate.config(one)):
        assert 0.6 * nbytes <= peak <= 1.05 * nbytes


def advised(kind, memory=1, world=2, topology="a100"):
    with torch.device("meta"):
        model, sample = kind(), [torch.zeros(2, TOKENS).long()]
    given = AdviceRequest(
        target="",
        world=world,
        memory=memory,
        batch=None,
        optimizer="adam",
        topology=preset(topology),
    )
    return advise_model(model, sample, LOCAL, given)


CONFIGS = {
    "data parallel + place": {"mesh": {"dp": -1}, "place": {"table": "cpu"}},
    "data parallel + offload activations": {
        "mesh": {"dp": -1},
        "offload": {"activations": ["layers.*"]},
    },
    "zero 3 + offload optimizer": {
        "mesh": {"dp": -1},
        "optimizer": {"zero": 3, "offload": True},
    },
    "tp 2 + copies 2": {"mesh": {"dp": -1, "tp": 2}, "plan": "auto_tp", "copies": 2},
}


def test_each_has_a_row_that_says_what_travels_and_its_configuration():
    rows = {row.name: row for row in advised(Words, memory=2**40).rows}

    assert {name: rows[name].config for name in CONFIGS} == CONFIGS
    place, offload, optimizer, copies = (rows[name] for name in CONFIGS)
    ids = LOCAL * TOKENS
    assert place.moved == 2 * ids * WIDTH * 4 + ids * 8
    assert place.cost == f"{place.moved / MIB:.3g} MiB to the host and back a step"
    # What a block saves: its input, statistics, and the input and output of the activation.
    block = ids * (2 * WIDTH + 2 * 4 * WIDTH + 2) * 4
    assert offload.moved == 2 * BLOCKS * block
    params = sum(param.numel() for param in Words().parameters())
    assert optimizer.moved == 3 * params * 4 / 2
    assert "the host updates the parameters" in optimizer.cost
    assert copies.sent == rows["tp 2"].sent
    assert "2 times the collectives, beside which a slice computes: up to" in copies.cost
    assert copies.cost.endswith("% of the time saved")


def test_the_host_is_recommended_where_simpler_techniques_do_not_fit():
    sizes = {row.name: row.nbytes for row in advised(Words).rows}
    least_alone = min(sizes[name] for name in ("data parallel", "zero 1"))
    assert sizes["data parallel + place"] < least_alone

    advice = advised(Words, memory=least_alone - 1)

    assert advice.chosen == "data parallel + place"
    assert advice.config == CONFIGS["data parallel + place"]
    assert advice.notes == [
        "give the optimizer foreach=True, which torch does not choose on two devices"
    ]
    both = advised(Words, memory=min(sizes.values()))
    assert {PLACE, ACTIVATIONS} & {*both.chosen.split(" + ")}


class Normed(Words):
    """Has no blocks, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.layers = Block()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.table(ids)).mean(1))).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "topology", "key", "said"),
    [
        (Words, "cpu", "place, offload", "ranks on hosts have the memory of the host alone"),
        (
            Tied,
            "a100",
            PLACE,
            "no table that no other module shares has a sixteenth of the parameters",
        ),
        (Normed, "a100", ACTIVATIONS, "no list of blocks is found, whose activations could go"),
        (Normed, "a100", "copies", "a batch norm needs all samples at once"),
    ],
)
@pytest.mark.few(2)
def test_what_is_not_for_a_model_is_said_with_its_reason(kind, topology, key, said):
    assert advised(kind, topology=topology).refused[key] == said


def trained(config):
    """Return losses of some steps."""
    torch.manual_seed(0)
    batches = [torch.randint(0, ROWS, (2 * LOCAL, TOKENS)) for _ in range(3)]
    rt = msrun.init(config)
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")
    model = rt.shard(Words())
    optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    return [rt.step(model, optimizer, None, ids.chunk(count)[share]).item() for ids in batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_row_says_trains_as_one_process(name):
    (losses,) = run_ranks(trained, 1, {})

    for found in run_ranks(trained, 2, CONFIGS[name]):
        assert found == pytest.approx(losses, rel=1e-5)
