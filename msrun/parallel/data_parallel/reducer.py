"""Data parallel: gradients are summed over the ranks of one axis while backward still runs.

Each parameter belongs to one *bucket*, a flat buffer that is reduced at once.  Buckets are
reduced in one order on all ranks, whatever the order in which autograd fills them.  Behind the
gradients a bucket carries one number for each parameter, which tells after the sum whether any
rank had a gradient at all: one that nobody used keeps none, as in a single process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.data_parallel.sparse_embedding import RowBucket
from msrun.parallel.local import local_gradient, local_part, set_local_gradient

Named = Sequence[tuple[str, Parameter]]


class Bucket:
    """Parameters whose gradients travel together, one after the other in one piece of memory.

    It has that memory while they travel; afterwards it is that of the gradients themselves.  On
    a host the next ones travel in it again, as new memory costs a page fault each 4 KiB; other
    devices' allocators keep it by themselves.
    """

    def __init__(self, named: Named, dtype: torch.dtype | None) -> None:
        self.names, self.params = zip(*named, strict=True)
        self._dtype = dtype or local_part(self.params[0]).dtype
        self._shapes = [local_part(p).shape for p in self.params]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._sent: tuple[Tensor, dist.Work] | None = None
        self._room: Tensor | None = None
        self._is_full = False
        self.pending = len(self.params)

    def launch(self, group: dist.ProcessGroup, scale: float) -> None:
        """Start the sum over `group` of the gradients times `scale`, and let go of these."""
        elements = sum(self._sizes)
        flat = self._take_room(elements + len(self.params))
        used = []
        parts = flat[:elements].split(self._sizes)
        for name, param, part in zip(self.names, self.params, parts, strict=True):
            gradient = local_gradient(param)
            used.append(float(gradient is not None))
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise ModelError(
                    f"{name} has a sparse gradient, which no nn.Embedding(sparse=True) announced",
                    hint="pass sparse=False, or use such a module",
                )
            else:
                torch.mul(gradient.reshape(-1), scale, out=part)
                param.grad = None
        flat[elements:].copy_(torch.tensor(used))
        self._is_full = all(used)
        work = dist.all_reduce(flat, group=group, async_op=True)
        self._sent = flat, work

    def finish(self) -> None:
        """Wait for the sum and make it the gradients."""
        if self._sent is None:
            raise RuntimeError("the bucket was not launched")
        flat, work = self._sent
        work.wait()
        self._sent = None
        self.pending = len(self.params)
        *parts, marks = flat.split([*self._sizes, len(self.params)])
        used = [1.0] * len(parts) if self._is_full else marks.tolist()
        for param, part, shape, count in zip(self.params, parts, self._shapes, used, strict=True):
            if count:
                set_local_gradient(param, part.view(shape))
        if flat.device.type == "cpu" and flat.dtype == self.params[0].dtype:
            self._room = flat

    def _take_room(self, elements: int) -> Tensor:
        """Return memory for a sum: that of the last one, once nobody has gradients in it."""
        room = self._room
        self.forget_room()
        if room is not None and torch_compat.tensors_in(room.untyped_storage()) == 1:
            return room
        return torch.empty(elements, dtype=self._dtype, device=local_part(self.params[0]).device)

    def forget_room(self) -> None:
        """Let go of the memory of the last sum, which lives as long as its gradients then."""
        self._room = None


class GradientReducer:
    """Sums gradients over one group of ranks at the end of each backward pass.

    Args:
        buckets: All parameters, in the order in which buckets are to be reduced.
        group: Ranks to sum over.
        scale: Factor of each gradient before the sum: 1 / ranks makes it a mean.
        check: Refuses a model of which these are no longer all parameters.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket | RowBucket],
        group: dist.ProcessGroup,
        *,
        scale: float,
        check: Callable[[], None],
    ) -> None:
        self._buckets = tuple(buckets)
        self._group = group
        self._scale = scale
        self._check = check
        self._is_on = True
        self._is_running = False
        self._is_done = False
        self._next = 0
        self._bucket_of: Mapping[Parameter, Bucket | RowBucket] = {
            param: bucket for bucket in buckets for param in bucket.params
        }
        for param in self._bucket_of:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up locally; the next backward outside reduces them all."""
        before, self._is_on = self._is_on, False
        for bucket in self._buckets:
            bucket.forget_room()  # what adds up meanwhile has its own
        try:
            yield
        finally:
            self._is_on = before

    @contextlib.contextmanager
    def completed(self) -> Iterator[None]:
        """Have this rank take part in the sum after one backward pass, whatever that came to.

        One that came to no parameter calls no hook, and the other ranks would wait.
        """
        self._is_done = False
        yield
        if not self._is_done:
            self.reduce()

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
        self._check()
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.finish()
        self._is_running = False
        self._is_done = True
        self._next = 0


def fill_buckets(
    params: Sequence[tuple[str, Parameter]],
    fuse: int | str | list[int],
    dtype: torch.dtype | None,
    tables: Collection[Tensor] = (),
) -> list[Bucket | RowBucket]:
    """Return `params`, given in the order of the model, as buckets, last parameters first.

    Args:
        params: Name and parameter, each parameter once.
        fuse: As of `config.Reduce.fuse`.
        dtype: Type on the wire; None keeps the gradients'.
        tables: Those whose gradients are rows, each a bucket of its own.
    """
    match fuse:
        case list():
            edges = [0, *(index for index in fuse if index < len(params)), len(params)]
            runs = [params[a:b] for a, b in itertools.pairwise(edges)]
        case str():
            runs = _by_module(params)
        case _:
            runs = _by_size(params, fuse)
    buckets: list[Bucket | RowBucket] = []
    for run in reversed(runs):
        buckets += [RowBucket(param, dtype) for _, param in run if param in tables]
        others = [(name, param) for name, param in run if param not in tables]
        buckets += [Bucket(part, dtype) for part in _of_one_kind(others)]
    return buckets


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


def _of_one_kind(run: Named) -> list[Named]:
    """Split `run` by type and device, which one buffer cannot mix."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
    for name, param in run:
        local = local_part(param)
        kinds.setdefault((local.dtype, local.device), []).append((name, param))
    return list(kinds.values())
