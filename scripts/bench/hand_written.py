"""Models of `runtime.py` as users write them on plain torch: a grid of ranks, and uneven rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def grid_shape(ranks: int) -> tuple[int, int]:
    """Return the two axes of a grid, as equal as they can be."""
    first = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return first, ranks // first


# Along the last dim.


def _joined(x: Tensor, group: Any) -> Tensor:
    parts = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_single(parts, x.contiguous(), group=group)
    found: Tensor = parts.unflatten(0, (group.size(), -1)).movedim(0, -2).flatten(-2)
    return found


def _summed(x: Tensor, group: Any) -> Tensor:
    parts = x.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    found = torch.empty_like(parts[0])
    dist.reduce_scatter_single(found, parts.flatten(0, 1), group=group)
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _joined(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _summed(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _joined(gradient, ctx.group), None


class _Cut(torch.autograd.Function):
    """This rank's columns; every rank computes the same before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return _joined(gradient, dist.group.WORLD)


class _Whole(torch.autograd.Function):
    """All columns; every rank computes the same behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return _joined(x, dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Cut.forward(ctx, gradient)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(ctx, gradient)


class _Product(nn.Module):
    """A block of a Linear; `turn` says in which order the axes shard its input."""

    def __init__(self, whole: nn.Linear, mesh: DeviceMesh, turn: int) -> None:
        super().__init__()
        names = ("x", "y")[:: -1 if turn else 1]
        (rows, columns) = (mesh.get_group(name) for name in names)
        self.gathered, self.reduced = columns, rows
        i, j = rows.rank(), columns.rank()
        weight = whole.weight.detach().chunk(columns.size(), 0)[j].chunk(rows.size(), 1)[i]
        self.weight = nn.Parameter(weight.clone())
        bias = whole.bias.detach().chunk(columns.size())[j].chunk(rows.size())[i]
        self.bias = nn.Parameter(bias.clone())

    def forward(self, gathered: Tensor) -> Tensor:
        sums = functional.linear(gathered, self.weight)
        found: Tensor = _Scatter.apply(sums, self.reduced)  # type: ignore[no-untyped-call]
        return found + self.bias

    def gather(self, x: Tensor) -> Tensor:
        """Return the columns that the block takes."""
        found: Tensor = _Gather.apply(x, self.gathered)  # type: ignore[no-untyped-call]
        return found


class _Norm(nn.Module):
    def __init__(self, whole: nn.LayerNorm) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[rank].clone())
        self.width, self.eps = whole.weight.numel(), whole.eps

    def forward(self, x: Tensor) -> Tensor:
        total = _Sum.apply
        centered = x - total(x.sum(-1, keepdim=True)) / self.width  # type: ignore[no-untyped-call]
        squares = centered.square().sum(-1, keepdim=True)
        variance = total(squares) / self.width  # type: ignore[no-untyped-call]
        found: Tensor = centered * torch.rsqrt(variance + self.eps) * self.weight + self.bias
        return found


def divide_on_grid(model: Any, lm: Any) -> None:
    """Have the layers of the GPT compute on a grid of all ranks, embedding and head whole."""
    shape = grid_shape(dist.get_world_size())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y"))
    for layer in model.layers:
        for name in ("query", "key", "value", "up"):
            setattr(layer, name, _Product(getattr(layer, name), mesh, 0))
        for name in ("project", "down"):
            setattr(layer, name, _Product(getattr(layer, name), mesh, 1))
        layer.norm1, layer.norm2 = _Norm(layer.norm1), _Norm(layer.norm2)
        layer.forward = functools.partial(_layer, lm, layer)
    model.norm = _Norm(model.norm)

    def forward(codes: Tensor) -> Tensor:
        x = _Cut.apply(model.embed(codes) + model.position)  # type: ignore[no-untyped-call]
        for layer in model.layers:
            x = layer(x)
        found: Tensor = model.head(_Whole.apply(model.norm(x)))  # type: ignore[no-untyped-call]
        return found

    model.forward = forward


def _layer(lm: Any, layer: Any, x: Tensor) -> Tensor:
    gathered = layer.query.gather(layer.norm1(x))
    heads = (*x.shape[:2], -1, lm.WIDTH // lm.HEADS)
    query, key, value = (
        part(gathered).view(heads).transpose(1, 2) for part in (layer.query, layer.key, layer.value)
    )
    found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + layer.project(layer.project.gather(found.transpose(1, 2).flatten(2)))
    inner = functional.gelu(layer.up(layer.up.gather(layer.norm2(x))))
    result: Tensor = x + layer.down(layer.down.gather(inner))
    return result


class Clicks(nn.Module):
    """The part of an example for tables: fields of ids, and a head over all of them."""

    SAMPLES, FIELDS, WIDTH, ROWS = 4096, 8, 64, 40_000
    # `runtime.py` counts tokens of 8 samples; here they are rows that are looked up.
    LENGTH = SAMPLES * FIELDS // 8

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.ROWS, self.WIDTH)
        self.head = nn.Sequential(
            nn.Linear(self.FIELDS * self.WIDTH, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return a number for each sample."""
        found: Tensor = self.head(self.table(ids).flatten(1)).squeeze(1)
        return found

    @classmethod
    def GPT(cls, _: int) -> nn.Module:  # noqa: N802 - as in the example
        """Return the model."""
        return cls()

    @classmethod
    def rows(cls, ranks: int) -> list[int]:
        """Return uneven rows of each rank: the first has twice those of each other."""
        part = cls.ROWS // (ranks + 1)
        return [cls.ROWS - part * (ranks - 1), *[part] * (ranks - 1)]

    @classmethod
    def batch(cls, generator: torch.Generator, ranks: int) -> tuple[Tensor, Tensor]:
        """Return ids and targets of all samples, which every rank has."""
        counts, firsts = cls.rows(ranks), [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        size = (cls.SAMPLES, cls.FIELDS // ranks)
        columns = [
            first + torch.randint(0, count, size, generator=generator)
            for first, count in zip(firsts, counts, strict=False)
        ]
        return torch.cat(columns, 1), torch.randn(cls.SAMPLES, generator=generator)

    @staticmethod
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples."""
        return (output - target).square().mean()


class _Exchange(torch.autograd.Function):
    """From the fields of this rank to its samples, with the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        del ctx
        ranks = dist.get_world_size()
        parts = rows.unflatten(0, (ranks, -1)).contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts)
        return found.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        ranks = dist.get_world_size()
        parts = gradient.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts)
        # Each rank has the mean over its samples.
        return found.flatten(0, 1) / ranks


def share_out_rows(model: Any, _: Any) -> nn.Module:
    """Give each rank its rows, and have it compute the head of its samples."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    counts = Clicks.rows(ranks)
    first = sum(counts[:rank])
    table = nn.Parameter(model.table.weight.detach()[first : first + counts[rank]].clone())
    model.table.weight = table

    def forward(ids: Tensor) -> Tensor:
        own = functional.embedding(ids.chunk(ranks, 1)[rank] - first, table)
        rows = _Exchange.apply(own)  # type: ignore[no-untyped-call]
        found: Tensor = model.head(rows.flatten(1)).squeeze(1)
        return found

    model.forward = forward
    kind: Any = DistributedDataParallel
    # What users of it call.
    kind._set_params_and_buffers_to_ignore_for_model(model, ["table.weight"])  # noqa: SLF001
    divided: nn.Module = DistributedDataParallel(model)
    return divided


def on_own_samples(step: Callable[[Tensor, Tensor], Any], inputs: Tensor, target: Tensor) -> Any:
    """Run a step that computes the loss of this rank's samples."""
    return step(inputs, target.chunk(dist.get_world_size())[dist.get_rank()])
