"""Batches of one data-parallel rank: every sample once an epoch, resumable in the middle of it.

Samplers usually give each rank every n-th sample and repeat some at the end.  The samples of a step
then depend on the number of ranks, the last step counts some samples twice, and a job cannot
continue in the middle of an epoch on another number of ranks.

Here the shuffled order of an epoch is cut into global batches, as one process would read them, and
each global batch into one contiguous part a rank.  So the samples of a step are the same for every
number of ranks, and the position in an epoch is one number: the samples that all ranks have read.
If the last global batch does not divide evenly, earlier ranks get one sample more.  `rt.step` then
weights the mean of each rank by its samples (`rt.batch_weight`).  A last batch with fewer samples
than ranks is refused when the loader is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from msrun.errors import UsageError
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.rank_context import EpochEnd, LoaderUse, RankContext
from msrun.worker.beat import beat

if TYPE_CHECKING:
    from msrun.parallel.data_parallel.stream import StreamLoader


class SizedDataset(Protocol):
    """A dataset of known length whose samples are read by index."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return one sample."""


class LoaderOptions(TypedDict, total=False):
    """Options of `Runtime.loader`.

    `shuffle`, `seed` and `drop_last` are those of `MeshLoader`; `torch.utils.data.DataLoader`
    takes the others.
    """

    shuffle: bool
    seed: int
    drop_last: bool
    num_workers: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    generator: torch.Generator | None
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool


class LoaderState(TypedDict):
    """Position of a loader, from which any number of ranks can continue.

    Args:
        epoch: Number of the epoch, from 0.
        samples: Samples of this epoch that all ranks together have read.
        seed: Seed of the shuffling.
    """

    epoch: int
    samples: int
    seed: int


class EpochSplit(msgspec.Struct, frozen=True, kw_only=True):
    """How an epoch is split into global batches, and these among ranks.

    Args:
        samples: Samples of the dataset.
        batch_size: Samples of one rank in a full batch.
        ranks: Ranks that share each global batch.
        drop_last: Leave out the last batch if it is not full.
    """

    samples: int
    batch_size: int
    ranks: int
    drop_last: bool

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a full batch."""
        return self.batch_size * self.ranks

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (1 if rest and not self.drop_last else 0)

    def size(self, batch: int) -> int:
        """Return the samples of all ranks in `batch`."""
        return min(self.global_batch, self.samples - batch * self.global_batch)

    @property
    def end(self) -> EpochEnd:
        """The last batch."""
        return EpochEnd.divided(self.size(self.batches - 1), self.ranks, full=self.batch_size)

    @property
    def is_uneven(self) -> bool:
        """Whether some rank has fewer samples of the last batch than another."""
        return self.size(self.batches - 1) % self.ranks > 0

    def part(self, batch: int, rank: int) -> range:
        """Return the positions in the epoch's order of the part of `rank` in `batch`.

        Parts differ by at most one sample; earlier ranks have the extra ones.
        """
        size = self.size(batch)
        least, extra = divmod(size, self.ranks)
        first = batch * self.global_batch + rank * least + min(rank, extra)
        return range(first, first + least + (rank < extra))


class _Batches:
    """Batch sampler: yields the indices of one rank's batches, from the loader's position on."""

    def __init__(self, loader: MeshLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches, to the loader itself alone.

        Raises:
            UsageError: Another loader was made of this one.
        """
        if self._loader.is_divided and not self._loader.is_begun:
            raise UsageError(
                "another loader reads the batches of rt.loader, which are this rank's part already",
                hint="loop over what rt.loader returned; leave it out of Accelerator.prepare",
            )
        return self._loader.indices()

    def __len__(self) -> int:
        return self._loader.split.batches


class MeshLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a dataset.

    Each iteration is one epoch.  The next one uses the order of the next epoch, unless
    `set_epoch` chooses another.

    Args:
        context: Rank whose data-parallel axis shards the samples.
        dataset: A dataset with a length.
        batch_size: Samples of one batch of one data-parallel rank, at least 1.
        shuffle: Use another order each epoch, the same on every rank.
        seed: Seed of the shuffling.
        drop_last: Leave out the last batch if it is not full.
        options: Options of `DataLoader`.

    Attributes:
        drawn: Passes batches on as they are drawn.
        is_begun: Whether the loader itself takes the batches of its sampler now.
        is_divided: Whether there are other ranks.
    """

    drawn: Callable[[Iterator[Any]], Iterator[Any]] = staticmethod(iter)
    is_begun = False

    def __init__(
        self,
        context: RankContext,
        dataset: SizedDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        ranks = context.layout.size(DATA_AXIS)
        self.split = EpochSplit(
            samples=len(dataset),
            batch_size=batch_size,
            ranks=ranks,
            drop_last=drop_last,
        )
        _check_last(self.split)
        # `rt.step` reads the weights here, of every loader for as long as its batch is in use.
        self._weights = context.batch
        self._rank = context.coordinate.get(DATA_AXIS, 0)
        self.is_divided = context.world_size > 1
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._first = 0
        self._next = 0
        # The base class draws a seed for its workers at each iteration.  Drawn from the global
        # generator, that would shift the stream that dropout uses.
        options.setdefault("generator", torch.Generator().manual_seed(seed * ranks + self._rank))
        super().__init__(cast("Dataset[Any]", dataset), batch_sampler=_Batches(self), **options)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be `epoch`; one that is running continues."""
        if epoch != self._epoch:
            self._epoch, self._first, self._next = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # the base class names its own iterator
        """Yield this rank's batches of one epoch, from the position of `load_state_dict` on."""
        self._next = self._first
        use = LoaderUse(is_due=self.split.is_uneven, end=self.split.end)
        try:
            for batch in self.drawn(self._begin()):
                beat()
                use.samples = len(self.split.part(self._next, self._rank))
                use.value = use.samples * self.split.ranks / self.split.size(self._next)
                use.tensors = [weakref.ref(tensor) for tensor in tensors_in(batch)]
                self._weights.latest(use)
                self._next += 1
                yield batch
        finally:
            self._weights.left(use)
        self._epoch, self._first, self._next = self._epoch + 1, 0, 0

    def _begin(self) -> Iterator[Any]:
        """Return an iteration of the base class, which takes the batches at once."""
        self.is_begun = True
        try:
            return super().__iter__()
        finally:
            self.is_begun = False

    def indices(self) -> Iterator[list[int]]:
        """Yield the indices of each batch, from the first batch of this iteration on."""
        order = self._order()
        for batch in range(self._first, self.split.batches):
            yield [order[position] for position in self.split.part(batch, self._rank)]

    def state_dict(self) -> LoaderState:
        """Return the position after the last batch that this loader yielded."""
        samples = min(self._next * self.split.global_batch, self.split.samples)
        return LoaderState(epoch=self._epoch, samples=samples, seed=self._seed)

    def load_state_dict(self, state: LoaderState) -> None:
        """Have the next iteration begin at the position `state`, on any number of ranks.

        Raises:
            UsageError: The global batch differs, and the position is inside one of them.
        """
        # On another number of ranks only the number of samples is the same, not that of batches.
        batch, rest = divmod(state["samples"], self.split.global_batch)
        if rest and state["samples"] < self.split.samples:
            raise UsageError(
                f"the loader stopped after {state['samples']} samples, which is no multiple of "
                f"the global batch of {self.split.global_batch}"
            )
        is_over = state["samples"] >= self.split.samples or batch >= self.split.batches
        self._seed = state["seed"]
        self._epoch = state["epoch"] + is_over
        self._first = self._next = 0 if is_over else batch

    def _order(self) -> range | list[int]:
        if not self._shuffle:
            return range(self.split.samples)
        # A generator of its own: every rank must shuffle alike, whatever it has drawn before.
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order: list[int] = torch.randperm(self.split.samples, generator=generator).tolist()
        return order


def make_loader(
    context: RankContext,
    dataset: SizedDataset | Iterable[Any],
    batch_size: int | None,
    **options: Any,
) -> MeshLoader | StreamLoader:
    """Return a loader of `dataset`; see `Runtime.loader`."""
    batch_size = check_options(batch_size, options)
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "rt.loader: it was given a DataLoader, and makes its own",
            hint="give it the loader's dataset and the batch size of one rank",
        )
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        from msrun.parallel.data_parallel.stream import StreamLoader

        return StreamLoader(context, dataset, batch_size, **options)
    return MeshLoader(context, dataset, batch_size, **options)


def check_options(batch_size: int | None, options: dict[str, Any]) -> int:
    """Refuse options that a loader decides by itself; return the batch size.

    Raises:
        UsageError: There is one, or the batch has no sample.
    """
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise UsageError(
                f"rt.loader: it makes its own {name}, which gives each rank its part of a batch",
                hint="give it batch_size, the samples of one rank, and shuffle=True for another "
                "order each epoch; a DataLoader of your own may have any batch_sampler, which "
                "yields on each rank its own batches: every rt.layout.axes['dp']th one from number "
                "rt.coordinate['dp'] on",
            )
    if batch_size is None or not hasattr(batch_size, "__index__"):
        raise UsageError(
            f"rt.loader: batch_size is {batch_size!r}, and must be the number of samples of one "
            "rank",
            hint="a dataset that makes its own batches needs a DataLoader of your own, with a part "
            "of them on each rank: by rt.coordinate['dp'] of rt.layout.axes['dp']",
        )
    if batch_size < 1:
        raise UsageError(f"rt.loader: batch_size {batch_size} must be at least 1")
    return batch_size


def _check_last(split: EpochSplit) -> None:
    """Refuse an epoch without a batch, or whose last batch has no sample for some rank."""
    if split.batches == 0:
        raise UsageError(
            f"rt.loader: {split.samples} samples are no batch of {split.batch_size} for each of "
            f"{split.ranks} ranks"
        )
    last = split.size(split.batches - 1)
    if last < split.ranks:
        raise UsageError(
            f"rt.loader: the last batch has {last} of {split.samples} samples, fewer than the "
            f"{split.ranks} data-parallel ranks (choose drop_last=True or another batch_size)"
        )
