"""Data parallelism: all-reduces gradients over the ranks of one axis while backward still runs.

The problem.  Every step needs the sum of each gradient over the data-parallel ranks.  One
all-reduce a parameter is slow for small ones, one for all parameters could only start after the
backward pass, and ranks must start collectives in the same order although autograd may not.

The idea.  Each parameter belongs to one bucket, a flat buffer that one all-reduce sends.  Autograd
computes gradients roughly from the last parameter to the first, so buckets fill in that order.  A
hook of each parameter counts down its bucket; a full bucket is sent at once, asynchronously.  At
the end of the backward pass the remaining buckets are sent, and the sums become the gradients, as
views of the buckets.

Invariants:

- All ranks send the same buckets in the same order.  A full bucket waits for those before it, so
  ranks whose graphs use parameters in different orders are correct, only reduced late.
- Every rank sends every bucket once a step, also if its backward pass reached no parameter and
  called no hook (`completed`).  Such a rank once went on to the all-reduce of its loss, which met
  the gradients of the others.
- A parameter has a gradient after the reduction if some rank had one before, as in one process.
  Behind the gradients a bucket carries one mark a parameter, 1 if this rank has a gradient; a sum
  of 0 means that no rank has.  So a bucket is larger than its gradients by one element a parameter.
- The parameters are those of `rt.shard`: at the end of a backward pass `check` refuses a model
  that has others by now, before the optimizer uses the gradients.
- Buckets hold the parameters that are trained.  If a script freezes or thaws some, the pass that
  sees it first sends the old buckets, then those of the thawed ones, and the next pass begins with
  new buckets of all (`trained_set`).  Hooks are therefore on frozen parameters, too.

It serves plain data parallelism, data parallelism around operator plans (the parts of DTensors are
reduced like plain tensors), and the parameters that ZeRO leaves replicated.  Embedding tables with
sparse gradients have a bucket of rows instead (`sparse_embedding`).

Rejected: `DistributedDataParallel`.  It wraps the model, so names in checkpoints change; it fuses
only by size, leaves no parameter out by name, is wrong for parameters that are DTensors, does
nothing for parameters that `fully_shard` ignores, and imports torch's compiler in every rank (1.2
CPU-s).  Its communication hook changes the type on the wire and the operation, and none of these.
See docs/decisions/0013.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.data_parallel.sparse_embedding import RowBucket
from msrun.parallel.data_parallel.trained_set import Named, TrainedSet, VoteBucket, vote
from msrun.parallel.local import (
    is_sharded,
    local_gradient,
    local_part,
    on_accumulation,
    set_local_gradient,
)


class Bucket:
    """Parameters whose gradients are sent together, in one flat buffer.

    After the reduction the gradients are views of the buffer, so no second copy exists.  On a host
    the next step reuses the buffer if no gradient refers to it any more, since new memory costs a
    page fault each 4 KiB; the allocators of other devices cache memory themselves.

    Attributes:
        pending: Parameters whose gradient this backward pass has not computed yet.
    """

    def __init__(self, named: Named, dtype: torch.dtype | None) -> None:
        self.names, self.params = zip(*named, strict=True)
        self._dtype = dtype or self.params[0].dtype
        self._has_shards = any(map(is_sharded, self.params))
        self._shapes = [local_part(p).shape for p in self.params]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._sent: tuple[Tensor, dist.Work] | None = None
        self._room: Tensor | None = None
        self._votes: Tensor | None = None
        self._is_full = False
        self.pending = len(self.params)

    def launch(
        self, group: dist.ProcessGroup, scale: float, *, has_changed: bool | None = None
    ) -> None:
        """Start the all-reduce over `group` of the gradients times `scale`, and release these.

        Args:
            group: The ranks.
            scale: Factor of each gradient.
            has_changed: Vote to send behind the marks; None sends none.
        """
        elements = sum(self._sizes)
        votes = [] if has_changed is None else vote(has_changed=has_changed)
        flat = self._take_room(elements + len(self.params) + len(votes))
        # Marks: 1 for each parameter that has a gradient on this rank.
        used = []
        parts = flat[:elements].split(self._sizes)
        for name, param, part in zip(self.names, self.params, parts, strict=True):
            gradient = local_gradient(param) if self._has_shards else param.grad
            used.append(float(gradient is not None))
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise ModelError(
                    f"{name} has a sparse gradient, which no nn.Embedding(sparse=True) announced",
                    hint="pass sparse=False, or use such a module",
                )
            else:
                # Scaled before the sum, which might overflow in a narrow type otherwise.
                torch.mul(gradient.reshape(-1), scale, out=part)
                param.grad = None
        flat[elements:].copy_(torch.tensor([*used, *votes]))
        # If this rank has every gradient, all marks are positive.  `finish` then need not read
        # them, for which the host would wait for the device.
        self._is_full = all(used)
        work = dist.all_reduce(flat, group=group, async_op=True)
        self._sent = flat, work

    def finish(self) -> None:
        """Wait for the all-reduce and set its parts as the gradients."""
        if self._sent is None:
            raise RuntimeError("the bucket was not launched")
        flat, work = self._sent
        work.wait()
        self._sent = None
        self.pending = len(self.params)
        count = len(self.params)
        votes = flat.numel() - sum(self._sizes) - count
        *parts, marks, sums = flat.split([*self._sizes, count, votes])
        # Also an empty view of the buffer would keep the next step from using it again.
        self._votes = sums if votes else None
        # Marks are sums now: 0 only if no rank had a gradient.
        used = [1.0] * len(parts) if self._is_full else marks.tolist()
        # A forward may give a parameter another type, such as a router that casts its classifier.
        is_of_type = all(param.dtype == flat.dtype for param in self.params)
        is_plain = is_of_type and not self._has_shards
        for param, part, shape, mark in zip(self.params, parts, self._shapes, used, strict=True):
            if mark and is_plain:
                param.grad = part.view(shape)
            elif mark:
                set_local_gradient(param, part.view(shape))
        # In another type the gradients are copies, and the buffer would be held beside them.
        if flat.device.type == "cpu" and is_of_type:
            self._room = flat

    def drop(self) -> None:
        """Forget the gradients of a backward pass that raised, once other ranks have them."""
        if self._sent is not None:
            self._sent[1].wait()
            self._sent = None
        self.pending = len(self.params)

    def take_votes(self) -> Tensor:
        """Return the sums of what ranks voted, and release them: they are a view of the buffer."""
        votes, self._votes = self._votes, None
        if votes is None:
            raise RuntimeError("the bucket has not finished")
        return votes

    def _take_room(self, elements: int) -> Tensor:
        """Return memory for the bucket: the last step's if no gradient is left in it, or new."""
        room = self._room
        # A script may keep a gradient of the last step, which a new sum must not overwrite.
        self.forget_room()
        if room is not None and torch_compat.tensors_in(room.untyped_storage()) == 1:
            return room
        return torch.empty(elements, dtype=self._dtype, device=local_part(self.params[0]).device)

    def forget_room(self) -> None:
        """Release the last step's buffer, which then lives as long as its gradients."""
        self._room = None


Fill = Callable[[Named], "list[Bucket | RowBucket]"]


class GradientReducer:
    """Reduces gradients over one group of ranks during each backward pass.

    Args:
        named: Parameters that may be trained at some time, in the order of the model.
        fill: Returns the buckets of trained ones, in the order in which they are reduced.
        group: Ranks to reduce over.
        device: Of this rank.
        scale: Factor of each gradient before the sum: 1 / ranks makes it a mean.
        check: Raises if the model has other parameters than these by now.
        check_hooks: Raises, at the first gradient of a backward pass, if hooks of the script see
            gradients before they are reduced.
    """

    def __init__(
        self,
        named: Named,
        fill: Fill,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        scale: float,
        check: Callable[[], None],
        check_hooks: Callable[[], None] = lambda: None,
    ) -> None:
        self._check_hooks = check_hooks
        self._fill = fill
        self._group = group
        self._device = device
        self._scale = scale
        self._check = check
        self._is_on = True
        self._is_running = False
        self._is_done = False
        self._has_changed = False
        self._next = 0
        self._params = [param for _, param in named]
        self._trained = TrainedSet(named, group, device)
        self._set_buckets(fill(self._trained.params()))
        for index, (_, param) in enumerate(named):
            on_accumulation(param, _hook(self, index))

    def _set_buckets(self, buckets: Sequence[Bucket | RowBucket]) -> None:
        """Send `buckets` from now on, the votes with the last that is dense."""
        dense = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self._voter = dense[-1] if dense else VoteBucket(self._device)
        self._buckets = [*buckets] if dense else [*buckets, self._voter]
        found = {param: bucket for bucket in buckets for param in bucket.params}
        self._bucket_of = [found.get(param) for param in self._params]
        self._next = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward pass outside reduces them all."""
        before, self._is_on = self._is_on, False
        for bucket in self._buckets:
            # Gradients that accumulate meanwhile have memory of their own, so the buffer would be
            # kept for nothing.
            bucket.forget_room()
        try:
            yield
        finally:
            self._is_on = before

    @contextlib.contextmanager
    def completed(self) -> Iterator[None]:
        """Reduce after one backward pass, even if it reached no parameter.

        Such a pass calls no hook, and the other ranks would wait for this one.
        """
        self._is_done = False
        yield
        if not self._is_done:
            self.reduce()

    def on_gradient(self, index: int) -> None:
        """Count down the bucket of a parameter, whose gradient is there; send those that are full.

        Args:
            index: Of the parameter among those that may be trained.
        """
        if not self._is_on:
            return
        # The first gradient of a backward pass arranges for its end.
        if not self._is_running:
            self._check_hooks()
            self._has_changed = self._trained.has_changed()
            self._is_running = True
            torch_compat.after_backward(self.reduce)
        bucket = self._bucket_of[index]
        if bucket is None:
            return  # thawed since the last step; `reduce` sends it
        bucket.pending -= 1
        if bucket.pending > 0:
            return
        # In order: a full bucket waits for those before it, as it does on every other rank.
        while self._next < len(self._buckets) and self._buckets[self._next].pending <= 0:
            self._launch_next()

    def forget_raised(self) -> None:
        """Forget a backward pass that raised, whose end never came; before each forward pass.

        Gradients that were on their way are dropped, as `zero_grad` of the script drops others.
        """
        if self._is_running and not torch_compat.is_in_backward():
            for bucket in self._buckets:
                bucket.drop()
            self._is_running = self._has_changed = False
            self._next = 0

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        if bucket is self._voter:
            self._voter.launch(self._group, self._scale, has_changed=self._has_changed)
        elif not isinstance(bucket, VoteBucket):
            bucket.launch(self._group, self._scale)
        self._next += 1

    def reduce(self) -> None:
        """Send the remaining buckets and wait for all; runs at the end of each backward pass."""
        self._check()
        if not self._is_running:  # no gradient came first
            self._has_changed = self._trained.has_changed()
        while self._next < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            bucket.finish()
        self._is_running = False
        self._is_done = True
        self._next = 0
        self._trained.check(self._voter.take_votes(), has_changed=self._has_changed)
        if self._has_changed:
            self._has_changed = False
            self._follow()

    def _follow(self) -> None:
        """Send the gradients of what the script thawed, and make buckets of what is trained now."""
        thawed = self._fill(self._trained.follow())
        for bucket in thawed:
            bucket.launch(self._group, self._scale)
        for bucket in thawed:
            bucket.finish()
        self._set_buckets(self._fill(self._trained.params()))


def _hook(reducer: GradientReducer, index: int) -> Callable[[Tensor], None]:
    """Return what tells `reducer` of the gradient of a parameter, and does not keep it alive.

    torch hides these hooks from the garbage collector: one that led to the parameters would keep
    their memory, and the process group, for ever.
    """
    reference = weakref.ref(reducer)

    def on_gradient(_: Tensor) -> None:
        if (own := reference()) is None:
            raise ModelError(
                "the runtime that reduces the gradients of this model was closed",
                hint="close it after the last backward pass",
            )
        own.on_gradient(index)

    return on_gradient


def fill_buckets(
    params: Sequence[tuple[str, Parameter]],
    fuse: int | str | list[int],
    dtype: torch.dtype | None,
    tables: Collection[Tensor] = (),
) -> list[Bucket | RowBucket]:
    """Return buckets of `params`, given in the order of the model; last parameters first.

    Args:
        params: Name and parameter, each parameter once.
        fuse: As in `config.Reduce.fuse`.
        dtype: Type on the wire; None keeps that of the gradients.
        tables: Embedding tables with sparse gradients, each a bucket of its own.
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
    """Return runs of at most `bytes_max`, filled from the last parameter on.

    Its gradient comes first, so full buckets are sent early; the one that is not full comes last.
    """
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
    """Split `run` by type and device, since one buffer has one of each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
    for name, param in run:
        local = local_part(param)
        kinds.setdefault((local.dtype, local.device), []).append((name, param))
    return list(kinds.values())
