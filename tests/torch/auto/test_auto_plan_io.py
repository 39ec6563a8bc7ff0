"""A plan that `msrun search` saved runs as one that `rt.shard` finds, and as one process."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch
from auto_models import GPT, MODELS, Llama
from ranks import Counted, run_warm

import msrun
from msrun.cli.main import main
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

MODEL = """
from auto_models import GPT, tokens


def make():
    return GPT(layers=3).double(), tokens()
"""
MESH = {"dp": 2, "tp": 2}
AUTO = {"mode": "auto", "mesh": MESH}
# So little that parameters are cut.
MEMORY = "400KiB"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the text of a plan."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "saved_gpt.py").write_text(MODEL)
    words = ("--world", "4", "--mesh", "dp=2,tp=2", "--topology", "cpu", "-o", "plan.json")
    with contextlib.chdir(folder):
        assert main(["search", "saved_gpt.py:make", "--memory", MEMORY, *words]) == 0
    return (folder / "plan.json").read_text()


@pytest.fixture
def saved(plan, tmp_path, monkeypatch):
    """Return the file of a plan."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "plan.json"
    file.write_text(plan)
    return file


def local(rt, batch):
    """Return this rank's part of a batch."""
    return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]


def train(config):
    """Return losses, whole weights, where each lies, and the collectives of all steps."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    net = GPT(layers=3).double()
    torch.manual_seed(1)
    whole = [MODELS["gpt"][1]() for _ in range(3)]
    is_found = config["mesh"] == "auto"
    net = rt.shard(net, sample=whole[0] if is_found else local(rt, whole[0]))
    batches = [local(rt, batch) for batch in whole]
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    with Counted() as counted:
        for x, y in batches:
            losses.append(rt.step(net, optimizer, lambda out, _: out, x, y, y).item())
    weights, places = {}, {}
    for name, param in net.named_parameters():
        is_divided = hasattr(param, "full_tensor")
        weights[name] = (param.full_tensor() if is_divided else param).detach()
        places[name] = str(param.placements) if is_divided else ""
    return losses, weights, places, (counted.calls, counted.bytes)


def test_a_saved_plan_runs_as_a_found_one_and_as_one_process(saved):
    ((want, weights, _, _),) = run_warm(train, 1, {"mesh": {"dp": 1}})
    found = run_warm(train, 4, AUTO | {"memory": MEMORY})
    loaded = run_warm(train, 4, AUTO | {"plan": str(saved)})
    plan = json.loads(saved.read_text()) | {"recompute": True}
    saved.write_text(json.dumps(plan))
    # The plan knows its mesh.
    again = run_warm(train, 4, AUTO | {"mesh": "auto", "plan": str(saved)})
    for losses, whole, places, _ in (*loaded, *again):
        assert losses == pytest.approx(want, rel=1e-10)
        for name, weight in weights.items():
            assert torch.allclose(whole[name], weight, rtol=1e-10, atol=1e-12), name
        assert places == found[0][2]
    assert all(sent == found[0][3] for *_, sent in loaded)
    # What blocks send, they send again in the backward pass.
    assert again[0][3][0].total() > found[0][3][0].total()
    assert any("Shard" in place for place in loaded[0][2].values())


def refused(config, make):
    """Return what a rank is told: the error in one line, and what to do."""
    x = torch.zeros(4, 8, dtype=torch.long)
    with pytest.raises(UsageError) as caught:
        msrun.init(config).shard(make().double(), sample=(x, x.clone()))
    return caught.value.message


def gpt():
    return GPT(layers=3)


def three_sizes():
    net = gpt()
    net.blocks[1].up.bias = None
    return net


@pytest.mark.parametrize(
    ("change", "mesh", "sentence"),
    [
        ({}, {"dp": 2}, "plan.json is for 4 ranks, and world_size is 2"),
        ({}, {"dp": 4}, "plan.json is for the mesh dp 2 x tp 2 = 4, not dp 4"),
        ({"version": 1}, {"dp": 2}, "plan.json has version 1 (this msrun reads 2)"),
        (
            {"batch": 16},
            MESH,
            "plan.json is for 16 samples a step, and the sample of rt.shard makes 8",
        ),
        (
            {"rank_list": [1, 0, 2, 3]},
            MESH,
            "plan.json is for ranks in [1, 0, 2, 3], not in their own order",
        ),
        (
            {"stages": 2, "mesh": {"tp": 2}},
            MESH,
            "plan.json is for the mesh pp 2 x tp 2 = 4, not dp 2 x tp 2 = 4",
        ),
        (
            {"shared": {}},
            MESH,
            "plan.json has nothing for p_tokens_weight, which has no such placement",
        ),
    ],
    ids=["world", "mesh", "version", "batch", "order", "stages", "shared"],
)
def test_a_plan_for_something_else_is_refused(saved, change, mesh, sentence):
    saved.write_text(json.dumps(json.loads(saved.read_text()) | change))
    config = {"mode": "auto", "mesh": mesh, "plan": "plan.json"}
    for said in run_warm(refused, math.prod(mesh.values()), config, gpt):
        assert said == f"parallel.plan: {sentence}"


@pytest.mark.parametrize("make", [Llama, three_sizes])
def test_a_plan_of_another_model_is_refused(saved, make):
    config = AUTO | {"plan": "plan.json"}
    program = json.loads(saved.read_text())["program"]
    for said in run_warm(refused, 4, config, make):
        assert said.startswith(f"parallel.plan: plan.json is for a model of {program}, and this ")
        assert said.count("parameters and") == 2


def test_what_is_no_plan_is_refused(saved):
    saved.write_text('{"version": 2}')
    config = AUTO | {"plan": "plan.json"}
    sentence = "parallel.plan: plan.json is no plan of msrun search: Object missing required field"
    for said in run_warm(refused, 4, config, gpt):
        assert said.startswith(sentence)


NORMED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()

    def forward(self, x):
        x = self.norm(self.linear(x))
        if self.kind == "drawn":
            return torch.relu(torch.native_dropout(x, 0.5, True)[0])
        return torch.relu(x - x.mean(0) if self.kind == "centred" else x)


def made(kind):
    return nn.Sequential(*[Block(kind) for _ in range(5)]), torch.randn(8, 8)


def plain():
    return made("plain")


def norm():
    return made("norm")


def centred():
    return made("centred")


def drawn():
    return made("drawn")
"""


@pytest.fixture
def normed(tmp_path, monkeypatch):
    """Return what `msrun search` says of a model of the file, and the plan it saved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normed.py").write_text(NORMED)

    def searched(kind, *words):
        fixed = ("--world", "4", "--topology", "cpu", "-o", "plan.json")
        code = main(["search", f"normed.py:{kind}", *fixed, *words])
        return code, json.loads((tmp_path / "plan.json").read_text()) if code == 0 else {}

    return searched


@pytest.mark.parametrize(
    ("kind", "what"),
    [("norm", "batch norm 0.norm"), ("centred", "a mean over samples (in 0)")],
)
def test_a_batch_that_must_stay_whole_is_not_cut_by_a_search(normed, capsys, kind, what):
    code, plan = normed(kind)
    assert code == 0
    assert (plan["stages"], plan["microbatches"]) == (1, 1)
    assert f"no stages and micro-batches, since the model has {what}" in plan["rejected"]

    code, _ = normed(kind, "--mesh", "pp=2,dp=2")
    assert code != 0
    assert f"--mesh pp=2: the model has {what}, of which" in capsys.readouterr().err


def test_a_batch_that_may_be_cut_still_is(normed):
    code, plan = normed("plain", "--mesh", "pp=2,dp=2")
    assert code == 0
    assert plan["stages"] == 2
    assert plan["microbatches"] > 1
    assert not any("since the model has" in line for line in plan["rejected"])


def test_a_search_says_what_no_plan_could_run(normed, capsys):
    code, _ = normed("drawn")
    assert code != 0
    assert "cannot run native_dropout" in capsys.readouterr().err
