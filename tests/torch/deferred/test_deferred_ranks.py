"""Each rank gets its part of a model that no rank has as a whole."""

import ctypes
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deferred_models import CPU, assert_equal_bits, deferred, filled, plain
from ranks import MLP, Transformer, run_ranks, run_warm
from test_grid import ALL, pp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter, init

import msrun
from msrun.errors import UsageError
from msrun.parallel.deferred.fill import fill, find, share_random_state
from msrun.parallel.deferred.init import DeferredInit
from msrun.parallel.local import full_tensor, is_sharded
from msrun.parallel.torch_compat import strided_shard

pytestmark = pytest.mark.torch


def resident(key):
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def own():
    """Return the memory of this process that is no file's, also what the kernel swapped out."""
    return resident("RssAnon") + resident("VmSwap")


def large():
    """Divide 80 MB over the ranks; return by how much memory grew, at most and in the end."""
    torch.manual_seed(3)
    with DeferredInit():
        model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(20)])
    weights = find(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    # What earlier tests gave back to the allocator would be used again, and not show as growth.
    ctypes.CDLL(None).malloc_trim(0)
    resident_before, own_before = resident("VmRSS"), own()
    Path("/proc/self/clear_refs").write_text("5")
    fill(model, weights, CPU)
    return resident("VmHWM") - resident_before, own() - own_before


def test_a_rank_has_memory_for_its_part_alone():
    for most, end in run_ranks(large, 2):
        assert 35e6 < end < 45e6
        assert most < end + 15e6


def sharded(kind):
    def make():
        return Transformer(vocabulary=31, width=20)

    expected, after = plain(make)
    model = deferred(make)
    weights = find(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    if "tensor" in kind:
        divide(model, mesh["tp"])
    if "fully" in kind:
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh["dp"] if "tensor" in kind else None)
    fill(model, weights, CPU)
    assert torch.equal(torch.get_rng_state(), after)
    assert model.head.weight is model.embed.weight
    assert_equal_bits(model, expected)
    if kind == "fully":
        tokens = torch.arange(8).view(1, 8)
        torch.testing.assert_close(model(tokens), expected(tokens))
    return sum(param.to_local().numel() for param in model.parameters() if is_sharded(param))


def divide(model, mesh):
    done = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.dim() == 2 and not is_sharded(param):
                placed = [Shard(1 if param.shape[0] < param.shape[1] else 0)]
                part = distribute_tensor(param.data, mesh, placed, src_data_rank=None)
                done.setdefault(id(param), Parameter(part))
                setattr(module, name, done[id(param)])


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        *(("fully", 2), ("tensor", 2), ("tensor, fully", 4)),
        *(pytest.param(kind, 4, marks=pytest.mark.slow) for kind in ("fully", "tensor")),
    ],
)
def test_a_divided_model_has_the_bits_of_a_whole_one(kind, world_size):
    assert all(run_ranks(sharded, world_size, kind))


def strided():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    expected, _ = plain(lambda: nn.Linear(6, 16))
    model = deferred(lambda: nn.Linear(6, 16))
    weights = find(model)
    for name, placed in (
        ("weight", (strided_shard(0, 2), Shard(0))),
        ("bias", (Shard(0), strided_shard(0, 2))),
    ):
        whole = getattr(model, name).data
        setattr(model, name, Parameter(distribute_tensor(whole, mesh, placed, src_data_rank=None)))
    fill(model, weights, CPU)
    for name, param in model.named_parameters():
        whole = getattr(expected, name).data
        part = distribute_tensor(whole, mesh, param.placements, src_data_rank=None)
        assert torch.equal(param.to_local(), part.to_local())


def test_a_strided_shard_is_filled():
    run_ranks(strided, 4)


def unalike(change):
    rank = dist.get_rank()
    with DeferredInit():
        model = nn.Linear(3 + rank, 3) if change == "shape" else nn.Linear(3, 3)
        if change == "number":
            init.normal_(model.weight, std=1.0 + rank)
        if change == "constant":
            model.bias.data.copy_(torch.tensor([1.0, 2.0, rank]))
    try:
        fill(model, find(model), CPU)
    except UsageError as error:
        return error.message
    return None


@pytest.mark.parametrize("change", ["shape", "number", "constant", "state"])
def test_ranks_that_build_other_models_are_refused(change):
    sentence = "rank 1 did not build the model of rank 0 inside init_on_meta"

    assert run_ranks(unalike, 2, change) == [sentence] * 2


def shared_state():
    share_random_state(CPU)
    with DeferredInit():
        model = MLP()
    filled(model)
    return model.fc1.weight.sum().item(), torch.rand(1).item()


def test_ranks_can_share_the_state_of_the_first():
    one, other = run_ranks(shared_state, 2)

    assert one == other


UNDER_CONFIGURATIONS = {
    "dp": {"mesh": {"dp": 2}},
    "zero3": {"optimizer": {"zero": 3}},
    "tp": {"mesh": {"tp": 2}, "plan": ALL},
    "pp": pp(),
}


def under_configurations():
    """Return under which configurations a parameter or buffer has other bits than in one process.

    Also those after which the next random number is another.
    """
    torch.manual_seed(5)
    expected = dict(Transformer().state_dict())
    after = torch.rand(3)
    wrong = []
    for name, config in UNDER_CONFIGURATIONS.items():
        with msrun.init(config | {"seed": 5}) as runtime:
            with runtime.init_on_meta():
                model = Transformer()
            assert all(param.is_meta for param in model.parameters())
            model = runtime.shard(model)
            found = {key: full_tensor(value) for key, value in model.state_dict().items()}
            if not all(torch.equal(value, expected[key]) for key, value in found.items()):
                wrong.append(name)
            if name != "pp":
                assert found.keys() == expected.keys()
            if dist.get_rank() == 0 and not torch.equal(torch.rand(3), after):
                wrong.append(f"{name}, after it")
    return wrong


def test_weights_of_init_on_meta_are_those_of_one_process_with_the_same_seed():
    assert run_warm(under_configurations, 2) == [[], []]
