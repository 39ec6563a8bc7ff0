"""What gradients take of a rank's memory: exactly the formulas of each way to train in parallel."""

import time
import weakref

import pytest
import torch
from pipelines import stages
from ranks import MODELS, OPTIMIZERS, batches, build, run_warm
from test_collective_bytes import FLOAT, LAYERS, VOCABULARY, VOTES, padded, shapes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import msrun
from msrun.parallel.local import local_part

pytestmark = pytest.mark.torch


class Live(TorchDispatchMode):
    """Knows the memory that was taken inside and is not free again.

    Attributes:
        most: Bytes of it at the worst moment.
    """

    def __init__(self):
        super().__init__()
        self._taken = weakref.WeakSet()
        self.most = 0

    def bytes(self):
        return sum(memory.nbytes() for memory in self._taken)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_plain(t)}
        found = func(*args, **(kwargs or {}))
        for tensor in filter(is_plain, tree_leaves(found)):
            if tensor.untyped_storage()._cdata not in given:
                self._taken.add(tensor.untyped_storage())
        self.most = max(self.most, self.bytes())
        return found


def is_plain(value):
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def stored(tensors):
    """Return the bytes of the memory behind `tensors`, of which several may lie in one piece."""
    found = {}
    for tensor in map(local_part, tensors):
        memory = tensor.untyped_storage()
        found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


def held(config, model):
    """Return the bytes of gradients, and of parameters, when the optimizer is about to step."""
    runtime = msrun.init(config)
    network = runtime.shard(build(model))
    update = OPTIMIZERS["adamw"](network.parameters())
    params = list(network.parameters())
    found = []
    update.register_step_pre_hook(
        lambda *_: found.append((stored(p.grad for p in params), stored(params)))
    )
    share, count = runtime.coordinate.get("dp", 0), runtime.layout.size("dp")
    for batch in batches(model, steps=2):
        part = [tensor.chunk(count)[share] for tensor in batch]
        runtime.step(network, update, MODELS[model][1], *part)
    assert found[0] == found[1]
    return found[0]


def marks(model, share=1):
    """Return the bytes of the numbers that say whether anybody has a gradient, and of the votes."""
    return FLOAT * (len(shapes(model)) // share + VOTES)


def whole(model):
    return padded(shapes(model).values(), 1)


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        ({}, True),
        ({"accumulate": 4}, True),
        ({"reduce": {"fuse": "module"}}, True),
        # What was sent is half as wide, and gone again.
        ({"reduce": {"dtype": "bfloat16"}}, False),
    ],
)
def test_data_parallel_ranks_hold_whole_gradients_once(options, marked):
    expected = whole("mlp") + marks("mlp") * marked
    for gradients, params in run_warm(held, 2, options, "mlp"):
        assert (gradients, params) == (expected, whole("mlp"))


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_optimizer_parallel_ranks_hold_their_part(zero, accumulate):
    part = padded(shapes("mlp").values(), 4) // 4
    config = {"optimizer": {"zero": zero}, "accumulate": accumulate}
    for found in run_warm(held, 4, config, "mlp"):
        assert found == (part, part)


def test_copies_hold_the_part_of_their_few_ranks():
    part = padded(shapes("mlp").values(), 2) // 2
    for found in run_warm(held, 4, {"optimizer": {"zero": 2, "shard_size": 2}}, "mlp"):
        assert found == (part, part)


def test_what_stays_whole_has_whole_gradients():
    named = shapes("mlp").items()
    divided = padded([shape for name, shape in named if "weight" in name], 2) // 2
    biases = [shape for name, shape in named if "bias" in name]
    small = padded(biases, 1)
    for found in run_warm(held, 2, {"optimizer": {"zero": 3, "threshold": 256}}, "mlp"):
        assert found == (divided + small + FLOAT * (len(biases) + VOTES), divided + small)


@pytest.mark.parametrize(
    ("degree", "plan"), [(2, LAYERS), (2, LAYERS + VOCABULARY), (4, LAYERS + VOCABULARY)]
)
def test_tensor_parallel_ranks_hold_gradients_of_their_parameters(degree, plan):
    """Also of a table in rows, whose gradient torch computes whole."""
    cut = sum(
        padded([shape], 1) for name, shape in shapes("transformer").items() if is_cut(name, plan)
    )
    part = whole("transformer") - cut + cut // degree
    for found in run_warm(held, degree, {"mesh": {"tp": degree}, "plan": plan}, "transformer"):
        assert found == (part, part)


def is_cut(name, plan):
    module = name.rpartition(".")[0]
    if module == "embed":
        return len(plan) > len(LAYERS)
    return module.endswith((".q", ".k", ".v", ".up")) or name.endswith(
        (".o.weight", ".down.weight")
    )


@pytest.mark.parametrize(("schedule", "degree"), [("1f1b", 2), ("1f1b", 4), ("zbv", 2)])
def test_stages_hold_gradients_of_their_parameters(schedule, degree):
    settings = {"stages": stages("deep", schedule, degree), "schedule": schedule}
    config = {"mesh": {"pp": degree}, "pipeline": settings | {"microbatches": 4}}
    part = whole("deep") // degree
    for found in run_warm(held, degree, config, "deep"):
        assert found == (part, part)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_divide_theirs_further(zero):
    pipeline = {"stages": stages("deep", "1f1b", 2), "microbatches": 4}
    config = {"mesh": {"pp": 2, "dp": 2}, "pipeline": pipeline, "optimizer": {"zero": zero}}
    stage = whole("deep") // 2
    expected = (stage // 2, stage // 2) if zero else (stage + marks("deep", 2), stage)
    for found in run_warm(held, 4, config, "deep"):
        assert found == expected


WIDTH, LAYER_COUNT = 128, 6
LAYER = FLOAT * WIDTH * WIDTH
# Activations of two samples, and numbers for each of a few layers.
LITTLE = LAYER // 8
PATIENCE = 10.0


def settled(live, expected):
    """Return what is held once gloo's threads have let go of what they have sent."""
    deadline = time.monotonic() + PATIENCE
    while live.bytes() >= expected * LAYER + LITTLE and time.monotonic() < deadline:
        time.sleep(0.001)
    return live.bytes()


def kept(config, expected_between, expected_after):
    """Return the bytes held between two micro-batches, at most, and at the end of a backward."""
    runtime = msrun.init(config)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYER_COUNT))
    network = runtime.shard(nn.Sequential(*layers))
    x = torch.ones(2, WIDTH)

    def first_micro_batch():
        with runtime.no_sync(network):
            network(x).sum().backward()

    # The first step makes what lives as long as the model.
    first_micro_batch()
    network(x).sum().backward()
    network.zero_grad()
    with Live() as live:
        first_micro_batch()
        between, live.most = settled(live, expected_between), 0
        network(x).sum().backward()
    return between, live.most, settled(live, expected_after)


@pytest.mark.parametrize(
    ("config", "between", "most", "after"),
    [
        # Beside the sums of all buckets one that is being filled.
        ({"reduce": {"fuse": "module"}}, LAYER_COUNT, LAYER_COUNT + 1, LAYER_COUNT),
        ({"reduce": {"fuse": 2 * LAYER}}, LAYER_COUNT, LAYER_COUNT + 2, LAYER_COUNT),
        ({"optimizer": {"zero": 1}}, LAYER_COUNT, None, LAYER_COUNT / 2),
        ({"optimizer": {"zero": 2}}, LAYER_COUNT / 2, None, LAYER_COUNT / 2),
        ({"optimizer": {"zero": 3}}, LAYER_COUNT / 2, None, LAYER_COUNT / 2),
    ],
)
def test_micro_batches_hold_what_their_level_says(config, between, most, after):
    for found in run_warm(kept, 2, config, between, after):
        assert 0 <= found[0] - between * LAYER < LITTLE
        assert most is None or 0 <= found[1] - most * LAYER < LITTLE
        assert 0 <= found[2] - after * LAYER < LITTLE
