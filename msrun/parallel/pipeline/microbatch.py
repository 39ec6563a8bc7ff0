"""A batch in micro-batches of one shape, their outputs as one batch again, and what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.copies.attributes import Attributes
from msrun.parallel.data_parallel.written_parameters import WrittenParameters
from msrun.parallel.local import is_equal, numbers
from msrun.parallel.losses.batch import like, map_leaves, note_cut, with_fields, with_items
from msrun.parallel.pipeline.chunks import MICROBATCHES


@dataclass(frozen=True, slots=True)
class MicrobatchSplit:
    """How the samples of a batch are split into micro-batches, as equal as they can be.

    All have the same shape: one with fewer samples repeats its last one.  Outputs of a repeated
    sample count nothing, but modules that look across samples see it.

    Args:
        samples: Samples of the batch.
        parts: Micro-batches.
        wide: Samples of each part at least, with the repeated ones.
    """

    samples: int
    parts: int
    wide: int = 1

    @property
    def width(self) -> int:
        """Samples of each part, with the repeated ones."""
        return max(self.wide, -(-self.samples // self.parts))

    @property
    def repeats(self) -> bool:
        """Whether some part repeats a sample."""
        return self.width * self.parts != self.samples

    def count(self, part: int) -> int:
        """Return the samples of `part` that count; 0 where there are fewer than parts."""
        return self.samples // self.parts + (part < self.samples % self.parts)

    def share(self, part: int) -> float:
        """Return the weight of `part` in a mean over samples."""
        return self.count(part) / self.samples

    def padded(self, value: Any, part: int) -> Any:
        """Return `part` of `value`, padded to `width`; tensors without samples are not cut."""
        width = self.width
        return map_leaves(lambda tensor: self._rows(tensor, part, width), value)

    def real(self, value: Any, part: int) -> Any:
        """Return `part` of `value` as `trim` leaves its output; other tensors are not cut."""
        rows = self._real_rows(part)
        return map_leaves(lambda tensor: self._rows(tensor, part, rows), value)

    def _real_rows(self, part: int) -> int:
        """Return the samples that `trim` leaves: an empty part keeps one, which counts nothing."""
        return max(self.count(part), 1)

    def _rows(self, tensor: Tensor, part: int, wanted: int) -> Tensor:
        if not tensor.dim() or len(tensor) != self.samples:
            return tensor
        least, more = divmod(self.samples, self.parts)
        start, count = part * least + min(part, more), self.count(part)
        piece = tensor.narrow(0, start, count)
        if count == wanted:
            return note_cut(piece)
        last = min(start + self._real_rows(part), self.samples) - 1
        rest = [tensor[last : last + 1]] * (wanted - count)
        return note_cut(torch.cat([piece, *rest]))

    def trim(self, output: Any, part: int) -> Any:
        """Return `output` of a part without its repeated samples.

        Raises:
            ModelError: It has repeated ones, and a tensor in it does not begin with samples.
        """
        rows = self._real_rows(part)

        def trim_tensor(tensor: Tensor) -> Tensor:
            if tensor.dim() and len(tensor) == self.width:
                return tensor[:rows]
            raise ModelError(
                f"{MICROBATCHES}: {self.samples} samples do not divide into {self.parts} equal "
                f"micro-batches, and an output of shape {tuple(tensor.shape)} "
                "does not begin with samples"
            )

        return output if rows == self.width else map_leaves(trim_tensor, output)


def split_batch(inputs: Sequence[Any], parts: int, *, may_differ: bool) -> MicrobatchSplit:
    """Return how a batch with these inputs is split.

    Args:
        inputs: Of the whole batch.
        parts: Micro-batches.
        may_differ: Whether there are fewer where there are fewer samples.

    Raises:
        ModelError: There is no tensor in it, or no sample.
    """
    lengths: list[int] = []
    map_leaves(lambda tensor: lengths.extend(tensor.shape[:1]), list(inputs))
    if not lengths:
        raise ModelError("the batch holds no tensor with a first dim of samples")
    samples = lengths[0]
    if samples == 0:
        raise ModelError("the batch has no sample")
    return MicrobatchSplit(samples, min(parts, samples) if may_differ else parts)


def join(outputs: Sequence[Any]) -> Any:
    """Return the outputs of all parts, trimmed, as that of one batch.

    Raises:
        ModelError: A tensor in them has no samples to join.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    match first:
        case Tensor() if first.dim():
            return torch.cat(list(outputs))
        case Tensor():
            raise ModelError(
                f"{MICROBATCHES}: the output holds a tensor without samples, which "
                f"{len(outputs)} micro-batches cannot make one"
            )
        case tuple() | list():
            return like(first, [join(items) for items in zip(*outputs, strict=True)])
        case Mapping():
            joined = {key: join([output[key] for output in outputs]) for key in first}
            return with_items(first, joined)
        case _ if is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in fields(first)]
            items = {name: join([getattr(output, name) for output in outputs]) for name in names}
            return with_fields(first, items)
        case _:
            return first


class WrittenBuffers:
    """Which buffers and numbers of a stage the micro-batches of the first step have written.

    One process writes them once a step, a stage once a micro-batch.

    A buffer that one micro-batch fills, and others only read, passes.

    Args:
        parts: Micro-batches of a step.
        has_copies: Whether some of them take turns later.
    """

    def __init__(self, parts: int, *, has_copies: bool = False) -> None:
        self._parts = parts
        self._has_copies = has_copies
        self._attributes: Attributes | None = None
        self._written: set[str] = set()
        self._params = WrittenParameters()
        self.is_checked = parts == 1

    def watched(
        self, model: nn.Module, refuse: Callable[[ModelError], None]
    ) -> AbstractContextManager[None]:
        """Return the context of a run of a chunk of `model` on a micro-batch.

        Args:
            model: The stage.
            refuse: Called if it writes a buffer that another micro-batch has written.
        """
        return nullcontext() if self.is_checked else self._watched(model, refuse)

    @contextmanager
    def _watched(self, model: nn.Module, refuse: Callable[[ModelError], None]) -> Iterator[None]:
        before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        counts = numbers(model)
        self._params.begin(model)
        yield
        if self._has_copies:
            self._check_attributes(model, refuse)
        written = {name for name, now in model.named_buffers() if _differs(before.get(name), now)}
        written |= {name for name, now in numbers(model).items() if counts.get(name) != now}
        again = sorted(written & self._written) + self._params.again(model)
        if again:
            problem = (
                f"{MICROBATCHES}: each of {self._parts} micro-batches changes {again[0]}, which "
                "one process changes once a step"
            )
            refuse(ModelError(problem, hint="say `batch_norm: local` if that is meant"))
        self._written |= written

    def _check_attributes(self, model: nn.Module, refuse: Callable[[ModelError], None]) -> None:
        """Refuse what copies would find changed by each other."""
        attributes = Attributes(model)
        if self._attributes is not None:
            try:
                self._attributes.check_unchanged(attributes)
            except ModelError as error:
                refuse(error)
        self._attributes = attributes


def _differs(before: Tensor | None, now: Tensor) -> bool:
    return before is not None and not is_equal(before, now)
