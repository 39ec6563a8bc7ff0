"""Checks now and then that ranks which share samples got the same batch.

The problem.  Batches are local to a coordinate of `dp`: all other ranks with that coordinate must
get the same samples.  `rt.loader` sees to it.  Other loaders may not.  A `DataLoader` that shuffles
draws from torch's generator, and stages of a pipeline draw different numbers, so that their dropout
differs; a sampler that divides the data by `WORLD_SIZE`, as Lightning and accelerate put into a
loader, gives every rank other samples.  Nothing fails then: the first stage computes the outputs of
one batch, and the last compares them with the targets of another.

The idea.  In steps 1, 3, 10, 30, 100, 300 and every 1000 each rank computes a digest of a sample of
the elements of its batch, and one all-reduce over the job compares them.  Its vector has two
numbers for each set of ranks that must agree, the digest and its complement, so that one maximum
gives the largest and the smallest.  Only if digests differ do ranks exchange them by name.

Stages of a pipeline need not have the same inputs, which the first one alone may read, with noise
or crops that each stage draws for itself.  So between stages only the target is compared, and of
the inputs those that are not floating point, such as tokens, or are labels by their name.

A plain loop calls the model itself.  A hook of the model counts its calls in training, and compares
their arguments along the axes whose ranks compute a call together.  Calls of a step do not count.

Invariants:

- All ranks of the job raise, or none, and before a weight changes; in a plain loop all that share
  the samples, since others need not call the model as often.
- A step or call that compares nothing costs one addition.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import RanksDisagreeError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ParallelConfig
from msrun.parallel.exchange import messages
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import StepBatch, tensors_in
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import is_transforming

_FIRST_STEPS = frozenset([1, 3, 10, 30, 100, 300])
_EVERY = 1000
_ELEMENTS = 4096
_LEAST = torch.iinfo(torch.int64).min
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Digest(msgspec.Struct, frozen=True):
    """A digest of one tensor of a batch.

    Args:
        name: What the tensor is, in words.
        is_of_stages: Whether all stages of a pipeline must have it.
        value: The digest.
    """

    name: str
    is_of_stages: bool
    value: int


class EqualBatches:
    """Compares the batches of ranks that share samples.

    Args:
        config: The configuration.
        context: This rank.
    """

    def __init__(self, config: ParallelConfig, context: RankContext) -> None:
        configured = context.configured
        self._axes = configured.layout.axes
        self._coordinate = configured.coordinate
        self._layout = configured.layout
        self._device = context.device
        self._steps = self._calls = 0
        self._is_step = False
        shared = math.prod(size for axis, size in self._axes.items() if axis != DATA_AXIS)
        # Ranks that share images have parts of them, and with `mode: manual` the script decides.
        self._is_on = shared > 1 and config.mode != "manual" and context.images is None
        self._groups = [
            configured.group(axis)
            for axis, size in self._axes.items()
            if self._is_on and size > 1 and axis not in (DATA_AXIS, PIPELINE_AXIS)
        ]

    def count_step(self, batch: StepBatch) -> None:
        """Compare `batch` if it is time to; all ranks call it in each step.

        Raises:
            RanksDisagreeError: Ranks that share samples have other batches.
        """
        self._steps += 1
        if self._is_on and _is_due(self._steps):
            self._compare(batch)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Let calls of the model inside be those of a step, whose batch was compared."""
        self._is_step = True
        try:
            yield
        finally:
            self._is_step = False

    def watch(self, model: nn.Module) -> None:
        """Compare what a plain loop calls `model` with, too."""
        if self._groups:
            hook = _CallHook(self.count_call)
            nn.Module.register_forward_pre_hook(model, hook, with_kwargs=True)

    def count_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the arguments of a call if it is time to; ranks that compute it call it.

        Raises:
            RanksDisagreeError: They have other arguments.
        """
        if self._is_step or is_transforming():  # there are no values to compare in a transform
            return
        self._calls += 1
        if _is_due(self._calls):
            self._compare_call(StepBatch(args, kwargs, None))

    @torch.no_grad()
    def _compare_call(self, batch: StepBatch) -> None:
        named = list(_named(batch))
        digests = [_digest(tensor, self._device) for _, _, tensor in named]
        total = _joined(digests, self._device)
        found = torch.stack([total, ~total])
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        if not bool(found[0] != ~found[1]):
            return
        own = [
            _Digest(name=name, is_of_stages=True, value=int(value))
            for value, (name, _, _) in zip(digests, named, strict=True)
        ]
        # A rank that raises before the last group has it would leave others waiting there.
        of_ranks = {dist.get_rank(): own}
        for group in self._groups:
            for others in messages.gather_all(
                of_ranks, dict[int, list[_Digest]], group, self._device
            ):
                of_ranks |= others
        first = min(of_ranks)
        for rank, other in sorted(of_ranks.items()):
            if names := _differing(other, of_ranks[first], is_stage=True):
                raise RanksDisagreeError(_different(rank, first, names), hint=_HINT)
        raise RanksDisagreeError(_UNNAMED, hint=_HINT)

    @torch.no_grad()
    def _compare(self, batch: StepBatch) -> None:
        named = list(_named(batch))
        digests = [_digest(tensor, self._device) for _, _, tensor in named]
        everywhere = [d for d, (_, of_stages, _) in zip(digests, named, strict=True) if of_stages]
        if not self._differ(digests, everywhere):
            return
        own = [
            _Digest(name, of_stages, int(value))
            for value, (name, of_stages, _) in zip(digests, named, strict=True)
        ]
        of_ranks = messages.gather_all(own, list[_Digest], None, self._device)
        raise RanksDisagreeError(self._sentence(of_ranks), hint=_HINT)

    def _differ(self, digests: Sequence[Tensor], everywhere: Sequence[Tensor]) -> bool:
        """Return whether some ranks of the job differ, the same on all of them."""
        stages = self._axes.get(PIPELINE_AXIS, 1)
        sets = self._axes.get(DATA_AXIS, 1)
        own = self._coordinate.get(DATA_AXIS, 0)
        places = [own * stages + self._coordinate.get(PIPELINE_AXIS, 0), sets * stages + own]
        found = torch.full((2, sets * stages + sets), _LEAST, device=self._device)
        for place, values in zip(places, (digests, everywhere), strict=True):
            total = _joined(values, self._device)
            found[0, place], found[1, place] = total, ~total
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool((found[0] != ~found[1]).any())

    def _sentence(self, of_ranks: Sequence[Sequence[_Digest]]) -> str:
        first: dict[int, int] = {}  # coordinate of dp -> its first rank
        for rank, own in enumerate(of_ranks):
            place = self._layout.coordinate(rank)
            other = first.setdefault(place.get(DATA_AXIS, 0), rank)
            stage = self._layout.coordinate(other).get(PIPELINE_AXIS, 0)
            is_stage = place.get(PIPELINE_AXIS, 0) == stage
            names = _differing(own, of_ranks[other], is_stage=is_stage)
            if names:
                return _different(rank, other, names)
        return _UNNAMED


class _CallHook:
    """A hook of a model that is left out of copies in files, and is the same in others.

    Args:
        call: Gets the arguments of each call in training.
    """

    def __init__(self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._call = call

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._call(args, kwargs)

    def __deepcopy__(self, _: object) -> _CallHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _CallHook, (_nothing,)


def _nothing(*_: object) -> None:
    """Do nothing with a call of a model that was read from a file."""


def _is_due(count: int) -> bool:
    return count in _FIRST_STEPS or count % _EVERY == 0


def _different(rank: int, other: int, names: Sequence[str]) -> str:
    return (
        f"the batch of rank {rank} is not that of rank {other} ({', '.join(names)}), but ranks "
        f"with the same {DATA_AXIS} coordinate train on one batch"
    )


def _differing(own: Sequence[_Digest], other: Sequence[_Digest], *, is_stage: bool) -> list[str]:
    """Name what differs in two batches, of ranks of one stage or of several."""
    if [each.name for each in own] != [each.name for each in other]:
        return ["other values by number or name"]
    pairs = zip(own, other, strict=True)
    return list(dict.fromkeys(a.name for a, b in pairs if a != b and (is_stage or a.is_of_stages)))


def _named(batch: StepBatch) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield the tensors of a batch: its name, whether all stages must have it, and the tensor."""
    has_target = batch.target is not None
    for index, value in enumerate(batch.inputs):
        for tensor in filter(_has_bits, tensors_in(value)):
            yield f"input {index}", not (has_target and tensor.is_floating_point()), tensor
    for name, value in batch.named.items():
        is_target = any(word in str(name).lower() for word in ("label", "target"))
        for tensor in filter(_has_bits, tensors_in(value)):
            yield f"input {name}", is_target or not tensor.is_floating_point(), tensor
    for tensor in filter(_has_bits, tensors_in(batch.target)):
        yield "target", True, tensor


def _has_bits(tensor: Tensor) -> bool:
    """Return whether `tensor` has memory of its own in which to compare bits."""
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    return is_dense and not tensor.is_nested and not is_sharded(tensor)


def _digest(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a number of the shape of `tensor`, and of the bits of some of its elements."""
    shape = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    # Odd, so that samples of a power of two of numbers each do not show the first number alone.
    flat = flat[:: flat.numel() // _ELEMENTS | 1]
    flat = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    bits = flat.contiguous().view(_INTEGERS[flat.element_size()])
    # Odd numbers, one an element: sums are then unlikely to be equal in another order.
    weights = ((torch.arange(bits.numel()) * 2 + 1) * _GOLDEN | 1).to(bits.device)
    return (bits * weights).sum().to(device) + shape


def _joined(digests: Sequence[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=device)
    for digest in digests:
        total = (total + digest) * _GOLDEN + 1
    return total


_UNNAMED = f"ranks with the same {DATA_AXIS} coordinate got different batches"
_HINT = (
    "read batches by rt.loader; another loader must shuffle by a generator that is the same on "
    "these ranks (DataLoader(..., generator=torch.Generator().manual_seed(0))), and its sampler "
    "divides the data over rt.layout.axes['dp'] replicas by rt.coordinate['dp'], not over all ranks"
)
