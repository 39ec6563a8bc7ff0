"""Batches of one data-parallel rank from a dataset without a length, such as a stream of files.

Theory of operation.  Every rank reads the whole stream and keeps its part of each global batch: the
samples of a step are those of one process that reads global batches, on any number of ranks and
with any number of DataLoader workers.  Reading is not divided.  A dataset that reads only its
share, by `rt.coordinate`, needs a DataLoader of its own, and the step then has other samples.

The end is found when it comes.  Of a last batch that does not divide evenly earlier ranks get one
sample more, as in `data`; one with fewer samples than ranks is refused on all ranks.

All ranks must read the same: a dataset that shuffles by numbers of its own would give each rank
parts of other batches.  So ranks note a digest of what they read, and compare it where replicas are
compared (`replica_digest`).
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from msrun.errors import UsageError
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.rank_context import EpochEnd, LoaderUse, RankContext
from msrun.worker.beat import beat

# Elements of each tensor of a sample that count in the digest.
_LOOKED_AT = 64


class _StreamPart(NamedTuple):
    """One rank's part of a global batch.

    Args:
        samples: The part; what `collate_fn` makes of it once it is collated.
        own: Samples of the part.
        size: Samples of the global batch.
        digest: Of the global batch.
    """

    samples: Any
    own: int
    size: int
    digest: int


class _StreamParts(IterableDataset[_StreamPart]):
    """This rank's parts of the global batches of a stream, in the process that reads them.

    Args:
        stream: The dataset.
        rank: Of the data-parallel ranks.
        ranks: How many there are.
        batch_size: Samples of one rank.
        drop_last: Leave out the last batch if it is not full.
    """

    def __init__(
        self, stream: Iterable[Any], rank: int, ranks: int, *, batch_size: int, drop_last: bool
    ) -> None:
        self.stream = stream
        self.first = 0
        self._rank, self._ranks = rank, ranks
        self.global_batch = batch_size * ranks
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[_StreamPart]:
        samples = iter(self.stream)
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker else (0, 1)
        # The loader asks the workers in turns, and leaves these out.
        for _ in range(index, self.first, count):
            for _ in itertools.islice(samples, self.global_batch):
                pass
            yield _StreamPart((), 0, self.global_batch, 0)
        while batch := list(itertools.islice(samples, self.global_batch)):
            size = len(batch)
            if size < self.global_batch and self._drop_last:
                return
            least, extra = divmod(size, self._ranks)
            first = self._rank * least + min(self._rank, extra)
            own = batch[first : first + least + (self._rank < extra)]
            # The loader refuses fewer samples than ranks: an error of a worker loses its form.
            yield _StreamPart(own, len(own) if least else 0, size, _digest(batch))


class _Collate:
    """Collates the samples of a part.

    Args:
        collate: Of the script, or that of torch.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, part: _StreamPart) -> _StreamPart:
        return part._replace(samples=self._collate(part.samples)) if part.own else part


class StreamLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a dataset without a length.

    Each iteration is one epoch.  A dataset with `set_epoch` is told its number.

    Args:
        context: Rank whose data-parallel axis shards the samples.
        dataset: Iterated anew each epoch.
        batch_size: Samples of one batch of one data-parallel rank, at least 1.
        drop_last: Leave out the last batch if it is not full.
        options: Options of `DataLoader`.

    Attributes:
        drawn: Passes parts on as they are drawn.
    """

    drawn: Callable[[Iterator[Any]], Iterator[Any]] = staticmethod(iter)

    def __init__(
        self,
        context: RankContext,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        options.pop("seed", None)
        _check(dataset, options)
        self._ranks = context.layout.size(DATA_AXIS)
        rank = context.coordinate.get(DATA_AXIS, 0)
        # `rt.step` reads the weights here, of every loader for as long as its batch is in use.
        self._weights = context.batch
        self._epoch = self._next = 0
        self._parts = _StreamParts(
            dataset, rank, self._ranks, batch_size=batch_size, drop_last=drop_last
        )
        collate = _Collate(options.pop("collate_fn", None) or default_collate)
        # As in `MeshLoader`.
        options.setdefault("generator", torch.Generator().manual_seed(rank))
        options["collate_fn"] = collate  # without batches, it gets what the dataset yields
        super().__init__(self._parts, batch_size=None, **options)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be `epoch`; one that is running continues."""
        if epoch != self._epoch:
            self._epoch, self._parts.first, self._next = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # the base class names its own iterator
        """Yield this rank's batches of one epoch, from the position of `load_state_dict` on."""
        self._next = self._parts.first
        if tell := getattr(self._parts.stream, "set_epoch", None):
            tell(self._epoch)
        use = LoaderUse()
        try:
            # No name: an exception, and what keeps it, would keep the workers of the iterator.
            for part in self.drawn(itertools.islice(super().__iter__(), self._parts.first, None)):
                beat()
                if not part.own:
                    raise UsageError(
                        f"rt.loader: the last batch of the stream has {part.size} sample(s), fewer "
                        f"than the {self._ranks} data-parallel ranks",
                        hint="choose drop_last=True or another batch_size",
                    )
                use.samples = part.own
                use.value = part.own * self._ranks / part.size
                use.is_due = part.size % self._ranks > 0
                if part.size < self._parts.global_batch:  # all ranks know it
                    full = self._parts.global_batch // self._ranks
                    use.end = EpochEnd.divided(part.size, self._ranks, full=full)
                use.digest = zlib.crc32(str(part.digest).encode(), use.digest)
                use.tensors = [weakref.ref(tensor) for tensor in tensors_in(part.samples)]
                self._weights.latest(use)
                self._next += 1
                yield part.samples
        finally:
            self._weights.left(use)
        self._epoch, self._parts.first, self._next = self._epoch + 1, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that this loader yielded."""
        samples = self._next * self._parts.global_batch
        return {"epoch": self._epoch, "samples": samples, "seed": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration begin at the position `state`, on any number of ranks.

        Samples before it are read and left out.

        Raises:
            UsageError: The global batch differs, and the position is inside one of them.
        """
        batch, rest = divmod(state["samples"], self._parts.global_batch)
        if rest:
            raise UsageError(
                f"the loader stopped after {state['samples']} samples, which is no multiple of "
                f"the global batch of {self._parts.global_batch}"
            )
        self._epoch = state["epoch"]
        self._parts.first = self._next = batch


def _check(dataset: object, options: dict[str, Any]) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, Iterator) or not isinstance(dataset, Iterable):
        problem = "can be read once" if isinstance(dataset, Iterator) else "has no length to divide"
        raise UsageError(
            f"rt.loader: {name} {problem}",
            hint="give an IterableDataset, whose __iter__ begins each epoch anew",
        )
    if options.pop("shuffle", False):
        raise UsageError(
            f"rt.loader: {name} has no length, so rt.loader cannot shuffle it",
            hint="shuffle in the dataset, with the same seed on all ranks",
        )
    if options.get("persistent_workers"):
        raise UsageError(
            f"rt.loader: persistent_workers would begin each epoch of {name} where the first began",
            hint="leave it out",
        )


def _digest(samples: Sequence[Any]) -> int:
    """Return a number of the values of `samples`, equal in every process."""
    found = 0
    for leaf in _leaves(samples):
        if isinstance(leaf, Tensor):
            flat = leaf.detach().reshape(-1)
            step = max(1, flat.numel() // _LOOKED_AT)
            content = repr((tuple(leaf.shape), flat[::step][:_LOOKED_AT].tolist()))
        elif hasattr(leaf, "tobytes"):  # an array of numpy
            content = repr(leaf.tobytes()[: 8 * _LOOKED_AT])
        elif isinstance(leaf, str | bytes):
            content = repr(leaf[:_LOOKED_AT])
        elif isinstance(leaf, int | float):
            content = repr(leaf)
        else:
            content = type(leaf).__name__
        found = zlib.crc32(content.encode(), found)
    return found


def _leaves(value: object) -> Iterator[object]:
    """Yield the values in mappings, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
