"""Batches of which each rank reads its part of every image.

A dataset that can read a part of a sample has a method `get_part(index, rows)`, which is called in
place of `__getitem__`.  It calls `rows` with the sizes of the whole image along the axes that
divide it, in the order of the mesh, gets one slice for each, and returns a sample of just these
rows.  Of other datasets whole samples are read and cut before they are collated, so that memory and
transfers are those of the part; with a `collate_fn` of the script the step cuts instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from msrun.errors import UsageError
from msrun.parallel.config import ParallelConfig
from msrun.parallel.data import MeshLoader, SizedDataset, check_options, make_loader
from msrun.parallel.images.division import ImageDims
from msrun.parallel.images.image_tensor import wrapped
from msrun.parallel.losses.batch import like, tensors_in, with_items
from msrun.parallel.notation.image_parts import spans
from msrun.parallel.rank_context import RankContext

if TYPE_CHECKING:
    from msrun.parallel.data_parallel.stream import StreamLoader

# Name of a value -> dim of a sample -> rows of the whole image.
Wholes = dict[str, dict[int, int]]


class _Cut(NamedTuple):
    """How samples are cut, without process groups: worker processes get it too.

    Args:
        dims: Name of a value -> dim of a sample -> number of the axis; in order of the values.
        axes: For each axis the index of this rank and the number of ranks.
    """

    dims: dict[str, dict[int, int]]
    axes: list[tuple[int, int]]

    def part(self, at: int, rows: int) -> slice:
        """Return the rows of this rank along axis number `at`."""
        rank, ranks = self.axes[at]
        return slice(*spans(rows, ranks)[rank])


class _Sample(NamedTuple):
    """A sample or a batch of parts, and the sizes of its whole images."""

    value: Any
    wholes: Wholes


class _Samples(Dataset[_Sample]):
    """Samples of which this rank has parts.

    Args:
        dataset: Of whole samples, or with `get_part`.
        cut: How they are cut.
        is_whole: Whether to leave whole samples to the step.
    """

    def __init__(self, dataset: Any, cut: _Cut, *, is_whole: bool) -> None:
        self._dataset, self._cut, self._is_whole = dataset, cut, is_whole

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> _Sample:
        if hasattr(self._dataset, "get_part"):
            return self._read(index)
        value = self._dataset[index]
        wholes: Wholes = {}
        if self._is_whole:
            return _Sample(value, wholes)

        def part(name: str, x: Any) -> Any:
            dims = self._cut.dims.get(name)
            shape = getattr(x, "shape", None)
            if not dims or not isinstance(shape, tuple) or len(shape) <= max(dims):
                return x
            wholes[name] = {dim: int(shape[dim]) for dim in dims}
            slices = [slice(None)] * len(shape)
            for dim, at in dims.items():
                slices[dim] = self._cut.part(at, shape[dim])
            return x[tuple(slices)]

        return _Sample(_by_name(value, list(self._cut.dims), part), wholes)

    def _read(self, index: int) -> _Sample:
        sizes: list[int] = []

        def rows(*given: int) -> tuple[slice, ...]:
            if len(given) != len(self._cut.axes):
                raise UsageError(
                    f"rt.loader: get_part called rows with {len(given)} size(s), and "
                    f"{len(self._cut.axes)} axes divide images"
                )
            sizes[:] = given
            return tuple(self._cut.part(at, size) for at, size in enumerate(given))

        value = self._dataset.get_part(index, rows)
        if not sizes:
            raise UsageError("rt.loader: get_part returned a sample without a call of rows")
        dims = self._cut.dims.items()
        return _Sample(value, {name: {d: sizes[at] for d, at in own.items()} for name, own in dims})


def _by_name(value: Any, names: Sequence[str], change: Callable[[str, Any], Any]) -> Any:
    """Return a sample or a batch with each value changed, by its name or in its order."""
    if isinstance(value, Mapping):
        return with_items(value, {name: change(name, x) for name, x in value.items()})
    if isinstance(value, tuple | list):
        named = [*names, *[""] * (len(value) - len(names))]
        items = [change(name, x) for name, x in zip(named, value, strict=False)]
        return like(value, items)
    return change(names[0], value)


class _CollateParts:
    """Collates samples of parts."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: list[_Sample]) -> _Sample:
        first = samples[0].wholes
        for sample in samples:
            if sample.wholes != first:
                raise UsageError(
                    f"rt.loader: images of one batch have other sizes ({first} and {sample.wholes})"
                )
        return _Sample(self._collate([sample.value for sample in samples]), first)


class ImageLoader(MeshLoader):
    """A loader whose batches have this rank's parts of images, as tensors that know the whole.

    Args:
        dims: Which dims of a batch are divided.
        context: Rank whose data-parallel axis divides the samples.
        dataset: A dataset with a length.
        batch_size: Samples of one batch of one data-parallel rank.
        options: Of `MeshLoader`.
    """

    def __init__(
        self,
        dims: ImageDims,
        context: RankContext,
        dataset: SizedDataset,
        batch_size: int,
        **options: Any,
    ) -> None:
        collate = options.pop("collate_fn", None)
        cut = _Cut(
            {name: {dim - 1: at for dim, at in dims.divided(name).items()} for name in dims.data},
            [(axis.rank, axis.size) for axis in dims.axes],
        )
        self._dims = dims
        samples = _Samples(dataset, cut, is_whole=collate is not None)
        super().__init__(
            context,
            cast("SizedDataset", samples),
            batch_size,
            collate_fn=_CollateParts(collate),
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # as of the base class
        """Yield this rank's batches of one epoch."""
        for found in super().__iter__():
            batch = _by_name(found.value, list(self._dims.data), self._wrapped(found.wholes))
            self._weights.current.tensors = [weakref.ref(x) for x in tensors_in(batch)]
            yield batch

    def _wrapped(self, wholes: Wholes) -> Callable[[str, Any], Any]:
        def image(name: str, x: Any) -> Any:
            sizes = wholes.get(name)
            if not sizes:
                return x
            if not isinstance(x, Tensor):
                raise UsageError(
                    f"rt.loader: parts of {name} became {type(x).__name__} in collate_fn, and no "
                    "tensor"
                )
            shape = list(x.shape)
            for dim, rows in sizes.items():
                shape[dim + 1 : dim + 2] = [rows]
            places = self._dims.places(name, shape)
            for axis, place in zip(self._dims.axes, places, strict=True):
                if place and x.shape[place.dim] != len(range(*axis.part(place.rows))):
                    raise UsageError(
                        f"rt.loader: a part of {name} has {x.shape[place.dim]} rows in dim "
                        f"{place.dim}, and that of {place.rows} rows on this rank has "
                        f"{len(range(*axis.part(place.rows)))}"
                    )
            return wrapped(x, self._dims.axes, places)

        return image


def make_image_loader(
    config: ParallelConfig,
    context: RankContext,
    dataset: SizedDataset | Iterable[Any],
    batch_size: int | None,
    **options: Any,
) -> MeshLoader | StreamLoader:
    """Return a loader of parts; an iterable dataset gives whole images, which the step cuts."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return make_loader(context.configured, dataset, batch_size, **options)
    own = check_options(batch_size, options)
    return ImageLoader(ImageDims(config, context), context.configured, dataset, own, **options)
