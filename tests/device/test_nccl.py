"""The grid on NCCL, and what memory and time it takes: `pytest -m device tests/device`.

One GPU runs each configuration with all axes at one rank; those of the grid that ask for no more
GPUs than there are run as they stand.  `MSRUN_TEST_DEVICE=cpu` checks this file where none is.
"""

import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import (
    MODELS,
    OPTIMIZERS,
    TIMEOUT,
    Transformer,
    _train_each,
    assert_equal_curves,
    batches,
    build,
    oracle,
    run_ranks,
    token_loss,
)
from test_grid import CASES

import msrun
from msrun.parallel.device import backend_for, pick_device
from msrun.supervise.devices import read_devices
from msrun.topology import DeviceKind

# Counted without torch: a question to CUDA would poison every fork.
FOUND = read_devices(Path("/"), dict(os.environ))
GPUS = sum(device.kind is DeviceKind.CUDA for device in FOUND)
KIND = os.environ.get("MSRUN_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        KIND == "cuda" and GPUS == 0, reason="needs a CUDA GPU, and this machine has none"
    ),
]
on_a_gpu = pytest.mark.skipif(KIND != "cuda", reason="measures a GPU")
# A GPU adds up in another order than the CPU of the oracle.
TOLERANCE = 1e-5
SINGLE = ("gpipe", "1f1b")


def on_one_rank(config):
    """Return `config` with every axis at one rank; None where its schedule needs several."""
    found = json.loads(json.dumps(config))
    found["mesh"] = dict.fromkeys(config.get("mesh", {"dp": 1}), 1)
    found.get("optimizer", {}).pop("shard_size", None)
    if pipeline := found.get("pipeline"):
        if pipeline["schedule"] not in SINGLE:
            return None
        if pipeline["stages"] != "auto":
            pipeline["stages"] = dict.fromkeys(pipeline["stages"], 0)
    return found


def alone():
    """Yield each case of the grid that one GPU can run, once."""
    seen = set()
    for name, (_, config, *rest) in CASES.items():
        adapted = on_one_rank(config)
        key = json.dumps([adapted, rest])
        if adapted is not None and key not in seen:
            seen.add(key)
            yield name.rpartition(" on ")[0], (adapted, *rest)


ALONE = dict(alone())
TOGETHER = {name: case for name, case in CASES.items() if 1 < case[0] <= GPUS}


def on_devices(store, function, *args):
    """Call `function(*args)` in a process group of the devices' own backend."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = pick_device(KIND, msrun.environ.rank_identity(dict(os.environ)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        backend_for(device),
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    return function(*args)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Losses of each rank by name, of all cases for one number of ranks in one go."""
    found = {}

    def train(world_size, cases):
        if world_size not in found:
            store = str(tmp_path_factory.mktemp("group") / "store")
            limit = TIMEOUT + 10 * len(cases)
            arguments = (store, _train_each, cases)
            found[world_size] = run_ranks(on_devices, world_size, *arguments, timeout=limit)
        return found[world_size]

    return train


@pytest.mark.timeout(1200)  # the first of them trains all
@pytest.mark.parametrize("name", ALONE)
def test_one_gpu_equals_one_process(curves, name):
    [of_rank] = curves(1, ALONE)

    assert not isinstance(of_rank.get(name, "not reached"), str), of_rank.get(name)
    assert_equal_curves([of_rank[name]], oracle(*ALONE[name][1:]), TOLERANCE)


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not TOGETHER, reason="needs several GPUs")
@pytest.mark.parametrize("name", TOGETHER or ["none"])
def test_gpus_together_equal_one_process(curves, name):
    ranks, _, *rest = TOGETHER[name]
    cases = {n: case[1:] for n, case in TOGETHER.items() if case[0] == ranks}
    answers = [of_rank.get(name, "not reached") for of_rank in curves(ranks, cases)]

    assert not [text for text in answers if isinstance(text, str)]
    assert_equal_curves(answers, oracle(*rest), TOLERANCE)


def moved(folder):
    """Save on the device after a step; return the losses of the steps that follow."""
    runtime = msrun.init({"optimizer": {"zero": 1}})
    model = runtime.shard(build("transformer"))
    optimizer = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    losses = []
    for index, batch in enumerate(batches("transformer")):
        if index == 1:
            runtime.save(model, optimizer, step=1, path=folder)
        losses.append(runtime.step(model, optimizer, token_loss, *batch).item())
    assert runtime.device.type == KIND
    assert {param.device.type for param in model.parameters()} == {KIND}
    return losses[1:]


def loaded(folder):
    runtime = msrun.init(device="cpu")
    model = runtime.shard(build("transformer"))
    optimizer = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    step = runtime.load(model, optimizer, path=folder)
    rest = batches("transformer")[step:]
    return [runtime.step(model, optimizer, token_loss, *batch).item() for batch in rest]


def test_a_checkpoint_of_a_gpu_goes_on_without_one(tmp_path):
    group, folder = str(tmp_path / "store"), str(tmp_path / "c")
    [losses] = run_ranks(on_devices, 1, group, moved, folder)

    assert_equal_curves(run_ranks(loaded, 1, folder), losses, TOLERANCE)


LARGE = {"layers": 8, "width": 256, "heads": 8, "length": 128, "vocabulary": 512}


def peak(config):
    """Return the most bytes that a step of a larger model had on the device."""
    runtime = msrun.init(config)
    model = runtime.shard(Transformer(**LARGE))
    optimizer = runtime.optimizer(OPTIMIZERS["adamw"](model.parameters()))
    tokens = torch.randint(0, 512, (32, 129))
    runtime.step(model, optimizer, token_loss, tokens[:, :-1], tokens[:, 1:])
    torch.cuda.reset_peak_memory_stats()
    runtime.step(model, optimizer, token_loss, tokens[:, :-1], tokens[:, 1:])
    return torch.cuda.max_memory_allocated()


@on_a_gpu
def test_recomputation_and_micro_batches_take_less_memory(tmp_path):
    def measured(name, config):
        return run_ranks(on_devices, 1, str(tmp_path / name), peak, config)[0]

    whole = measured("whole", {})
    recomputed = measured("recomputed", {"recompute": {"modules": ["layers.*"]}})
    in_parts = measured("parts", {"accumulate": 8})
    print(f"peak MiB: {whole >> 20}, recomputed {recomputed >> 20}, in parts {in_parts >> 20}")

    assert recomputed < 0.5 * whole
    assert in_parts < 0.5 * whole


def speeds(turns):
    """Return the seconds of turns of ours and of plain torch, which alternate."""
    runtime = msrun.init({})
    ours = runtime.shard(Transformer(**LARGE))
    plain = Transformer(**LARGE).to(runtime.device)
    updates = [OPTIMIZERS["adamw"](model.parameters()) for model in (ours, plain)]
    tokens = torch.randint(0, 512, (16, 129), device=runtime.device)

    def our_step():
        runtime.step(ours, updates[0], token_loss, tokens[:, :-1], tokens[:, 1:]).item()

    def plain_step():
        updates[1].zero_grad()
        loss = MODELS["transformer"][1](plain(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        updates[1].step()
        loss.item()

    found = {our_step: [], plain_step: []}
    for turn in range(turns):
        for step in (our_step, plain_step) if turn % 2 else (plain_step, our_step):
            start = time.perf_counter()
            for _ in range(5):
                step()
            found[step].append(time.perf_counter() - start)
    return list(found.values())


@on_a_gpu
def test_a_step_takes_as_long_as_on_plain_torch(tmp_path):
    [(ours, plain)] = run_ranks(on_devices, 1, str(tmp_path / "store"), speeds, 20)
    ratio = statistics.median(b / a for a, b in zip(ours[2:], plain[2:], strict=True))
    tokens = 5 * 16 * 128 / statistics.median(ours)
    print(f"{tokens:,.0f} tokens/s, {ratio:.3f} of plain torch")

    assert ratio > 0.9
