"""Rules of the operator plan as data: which modules they match, and how these are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from msrun.parallel.settings.grids import grid_problem
from msrun.parallel.settings.section import ConfigSection
from msrun.parallel.settings.section import at_least as _at_least

# The axis over which ranks have consecutive tokens of each sequence.
CONTEXT_AXIS = "cp"

# In a list of dims: as many unsharded dims as the tensor has beyond those that are listed.
UNSHARDED_DIMS = "..."

Dim = str | list[str] | None
Dims = list[Dim]
# `in` and `out`: dims of one tensor, or of several by position or by name.  A list of lists has one
# for each position; where it could also be dims of one tensor, as `[[x, y], null]` is, it is those.
TensorAxes = (
    Sequence[str | Sequence[str | Sequence[str] | None] | None]
    | Mapping[str | int, Sequence[str | Sequence[str] | None] | None]
)
Style = Literal[
    "colwise",
    "rowwise",
    "sequence",
    "embedding",
    "vocab",
    "experts",
    "context",
    "2d",
    "2.5d",
    "3d",
]


class LayoutRule(ConfigSection, frozen=True, kw_only=True):
    """A rule in MindSpore's `Layout` notation, which names the devices by aliases of its own.

    One of `params`, `in` and `out` must be given.

    Args:
        device_matrix: Sizes of the device axes, the slowest-varying first.
        alias_name: Names of the device axes, as many as `device_matrix` has sizes.
        rank_list: Ranks of `device_matrix` in row-major order; None is the order of the mesh.
        params: Parameter name -> aliases that shard each of its dims; `"None"` leaves a dim
            unsharded.
        inputs: Key `in`: aliases that shard each dim of the first positional input; None leaves
            the input as it comes.
        out: Aliases that shard each dim of the output; None leaves the output as it comes.
        enable_nd_tp: Whether `in` and the weight are those of MindSpore's high-dimension tensor
            parallelism, which become the style `2d`, `2.5d` or `3d`.
    """

    device_matrix: list[int]
    alias_name: list[str]
    rank_list: list[int] | None = None
    params: dict[str, Dims] = {}
    inputs: Dims | None = msgspec.field(default=None, name="in")
    out: Dims | None = None
    enable_nd_tp: bool = False

    def __post_init__(self) -> None:
        if not self.params and self.inputs is None and self.out is None:
            raise ValueError("params: or in or out must be given")


class PlanRule(ConfigSection, frozen=True, kw_only=True):
    """How the modules that `match` matches shard their parameters, input and output.

    A rule has one of five forms: `style`, `strategy`, `layout`, `rows`, or any of `params`, `in`
    and `out`.  In a list of dims, each entry is null for an unsharded dim, the name of one mesh
    axis, or a list of names, the most significant first; `...` stands for as many unsharded dims as
    fit.

    Args:
        match: Pattern of module names, such as `layers.*.up`; `*` also matches dots.
        style: Name of a common sharding: `colwise`, `rowwise` and `embedding` shard the weight of
            a `Linear`, convolution or `Embedding`, `vocab` keeps logits sharded by class,
            `sequence` shards dim 1 of input and output, `experts` shards every expert of a module
            with 3-D parameters of all, and over the axis `ep` sends tokens to the ranks of experts,
            `context` computes the attention in these modules over the axis `cp`, whose ranks have
            consecutive tokens of each sequence, `2d`, `2.5d` and `3d` shard a `Linear`, or a norm
            between two, over a grid of axes.
        axis: Mesh axis of `style` or `rows`; None takes the only axis beside `dp` and `pp`.
        axes: With `2d` two mesh axes, with `2.5d` and `3d` three; the product that follows takes
            the two that shard columns in the other order.
        parts: With `colwise`: number of equal projections that follow each other in one weight,
            such as 3 for query, key and value; each is sharded, at least 1.
        kind: With `context`: `all_to_all` gives each rank all tokens of some heads, `ring` sends
            keys and values around; `auto`, the default, is the first if the axis divides the heads.
        rows: Of an embedding table, how many rows each rank of `axis` has; as many numbers as it
            has ranks.  The last dim of the ids has the fields: those of the first run of fields
            are ids of the rows of the first rank, and so on.  The output is sharded by dim 0,
            unless `out` is given.
        strategy: MindSpore's notation: into how many parts each dim of each input is split,
            weights included.
        out_strategy: With `strategy`: into how many parts each dim of the output is split; None
            derives it from `strategy`.
        layout: MindSpore's `Layout` notation.
        params: Parameter name -> axes that shard each of its dims; a parameter that is not named
            is replicated.
        inputs: Key `in`: axes that shard each dim of the first tensor input; or a mapping of names
            of arguments of `forward`, or of positions from 0, to axes, or a list of such axes by
            position.  None leaves an input as it comes.
        out: Axes that shard each dim of the output, of several the first tensor; or a mapping of
            keys, fields or positions of the outputs to axes, or a list of such axes, one for each
            output.  None leaves an output as it comes.
    """

    match: str
    style: Style | None = None
    axis: str | None = None
    axes: list[str] = []
    parts: int = 1
    kind: Literal["auto", "all_to_all", "ring"] | None = None
    rows: list[int] | None = None
    strategy: list[list[int]] | None = None
    out_strategy: list[list[int]] | None = None
    layout: LayoutRule | None = None
    params: dict[str, Dims] = {}
    inputs: TensorAxes | None = msgspec.field(default=None, name="in")
    out: TensorAxes | None = None

    def __post_init__(self) -> None:
        self._check_tensors()
        self._check_form()
        if self.axis and not self.style and self.rows is None:
            raise ValueError("axis: belongs to a style")
        if self.rows is not None and (not self.rows or min(self.rows) < 1):
            raise ValueError(f"rows: {self.rows} must have a number from 1 for each rank of axis")
        if problem := grid_problem(self.style, self.axis, self.axes):
            raise ValueError(problem)
        if self.style == "context" and self.axis not in (None, CONTEXT_AXIS):
            raise ValueError(f"axis: style context divides the axis {CONTEXT_AXIS}")
        if self.kind and self.style != "context":
            raise ValueError("kind: belongs to style context")
        _at_least(self, "parts", 1)
        if self.parts > 1 and self.style != "colwise":
            raise ValueError("parts: belongs to style colwise")
        if self.out_strategy and not self.strategy:
            raise ValueError("out_strategy: belongs to a strategy")

    def _check_tensors(self) -> None:
        """Refuse `in` and `out` that are neither for one tensor nor for several."""
        for key, name, axes in (("in", "inputs", self.inputs), ("out", "out", self.out)):
            if problem := _axes_problem(key, axes):
                raise ValueError(problem)
            if isinstance(axes, Mapping):  # positions as text, which is what JSON makes of them
                by_text = {str(place): dims for place, dims in axes.items()}
                msgspec.structs.force_setattr(self, name, by_text)
        if self.rows is not None and several_tensors(self.out):
            raise ValueError("out: of rows is one tensor (choose one list of axes)")

    def _check_form(self) -> None:
        """Refuse a rule of no form, or of several."""
        forms = {
            "style": self.style is not None,
            "strategy": self.strategy is not None,
            "layout": self.layout is not None,
            "rows": self.rows is not None,
            "params": bool(self.params)
            or self.inputs is not None
            or (self.out is not None and self.rows is None),
        }
        given = [name for name, is_given in forms.items() if is_given]
        if not given:
            raise ValueError(
                "style: or strategy, layout, rows, or params, in and out must be given"
            )
        if len(given) > 1:
            raise ValueError(f"{given[0]}: cannot be combined with {given[1]}")


def one_tensor(axes: TensorAxes | None) -> Dims | None:
    """Return the dims of the one tensor that `axes` is for; None if it is for several."""
    if axes is None or isinstance(axes, Mapping) or not all(map(_is_dim, axes)):
        return None
    return _dims(axes)


def several_tensors(axes: TensorAxes | None) -> dict[str, Dims | None]:
    """Return the dims of each tensor by its name, or by its position as digits.

    A tensor without dims stays as it comes.  It is empty for the axes of one tensor.
    """
    if axes is None or one_tensor(axes) is not None:
        return {}
    pairs = axes.items() if isinstance(axes, Mapping) else enumerate(axes)
    return {str(name): None if dims is None else _dims(dims) for name, dims in pairs}


def _axes_problem(key: str, axes: TensorAxes | None) -> str | None:
    """Return why `axes` is neither for one tensor nor for several; None if it is."""
    if isinstance(axes, Mapping):
        if not axes:
            return f"{key}: names no tensor (leave it out)"
        return next((f"{key}: {n} is no position" for n in axes if str(n)[:1] == "-"), None)
    if axes is None or one_tensor(axes) is not None:
        return None
    for index, dims in enumerate(axes):
        if isinstance(dims, str):
            return (
                f"{key}[{index}]: {dims!r} stands between lists of axes, one for each tensor "
                f"(choose [{dims}])"
            )
    return None


def _is_dim(entry: object) -> bool:
    """Return whether `entry` can be a dim of one tensor."""
    if entry is None or isinstance(entry, str):
        return True
    return isinstance(entry, Sequence) and all(
        isinstance(axis, str) and axis != UNSHARDED_DIMS for axis in entry
    )


def _dims(entries: Sequence[object]) -> Dims:
    return [
        [str(axis) for axis in entry] if isinstance(entry, list | tuple) else entry  # type: ignore[misc]
        for entry in entries
    ]


def placed_tensors(rule: PlanRule) -> Iterator[tuple[str, Dims]]:
    """Yield the path, such as `in.mask`, and the dims of each tensor that `rule` places."""
    for key, axes in (("in", rule.inputs), ("out", rule.out)):
        one = one_tensor(axes)
        if one is not None:
            yield key, one
        for name, dims in several_tensors(axes).items():
            if dims is not None:
                yield tensor_path(key, name), dims


def tensor_path(key: str, name: str) -> str:
    """Return the path of a tensor below `key`: of the name, or of the position in digits."""
    return f"{key}[{name}]" if name.isdigit() else f"{key}.{name}"
