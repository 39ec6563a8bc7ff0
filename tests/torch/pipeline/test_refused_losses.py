"""What one stage refuses in a step, all stages raise: none is left waiting for it."""

import functools
import warnings

import pytest
import torch
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError, UsageError

pytestmark = pytest.mark.torch

MESHES = {"1f1b": {"pp": 2}, "gpipe": {"pp": 2, "dp": 2}, "interleaved": {"pp": 2}}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


class OwnLoss(Layers):
    """Returns a loss with a term over the whole batch, as a mixture of experts does."""

    def forward(self, x, labels):
        output = self.layers(x)
        loss = functional.mse_loss(output, labels)
        return {"loss": loss, "aux_loss": output.mean()}


class Counts(nn.Module):
    """Writes a buffer in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class CountsFirst(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0] = Counts()


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.mul_(2))


class WritesReceived(Layers):
    """Writes in place what another stage differentiates."""

    def __init__(self):
        super().__init__()
        self.layers[2] = Writes()


class WritesInput(Layers):
    """Writes the input, of which micro-batches are views."""

    def __init__(self):
        super().__init__()
        self.layers[0] = Writes()


def root(output, target):
    return functional.mse_loss(output, target).sqrt()


def of_all(output, target):
    return functional.mse_loss(msrun.init().gather(output), msrun.init().gather(target))


def of_nothing(output, target):
    return functional.mse_loss(output.detach(), target)


def root_of_one(output, target):
    is_refused = msrun.init().coordinate["dp"] == 1
    return root(output, target) if is_refused else functional.mse_loss(output, target)


def refused(kind, loss_fn, mesh, schedule, **options):
    stages = {"stages": "auto", "microbatches": 2, "schedule": schedule}
    rt = msrun.init({"mesh": mesh, "pipeline": stages, **options})
    torch.manual_seed(0)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    sample = (x, y) if kind is OwnLoss else (x,)
    model = rt.shard(kind(), sample)
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    losses = [] if loss_fn is None else [loss_fn]
    found = []
    for _ in range(2):
        try:
            rt.step(model, update, *losses, x, y)
        except UsageError as error:
            found.append((type(error), error.message, error.hint))
    assert all(map(torch.equal, before, model.parameters()))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_refused_loss_is_refused_by_all_stages(schedule):
    mesh = MESHES[schedule]
    every = run_warm(refused, 4 if "dp" in mesh else 2, Layers, root, mesh, schedule)
    kind, message, hint = every[0][0]
    assert kind is ModelError
    assert "mse_loss" in message
    assert "(sum, count)" in hint
    assert every == [[every[0][0]] * 2] * len(every)  # and in the next step once more


@pytest.mark.parametrize(
    ("kind", "loss_fn", "word"),
    [
        (OwnLoss, None, "aux_loss"),
        (CountsFirst, root, "layers.0.calls"),
        (Layers, of_all, "gather"),
        (Layers, of_nothing, "the loss of no rank depends on a parameter that is trained"),
    ],
)
def test_what_any_stage_refuses_all_refuse(kind, loss_fn, word):
    every = run_warm(refused, 2, kind, loss_fn, {"pp": 2}, "1f1b")
    assert word in every[0][0][1]
    assert every[1] == every[0]


def test_a_loss_that_one_data_parallel_rank_refuses_all_refuse():
    mesh, options = {"pp": 2, "dp": 2}, {"optimizer": {"zero": 1}}
    every = run_warm(refused_with, 4, root_of_one, mesh, options)
    assert "mse_loss" in every[0][0][1]
    assert every == [every[0]] * 4


def refused_with(loss_fn, mesh, options):
    return refused(Layers, loss_fn, mesh, "1f1b", **options)


class Raises(nn.Module):
    """Raises for values that no trace has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Checked.apply(self.linear(x))


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        del ctx
        if x.device.type == "cpu" and type(x) is torch.Tensor and not x.isfinite().all():
            raise KeyError("gone")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient


class RaisesFirst(Layers):
    def __init__(self):
        super().__init__()
        self.layers[0] = Raises()


def of_half(output, target):
    if msrun.init().coordinate.get("dp", 0) == 0 and not output.isnan().any():
        raise ValueError("a label is 9\nand more")
    return functional.mse_loss(output, target)


def of_text(output, target):
    warnings.simplefilter("ignore")  # tp computes this loss whole
    return functional.mse_loss(output, target) + torch.ones(3) @ torch.ones(4)


def raised(kind, loss_fn, mesh, value, options):
    """Return what each of two steps raises, and whether the weights stay."""
    stages = {"stages": "auto", "microbatches": 2}
    rt = msrun.init({"mesh": mesh, "pipeline": stages, **options})
    torch.manual_seed(0)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    model = rt.shard(kind(), (x,))
    update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [param.detach().clone() for param in model.parameters()]
    found = []
    for _ in range(2):
        try:
            rt.step(model, update, loss_fn, torch.full((4, 8), value), y)
        except (UsageError, ValueError, KeyError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    assert all(map(torch.equal, before, model.parameters()))
    return found


OTHERS = "PeerRankError: {} on rank {}: {}; no weight was changed"
FORWARD = "the forward of the model raised KeyError", "'gone'"
LOSS = "the loss function raised ValueError", "a label is 9"


@pytest.mark.parametrize(
    ("kind", "mesh", "value", "rank", "own"),
    [
        (Layers, {"pp": 2}, 1.0, 1, "ValueError: a label is 9"),
        (RaisesFirst, {"pp": 2}, torch.nan, 0, "KeyError: 'gone'"),
        pytest.param(
            *(Layers, {"pp": 2, "dp": 2}, 1.0, 2, "ValueError: a label is 9"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_script_raises_on_one_rank_ends_the_step_on_all(kind, mesh, value, rank, own):
    world = 4 if "dp" in mesh else 2
    every = run_warm(raised, world, kind, of_half, mesh, value, {})
    others = LOSS if kind is Layers else FORWARD
    said = OTHERS.format(others[0], rank, others[1])
    assert every == [[own] * 2 if at == rank else [said] * 2 for at in range(world)]


class RaisesLast(Layers):
    def __init__(self):
        super().__init__()
        self.layers[3] = Raises()


def evaluated(kind, mesh, schedule):
    """Return what evaluations of values that raise, and of others, come to."""
    stages = {"stages": "auto", "microbatches": 2, "schedule": schedule}
    rt = msrun.init({"mesh": mesh, "pipeline": stages})
    torch.manual_seed(0)
    model = rt.shard(kind(), (torch.randn(4, 8),))
    model.eval()
    found = []
    for value in (torch.nan, 1.0, torch.nan):
        try:
            with torch.no_grad():
                found.append(model(torch.full((4, 8), value)).isfinite().all().item())
        except (UsageError, KeyError) as error:
            found.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return found


@pytest.mark.parametrize(
    ("kind", "schedule", "rank"),
    [(RaisesFirst, "1f1b", 0), (RaisesLast, "interleaved", 1)],
)
def test_what_a_script_raises_in_an_evaluation_ends_it_on_all_ranks(kind, schedule, rank):
    every = run_warm(evaluated, 2, kind, {"pp": 2}, schedule)
    other = f"PeerRankError: the forward of the model raised KeyError on rank {rank}: 'gone'"
    for at, found in enumerate(every):
        said = "KeyError: 'gone'" if at == rank else other
        assert found == [said, True, said]


@pytest.mark.slow
def test_what_torch_raises_in_a_loss_names_its_rank_beside_a_plan():
    mesh, plan = {"pp": 2, "tp": 2}, {"plan": [{"match": "layers.*", "style": "colwise"}]}
    every = run_warm(raised, 4, Layers, of_text, mesh, 1.0, plan)
    for rank, found in enumerate(every):
        kind = "RuntimeError" if rank in (2, 3) else "PeerRankError: the loss function raised"
        assert [text.startswith(kind) for text in found] == [True] * 2, found


def losses_of_writes():
    """Return the losses under a pipeline and in one process, and the inputs after them."""
    torch.manual_seed(1)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    stages = {"stages": "auto", "microbatches": 2, "schedule": "gpipe"}
    rt = msrun.init({"mesh": {"pp": 2}, "pipeline": stages})
    found = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        model, given = WritesInput(), x.clone()
        model = rt.shard(model, (x,)) if is_sharded else model
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            if is_sharded:
                loss = rt.step(model, update, functional.mse_loss, x.clone(), y)
            else:
                update.zero_grad()
                loss = functional.mse_loss(model(given.clone()), y)
                loss.backward()
                update.step()
            losses.append(loss.item())
        found.append(losses)
    return found


def test_a_model_may_write_its_input():
    for found, expected in run_warm(losses_of_writes, 2):
        assert found == pytest.approx(expected, rel=1e-6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def with_features():
    """Return what a loss says that reads what a hook took from a layer of the first stage."""
    features = []
    rt = msrun.init(
        {"mesh": {"pp": 2}, "pipeline": {"stages": {"up": 0, "down": 1}, "microbatches": 2}}
    )
    torch.manual_seed(0)
    model, x = Named(), torch.randn(4, 8)
    model.up.register_forward_hook(lambda _, __, output: features.append(output))
    model = rt.shard(model, (x,))
    update = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(output, target):
        return functional.mse_loss(output, target) + features[-1].square().mean()

    with pytest.raises(ModelError) as caught:
        rt.step(model, update, loss, x, x)
    rt.close()
    return caught.value.message


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks, where the two kinds meet
def test_a_loss_of_what_was_recorded_without_values_is_refused_on_all_ranks():
    for said in run_warm(with_features, 2):
        assert said.startswith("the loss function reads a tensor without values")


class Heads(nn.Module):
    """A head for each task, of which a number among the inputs chooses one."""

    def __init__(self, *, computes_all):
        super().__init__()
        self.computes_all = computes_all
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x, task):
        x = self.body(x).relu()
        if self.computes_all:
            return torch.stack([head(x) for head in self.heads])[task]
        return self.heads[task](x)


def chosen(pipeline, *, computes_all, has_sample=True):
    """Train tasks in turn; return the losses, or the refusal and its hint."""
    rt = msrun.init(pipeline)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    try:
        model = rt.shard(Heads(computes_all=computes_all), (x, 0) if has_sample else None)
        update = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        return [
            rt.step(model, update, functional.mse_loss, x, task, 0.5 * x).item()
            for task in (0, 1, 0)
        ]
    except ModelError as error:
        return error.message, error.hint


HEADS = {"mesh": {"pp": 2}, "pipeline": {"stages": {"body": 0, "heads": 1}, "microbatches": 2}}
ALL_HEADS = "torch.stack([head(x) for head in self.heads])[task]"


@pytest.mark.parametrize("has_sample", [True, False])
def test_a_head_that_a_number_chooses_is_refused_with_what_trains(has_sample):
    whole = functools.partial(chosen, computes_all=True, has_sample=has_sample)
    one = functools.partial(chosen, computes_all=False, has_sample=has_sample)
    for message, hint in run_warm(one, 2, HEADS):
        assert message.startswith("parallel.pipeline.stages: ")
        assert ALL_HEADS in hint

    [expected] = run_warm(whole, 1, {})
    assert run_warm(whole, 2, HEADS) == [pytest.approx(expected, abs=1e-6)] * 2
