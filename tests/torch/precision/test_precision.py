"""`precision`: equal to plain torch's same combination, and near one process, in every layout."""

import functools

import pytest
import torch
from ranks import MODELS, OPTIMIZERS, STEPS, batches, build, run_warm, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import msrun
from msrun.errors import UsageError

pytestmark = pytest.mark.torch

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of losses near 3, whose weight gradients are sums of other roundings.
NEAR = 0.02
# No gradient of these models is too large under it, whatever the layout.
SCALE = 1024.0
TENSOR = [
    {"match": "layers.*.[qkv]", "style": "colwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.o", "style": "rowwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
STAGES = {"embed": 0, "position": 0, "layers.0": 0, "layers.1": 1, "norm": 1, "head": 1}
PIPELINE = {"stages": STAGES, "microbatches": 2}
DP_TP = {"mesh": {"dp": 2, "tp": 2}, "plan": TENSOR}
RECOMPUTE = {"recompute": {"modules": ["layers.*"]}}
VOCABULARY = [{"match": "embed", "style": "embedding"}, {"match": "head", "style": "vocab"}]
GRID = {
    "mesh": {"x": 2, "y": 2},
    "plan": [
        {"match": "layers.*.[qkv]", "style": "2d", "axes": ["x", "y"]},
        {"match": "layers.*.o", "style": "2d", "axes": ["y", "x"]},
        {"match": "layers.*.up", "style": "2d", "axes": ["x", "y"]},
        {"match": "layers.*.down", "style": "2d", "axes": ["y", "x"]},
        {"match": "*norm*", "style": "2d", "axes": ["x", "y"]},
    ],
}
LAYOUTS = {
    "dp": {},
    "micro-batches": {"accumulate": 2},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 1 over micro-batches": {"optimizer": {"zero": 1}, "accumulate": 2},
    "zero 2 over micro-batches": {"optimizer": {"zero": 2}, "accumulate": 2},
    "zero 3": {"optimizer": {"zero": 3}, "accumulate": 2},
    "zero 3 with a threshold": {"optimizer": {"zero": 3, "threshold": 128}},
    "tp": {"mesh": {"tp": 4}, "plan": TENSOR},
    "dp tp recompute": {
        "mesh": {"dp": 2, "tp": 2},
        "plan": TENSOR,
        "recompute": {"modules": ["layers.*"]},
    },
    "zero tp": {"mesh": {"dp": 2, "tp": 2}, "plan": TENSOR, "optimizer": {"zero": 3}},
    "pp": {"mesh": {"dp": 2, "pp": 2}, "pipeline": PIPELINE},
    "pp zero recompute": {
        "mesh": {"dp": 2, "pp": 2},
        "pipeline": PIPELINE,
        "optimizer": {"zero": 2},
        "recompute": {"modules": ["layers.*"]},
    },
    "vocab": {"mesh": {"dp": 2, "tp": 2}, "plan": TENSOR + VOCABULARY},
    "copies": {**DP_TP, "copies": 2},
    "copies recompute accumulate": {**DP_TP, **RECOMPUTE, "copies": 2, "accumulate": 2},
    "copies zero 2": {**DP_TP, "copies": 2, "optimizer": {"zero": 2}},
    "copies pp": {
        "mesh": {"pp": 2, "tp": 2},
        "plan": TENSOR,
        "pipeline": PIPELINE,
        "copies": 2,
    },
    "2d": GRID,
    "2d recompute": {**GRID, **RECOMPUTE},
    "2d copies": {**GRID, "copies": 2},
}


def plain(precision, rank=0, size=1, wrap=None):
    """Return the losses of plain torch on a rank's parts of the batches."""
    model = build("transformer")
    model = wrap(model) if wrap else model
    update = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=precision == "fp16")
    losses = []
    for x, y in batches("transformer"):
        update.zero_grad()
        with torch.autocast("cpu", dtype=TYPES[precision]):
            loss = MODELS["transformer"][1](model(x.chunk(size)[rank]), y.chunk(size)[rank])
        scaler.scale(loss).backward()
        scaler.unscale_(update)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(update)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.cache
def of_one(precision):
    return run_warm(plain, 1, precision)[0].tolist()


def of_torch():
    """Return the losses of torch's own class, averaged over ranks."""
    rank = torch.distributed.get_rank()
    losses = plain("bf16", rank, 4, DistributedDataParallel)
    torch.distributed.all_reduce(losses)
    return (losses / 4).tolist()


def curves(precision):
    """Return the losses of every layout, and in which types linear layers computed."""
    found, kinds = {}, set()
    linear = nn.functional.linear

    def noted(x, weight, bias=None):
        kinds.add(linear(x, weight, bias).dtype)
        return linear(x, weight, bias)

    for name, layout in LAYOUTS.items():
        config = {"precision": precision, **layout}
        rt = msrun.init(config)
        if rt.loss_scale:
            rt.loss_scale.value = SCALE
        kinds.clear()
        nn.functional.linear = noted
        try:
            found[name] = train(config, "transformer", "sgd", 1.0)
        finally:
            nn.functional.linear = linear
        rt.close()
        assert kinds == {TYPES[precision]}, name
    return found


@functools.cache
def found(precision):
    return run_warm(curves, 4, precision, timeout=200)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_near_one_process(precision, name):
    for of_rank in found(precision):
        assert of_rank[name] == pytest.approx(of_one(precision), abs=NEAR)


@pytest.mark.few(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_training_equals_that_of_torch(zero):
    config = {"precision": "bf16", "optimizer": {"zero": zero}}
    ours = run_warm(train, 4, config, "transformer", "sgd", 1.0)

    for losses in ours:
        assert losses == pytest.approx(run_warm(of_torch, 4)[0], abs=1e-6)
    assert losses != pytest.approx(of_one("bf16"), abs=1e-9)  # it is no constant
    assert len(losses) == STEPS


ELEMENTS = (
    "mse_loss",
    "huber_loss",
    "l1_loss",
    "smooth_l1_loss",
    "binary_cross_entropy_with_logits",
)


def losses_of_steps():
    """Return values and types of torch's losses inside of steps, and those beside them."""
    rt = msrun.init({"precision": "bf16"})
    found = {}
    for name in ("cross_entropy", *ELEMENTS):
        model = rt.shard(nn.Linear(16, 10))
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        inside, own = [], getattr(nn.functional, name)

        def noted(out, target, own=own, inside=inside):
            loss = own(out, target)
            inside.append((loss.detach(), loss.dtype, out.detach()))
            return loss

        x = torch.randn(4, 16)
        target = torch.rand(4, 10) if name in ELEMENTS else torch.randint(0, 10, (4,))
        rt.step(model, update, noted, x, target)
        ((loss, kind, out),) = inside
        with torch.autocast("cpu", torch.bfloat16):
            expected = own(out, target)
        found[name] = (loss.item(), kind), (expected.item(), expected.dtype)
    return found


def test_losses_have_the_types_of_autocast():
    for of_rank in run_warm(losses_of_steps, 2):
        for name, ((value, kind), (expected, of_torch)) in of_rank.items():
            assert (name, kind) == (name, of_torch)
            assert value == pytest.approx(expected, abs=1e-6)


class Overflowing(nn.Module):
    """Has gradients that are no finite number on one rank, in the second step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


def steps_of_all(config):
    rt = msrun.init(config)
    model = rt.shard(Overflowing())
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for step in range(3):
        x = torch.ones(2)
        if step == 1 and rt.rank == 1:
            x[0] = 1e36
        rt.step(model, update, lambda out, _: out.mean(), x, torch.zeros(2))
        found.append((round(model.scale.item(), 4), rt.loss_scale.value))
    return found, rt.loss_scale.state_dict()


def test_no_rank_takes_a_step_that_one_cannot():
    expected = [(0.0, 65536.0), (0.0, 32768.0), (-1.0, 32768.0)]

    answers = run_warm(steps_of_all, 2, {"precision": "fp16"})
    assert answers == 2 * [(expected, {"value": 32768.0, "good_steps": 1})]


def refused():
    """Return what is said of a plain step in fp16, and of a model that is float16."""
    rt = msrun.init({"precision": "fp16"})
    model = rt.shard(nn.Linear(2, 2))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(1, 2)).sum().backward()
    sentences = []
    for call in (update.step, lambda: rt.shard(nn.Linear(2, 2).half())):
        with pytest.raises(UsageError) as caught:
            call()
        sentences.append(caught.value.message)
    return sentences


def test_what_would_train_wrongly_is_refused():
    assert run_warm(refused, 1)[0] == [
        "parallel.precision: fp16 needs a scaled loss, and this optimizer steps outside of rt.step",
        "parallel.precision: fp16 computes with parameters of float32, and weight is float16",
    ]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"precision": "bf16", "mode": "auto"},
            "precision: mode auto runs operators in the types of the model (choose semi_auto)",
        ),
        (
            {"precision": "bf16", "optimizer": {"zero": 1, "dtype": "bfloat16"}},
            "precision: bf16 chooses optimizer.dtype, which is bfloat16 (leave out one of the two)",
        ),
        (
            {"precision": "fp16", "verify": 1},
            (
                "verify: fp16 rounds differently in other layouts (leave out precision where steps "
                "are compared)"
            ),
        ),
        ({"precision": "fp8"}, "precision: 'fp8' is not known (choose bf16, fp16)"),
        (
            {"compile": {"modules": []}},
            "compile.modules: is empty (name the modules to compile, such as 'layers.*')",
        ),
    ],
)
def test_a_contradiction_is_refused(tree, sentence):
    with pytest.raises(UsageError) as caught:
        msrun.init(tree)
    assert caught.value.message == f"parallel.{sentence}"
