"""Rules of the operator plan as data: which modules they match, and how these are sharded."""

from __future__ import annotations

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
        rank_list: Ranks of `device_matrix` in row-major order, which must be consecutive and
            ascending; None is 0, 1 and so on.
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
        inputs: Key `in`: axes that shard each dim of the first tensor input; None leaves the
            input as it comes.
        out: Axes that shard each dim of the output; None leaves the output as it comes.
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
    inputs: Dims | None = msgspec.field(default=None, name="in")
    out: Dims | None = None

    def __post_init__(self) -> None:
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
