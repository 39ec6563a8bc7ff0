"""A search gives experts and sequences ranks of their own, and they train as one process."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from advise_models import Held
from ranks import run_ranks
from torch import Tensor
from whole_models import MODELS, batch

import msrun
from msrun.errors import UsageError
from msrun.parallel.advise.advise import AdviceRequest, advise_model
from msrun.parallel.advise.estimate import Estimator
from msrun.parallel.advise.module_search import search_model
from msrun.parallel.advise.techniques import Technique
from msrun.parallel.auto.left_out import MISSING
from msrun.parallel.auto.offline.search import SearchRequest
from msrun.parallel.search.cost.cost import collective
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import preset
from msrun.parallel.search.modules.seconds import RoutedCall
from msrun.parallel.torch_compat import as_plain_tensors

pytestmark = [pytest.mark.torch, pytest.mark.own_process]

PAGE = Path(__file__).parents[3] / "docs" / "auto.md"
AUTO = {"mode": "auto", "mesh": "auto", "topology": "cpu"}
MIXTURE, TEXT, ODD = ("mixture", 8, 16), ("text", 1, 1024), ("text of 3 heads", 1, 2048)


def searched(case, tmp_path, world, memory=2.0**40, mesh=None):
    """Return the plan of `msrun search` for a case: a model, samples and tokens."""
    path = tmp_path / "model.py"
    path.write_text(
        "from whole_models import MODELS, batch\n"
        f"def make():\n    return MODELS[{case[0]!r}](), batch({case[1]}, {case[2]})\n"
    )
    request = SearchRequest(
        target=f"{path}:make",
        world=world,
        batch=None,
        memory=memory,
        topology=preset("cpu"),
        mesh=mesh or {},
    )
    return search_model(request, clock=time.monotonic, report=lambda _: None)


def test_experts_larger_than_a_rank_get_ranks_of_their_own(tmp_path):
    experts = 4 * sum(x.nbytes for x in MODELS["mixture"]().layers.parameters())
    plan = searched(MIXTURE, tmp_path, 4, memory=8 * 2.0**20)
    assert plan.memory <= 8 * 2**20 < experts  # with gradients and state
    assert plan.config == {
        "mesh": {"dp": 1, "ep": 4},
        "plan": [{"match": "*.experts", "style": "experts", "axis": "ep"}],
    }
    assert plan.runs_on == "ep 4"
    assert plan.rejected[0].startswith("plan of operators on dp 4: ")
    assert plan.rejected[-1] == "cp: not for this model, no sequences of 1024 tokens or more"


@pytest.mark.parametrize(
    ("tokens", "ranks", "is_in_pieces"), [(1024, 2, True), (512, 2, False), (2048, 8, False)]
)
def test_tokens_in_two_pieces_are_priced_beside_the_work_of_experts(tokens, ranks, is_in_pieces):
    with torch.device("meta"):
        net = MODELS["mixture"]()
    sample = [x.to("meta") for x in batch(16 * ranks, tokens)]
    estimator = Estimator(net, sample, batch=16 * ranks, world=ranks, states=2, is_host=True)
    one, topology = Technique(ep=ranks), preset("cpu")
    pairs = 2 * 16 * tokens
    call = RoutedCall(pairs * 64 * 4, pairs * 2 * 2 * 4 * 64 * 64, is_in_pieces=tokens > 512)
    assert estimator.peaks(one).calls == (call,) * 3

    (wire,) = topology.wires((ranks,))
    seconds, hidden = estimator.exchange(one, wire, topology)
    start, rate = collective(MoveKind.MOVE, wire)
    way = rate * ranks * call.nbytes
    computed = call.flops / topology.flops
    assert hidden == pytest.approx(is_in_pieces * 3 * (min(way, computed) + min(way, 2 * computed)))
    starts = 3 * (9 if is_in_pieces else 5) * start
    assert seconds == pytest.approx(12 * way + starts - hidden)
    assert estimator.beside(one, topology) == pytest.approx(hidden / (seconds + hidden))


@pytest.mark.slow
def test_advice_says_what_computes_beside_tokens_on_their_way():
    with torch.device("meta"):
        net = MODELS["mixture"]()
    asked = AdviceRequest(
        target="",
        world=2,
        memory=2**20,
        batch=None,
        optimizer="adam",
        topology=preset("cpu"),
    )
    said = []
    for tokens in (512, 1024):
        sample = [x.to("meta") for x in batch(16, tokens)]
        rows = advise_model(net, sample, 16, asked).rows
        said.append(next(row.cost for row in rows if row.name == "ep 2"))
    assert said[0] == "tokens travel to their experts and back"
    assert re.fullmatch(rf"{said[0]}, \d\d% of the time beside the work on others", said[1])


@pytest.mark.parametrize(("case", "kind"), [(TEXT, "all_to_all"), (ODD, "ring")])
def test_long_sequences_are_shared_by_the_kind_that_fits_their_heads(case, kind, tmp_path):
    plan = searched(case, tmp_path, 2)
    assert plan.config["mesh"] == {"dp": 1, "cp": 2}
    assert plan.config["plan"] == [{"match": "*", "style": "context", "kind": kind}]
    assert sum(plan.costs.values()) == pytest.approx(plan.seconds)


def test_what_mixes_tokens_is_refused_in_the_report(tmp_path):
    plan = searched(("smoothed", 1, 2048), tmp_path, 2)
    assert not plan.config
    (line,) = [line for line in plan.rejected if line.startswith("cp 2")]
    assert "the model has a conv1d over tokens (whole_models.py, line " in line


def train(case, config, dtype=torch.float64):
    """Return losses, whole weights, the mesh, and the most bytes at any time."""
    rt = msrun.init(config)
    torch.manual_seed(0)
    name, samples, tokens = case
    net = MODELS[name]().to(dtype)
    is_found = config["mesh"] == "auto"

    def part(seed):
        count = rt.layout.size("dp")
        return [x.chunk(count)[rt.coordinate.get("dp", 0)] for x in batch(samples, tokens, seed)]

    net = rt.shard(net, sample=batch(samples, tokens) if is_found else part(0))
    optimizer = rt.optimizer(torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False))
    losses, held = [], Held()
    for seed in range(3):
        words, target = part(seed)
        held.know([*net.parameters(), *net.buffers(), words, target])
        with held.counted():
            loss = rt.step(net, optimizer, lambda loss, _: loss, words, target, target)
        losses.append(loss.item())
    with as_plain_tensors():
        weights = {
            name: (
                param.full_tensor() if hasattr(param, "full_tensor") else param.as_subclass(Tensor)
            ).detach()
            for name, param in net.named_parameters()
        }
    return losses, weights, (dict(rt.layout.axes), rt.layout.ep), held.peak


def check(case, config, ranks, mesh):
    ((want, weights, _, _),) = run_ranks(train, 1, case, {"mesh": {"dp": 1}})
    seen = set()
    for losses, ours, found, _ in run_ranks(train, ranks, case, config):
        assert found == mesh
        assert losses == pytest.approx(want, rel=1e-10)
        for name, weight in weights.items():
            if not len(ours[name]):
                continue  # of a list, on another rank
            seen.add(name)
            assert torch.allclose(ours[name], weight, rtol=1e-9, atol=1e-11), name
    assert seen == {*weights}


def test_a_found_mesh_of_experts_learns_what_one_process_does():
    check(MIXTURE, AUTO, 2, ({"dp": 2}, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "config", "ranks", "mesh"),
    [
        (MIXTURE, AUTO, 4, ({"dp": 4}, 4)),
        (TEXT, AUTO, 2, ({"dp": 1, "cp": 2}, 0)),
        (ODD, AUTO, 2, ({"dp": 1, "cp": 2}, 0)),
        (("text", 2, 1024), {**AUTO, "mesh": {"dp": 2, "cp": 2}}, 4, ({"dp": 2, "cp": 2}, 0)),
        (ODD, {**AUTO, "mesh": {"cp": 2}}, 2, ({"cp": 2}, 0)),
        (MIXTURE, {**AUTO, "mesh": {"dp": 2, "ep": 2}}, 4, ({"dp": 4}, 2)),
        (
            MIXTURE,
            {**AUTO, "optimizer": {"zero": 2}, "recompute": {"modules": ["layers.*"]}},
            4,
            ({"dp": 4}, 4),
        ),
        (
            MIXTURE,
            {**AUTO, "mesh": {"dp": 2, "ep": 2}, "accumulate": 2, "optimizer": {"zero": 3}},
            4,
            ({"dp": 4}, 2),
        ),
    ],
)
def test_found_techniques_learn_what_one_process_does(case, config, ranks, mesh):
    check(case, config, ranks, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "one", "world"),
    [
        (MIXTURE, Technique(ep=4), 4),
        (MIXTURE, Technique(ep=2, zero=1), 4),
        (MIXTURE, Technique(ep=2, zero=1), 2),
        (TEXT, Technique(cp=2, kind="all_to_all"), 2),
        (ODD, Technique(cp=2, kind="ring"), 2),
    ],
)
def test_ranks_take_no_more_than_predicted(case, one, world):
    name, samples, tokens = case
    with torch.device("meta"):
        net = MODELS[name]()
    sample = [x.to("meta") for x in batch(samples, tokens)]
    estimator = Estimator(net, sample, batch=samples, world=world, states=2, is_host=True)
    predicted, _ = estimator.nbytes(one)
    for _, _, _, peak in run_ranks(train, world, case, estimator.config(one), torch.float32):
        assert 0.5 * predicted <= peak <= 1.05 * predicted, (peak, predicted)


def saved(case, path, config):
    return train(case, {"mode": "auto", "plan": str(path)} | config)[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks", "named", "mesh"),
    [
        (MIXTURE, 4, {"dp": 1, "ep": 4}, ({"dp": 4}, 4)),
        (TEXT, 2, {"dp": 1, "cp": 2}, ({"dp": 1, "cp": 2}, 0)),
    ],
)
def test_a_plan_of_a_laptop_trains_under_its_configuration(tmp_path, case, ranks, named, mesh):
    from msrun.parallel.search.plan.plan import write_plan

    plan = searched(case, tmp_path, ranks)
    write_plan(plan, tmp_path / "plan.json")
    ((want, _, _, _),) = run_ranks(train, 1, case, {"mesh": {"dp": 1}})
    for axes in ("auto", named):
        for losses, _, found in run_ranks(
            saved, ranks, case, tmp_path / "plan.json", {"mesh": axes}
        ):
            assert (losses, found) == (pytest.approx(want, rel=1e-10), mesh)


def snippet(code):
    """Run a snippet of the docs, which asserts what it shows."""
    os.environ["MSRUN_CONFIG"] = "p.yaml"
    names = {"__name__": "__main__", "msrun": msrun, "torch": torch}
    exec(code, names | {"nn": torch.nn, "functional": torch.nn.functional})


def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("### Experts and long sequences")[2]
    config, code = re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "p.yaml").write_text(config)  # a rank that wrote it would empty it for others
    run_ranks(snippet, 4, code)


def refused(case, config):
    with pytest.raises(UsageError) as caught:
        train(case, config)
    return caught.value.message


def test_what_no_rank_can_share_is_one_sentence():
    named = {**AUTO, "mesh": {"dp": 1, "ep": 2}}
    for case, config, sentence in (
        (
            ("text", 2, 16),
            named,
            "parallel.mesh.ep: not for this model, " + MISSING["ep"],
        ),
        (
            MIXTURE,
            named | {"plan": [{"match": "head", "out": ["dp", None, None]}]},
            "parallel.plan: mode auto finds no place for experts beside it, and the mesh has ep 2",
        ),
    ):
        assert run_ranks(refused, 2, case, config) == [sentence] * 2
