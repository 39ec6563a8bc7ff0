"""What of models and optimizers a checkpoint holds, of every kind."""

import pytest
import torch
from checkpoint_calls import in_one, make, refusal, start, train
from ranks import OPTIMIZERS, batches, build, run_warm
from torch import nn
from torch.nn import functional

from msrun.parallel.checkpoint import plan as plans
from msrun.parallel.checkpoint import schema, tensors
from msrun.parallel.checkpoint.checksums import DataFiles

pytestmark = pytest.mark.torch


# Models


def _tied(folder):
    _, checkpoints = start()
    network, optimizer = make("transformer")
    train(network, optimizer, slice(1), "transformer")
    checkpoints.save(folder / "one", network, optimizer, step=1)
    index = schema.read_index(folder / "one", schema.read_manifest(folder / "one"))
    assert index.aliases == {"model.head.weight": "model.embed.weight"}

    # As on the two ends of a pipeline: two parameters, each with a state of its own.
    stages = [nn.ModuleDict({"embed": nn.Embedding(32, 16)}), build("transformer")]
    del stages[1].embed
    stages[1].head = nn.Linear(16, 32, bias=False)
    apart = OPTIMIZERS["adamw"]([p for stage in stages for p in stage.parameters()])
    checkpoints.load(folder / "one", stages, apart)
    for param in (stages[0]["embed"].weight, stages[1].head.weight):
        assert torch.equal(param, network.embed.weight)
        for key, value in optimizer.state[network.embed.weight].items():
            assert torch.equal(apart.state[param][key], value)

    checkpoints.save(folder / "two", stages, apart, step=1)

    # As where both ends are on one rank.
    stages[1].head.weight = stages[0]["embed"].weight
    both = OPTIMIZERS["adamw"](dict.fromkeys(p for stage in stages for p in stage.parameters()))
    checkpoints.load(folder / "two", stages, both)
    checkpoints.save(folder / "both", stages, both, step=1)

    expected = train(network, optimizer, slice(1, 3), "transformer")
    for name in ("two", "both"):
        again, update = make("transformer")
        checkpoints.load(folder / name, again, update)
        assert train(again, update, slice(1, 3), "transformer") == expected


def test_tied_weights(tmp_path):
    run_warm(_tied, 1, tmp_path)


def _statistics(folder):
    runtime, checkpoints = start(checkpoint={"dir": str(folder)}, batch_norm="local")
    network = nn.Sequential(*(nn.BatchNorm1d(400) for _ in range(4)))
    for layer in network:
        layer.running_mean.fill_(runtime.rank)
        layer.running_var.fill_(runtime.rank)
    checkpoints.save(None, network, step=1)
    return checkpoints.load(None, network).step, {
        value.item() for layer in network for value in layer.running_var.unique()
    }


def test_statistics_of_one_rank_belong_together(tmp_path):
    assert run_warm(_statistics, 3, tmp_path) == [(1, {0.0})] * 3


def _own(folder, *, is_resumed):
    runtime, checkpoints = start(checkpoint={"dir": str(folder)}, reduce={"exclude": ["fc2.*"]})
    network, optimizer = make()
    for param in network.parameters():
        param.grad = torch.full_like(param, runtime.rank + 1.0)
    if is_resumed:
        checkpoints.resume(network, optimizer)
    else:
        with torch.no_grad():
            network.fc2.weight.fill_(runtime.rank)
            optimizer.step()
        checkpoints.save(None, network, optimizer, step=1)
    average = optimizer.state[network.fc2.weight]["exp_avg"]
    return round(network.fc2.weight.mean().item(), 1), round(average.mean().item(), 1)


def _own_first(folder):
    return _own(folder, is_resumed=False)


def _own_resumed(folder):
    return _own(folder, is_resumed=True)


def test_parameters_of_single_ranks(tmp_path):
    assert run_warm(_own_first, 3, tmp_path) == [(0.0, 0.1), (1.0, 0.2), (2.0, 0.3)]

    assert run_warm(_own_resumed, 4, tmp_path) == [(0.0, 0.1), (1.0, 0.2), (2.0, 0.3), (0.0, 0.1)]


@in_one
def test_models_by_name(folder):
    """Two of one kind, such as a model and its running average."""
    _, checkpoints = start()
    network, optimizer = make()
    average = torch.optim.swa_utils.AveragedModel(network)
    train(network, optimizer, slice(2))
    checkpoints.save(folder / "c", {"net": network, "mean": average}, optimizer, step=2)

    again, update = make()
    other = torch.optim.swa_utils.AveragedModel(again)
    checkpoints.load(folder / "c", {"net": again, "mean": other}, update)

    assert torch.equal(again.fc1.weight, network.fc1.weight)
    assert torch.equal(other.module.fc1.weight, average.module.fc1.weight)
    assert not torch.equal(other.module.fc1.weight, again.fc1.weight)


@in_one
def test_what_is_planned_is_planned_once(folder):
    """As long as the tensors are of the same kinds."""
    _, checkpoints = start(checkpoint={"dir": str(folder)})
    network, optimizer = make()
    counted = []
    divide = plans.divide
    plans.divide = lambda proposals: counted.append(1) or divide(proposals)
    for step in range(4):
        if step == 3:
            network.half()
        checkpoints.save(None, network, optimizer, step=step)
        again, update = make()
        checkpoints.load(None, again, update)
        assert torch.equal(again.fc1.weight, network.fc1.weight.float())
        assert len(update.state) == (6 if step else 0)
        if step < 2:
            train(network, optimizer, slice(step, step + 1))

    assert len(counted) == 3  # without state of the optimizer, with it, with other types


def _divided_by_hand(folder, tensor):
    runtime, checkpoints = start(mesh={"dp": 1, "tp": 2}, mode="manual")
    network = nn.Linear(3, 2)
    with torch.no_grad():
        network.weight.fill_(runtime.rank if tensor == "weight" else 0)
        network.bias.fill_(runtime.rank if tensor == "bias" else 0)
    return refusal(checkpoints.save, folder / "c", network, step=1)


def test_what_a_script_divides_itself(tmp_path):
    for tensor in ("weight", "bias"):
        sentence = f"model.{tensor} is not the same on rank 0 and rank 1"
        found = run_warm(_divided_by_hand, 2, tmp_path, tensor)
        assert found == [sentence, f"rank 0: {sentence}"]


class Odd(nn.Module):
    """State of every kind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.inner = nn.Linear(2, 2)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("big", torch.tensor(2**40))
        self.register_buffer("small", torch.arange(5, dtype=torch.int8))
        self.register_buffer("complex", torch.tensor([1 + 2j]))
        self.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("temporary", torch.zeros(2), persistent=False)
        self.seen = {"names": ["a"]}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


@in_one
def test_state_of_every_kind(folder):
    """Types, scalars, what is empty, frozen or no tensor at all."""
    _, checkpoints = start()
    network = Odd()
    network.seen = {"names": ["a", "b"], "count": 3}
    checkpoints.save(folder / "c", network, step=1)

    again = Odd()
    for tensor in (*again.parameters(), *again.buffers()):
        tensor.data.zero_()
    checkpoints.load(folder / "c", again)

    assert again.seen == network.seen
    for name, value in network.state_dict().items():
        if name != "_extra_state":
            assert torch.equal(again.state_dict()[name], value), name


@in_one
def test_wrappers_leave_no_trace_in_names(folder):
    """Neither torch.compile, nor a wrapper for recomputation, nor DDP."""
    _, checkpoints = start()
    network, optimizer = make()
    network.fc1 = nn.ModuleDict({"_checkpoint_wrapped_module": network.fc1})
    network.fc2 = nn.ModuleDict({"_orig_mod": network.fc2})  # compiling takes a second to import
    whole = nn.parallel.DistributedDataParallel(network)
    checkpoints.save(folder / "c", whole, optimizer, step=1)

    again, update = make()
    checkpoints.load(folder / "c", again, update)


@pytest.mark.parametrize("code", tensors.TORCH_DTYPES)
def test_every_type_survives(tmp_path, code):
    value = torch.arange(6).reshape(2, 3).to(tensors.TORCH_DTYPES[code])
    plan = tensors.plan_file([tensors.slot("a", value), tensors.slot("b", torch.ones(()))])
    checksums = tensors.write_file(tmp_path / "f", plan, {"a": value, "b": torch.ones(())}.get)

    index = tensors.read_header(tmp_path / "f")

    with DataFiles(tmp_path, {"f": checksums}) as files:
        found = tensors.read_tensor(files, index.tensors["a"])
        other = tensors.read_tensor(files, index.tensors["b"])
    assert found.dtype == value.dtype
    assert found.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()
    assert other == 1


def test_others_read_our_files(tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    values = {"a": torch.randn(3, 5), "b": torch.ones(3, dtype=torch.bool), "c": torch.zeros(0, 2)}
    plan = tensors.plan_file(tensors.slot(*item) for item in values.items())
    tensors.write_file(tmp_path / "f.safetensors", plan, values.get)

    found = package.load_file(tmp_path / "f.safetensors")

    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in values.items()
    }


# Optimizers


@in_one
def test_an_optimizer_that_took_no_step(folder):
    """Has no state then, and none is made up: neither by saving nor by loading."""
    _, checkpoints = start()
    network, optimizer = make()
    expected = train(*make(), slice(3))
    checkpoints.save(folder / "c", network, optimizer, step=0)
    assert not optimizer.state

    again, update = make()
    train(again, update, slice(1))
    checkpoints.load(folder / "c", again, update)

    assert not update.state
    assert train(again, update, slice(3)) == expected == train(network, optimizer, slice(3))


@in_one
def test_a_parameter_without_gradient(folder):
    """Has no state, before and after."""
    _, checkpoints = start()
    network, optimizer = make()
    network.fc2.bias.requires_grad_(requires_grad=False)
    train(network, optimizer, slice(1))
    checkpoints.save(folder / "c", network, optimizer, step=1)

    again, update = make()
    checkpoints.load(folder / "c", again, update)

    assert again.fc2.bias not in update.state
    assert len(update.state) == 5


@in_one
def test_precise_state_of_rough_parameters(folder):
    """Is not rounded to their type, as torch's own load_state_dict does."""
    _, checkpoints = start()
    network = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(network.parameters())
    exact = torch.full((4, 4), 1.0 + 2**-20)
    optimizer.state[network.weight] = {"step": torch.tensor(3.0), "exp_avg": exact}
    checkpoints.save(folder / "c", network, optimizer, step=1)

    again = nn.Linear(4, 4).bfloat16()
    update = torch.optim.AdamW(again.parameters())
    checkpoints.load(folder / "c", again, update)

    assert torch.equal(update.state[again.weight]["exp_avg"], exact)


@in_one
def test_settings_of_groups(folder):
    """Come back in their types; how the optimizer computes stays the script's choice."""
    _, checkpoints = start()
    network = build("mlp")
    parts = [{"params": network.fc1.parameters()}, {"params": network.fc2.parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(parts, betas=(0.5, 0.75), lr=torch.tensor(0.1), foreach=False)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checkpoints.save(folder / "c", network, optimizer, step=1)

    parts = [{"params": network.fc1.parameters()}, {"params": network.fc2.parameters()}]
    update = torch.optim.AdamW(parts, lr=0.2, foreach=True)
    checkpoints.load(folder / "c", network, update)

    assert [group["lr"] for group in update.param_groups] == [torch.tensor(0.1).item(), 0.5]
    assert [group["initial_lr"] for group in update.param_groups][1] == 0.5
    assert [group["betas"] for group in update.param_groups] == [(0.5, 0.75)] * 2
    assert [group["foreach"] for group in update.param_groups] == [True] * 2
    one = torch.optim.AdamW([*network.fc1.parameters(), *network.fc2.parameters()])
    assert refusal(checkpoints.load, folder / "c", network, one) == (
        "fc1.weight and fc2.weight are in one group of AdamW, and not in the checkpoint"
    )


@in_one
def test_several_optimizers(folder):
    """Each of other parameters, in any order."""
    _, checkpoints = start()
    network = build("mlp")
    x, y = batches("mlp")[0]
    both = [
        torch.optim.SGD(network.fc1.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam([*network.fc2.parameters(), *network.fc3.parameters()]),
    ]
    functional.cross_entropy(network(x), y).backward()
    for optimizer in both:
        optimizer.step()
    checkpoints.save(folder / "c", network, both, step=1)

    again = build("mlp")
    update = [
        torch.optim.Adam([*again.fc2.parameters(), *again.fc3.parameters()]),
        torch.optim.SGD(again.fc1.parameters(), lr=0.3, momentum=0.9),
    ]
    checkpoints.load(folder / "c", again, update)

    assert list(update[1].state[again.fc1.weight]) == ["momentum_buffer"]
    assert update[1].param_groups[0]["lr"] == 0.1
    assert sorted(update[0].state[again.fc3.bias]) == ["exp_avg", "exp_avg_sq", "step"]
