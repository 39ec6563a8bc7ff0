"""Plans with pipeline stages: each stage runs its slice of the plan, and all learn as one does."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from auto_models import GPT, LENGTH, VOCAB, WIDTH, GPTBlock, tokens
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.cli.main import main
from msrun.errors import UsageError
from msrun.parallel.local import local_part
from msrun.parallel.pipeline.chunks import Chunks
from msrun.parallel.search.mesh.schedules import rounds

pytestmark = pytest.mark.torch

# What the optimizer remembers of the first step shows in the last loss.
STEPS, SAVED_AFTER = 3, 1
ALONE = {"mesh": {"dp": 1}}
# Where work takes long and a collective longer, stages are the fastest there is.
SLOW = "preset: cpu\nflops: 1.0e+8\nmemory_bandwidth: 1.0e+9\nlaunch: 0.0\ncollective: 0.01\n"
SEARCHED = """
from auto_models import GPT, tokens


def make():
    return GPT(layers=4, ignored=-100).double(), tokens()
"""


def gpt(**options):
    """Return a model with tied embeddings; all targets count, so micro-batches weigh alike."""
    return GPT(layers=4, ignored=-100, **options)


class Skips(nn.Module):
    """No two parts are equal; one weight is used twice, a value skips stages, the loss is outside.

    What no parameter has a part in is dropped from, and read at both ends.
    """

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.drop = nn.Dropout(0.25)
        self.widths = nn.ModuleList([nn.Linear(WIDTH, WIDTH * (n % 2 + 1)) for n in range(6)])
        self.block = GPTBlock(0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens, noise):
        noise = self.drop(noise) * self.scale
        x = y = self.tokens(tokens) + noise
        for layer in self.widths:
            y = functional.gelu(layer(y))[..., :WIDTH]
        return self.head(self.block(y) + x + noise)


def noisy():
    return tokens()[0], torch.randn(8, LENGTH, WIDTH).double(), tokens()[1]


def by_class(logits, target):
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def given(loss, _):
    return loss


def local(rt, batch):
    """Return this rank's part of a batch."""
    return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]


def whole(param):
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()


def train(config, save=None, load=None):
    """Train, then do it again from a checkpoint of the first step that somebody wrote.

    Args:
        config: Of all ranks.
        save: Where to write a checkpoint of the first step.
        load: Where there is one; None leaves it.

    Returns:
        All losses, whole weights, the mesh, and the elements of all parameters here, by name.
    """
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = gpt().double()
    torch.manual_seed(1)
    batches = [tokens() for _ in range(STEPS)]
    is_found = config["mesh"] == "auto"
    wholes = [weakref.ref(param) for param in net.parameters()]
    net = rt.shard(net, sample=batches[0] if is_found else local(rt, batches[0]))
    gc.collect()
    assert "pp" not in rt.layout.axes or not any(param() is not None for param in wholes)
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for start in (0,) if load is None else (0, SAVED_AFTER):
        if start:
            assert rt.load(net, optimizer, path=str(load)) == start
        for number in range(start, STEPS):
            if number == SAVED_AFTER and save is not None:
                rt.save(net, optimizer, step=number, path=str(save))
            x, y = local(rt, batches[number])
            losses.append(rt.step(net, optimizer, given, x, y, y).item())
    weights = {name: whole(param) for name, param in net.named_parameters()}
    held = {name: local_part(param).numel() for name, param in net.named_parameters()}
    return losses, weights, dict(rt.layout.axes), held


def auto(mesh, microbatches=4, schedule="1f1b", **others):
    pipeline = {"stages": "auto", "microbatches": microbatches, "schedule": schedule}
    return {"mode": "auto", "mesh": mesh, "pipeline": pipeline, **others}


def check(found, want, rel=1e-10):
    """Hold what ranks found against one process: losses, and the weights that each has."""
    seen = set()
    for losses, weights, *_ in found:
        expected = want[0] + want[0][SAVED_AFTER:] * (len(losses) > STEPS)
        assert losses == pytest.approx(expected, rel=rel)
        seen |= set(weights)
        for name, weight in weights.items():
            assert torch.allclose(weight, want[1][name], rtol=rel, atol=rel), name
    assert seen == set(want[1])


@pytest.mark.slow
def test_stages_of_a_named_mesh_learn_what_one_process_does(tmp_path):
    (want,) = run_warm(train, 1, ALONE, tmp_path / "one")
    wish = [{"match": "blocks.0.up", "style": "colwise"}]
    tp = run_warm(train, 4, auto({"pp": 2, "tp": 2}, plan=wish), tmp_path / "tp", tmp_path / "one")
    dp = run_warm(train, 4, auto({"pp": 2, "dp": 2}, schedule="gpipe"), None, tmp_path / "tp")
    one = run_warm(train, 1, ALONE, None, tmp_path / "tp")
    for found in (tp, dp, one):
        check(found, want)
    sizes = {name: weight.numel() for name, weight in want[1].items()}
    for *_, held in (*tp, *dp):
        assert sum(held.values()) < 0.7 * sum(sizes.values())
        assert "tokens.weight" in held
    assert tp[0][3]["blocks.0.up.weight"] == sizes["blocks.0.up.weight"] // 2


@pytest.mark.slow
def test_stages_that_a_search_finds_or_found_learn_what_one_process_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.yaml").write_text(SLOW)
    (tmp_path / "saved_gpt.py").write_text(SEARCHED)
    (want,) = run_warm(train, 1, ALONE)
    config = {"mode": "auto", "mesh": "auto"}
    found = run_warm(train, 4, config | {"topology": str(tmp_path / "slow.yaml")})
    check(found, want)
    assert [one[2] for one in found] == [{"pp": 4, "dp": 1}] * 4
    words = ("--world", "4", "--batch", "8", "--topology", "slow.yaml", "--memory", "120KiB")
    assert main(["search", "saved_gpt.py:make", *words, "-o", "plan.json"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["stages"], plan["mesh"], plan["recompute"]) == (2, {"tp": 2}, True)
    found = run_warm(train, 4, config | {"plan": str(tmp_path / "plan.json")})
    check(found, want)
    assert [one[2] for one in found] == [{"pp": 2, "tp": 2}] * 4
    twice = auto({"pp": 2, "tp": 2}, plan["microbatches"], "zbv", plan=str(tmp_path / "plan.json"))
    check(run_warm(train, 4, twice), want)


@pytest.mark.slow
def test_stages_that_a_search_finds_on_a_named_mesh_learn_it_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.yaml").write_text(SLOW)
    (tmp_path / "saved_gpt.py").write_text(SEARCHED)
    (want,) = run_warm(train, 1, ALONE)
    words = ("--world", "4", "--batch", "8", "--topology", "slow.yaml", "--mesh", "pp=2,dp=2")
    assert main(["search", "saved_gpt.py:make", *words, "-o", "plan.json"]) == 0
    config = {"mode": "auto", "mesh": {"pp": 2, "dp": 2}, "plan": str(tmp_path / "plan.json")}
    check(run_warm(train, 4, config), want)


def predict(config, parts):
    """Train with clipping and dropout; return losses, weights and predictions of a batch."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = Skips().double()
    torch.manual_seed(1)
    batches = [noisy() for _ in range(STEPS)]
    net = rt.shard(net, sample=local(rt, batches[0])[:2])
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = [
        rt.step(net, optimizer, by_class, *local(rt, batch), max_norm=0.1).item()
        for batch in batches
    ]
    net.eval()
    with torch.no_grad():
        # Without stages, whoever evaluates divides the batch.
        divided = list(zip(*(x.chunk(parts) for x in batches[0][:2]), strict=True))
        seen, again = (torch.cat([net(*inputs) for inputs in divided]) for _ in range(2))
    assert torch.equal(seen, again)
    weights = {name: whole(param) for name, param in net.named_parameters()}
    return losses, weights, seen, net.describe() if "pp" in rt.layout.axes else ""


def test_skips_ties_dropout_and_clipping_are_those_of_one_process():
    alone = {"mode": "auto", "mesh": {"dp": 1}, "accumulate": 4}
    (want,) = run_warm(predict, 1, alone, 4)
    found = run_warm(predict, 4, auto({"pp": 4}), 1)
    # The norm of gradients is taken in float32.
    check(found, want, rel=1e-6)
    for _, _, seen, _ in found:
        assert torch.allclose(seen, want[2], atol=1e-5)


@pytest.mark.parametrize(
    "schedule", ["interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"]
)
@pytest.mark.few(3)
def test_stages_of_several_chunks_learn_what_one_process_does_and_wait_as_is_priced(schedule):
    alone = {"mode": "auto", "mesh": {"dp": 1}, "accumulate": 4}
    (want,) = run_warm(predict, 1, alone, 4)
    found = run_warm(predict, 2, auto({"pp": 2}, schedule=schedule), 1)
    check(found, want, rel=1e-6)
    taken = rounds(Chunks(schedule=schedule, stages=2, segments=2), 4)
    for _, _, seen, described in found:
        assert torch.allclose(seen, want[2], atol=1e-5)
        assert f"ranks wait {1 - 4 / taken:.0%} of the time" in described


def test_chunks_that_are_divided_learn_what_one_process_does(tmp_path):
    (want,) = run_warm(train, 1, ALONE, tmp_path / "one")
    config = auto({"pp": 2, "tp": 2}, schedule="interleaved", memory="256KiB")
    check(run_warm(train, 4, config, None, tmp_path / "one"), want)


def refused(config, change=None):
    """Return what is said of a configuration, or of a batch once the model is made."""
    with pytest.raises(UsageError) as caught:
        one_step(config, change)
    return caught.value.message


def one_step(config, change):
    rt = msrun.init(config)
    torch.manual_seed(7)  # stages read the same data
    batch = tokens()
    net = rt.shard(gpt(), sample=batch)
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    rt.step(net, optimizer, given, *(x[:, :change] for x in batch), batch[1])


TOO_FEW = "parallel.pipeline.microbatches: 1 is too few, 1f1b with 2 stages needs 2"
UNEVEN = "parallel.pipeline.microbatches: 3 does not divide the 8 samples of a local batch, and "
NO_PLAN = "parallel.memory: no plan fits; the smallest takes "
SHAPE = "an input of shape [2, 4] came where the plan of parallel.mode auto has [2, 8]"


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        ({"mode": "auto", "mesh": {"pp": 2}}, None, TOO_FEW),
        (auto({"pp": 2}, microbatches=3), None, UNEVEN),
        (auto({"pp": 2}, memory="1KiB"), None, NO_PLAN),
        (auto({"pp": 2}), 4, SHAPE),
    ],
    ids=["microbatches", "uneven", "memory", "shape"],
)
def test_what_stages_cannot_run_is_one_sentence(config, change, sentence):
    for said in run_warm(refused, 2, config, change):
        assert said.startswith(sentence)


def on_meta():
    """Return what is said of a model without values."""
    rt = msrun.init({"mode": "auto", "mesh": {"dp": 1}})
    with rt.init_on_meta():
        net = gpt()
    with pytest.raises(UsageError) as caught:
        rt.shard(net, sample=tokens())
    return caught.value.message


def test_a_model_without_values_is_refused():
    assert run_warm(on_meta, 1) == [
        "parallel.mode: auto divides models with values, not those of init_on_meta"
    ]
