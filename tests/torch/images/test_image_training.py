"""Training on parts of images: loaders, micro-batches, checkpoints, plain loops, memory."""

import pytest
import torch
from image_models import CLASSES, ResNet, UNet, batches, build, data_of, loss_fn
from ranks import run_warm
from torch import nn
from torch.nn import functional

import msrun
from msrun.errors import ModelError, UsageError
from msrun.parallel.local import full_tensor

pytestmark = pytest.mark.torch

SIZE = (12, 10)
HEIGHT = {"mesh": {"h": 2}}


class Scans(torch.utils.data.Dataset):
    """Images, of which `get_part` reads only rows."""

    def __init__(self, count=8):
        draw = torch.Generator().manual_seed(9)
        self.images = torch.randn(count, 3, *SIZE, generator=draw).double()
        self.labels = torch.randint(0, CLASSES, (count, *SIZE), generator=draw)
        self.read = 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        self.read += self.images[index].numel()
        return self.images[index], self.labels[index]


class Parts(Scans):
    def get_part(self, index, rows):
        (height,) = rows(SIZE[0])
        self.read += self.images[index, :, height].numel()
        return self.images[index, :, height], self.labels[index, height]


class Named(Scans):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return {"image": image.numpy(), "label": label}


class ByName(UNet):
    def forward(self, image, label):
        return functional.cross_entropy(super().forward(image), label)


def loaded(config, dataset, options):
    """Return losses of an epoch, and values that were read."""
    with msrun.init(config) as rt:
        is_named = dataset is Named
        samples = dataset()
        model = rt.shard(build(ByName if is_named else UNet))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        loader = rt.loader(samples, 2, shuffle=True, **options)
        function = () if is_named else (loss_fn,)
        losses = []
        for batch in loader:
            values = (batch,) if is_named else batch
            losses.append(rt.step(model, optimizer, *function, *values).item())
        return losses, samples.read


@pytest.mark.parametrize(
    ("dataset", "options", "parts"),
    [
        (Scans, {}, 1),
        (Parts, {}, 2),
        (Named, {}, 1),
        (Scans, {"collate_fn": torch.utils.data.default_collate}, 1),
        pytest.param(Parts, {"num_workers": 1}, 0, marks=pytest.mark.slow),
    ],
)
def test_a_loader_reads_parts_where_the_dataset_can(dataset, options, parts):
    ((alone, read),) = run_warm(loaded, 1, {}, dataset, options)
    config = {**HEIGHT, "data": data_of(UNet, "h")}
    for losses, count in run_warm(loaded, 2, config, dataset, options):
        assert losses == pytest.approx(alone, abs=1e-10)
        assert not parts or count * parts == read


class Plain(nn.Module):
    """Norms of groups alone, so that micro-batches are those of one process."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, CLASSES, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.25)

    def forward(self, image):
        return self.two(functional.gelu(self.norm(self.one(image))))


def stepped(config, path):
    """Return losses of two steps, a checkpoint in between, and of a plain loop."""
    config = {**config, "data": data_of(UNet, "h")} if "mesh" in config else config
    with msrun.init(config) as rt:
        ranks, rank = rt.layout.size("dp"), rt.coordinate.get("dp", 0)
        first, second, third = (
            [t.tensor_split(ranks)[rank] for t in batch] for batch in batches(UNet)
        )
        losses = []
        for step in (0, 1):
            model = rt.shard(build(Plain))
            optimizer = rt.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
            if step:
                rt.load(model, optimizer, path=path)
            losses.append(rt.step(model, optimizer, loss_fn, *(second if step else first)))
            if not step:
                rt.save(model, optimizer, step=1, path=path)
        optimizer.zero_grad()
        loss = loss_fn(model(third[0]), third[1])
        loss.backward()
        if ranks > 1:  # of which each has another count of targets
            with pytest.raises(ModelError, match="divides cross_entropy by"):
                optimizer.step()
            return torch.stack(losses), {}
        optimizer.step()
        weights = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
        return torch.stack(losses), weights


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {**HEIGHT, "accumulate": 2}),
        pytest.param(4, {"mesh": {"dp": 2, "h": 2}, "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(2, {**HEIGHT, "optimizer": {"zero": 2}}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_micro_batches_checkpoints_and_plain_loops_equal_one_process(ranks, config, tmp_path):
    losses, weights = run_warm(stepped, 1, {"accumulate": 2}, tmp_path / "alone")[0]
    for found, own in run_warm(stepped, ranks, config, tmp_path / "parts"):
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-10)
        assert own or ranks > 2
        for name, weight in own.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-9)


def dropped():
    """Return masks of parts and of whole tensors."""
    with msrun.init({**HEIGHT, "data": {"x": ["dp", None, "h", None]}}) as rt:
        seen = []

        class Dropping(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x):
                y = functional.dropout(x * self.weight, 0.5)
                seen.append(functional.dropout(torch.ones(16), 0.5))
                seen.append(functional.dropout2d(x, 0.5).local[:, :, 0, 0])
                return y

        model = rt.shard(Dropping())
        return model(torch.ones(2, 8, 6, 4)).detach(), seen


def test_dropout_differs_between_parts_and_is_one_for_what_is_whole():
    (first, whole), (second, others) = run_warm(dropped, 2)
    assert torch.equal(first, second)
    upper, lower = first.chunk(2, 2)
    assert not torch.equal(upper, lower)
    assert 0.35 < (first == 0).float().mean() < 0.65
    assert all(map(torch.equal, whole, others))


def saved(config, make, size):
    """Return the bytes that a step keeps for its backward pass, beside weights."""
    kept = {}
    config = {**config, "data": data_of(make, config["mesh"])} if config else config
    with msrun.init(config) as rt:
        model = rt.shard(build(make))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            rt.step(model, optimizer, loss_fn, *batches(make, count=1, size=size)[0])
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("make", [ResNet, UNet])
@pytest.mark.parametrize("mesh", [{"h": 2}, {"h": 2, "w": 2}])
def test_activations_of_a_rank_fall_with_the_number_of_ranks(make, mesh):
    size, ranks = (96, 96), torch.Size(mesh.values()).numel()
    (alone,) = run_warm(saved, 1, {}, make, size)
    assert max(run_warm(saved, ranks, {"mesh": mesh}, make, size)) <= 1.2 * alone / ranks


def input_gradients():
    """Return how far gradients of an input, and of what was added to it, are from one process."""
    alone, (x, y) = build(Plain), batches(UNet)[0]
    found = []
    with msrun.init({**HEIGHT, "data": data_of(UNet, "h")}) as rt:
        for model in (alone, rt.shard(build(Plain))):
            image, noise = x.clone().requires_grad_(), torch.zeros_like(x[:1]).requires_grad_()
            loss = loss_fn(model(image + noise), y)
            (slope,) = torch.autograd.grad(loss, image, retain_graph=True)
            loss.backward()
            found.append([slope, image.grad, noise.grad])
        parts = next(iter(rt.loader(Parts(), 2)))[0]
        parts.local.requires_grad_()
        with pytest.raises(ModelError, match="an input that is read in parts needs a gradient"):
            model(parts)
    return max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))


def test_inputs_of_a_plain_loop_have_the_gradient_of_one_process():
    assert max(run_warm(input_gradients, 2)) < 1e-10


def refused():
    """Return what is said of batches that do not fit."""
    said = []
    with msrun.init({**HEIGHT, "data": data_of(UNet, "h")}) as rt:
        model = rt.shard(build(UNet))
        optimizer = rt.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batches(UNet)[0]
        calls = [
            lambda: rt.step(model, optimizer, loss_fn, x[:, :, :1], y[:, :1]),
            lambda: rt.step(model, optimizer, loss_fn, x[0], y),
            lambda: rt.step(model, optimizer, lambda o, _: o.backward() or o, x, y),
            lambda: rt.step(model, optimizer, lambda o, _: torch.matrix_exp(o).mean(), x, y),
            lambda: next(iter(rt.loader(Short(), 2))),
        ]
        for call in calls:
            with pytest.raises((ModelError, UsageError)) as error:
                call()
            said.append(error.value.message)
    return said


class Short(Scans):
    def get_part(self, index, rows):  # noqa: ARG002
        return self[index]


def test_batches_that_do_not_fit_are_refused_by_name():
    (said, _) = run_warm(refused, 2)
    assert said[0].startswith(
        "parallel.data.image: 1 rows in dim 2 can not be split into 2 parts, over h"
    )
    assert said[1].startswith("parallel.data.image: names 4 dims, and the value has the shape")
    assert "the model has backward, which is not known for parts of images" in said[2]
    assert "matrix_exp" in said[3]
    assert said[4] == "rt.loader: get_part returned a sample without a call of rows"
