"""`optimizer`, `recompute` and `reduce` beside stages that mode auto finds.

The runtime's pipeline runs both.  Stages are those of the search, and learn what one process does.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from auto_models import GPT, LENGTH, VOCAB, WIDTH, GPTBlock, tokens
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import UsageError
from msrun.parallel.auto.module_stages import possible_stages
from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.config_file import parse_config
from msrun.parallel.local import local_part

pytestmark = [
    pytest.mark.torch,
    # Harmless: nothing writes to the result of a layer in place.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
]

STEPS, SAVED_AFTER = 3, 1
ALONE = {"mesh": {"dp": 1}}
BOTH = {"pp": 2, "dp": 2}
AGAIN = {"recompute": {"modules": ["blocks.*"]}}
WISH = {"plan": [{"match": "blocks.*.up", "style": "colwise"}]}
# Where work takes long and a collective longer, stages are the fastest there is.
SLOW = "preset: cpu\nflops: 1.0e+8\nmemory_bandwidth: 1.0e+9\nlaunch: 0.0\ncollective: 0.01\n"


def auto(mesh=BOTH, schedule="1f1b", microbatches=4, **others):
    pipeline = {"stages": "auto", "microbatches": microbatches, "schedule": schedule}
    return {"mode": "auto", "mesh": mesh, "pipeline": pipeline, **others}


def local(rt, batch):
    """Return this rank's part of a batch."""
    return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]


def tensors(optimizer):
    states = (x for one in optimizer.state.values() for x in one.values())
    return [x for x in states if isinstance(x, torch.Tensor)]


def train(config, save=None, load=None):
    """Train, then do it again from a checkpoint of the first step that somebody wrote.

    Args:
        config: Of all ranks.
        save: Where to write a checkpoint of the first step.
        load: Where there is one; None leaves it.

    Returns:
        All losses; whole weights; the mesh; what was printed; the bytes of parameters, and of the
        state of the optimizer, that are here; how often a linear layer of each
        block here ran after the first step.
    """
    text = io.StringIO()
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = GPT(layers=4).double()
    torch.manual_seed(1)
    batches = [tokens() for _ in range(STEPS)]
    runs = []
    for block in net.blocks:
        block.up.register_forward_hook(lambda *_: runs.append(1))
    with contextlib.redirect_stdout(text):
        net = rt.shard(
            net, sample=batches[0] if config["mesh"] == "auto" else local(rt, batches[0])
        )
        optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
        losses = []
        for start in (0,) if load is None else (0, SAVED_AFTER):
            if start:
                assert rt.load(net, optimizer, path=str(load)) == start
            for number in range(start, STEPS):
                if number == SAVED_AFTER and save is not None:
                    rt.save(net, optimizer, step=number, path=str(save))
                losses.append(rt.step(net, optimizer, None, *local(rt, batches[number])).item())
                if not number:
                    runs.clear()  # those of copies that record the forward
    weights = {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
        for name, param in net.named_parameters(remove_duplicate=False)
    }
    held = sum(local_part(param).nbytes for param in net.parameters())
    state = sum(local_part(x).nbytes for x in tensors(optimizer))
    blocks = sum(name.endswith("up.weight") for name in weights)
    return losses, weights, dict(rt.layout.axes), text.getvalue(), held, state, len(runs) / blocks


def check(found, want, rel=1e-9):
    """Hold what ranks found against one process: losses, and the weights that each has."""
    seen = set()
    for losses, weights, *_ in found:
        expected = want[0] + want[0][SAVED_AFTER:] * (len(losses) > STEPS)
        assert losses == pytest.approx(expected, rel=rel)
        seen |= set(weights)
        for name, weight in weights.items():
            assert torch.allclose(weight, want[1][name], rtol=rel, atol=rel), name
    assert seen == set(want[1])


@pytest.mark.parametrize(
    ("config", "share"),
    [
        pytest.param(
            auto(schedule="1f1b", optimizer={"zero": 1}, **AGAIN), 0.4, marks=pytest.mark.slow
        ),
        pytest.param(auto(schedule="gpipe", optimizer={"zero": 2}), 0.4, marks=pytest.mark.slow),
        (auto(schedule="zbv", optimizer={"zero": 2, "threshold": 600}, **AGAIN), 0.45),
        (auto(schedule="interleaved", optimizer={"zero": 3}, **AGAIN), 0.4),
        (auto({"pp": 2, "tp": 2}, **AGAIN, **WISH), 0.6),
    ],
    ids=["1", "2", "2-zbv", "3-interleaved", "tp"],
)
@pytest.mark.few(1)
def test_each_stage_keeps_what_is_decided_and_learns_what_one_process_does(config, share):
    (want,) = run_warm(train, 1, ALONE)
    found = run_warm(train, 4, config)
    check(found, want)
    assert any(part in found[0][3] for part in ("runs on data parallel", "runs on styles"))
    for *_, held, state, runs in found:
        assert held < share * want[4]
        assert state < share * want[5]
        # Once a micro-batch, and again where its block is recomputed.
        assert runs == (STEPS - 1) * 4 * (1 + ("recompute" in config))


def test_a_reduction_in_another_type_is_kept():
    (want,) = run_warm(train, 1, ALONE)
    found = run_warm(train, 4, auto(reduce={"dtype": "float32"}, optimizer={"zero": 1}))
    check(found, want, rel=1e-4)
    assert found[0][0] != pytest.approx(want[0], rel=1e-12)


@pytest.mark.slow
def test_a_checkpoint_of_such_stages_continues_in_other_layouts(tmp_path):
    (want,) = run_warm(train, 1, ALONE, tmp_path / "one")
    config = auto(optimizer={"zero": 1}, **AGAIN)
    check(run_warm(train, 4, config, tmp_path / "stages", tmp_path / "one"), want)
    check(run_warm(train, 2, {"mesh": {"dp": 2}}, None, tmp_path / "stages"), want)


def test_a_mesh_with_stages_is_found_for_them(tmp_path):
    (tmp_path / "slow.yaml").write_text(SLOW)
    (want,) = run_warm(train, 1, ALONE)
    config = {"mode": "auto", "mesh": "auto", "topology": str(tmp_path / "slow.yaml"), **AGAIN}
    found = run_warm(train, 4, config)
    check(found, want)
    for _, _, mesh, _, held, _, runs in found:
        assert mesh["pp"] > 1
        assert held < 0.6 * want[4]
        assert runs % (2 * (STEPS - 1)) == 0


def test_stages_that_the_runtime_cannot_run_are_not_looked_at():
    net, batch = GPT(layers=4), tokens()
    config = parse_config({"mode": "auto", "mesh": "auto", **AGAIN})
    program = trace(net, batch).program
    assert possible_stages(config, net, program, batch, 4) == {2, 4}
    assert possible_stages(config, net, program, batch, 6) == {2}
    net.blocks.register_forward_hook(lambda *_: None)
    assert possible_stages(config, net, program, batch, 4) == set()
    whole = Skips()
    noise = torch.randn(8, LENGTH, WIDTH)
    program = trace(whole, (batch[0], noise)).program
    assert possible_stages(config, whole, program, (batch[0], noise), 4) == set()


class Skips(nn.Module):
    """Nothing repeats; a value skips stages, weights are used by themselves, and one by nobody."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.widths = nn.ModuleList([nn.Linear(WIDTH, WIDTH * (n % 2 + 1)) for n in range(6)])
        self.block = GPTBlock(0.0)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, tokens, noise):
        x = y = self.tokens(tokens) + noise * self.scale
        for layer in self.widths:
            y = functional.gelu(layer(y))[..., :WIDTH]
        y = (self.block(y) + x + self.shift) @ self.project.weight
        return self.head(y)


def by_class(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def skip(config):
    """Train with clipping; return losses, weights, and the output of a batch."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = Skips().double()
    torch.manual_seed(1)
    batches = [(tokens()[0], torch.randn(8, LENGTH, WIDTH).double(), tokens()[1]) for _ in "123"]
    net = rt.shard(net, sample=local(rt, batches[0])[:2])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = [
        rt.step(net, optimizer, by_class, *local(rt, batch), max_norm=0.1).item()
        for batch in batches
    ]
    net.eval()
    with torch.no_grad():
        seen = net(*local(rt, batches[0])[:2])
    weights = {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
        for name, param in net.named_parameters(remove_duplicate=False)
    }
    return losses, weights, seen, rt.coordinate.get("dp", 0)


def test_skips_ties_and_weights_used_by_themselves_are_those_of_one_process():
    (want,) = run_warm(skip, 1, ALONE)
    found = run_warm(skip, 4, auto(optimizer={"zero": 1}, recompute={"modules": ["block"]}))
    # The norm of gradients is taken in float32.
    check(found, want, rel=1e-6)
    for _, _, seen, index in found:
        assert torch.allclose(seen, want[2].chunk(2)[index], atol=1e-6)


class Pairs(nn.Module):
    """Adds samples to each other, so no rank can run it with its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x + x.flip(0)


def refused(config, make, hooked=""):
    """Return what is said of a model."""
    rt = msrun.init(config)
    net = make()
    if hooked:
        net.get_submodule(hooked).register_forward_hook(lambda *_: None)
    sample = tokens() if make is GPT else [torch.zeros(8, 8)]
    with pytest.raises(UsageError) as caught:
        rt.shard(net, sample=sample)
    return caught.value.message


ZERO = {"optimizer": {"zero": 1}}


@pytest.mark.parametrize(
    ("config", "make", "hooked", "sentence"),
    [
        (auto(**ZERO), Pairs, "", "parallel.optimizer: beside mode auto it needs a plan of module"),
        (auto(**ZERO, memory="4KiB"), GPT, "", "parallel.memory: no plan fits; the smallest takes"),
        (auto({"pp": 2}, microbatches=1, **AGAIN), GPT, "", "parallel.pipeline.microbatches: 1 is"),
        (auto({"pp": 4}, **AGAIN), GPT, "blocks", "parallel.pipeline.stages: "),
    ],
    ids=["pairs", "memory", "microbatches", "hooks"],
)
def test_what_such_stages_cannot_run_is_one_sentence(config, make, hooked, sentence):
    world = 4 if len(config["mesh"]) > 1 or config["mesh"]["pp"] == 4 else 2
    for said in run_warm(refused, world, config, make, hooked):
        assert said.startswith(sentence)
