"""torch's clipping and averages of models take plain and sharded parameters side by side."""

import math

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, assert_equal_curves, batches, build, run_warm
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import msrun
from msrun.errors import ModelError

pytestmark = pytest.mark.torch

# Of three layers one stays plain.
SOME = [{"match": "fc1", "style": "colwise"}, {"match": "fc2", "style": "rowwise"}]
TP = {"mesh": {"tp": 2}, "plan": SOME}
BOTH = {"mesh": {"dp": 2, "tp": 2}, "plan": SOME, "optimizer": {"zero": 3, "threshold": 100}}
CONFIGS = {
    "tp": (2, TP),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "zero 2, threshold": (2, {"optimizer": {"zero": 2, "threshold": 300}}),
    "dp x tp, zero 3": (4, BOTH),
}


def _clipped(config, clip):
    """Train with a clipping of torch; return losses and norms."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    found = []
    for batch in batches("mlp"):
        x, y = (tensor.chunk(count)[share] for tensor in batch)
        update.zero_grad()
        loss = MODELS["mlp"][1](network(x), y)
        loss.backward()
        if clip is None:
            nn.utils.clip_grad_value_(network.parameters(), 0.003)
        else:
            norm = nn.utils.clip_grad_norm_(network.parameters(), 0.05, norm_type=clip)
            found.append(norm.item())
        update.step()
        found.append(runtime.mean_over_data(loss).item())
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("clip", [2.0, 1.0, math.inf, None])
@pytest.mark.parametrize("case", CONFIGS)
def test_torch_clips_gradients_as_in_one_process(case, clip):
    ranks, config = CONFIGS[case]
    expected = run_warm(_clipped, 1, {}, clip)[0]

    assert_equal_curves(run_warm(_clipped, ranks, config, clip), expected, 1e-5)


def _averaged(config, is_ema, use_buffers):
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    function = get_ema_multi_avg_fn(0.5) if is_ema else None
    average = AveragedModel(network, multi_avg_fn=function, use_buffers=use_buffers)
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    losses = []
    for x, y in batches("mlp"):
        losses.append(runtime.step(network, update, MODELS["mlp"][1], x, y).item())
        average.update_parameters(network)
    with torch.no_grad():
        return [*losses, MODELS["mlp"][1](average(x), y).item()]


@pytest.mark.parametrize("is_ema", [True, False])
def test_averages_of_plain_and_sharded_weights(is_ema):
    expected = run_warm(_averaged, 1, {}, is_ema, is_ema)[0]

    assert_equal_curves(run_warm(_averaged, 2, TP, is_ema, is_ema), expected)


def _scaled():
    """Return weights after a step of a scaler whose gradient is infinite on one rank, and one."""
    rt = msrun.init({"mesh": {"tp": 2}, "plan": [{"match": "0", "style": "colwise"}]})
    torch.manual_seed(0)
    model = rt.shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    extra = nn.Parameter(torch.ones(3))  # a plain tensor in the same list
    update = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found = []
    for is_infinite in (True, False):
        update.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() + extra.sum()
        scaler.scale(loss).backward()
        if is_infinite and rt.rank == 1:
            model[0].weight.grad.to_local()[0, 0] = math.inf
        scaler.step(update)
        scaler.update()
        found.append((extra.tolist(), scaler.get_scale()))
    rt.close()
    return found


def test_all_ranks_of_a_plan_skip_what_a_scaler_skips_on_one():
    expected = [([1.0] * 3, 2.0), ([pytest.approx(0.9)] * 3, 2.0)]
    assert run_warm(_scaled, 2) == [expected] * 2


def _stage_clipped():
    stages = {"stages": {"fc1": 0, "fc2": 1, "fc3": 1}, "microbatches": 4}
    runtime = msrun.init({"mesh": {"pp": 2}, "pipeline": stages})
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS["sgd"](network.parameters()))
    update.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_norm_(network.parameters(), 1.0) and None
    )
    with pytest.raises(ModelError) as caught:
        runtime.step(network, update, MODELS["mlp"][1], *batches("mlp")[0])
    return caught.value.message


def test_the_norm_of_one_stage_is_refused():
    for message in run_warm(_stage_clipped, 2):
        assert "the norm of the gradients of this stage alone" in message


def _evaluated(config):
    """Evaluate in inference mode before and between steps."""
    runtime = msrun.init(config)
    network = runtime.shard(build("mlp"))
    update = runtime.optimizer(OPTIMIZERS["adamw"](network.parameters()))
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    found = []
    for batch in batches("mlp"):
        network.eval()
        with torch.inference_mode():
            found.append(MODELS["mlp"][1](network(batch[0]), batch[1]).item())
        network.train()
        x, y = (tensor.chunk(count)[share] for tensor in batch)
        found.append(runtime.step(network, update, MODELS["mlp"][1], x, y).item())
    return found


# In inference mode torch has no layout for linear layers: they are right, if slow.
@pytest.mark.filterwarnings("ignore:msrun. torch gathers what is divided")
@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"optimizer": {"zero": 1}}),
        (2, {"optimizer": {"zero": 3}}),
        (2, {"optimizer": {"zero": 3}, "verify": 1}),
        (2, {"optimizer": {"zero": 3, "dtype": "float32", "offload": True}}),
        (2, {"optimizer": {"zero": 3}, "recompute": {"modules": ["fc2"]}}),
        (2, TP),
        (4, BOTH),
    ],
)
def test_training_goes_on_after_an_evaluation_in_inference_mode(ranks, config):
    expected = run_warm(_evaluated, 1, {})[0]

    assert_equal_curves(run_warm(_evaluated, ranks, config), expected)
