"""Data parallel: gradients are summed over the ranks of one axis while backward still runs.

Each parameter belongs to one *bucket*, a flat buffer that is reduced at once.  Buckets are
reduced in one order on all ranks, whatever the order in which autograd fills them.  Behind the
gradients a bucket carries one number for each parameter, which tells after the sum whether any
rank had a gradient at all: one that nobody used keeps none, as in a single process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.parallel import torch_compat
from msrun.parallel.local import local_gradient, local_part, set_local_gradient


class Bucket:
    """Parameters whose gradients travel together; `flat` holds them one after the other."""

    def __init__(self, params: Sequence[Parameter], dtype: torch.dtype | None) -> None:
        self.params = tuple(params)
        first = local_part(params[0])
        self._shapes = [local_part(p).shape for p in params]
        sizes = [shape.numel() for shape in self._shapes]
        self.flat = torch.empty(
            sum(sizes) + len(params), dtype=dtype or first.dtype, device=first.device
        )
        self._parts = self.flat[: sum(sizes)].split(sizes)
        self._used = self.flat[sum(sizes) :]
        self._work: dist.Work | None = None
        self.pending = len(params)

    def launch(self, group: dist.ProcessGroup, scale: float) -> None:
        """Start the sum over `group` of the gradients times `scale`."""
        used = []
        for param, part in zip(self.params, self._parts, strict=True):
            gradient = local_gradient(param)
            used.append(float(gradient is not None))
            if gradient is None:
                part.zero_()
            else:
                torch.mul(gradient.reshape(-1), scale, out=part)
        self._used.copy_(torch.tensor(used))
        self._work = dist.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sum and make it the gradients."""
        if self._work is None:
            raise RuntimeError("the bucket was not launched")
        self._work.wait()
        self._work = None
        self.pending = len(self.params)
        missing = any(param.grad is None for param in self.params)
        used = self._used.tolist() if missing else [1.0] * len(self.params)
        for param, part, shape, count in zip(
            self.params, self._parts, self._shapes, used, strict=True
        ):
            if count:
                set_local_gradient(param, part.view(shape))


class GradientReducer:
    """Sums gradients over one group of ranks at the end of each backward pass.

    Args:
        buckets: All parameters, in the order in which buckets are to be reduced.
        group: Ranks to sum over.
        scale: Factor of each gradient before the sum: 1 / ranks makes it a mean.
    """

    def __init__(
        self, buckets: Sequence[Bucket], group: dist.ProcessGroup, *, scale: float
    ) -> None:
        self._buckets = tuple(buckets)
        self._group = group
        self._scale = scale
        self._is_on = True
        self._is_running = False
        self._next = 0
        self._bucket_of: Mapping[Parameter, Bucket] = {
            param: bucket for bucket in buckets for param in bucket.params
        }
        for param in self._bucket_of:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up locally; the next backward outside reduces them all."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def _on_gradient(self, param: Tensor) -> None:
        if not self._is_on:
            return
        if not self._is_running:
            self._is_running = True
            torch_compat.after_backward(self.reduce)
        bucket = self._bucket_of[param]  # type: ignore[index]  # a hook of a Parameter gets it
        bucket.pending -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].pending <= 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._buckets[self._next].launch(self._group, self._scale)
        self._next += 1

    def reduce(self) -> None:
        """Reduce what has not been sent yet; by itself this is done at the end of a backward."""
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.finish()
        self._is_running = False
        self._next = 0


def fill_buckets(
    params: Sequence[tuple[str, Parameter]],
    fuse: int | str | list[int],
    dtype: torch.dtype | None,
) -> list[Bucket]:
    """Return `params`, given in the order of the model, as buckets, last parameters first.

    Args:
        params: Name and parameter, each parameter once.
        fuse: As of `config.Reduce.fuse`.
        dtype: Type on the wire; None keeps the gradients'.
    """
    match fuse:
        case list():
            edges = [0, *(index for index in fuse if index < len(params)), len(params)]
            runs = [params[a:b] for a, b in itertools.pairwise(edges)]
        case str():
            runs = _by_module(params)
        case _:
            runs = _by_size(params, fuse)
    buckets = [part for run in reversed(runs) for part in _of_one_kind(run)]
    return [Bucket(bucket, dtype) for bucket in buckets]


Named = Sequence[tuple[str, Parameter]]


def _by_module(params: Named) -> list[Named]:
    runs: dict[str, list[tuple[str, Parameter]]] = {}
    for name, param in params:
        runs.setdefault(name.rpartition(".")[0], []).append((name, param))
    return list(runs.values())


def _by_size(params: Named, bytes_max: int) -> list[Named]:
    """Fill from the last parameter on, whose gradient comes first; the rest is one bucket."""
    runs: list[list[tuple[str, Parameter]]] = []
    room = 0
    for name, param in reversed(params):
        size = local_part(param).nbytes
        if not runs or size > room:
            runs.append([])
            room = bytes_max
        runs[-1].insert(0, (name, param))
        room -= size
    return list(reversed(runs))


def _of_one_kind(run: Named) -> list[list[Parameter]]:
    """Split `run` by type and device, which one buffer cannot mix."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for _, param in run:
        local = local_part(param)
        kinds.setdefault((local.dtype, local.device), []).append(param)
    return list(kinds.values())
