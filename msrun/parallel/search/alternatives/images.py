"""Parts of images: which axes divide height and width, and what that costs.

The runtime computes on parts whatever keeps the dims of an image (`parallel.images`), so one walk
tells which tensors a rank has a part of: those made from an image by operators that keep its dims.
What is made by others, such as the mean over pixels, is whole.  Activations fall with the ranks;
parameters stay whole, and all ranks reduce their gradients.  So this is for models whose
activations do not fit otherwise, and is looked at only then.

Rows that a rank gets from others follow from the runtime's own arithmetic (`notation.image_parts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msrun.parallel.config import DATA_AXIS
from msrun.parallel.notation.image_parts import Window, spans
from msrun.parallel.search.alternatives.one_rank import (
    Alternative,
    Findings,
    OneRank,
    Transfer,
    fitting,
    joined,
    wires_of,
)
from msrun.parallel.search.cost.redistribution import MoveKind
from msrun.parallel.search.cost.topology import Wire
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.graph.random_ops import draw_of
from msrun.parallel.search.mesh.job_layout import divisors

_WINDOWS = {
    *("conv1d", "conv2d", "conv3d", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d"),
}
_NORMS = ("batch_norm", "group_norm", "instance_norm")
_ALONE = """
    add add_ sub sub_ mul mul_ div div_ neg relu relu_ relu6 sigmoid tanh silu gelu elu celu selu
    mish exp log sqrt rsqrt square abs pow clamp clamp_min clamp_max hardswish hardsigmoid hardtanh
    leaky_relu softplus cat concat contiguous clone to _to_copy maximum minimum where
    upsample_nearest2d upsample_bilinear2d conv_transpose1d conv_transpose2d conv_transpose3d
"""
_SUMS = """
    mean sum amax amin adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool2d var std
"""
_ON_PARTS = {*_ALONE.split(), *_SUMS.split(), *_WINDOWS, *_NORMS}
_CHANNELS = 2  # dims before those of an image: samples and channels
_NUMBER = 4  # bytes


def image_meshes(world: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield meshes of all ranks with one or two axes that divide images, behind `dp`."""
    for data in (size for size in divisors(world) if batch % size == 0):
        rest = world // data
        for height in divisors(rest)[1:]:
            width = rest // height
            yield {DATA_AXIS: data, "h": height} | ({"w": width} if width > 1 else {})


def image_alternatives(alone: OneRank, mesh: Mapping[str, int], limit: float | None) -> Findings:
    """Return the division of images over the axes of a mesh beside `dp`, if there is one.

    Args:
        alone: The model, for the samples of a data-parallel rank.
        mesh: Axis -> size.
        limit: Bytes that a rank has; None is any.
    """
    walk = _ImageWalk(alone, mesh)
    if problem := walk.run():
        return Findings(None, [f"parts of images: {problem}"])
    return fitting([walk.alternative()], limit, [])


class _ImageWalk:
    """Follows images through a program.

    Args:
        alone: The program.
        mesh: Axis -> size.
    """

    def __init__(self, alone: OneRank, mesh: Mapping[str, int]) -> None:
        self._alone, self._mesh = alone, dict(mesh)
        self._program, self._values = alone.program, alone.program.values
        self._trained = self._program.trained()
        self._axes = [name for name, size in mesh.items() if name != DATA_AXIS and size > 1]
        self._images = [
            name
            for name in self._program.inputs
            if self._values[name].is_float and len(self._values[name].shape) > _CHANNELS + 1
        ]
        self._parts = set(self._images)
        self._shared: dict[str, float] = {}  # step -> the share of its work that a rank does
        self._transfers: list[Transfer] = []
        self._wires: dict[str, Wire] = wires_of(mesh, alone.setting)

    def run(self) -> str:
        """Follow the program; return why images cannot be divided, empty if they can."""
        if problem := self._problem():
            return problem
        for step in self._program.steps:
            inside = [name for name in step.inputs.values() if name in self._parts]
            if not inside:
                continue
            if step.packet not in _ON_PARTS and not self._is_small(inside):
                where = step.module or "the model"
                return f"{where} has {step.packet}, which is not known to run on parts"
            self._follow(step, inside)
        if not any(self._share(name) < 1 for name in self._parts):
            return "no image has as many rows as ranks"
        if any(name in self._parts for name in self._program.outputs):
            return "the model returns images, whose targets only a configuration can name"
        return ""

    def _problem(self) -> str:
        shapes = [self._values[name].shape for name in self._images]
        names = [*self._mesh]
        dims = min(map(len, shapes), default=0)
        sentences = {
            "the mesh has no axis beside dp": not self._axes,
            "their axes follow dp": DATA_AXIS in names[1:],
            "no input has the dims of an image": not shapes,
            "inputs have unlike numbers of dims": any(len(shape) != dims for shape in shapes),
            "the mesh has more axes than an image has dims": len(self._axes) > dims - _CHANNELS,
            "an image has fewer rows than ranks": any(
                size < ranks for shape in shapes for size, ranks in self._divided(shape)
            ),
            "random numbers differ between parts": any(
                draw_of(step) is not None for step in self._program.steps
            ),
        }
        return next((text for text, is_so in sentences.items() if is_so), "")

    def _divided(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the size of each dim that is divided, and its ranks."""
        ranks = [self._mesh[name] for name in self._axes]
        return list(zip(shape[_CHANNELS:], ranks, strict=False))

    def _share(self, name: str) -> float:
        """Return the largest share that a rank has of a value."""
        if name not in self._parts:
            return 1.0
        pairs = self._divided(self._values[name].shape)
        return math.prod(math.ceil(n / ranks) / n for n, ranks in pairs if n >= ranks)

    def _is_small(self, names: Sequence[str]) -> bool:
        """Return whether values are whole on each rank, since they have fewer rows than ranks."""
        return all(self._share(name) == 1 for name in names)

    def _follow(self, step: Step, inside: Sequence[str]) -> None:
        dims = len(self._values[inside[0]].shape)
        share = max(self._share(name) for name in inside)
        for name in step.outputs:
            if len(self._values[name].shape) == dims and not self._is_small(inside):
                self._parts.add(name)
                share = max(share, self._share(name))
        self._shared[step.name] = share
        rounds = self._alone.setting.rounds
        if step.packet in _WINDOWS:
            self._exchange(step, rounds)
        elif step.packet in _NORMS or step.packet in _SUMS.split():
            shape = self._values[inside[0]].shape
            everyone = joined(self._mesh) if len(self._mesh) > 1 else next(iter(self._mesh))
            nbytes = 2 * shape[0 if step.packet == "group_norm" else 1] * _NUMBER
            self._transfers.append(Transfer(MoveKind.REDUCE, everyone, nbytes, 2 * 2 * rounds))

    def _exchange(self, step: Step, rounds: float) -> None:
        """Add the all-to-alls that bring the rows around a part, forward and backward."""
        source = step.inputs[next(iter(step.inputs))]
        value, out = self._values[source], self._values[step.outputs[0]]
        dims = len(value.shape) - _CHANNELS
        weight = self._values.get(step.inputs.get("weight", ""))
        kernels = weight.shape[-dims:] if weight else _per_dim(step.attrs["kernel_size"], dims)
        strides = _per_dim(step.attrs.get("stride") or kernels, dims)
        dilations = _per_dim(step.attrs.get("dilation", 1), dims)
        paddings = step.attrs.get("padding", 0)
        for dim, axis in enumerate(self._axes):
            size, ranks = value.shape[_CHANNELS + dim], self._mesh[axis]
            made = out.shape[_CHANNELS + dim]
            if size < ranks or made < ranks:
                continue
            padding = dilations[dim] * (kernels[dim] - 1) // 2
            if not isinstance(paddings, str):
                padding = _per_dim(paddings, dims)[dim]
            window = Window(kernels[dim], strides[dim], padding, dilations[dim])
            rows = 0
            for own, end in zip(spans(size, ranks), spans(made, ranks), strict=True):
                first, last = window.rows(end)
                rows = max(rows, max(0, own[0] - max(0, first)) + max(0, min(size, last) - own[1]))
            others = self._share(source) / (math.ceil(size / ranks) / size)
            # `collective` counts the bytes of the full tensor, of which a rank gets this share.
            full = rows / size * value.nbytes * others * ranks**2 / (ranks - 1)
            times = rounds * (1 + (source in self._trained))
            if rows:
                self._transfers.append(Transfer(MoveKind.MOVE, axis, full, times))

    def alternative(self) -> Alternative:
        """Return the configuration, and what it costs."""
        alone = self._alone
        everyone = joined(self._mesh) if len(self._mesh) > 1 else next(iter(self._mesh))
        transfers = [*self._transfers, *alone.averaged({}, everyone)]
        work = alone.starts + sum(
            seconds * self._shared.get(name, 1.0) for name, seconds in alone.seconds.items()
        )
        memory = sum(nbytes * self._kept(name) for name, nbytes in alone.memory.items())
        costs = {"computation and update": work, **alone.moved(transfers, self._wires)}
        last = max(self._program.inputs.index(name) for name in self._images)
        data = {name: self._named(name) for name in self._program.inputs[: last + 1]}
        return Alternative(
            name="parts of images",
            config={"mesh": self._mesh, "data": data},
            seconds=sum(costs.values()),
            memory=memory,
            sent=alone.sent(transfers, self._wires),
            costs=costs,
        )

    def _named(self, name: str) -> list[str | None]:
        shape = self._values[name].shape
        dims: list[str | None] = [DATA_AXIS, *[None] * (len(shape) - 1)]
        if name in self._images:
            dims[_CHANNELS : _CHANNELS + len(self._axes)] = self._axes
        return dims

    def _kept(self, name: str) -> float:
        """Return the share of the tensors of a node that a rank keeps."""
        value = name.partition(":")[2]
        return self._share(value) if value else self._shared.get(name, 1.0)


def _per_dim(given: int | Sequence[int], dims: int) -> list[int]:
    """Return one number for each dim."""
    if isinstance(given, int):
        return [given] * dims
    return [*given] if len(given) == dims else [given[0]] * dims
