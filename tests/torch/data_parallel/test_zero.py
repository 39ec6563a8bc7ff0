"""Optimizer parallel: less on each rank, the same losses, the collectives of the formulas."""

import warnings

import pytest
import torch
from ranks import (
    OPTIMIZERS,
    Counted,
    assert_equal_curves,
    batches,
    build,
    oracle,
    run_warm,
    train,
)
from torch.nn import functional

import msrun

pytestmark = pytest.mark.torch

ELEMENTS = 16 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10
# Whole rows are divided, so a rank may have one row more than its share of each parameter.
ROWS = 16 + 1 + 32 + 1 + 32 + 1


def measured(options, accumulate):
    """Return the collectives of a step and the elements of parameters and optimizer state."""
    runtime = msrun.init({"optimizer": options, "accumulate": accumulate})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["adamw"](network.parameters())
    for x, y in batches("mlp", steps=2):
        with Counted() as counted:
            runtime.step(network, update, functional.cross_entropy, x, y)
    return (
        dict(counted.calls),
        sum(local(param).numel() for param in network.parameters()),
        sum(
            local(value).numel()
            for state in update.state.values()
            for value in state.values()
            if value.dim()
        ),
        sorted(name for name, p in network.named_parameters() if local(p) is p),
    )


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_collectives_and_memory_are_those_of_the_level(zero, accumulate):
    groups = 3  # one for each layer; the whole model has no parameter of its own
    for calls, parameters, state, whole in run_warm(measured, 4, {"zero": zero}, accumulate):
        # Level 3 gathers for each forward and each backward, the others once a step.
        assert calls[GATHER] == groups * (2 * accumulate if zero == 3 else 1)
        assert calls[SCATTER] == groups * (1 if zero == 1 else accumulate)
        assert calls["allreduce_"] == 2
        assert parameters <= ELEMENTS / 4 + ROWS
        assert state <= 2 * (ELEMENTS / 4 + ROWS)
        assert whole == []


def test_small_parameters_stay_whole_and_are_reduced_by_us():
    biases = ["fc1.bias", "fc2.bias", "fc3.bias"]
    for calls, _, _, whole in run_warm(measured, 2, {"zero": 3, "threshold": 256}, 1):
        assert whole == biases
        assert calls["allreduce_"] == 3


def test_copies_share_by_an_all_reduce():
    for calls, parameters, _, _ in run_warm(measured, 4, {"zero": 3, "shard_size": 2}, 1):
        assert calls[SCATTER] == 3
        assert calls["allreduce_"] == 3 + 2
        assert ELEMENTS / 2 - ROWS <= parameters <= ELEMENTS / 2 + ROWS


def gradients_of(config):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    x, y = (part.chunk(runtime.world_size)[runtime.rank] for part in batches("mlp")[0])
    functional.cross_entropy(network(x), y).backward()
    return [param.grad.full_tensor().tolist() for param in network.parameters()]


def test_sum_is_the_mean_times_the_ranks():
    mean = run_warm(gradients_of, 2, {"optimizer": {"zero": 2}})[0]
    total = run_warm(gradients_of, 2, {"optimizer": {"zero": 2}, "reduce": {"op": "sum"}})[0]

    for one, other in zip(mean, total, strict=True):
        torch.testing.assert_close(2 * torch.tensor(one), torch.tensor(other))


def computed_in():
    runtime = msrun.init({"optimizer": {"zero": 2, "dtype": "bfloat16"}})
    network = runtime.shard(build("mlp"))
    update = OPTIMIZERS["adamw"](network.parameters())
    seen = []
    network.fc2.register_forward_hook(lambda *call: seen.append(str(call[2].dtype)))
    x, y = batches("mlp")[0]
    loss = runtime.step(network, update, functional.cross_entropy, x, y).item()
    return seen, {str(param.dtype) for param in network.parameters()}, loss


def test_mixed_precision_computes_short_and_keeps_long():
    for seen, kept, loss in run_warm(computed_in, 2):
        assert (seen, kept) == (["torch.bfloat16"], {"torch.float32"})
        assert abs(loss - oracle("mlp", "adamw")[0]) < 0.02


def warned(options):
    """Return the warnings of one rank, and whether its parameters stay as they were."""
    runtime = msrun.init({"mesh": {"tp": 1}, "optimizer": {"zero": 3, **options}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network = runtime.shard(build("mlp"))
    return [str(warning.message) for warning in caught], network.fc1.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("key", "value", "shown"), [("dtype", "bfloat16", "bfloat16"), ("offload", True, "true")]
)
def test_one_rank_says_what_has_no_effect(key, value, shown):
    said = (
        f"msrun: parallel.optimizer.{key}: {shown} has no effect on one rank without an axis dp, "
        "which keeps the type and the device of its parameters"
    )
    assert run_warm(warned, 1, {key: value}) == [([said], True)]
    assert run_warm(warned, 1, {"threshold": 8}) == [([], True)]


def alone(options, level):
    """Return the losses of one rank, the type of its output and where its parameters are."""
    config = {"optimizer": {"zero": level, **options}, "accumulate": 2}
    losses = train(config, "mlp", "adamw", 0.1)
    runtime = msrun.init()
    network = runtime.shard(build("mlp"))
    with torch.no_grad():
        output = network(torch.ones(2, 16))
    return losses, output.dtype, {param.device.type for param in network.parameters()}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_one_rank_offloads(level):
    ((losses, dtype, places),) = run_warm(alone, 1, {"offload": True}, level)

    assert_equal_curves([losses], oracle("mlp", "adamw", 0.1))
    assert (dtype, places) == (torch.float32, {"cpu"})


def test_one_rank_computes_in_another_type():
    ((losses, dtype, _),) = run_warm(alone, 1, {"dtype": "bfloat16", "offload": True}, 3)

    assert dtype == torch.bfloat16
    assert_equal_curves([losses], oracle("mlp", "adamw", 0.1), tolerance=0.02)
