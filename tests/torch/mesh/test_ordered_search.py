"""`mode: auto` beside `rank_list`: a plan on ranks in any order learns as one process."""

from __future__ import annotations

import pytest
import torch
from auto_models import GPT, tokens
from ranks import run_warm

import msrun
from msrun.errors import UsageError
from msrun.parallel.local import local_part

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

ORDER = [2, 0, 3, 1]
MESH = {"dp": 2, "tp": 2}
ALONE = {"mesh": {"dp": 1}}
STEPS, SAVED_AFTER = 3, 1
COLWISE = {"match": "blocks.0.up", "style": "colwise"}
STAGES = {"pipeline": {"stages": "auto", "microbatches": 4}}
# A layout of MindSpore whose list, and no key of its own, is the order of the mesh.
WISH = {
    "match": "blocks.0.up",
    "layout": {
        "device_matrix": [2, 2],
        "alias_name": ["a", "b"],
        "rank_list": [0, 3, 1, 2],
        "params": {"weight": ["b", "None"]},
    },
}


def auto(**others):
    return {"mode": "auto", "mesh": MESH, "rank_list": ORDER, **others}


def train(config, save=None, load=None):
    """Train, the second time from a checkpoint of the first step; return losses and weights.

    Also the order of the ranks and the elements of the parameters here.
    """
    rt = msrun.init(config)
    torch.manual_seed(0)
    # Each target counts, so micro-batches weigh alike.
    net = GPT(layers=4, ignored=-100).double()
    torch.manual_seed(1)
    batches = [tokens() for _ in range(STEPS)]
    is_found = config["mesh"] == "auto"

    def local(batch):
        return [x.chunk(rt.layout.size("dp"))[rt.coordinate.get("dp", 0)] for x in batch]

    net = rt.shard(net, sample=batches[0] if is_found else local(batches[0]))
    optimizer = rt.optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for start in (0,) if load is None else (0, SAVED_AFTER):
        if start:
            assert rt.load(net, optimizer, path=str(load)) == start
        for number in range(start, STEPS):
            if number == SAVED_AFTER and save is not None:
                rt.save(net, optimizer, step=number, path=str(save))
            x, y = local(batches[number])
            losses.append(rt.step(net, optimizer, lambda loss, _: loss, x, y, y).item())
    weights = {}
    for name, param in net.named_parameters():
        weights[name] = (param.full_tensor() if hasattr(param, "full_tensor") else param).detach()
    held = sum(local_part(param).numel() for param in net.parameters())
    return losses, weights, list(rt.layout.ranks), held


def assert_equal(found, want):
    """Hold losses of all ranks, and the weights that each has, against one process."""
    seen = set()
    for losses, weights, *_ in found:
        expected = want[0] + want[0][SAVED_AFTER:] * (len(losses) > STEPS)
        assert losses == pytest.approx(expected, rel=1e-10)
        seen |= weights.keys()
        for name, weight in weights.items():
            assert torch.allclose(weight, want[1][name], rtol=1e-10, atol=1e-10), name
    assert seen == want[1].keys()


CASES = {
    "two ranks": (2, {"mode": "auto", "mesh": {"dp": 2}, "rank_list": [1, 0]}),
    "two ranks, divided": (
        2,
        {"mode": "auto", "mesh": {"tp": 2}, "rank_list": [1, 0], "plan": [COLWISE]},
    ),
    "dp x tp": (4, auto(plan=[COLWISE])),
    "little memory": (4, auto(memory="256KiB")),
    "the order of a wish": (4, auto(rank_list=[], plan=[WISH])),
    "mesh auto": (4, auto(mesh="auto")),
    "mesh auto, little memory": (4, auto(mesh="auto", memory="256KiB")),
    "zero and recomputation": (
        4,
        auto(optimizer={"zero": 1}, recompute={"modules": ["blocks.*"]}),
    ),
    "stages first": (4, auto(mesh={"pp": 2, "tp": 2}, plan=[COLWISE], **STAGES)),
    "stages last": (4, auto(mesh={"dp": 2, "pp": 2}, **STAGES)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
def test_training_equals_one_process(name):
    ranks, config = CASES[name]
    (want,) = run_warm(train, 1, ALONE)

    found = run_warm(train, ranks, config)

    assert_equal(found, want)
    whole = sum(weight.numel() for weight in want[1].values())
    for _, _, order, held in found:
        assert (held < whole) == (name not in {"two ranks", "mesh auto"})
        assert order == (config["rank_list"] or WISH["layout"]["rank_list"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "target"),
    [("dp x tp", "stages last"), ("little memory", "one"), ("one", "dp x tp")],
)
def test_checkpoints_go_to_another_layout(tmp_path, source, target):
    cases = CASES | {"one": (1, ALONE)}
    (want,) = run_warm(train, 1, ALONE)

    assert_equal(run_warm(train, *cases[source], tmp_path), want)
    assert_equal(run_warm(train, *cases[target], None, tmp_path), want)


def refused(config):
    with pytest.raises(UsageError) as caught:
        msrun.init(config)
    return caught.value.message


def test_a_list_of_other_ranks_is_refused_before_a_mesh_is_searched():
    config = {"mode": "auto", "mesh": "auto", "rank_list": [0, 1, 2]}
    assert run_warm(refused, 2, config) == 2 * [
        "parallel.rank_list: [0, 1, 2] has not each of the 2 ranks once"
    ]
