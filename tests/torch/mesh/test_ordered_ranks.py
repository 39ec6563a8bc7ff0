"""`rank_list`: ranks in any order on the mesh hold, train and load what the definition says."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from image_models import UNet, trained
from mixtures import RULE, difference
from ranks import OPTIMIZERS, Curves, assert_equal_curves, batches, build, oracle, run_warm
from torch.nn import functional
from torch.utils.data import TensorDataset

import msrun
from msrun.errors import ConfigError
from msrun.parallel.notation.mesh_layout import MeshLayout, local_slices

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:msrun. .* is computed whole on every rank"),
]

ORDER = [2, 0, 3, 1]
REVERSED = [3, 2, 1, 0]
SQUARE = {"x": 2, "y": 2}
COLUMNS_AND_ROWS = [
    {"match": "fc1", "style": "colwise", "axis": "tp"},
    {"match": "fc2", "style": "rowwise", "axis": "tp"},
]
TWO_AXES = [
    {
        "match": "fc1",
        "params": {"weight": [["y", "x"], None], "bias": [["y", "x"]]},
        "out": ["...", ["y", "x"]],
    },
    {
        "match": "fc2",
        "params": {"weight": [None, ["y", "x"]]},
        "in": ["...", ["y", "x"]],
        "out": ["...", None],
    },
]
MINDSPORE = [
    {
        "match": "fc1",
        "layout": {
            "device_matrix": [2, 2],
            "alias_name": ["a", "b"],
            "rank_list": [0, 3, 1, 2],
            "params": {"weight": ["b", "None"], "bias": ["b"]},
            "in": ["None", "None"],
            "out": ["None", "b"],
        },
    },
    {
        "match": "fc2",
        "layout": {
            "device_matrix": [4],
            "alias_name": ["all"],
            "rank_list": [0, 3, 1, 2],
            "params": {"weight": ["None", "all"]},
            "in": ["None", "all"],
            "out": ["None", "None"],
        },
    },
]
STAGES = {"stages": {"fc1": 0, "fc2": 0, "fc3": 1}, "microbatches": 2}
CASES = {
    "dp": {"accumulate": 2},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 3": {"optimizer": {"zero": 3}},
    "copies of zero 2": {"optimizer": {"zero": 2, "shard_size": 2}},
    "tp": {"mesh": {"tp": 4}, "plan": COLUMNS_AND_ROWS},
    "two axes": {"mesh": SQUARE, "plan": TWO_AXES},
    "dp x tp, zero 3": {
        "mesh": {"dp": 2, "tp": 2},
        "plan": COLUMNS_AND_ROWS,
        "optimizer": {"zero": 3},
        "accumulate": 2,
    },
    "pp x dp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": STAGES},
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}, "plan": COLUMNS_AND_ROWS, "pipeline": STAGES},
    "layouts of MindSpore": {"mesh": SQUARE, "plan": MINDSPORE, "rank_list": []},
    "verified": {"rank_list": [0, 3, 1, 2], "mesh": {"dp": 4}, "verify": 2},
}
CURVES = Curves(
    {
        **{name: (4, {"rank_list": ORDER} | case) for name, case in CASES.items()},
        "batch norm": (4, {"rank_list": ORDER}, "conv"),
        "cp": (
            4,
            {
                "mesh": {"dp": 2, "cp": 2},
                "rank_list": ORDER,
                "plan": [{"match": "*", "style": "context"}],
            },
            "transformer",
        ),
    }
)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(4)
def test_training_equals_one_process(name):
    assert_equal_curves(CURVES[name], oracle("mlp"))


def test_batch_norms_and_parts_of_sequences_equal_one_process():
    assert_equal_curves(CURVES["batch norm"], oracle("conv"))
    assert_equal_curves(CURVES["cp"], oracle("transformer"))


@pytest.mark.slow
def test_experts_and_parts_of_images_equal_one_process():
    config = {"mesh": {"dp": 2, "ep": 2}, "rank_list": ORDER, "plan": [RULE]}
    zero = {"optimizer": {"zero": 3}}
    for found in run_warm(difference, 4, "top 2", config | zero):
        assert found[0] < 2e-6

    losses, weights = run_warm(trained, 1, {}, UNet)[0]
    config = {"mesh": {"dp": 2, "h": 2}, "rank_list": ORDER}
    for found, held in run_warm(trained, 4, config, UNet):
        assert found.tolist() == pytest.approx(losses.tolist(), abs=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(held[name], weight, rtol=0, atol=1e-8)


def held(axes, orders, dims):
    """Return the part of a matrix of 0, 1 and so on that this rank holds in each order."""
    found = []
    for order in orders:
        rule = {"match": "0", "params": {"weight": dims}}
        rt = msrun.init({"mesh": axes, "rank_list": order, "plan": [rule]})
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
        model[0].weight.data.copy_(torch.arange(16.0).view(4, 4))
        weight = rt.shard(model)[0].weight
        assert torch.equal(weight.full_tensor(), torch.arange(16.0).view(4, 4))
        assert [rt.group(axis).rank() for axis in axes] == [*rt.coordinate.values()]
        found.append(weight.to_local().tolist())
        rt.close()
    return found


@pytest.mark.parametrize("dims", [[["x", "y"], None], [None, ["y", "x"]], ["y", "x"]], ids=str)
def test_each_rank_has_the_part_of_its_position(dims):
    orders = random.Random(1).sample([*itertools.permutations(range(4))], 4)
    whole = torch.arange(16.0).view(4, 4)
    found = run_warm(held, 4, SQUARE, [[*order] for order in orders], dims)

    for at, order in enumerate(orders):
        for position, rank in enumerate(order):
            part = local_slices((4, 4), dims, MeshLayout(SQUARE), position)
            assert found[rank][at] == whole[part].tolist()


def gathered(mesh, order):
    """Return what this rank and its peers of each axis say in a gather, and the axes as one."""
    rt = msrun.init({"mesh": mesh, "rank_list": order, "mode": "manual"})
    found = {}
    for axis in mesh:
        said = [None] * rt.layout.size(axis)
        dist.all_gather_object(said, rt.rank, group=rt.group(axis))
        assert rt.mesh.get_local_rank(axis) == rt.coordinate[axis]
        found[axis] = said, [*rt.layout.group(axis, rt.rank)]
    return found


@pytest.mark.parametrize("mesh", [{"dp": 4}, SQUARE], ids=str)
def test_groups_have_their_ranks_in_the_order_of_the_mesh(mesh):
    for of_axes in run_warm(gathered, 4, mesh, REVERSED):
        for said, expected in of_axes.values():
            assert said == expected
            assert said == sorted(said, reverse=True)


def read(config, count):
    loader = msrun.init(config).loader(TensorDataset(torch.arange(count)), 2, shuffle=True, seed=3)
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_a_loader_gives_each_sample_once_by_position(mesh):
    config = {"mesh": mesh, "mode": "manual"}
    expected = run_warm(read, 4, config, 23)
    found = run_warm(read, 4, config | {"rank_list": ORDER}, 23)

    assert [found[rank] for rank in ORDER] == expected
    firsts = [found[rank] for rank in ORDER[:: 4 // mesh["dp"]]]
    assert sorted(n for batches_ in firsts for batch in batches_ for n in batch) == [*range(23)]


LAYOUTS = {
    "dp, zero 3": {"optimizer": {"zero": 3}, "rank_list": ORDER},
    "dp, zero 3, reversed": {"optimizer": {"zero": 3}, "rank_list": REVERSED},
    "dp x tp": {"mesh": {"dp": 2, "tp": 2}, "plan": COLUMNS_AND_ROWS, "optimizer": {"zero": 1}},
    "layouts": {"mesh": SQUARE, "plan": MINDSPORE},
    "one": {},
}


def prepared(config):
    rt = msrun.init(config)
    model = rt.shard(build("mlp"))
    update = rt.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    share, count = rt.coordinate.get("dp", 0), rt.layout.size("dp")

    def step(batch):
        part = [t.chunk(count)[share] for t in batch]
        return rt.step(model, update, functional.cross_entropy, *part).item()

    return rt, model, update, [lambda b=b: step(b) for b in batches("mlp")]


def saved(config, folder):
    rt, model, update, steps = prepared(config)
    losses = [step() for step in steps[:2]]
    rt.save(model, update, step=2, path=folder)
    rt.finish()
    return losses, torch.rand(4).tolist()


def resumed(config, folder):
    rt, model, update, steps = prepared(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert rt.load(model, update, path=folder) == 2
    drawn = torch.rand(4).tolist()
    return [step() for step in steps[2:]], drawn


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("dp, zero 3", "dp x tp"),
        ("dp x tp", "dp, zero 3"),
        ("layouts", "dp, zero 3, reversed"),
        ("dp, zero 3", "layouts"),
        ("layouts", "one"),
        ("one", "dp, zero 3"),
    ],
)
@pytest.mark.few(3)
def test_checkpoints_go_to_another_layout(tmp_path, source, target):
    folder, expected = str(tmp_path / "saved"), oracle("mlp", "adamw")
    first = run_warm(saved, 1 if source == "one" else 4, LAYOUTS[source], folder)
    then = run_warm(resumed, 1 if target == "one" else 4, LAYOUTS[target], folder)

    assert_equal_curves([losses for losses, _ in first], expected[:2])
    assert_equal_curves([losses for losses, _ in then], expected[2:])


def test_random_numbers_go_on_at_the_same_position(tmp_path):
    folder = str(tmp_path / "saved")
    first = run_warm(saved, 4, LAYOUTS["dp, zero 3"], folder)
    then = run_warm(resumed, 4, LAYOUTS["dp, zero 3, reversed"], folder)

    of_positions = [first[rank][1] for rank in ORDER]
    assert [then[rank][1] for rank in REVERSED] == of_positions
    assert len({tuple(drawn) for drawn in of_positions}) == 4


def refused(config):
    with pytest.raises(ConfigError) as caught:
        msrun.init(config)
    return caught.value.message


def test_lists_of_other_ranks_are_refused():
    assert run_warm(refused, 2, {"rank_list": [0, 1, 2]}) == 2 * [
        "parallel.rank_list: [0, 1, 2] has not each of the 2 ranks once"
    ]
