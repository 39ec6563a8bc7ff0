"""Notations of how tensors are sharded: axis names of each dim, and MindSpore's strategies.

Ours lists axis names for each dim of a tensor: `["tp", None]`, or `[["sp", "dp"], None]` with
the most significant axis first.

MindSpore's strategy gives the number of shards of each dim of each input of an operator.  Its
device matrix has, in this order, the number of shards of every dim of the operator, where dims
that are multiplied or added with each other count once, and then the remaining devices, which
replicate the work.  `((A, B), (B, C))` of a matrix product has the device matrix (A, B, C, rest),
with ranks row-major.  So on a mesh each dim takes the axes after those of the dim before it, until
their product is its number of shards: the axes must be the smallest factors that any strategy
needs, such as 2 x 2 x 2 where one has (2, 4) and another (4, 2).  This holds for matrix products
and elementwise operators; some others of MindSpore, `Gather` among them, order their device matrix
differently, which changes the shard of a rank but no result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from msrun.errors import ConfigError, UsageError
from msrun.parallel.settings.plan_rules import Dim, Dims

REST_OF_DIMS = "..."

Strategy = Sequence[Sequence[int]]

# What modules compute: those that have a matrix, and any other.
_EQUATIONS = {"Linear": "...k,nk->...n", "Embedding": "vd,...->...d"}
_ANY_EQUATION = "...->..."

# Names of the dims that `...` stands for in an equation, the last dim being 0.
_LEADING = "9876543210"


def axes_of_dims(
    dims: Sequence[Dim], ndim: int, mesh: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each of `ndim` dims, the most significant first.

    Args:
        dims: Axis names of each dim; one `...` stands for as many replicated dims as fit.
        ndim: Dims of the tensor.
        mesh: Names of the axes there are.

    Raises:
        ConfigError: Their number is wrong, or an axis is unknown or occurs twice.
    """
    entries = list(dims)
    rests = entries.count(REST_OF_DIMS)
    if rests > 1:
        raise ConfigError(f"{shown_dims(dims)}: only one entry can be ...")
    if rests:
        at, missing = entries.index(REST_OF_DIMS), ndim - len(entries) + 1
        entries[at : at + 1] = [None] * max(missing, 0)
    if len(entries) != ndim:
        raise ConfigError(f"{shown_dims(dims)} does not fit a {ndim}-dim tensor")
    named = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries)
    seen: set[str] = set()
    for axis in (axis for axes in named for axis in axes):
        if axis not in mesh:
            raise ConfigError(
                f"{shown_dims(dims)}: axis {axis!r} is not in mesh ({', '.join(mesh)})"
            )
        if axis in seen:
            raise ConfigError(f"{shown_dims(dims)}: axis {axis!r} stands there twice")
        seen.add(axis)
    return named


def dim_of(axes: Sequence[str]) -> Dim:
    """Return `axes` as one entry of our notation."""
    return list(axes) if len(axes) > 1 else axes[0] if axes else None


def shown_dims(dims: Sequence[Dim]) -> str:
    """Return `dims` as YAML shows them: `[[sp, dp], null]`."""
    entries = [
        entry if isinstance(entry, str) else f"[{', '.join(entry)}]" if entry else "null"
        for entry in dims
    ]
    return f"[{', '.join(entries)}]"


def consecutive_axes(parts: Mapping[str, int], axes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return which axes make each number of parts: one dim after the other, and axis after axis.

    Args:
        parts: Name of a dim, for messages -> number of its parts.
        axes: Mesh axis -> size, the slowest-varying first.

    Raises:
        ConfigError: The axes do not make these numbers.
    """
    needed, there = math.prod(parts.values()), math.prod(axes.values())
    if needed > there:
        raise ConfigError(f"{needed} parts in all, and {shown_ranks(axes)}")
    left = [name for name, size in axes.items() if size > 1]
    axes_of: dict[str, list[str]] = {}
    for dim, count in parts.items():
        taken = axes_of[dim] = []
        while left and math.prod(axes[name] for name in taken) < count:
            taken.append(left.pop(0))
        if math.prod(axes[name] for name in taken) != count:
            start = f" from {taken[0]} on" if taken else ""
            raise ConfigError(
                f"no axes{start} make the {count} parts of {dim} in {shown_mesh(axes)}",
                hint="give the mesh the smallest factors as axes, such as 2 x 2 x 2 for 2 x 4 "
                "and 4 x 2",
            )
    return axes_of


def shown_mesh(axes: Mapping[str, int]) -> str:
    """Return a mesh of `axes`, for messages."""
    return f"mesh ({', '.join(f'{name} {size}' for name, size in axes.items())})"


def shown_ranks(axes: Mapping[str, int]) -> str:
    """Return a mesh of `axes` and its number of ranks, for messages."""
    if not axes:
        return "the mesh has no axis that a plan may divide over"
    return f"{shown_mesh(axes)} has {math.prod(axes.values())} ranks"


class ModuleDims(msgspec.Struct, frozen=True, kw_only=True):
    """How one module is sharded, by axis names.

    Args:
        params: Of each parameter that modules of its class can have.
        inputs: Of the first input; None leaves it as it comes.
        out: Of the output; None leaves it as it comes.
        copies: Pieces of this rank's part that are computed one after the other.
        copied_dim: Dim of input and output that `copies` cuts.
    """

    params: dict[str, Dims]
    inputs: Dims | None
    out: Dims | None
    copies: int = 1
    copied_dim: int = 0


def module_dims(
    kind: str, strategy: Strategy, axes: Mapping[str, int], *, out_strategy: Strategy | None = None
) -> ModuleDims:
    """Return what `strategy` means for a module of class `kind`.

    `Linear` is a product with a transposed weight, ((A, B), (C, B)); `Embedding` a lookup whose
    first entry is the table, ((V, D), (...)).  Any other has one input, and an output like it.
    Two entries for the input of `Linear` are for inputs of more dims too: the first is cut.

    Args:
        kind: Name of a class.
        strategy: As of `strategy_dims`.
        axes: As of `strategy_dims`.
        out_strategy: As of `strategy_dims`.

    Raises:
        ConfigError: The strategy is not one of such a module, or does not fit the mesh.
    """
    if kind not in _EQUATIONS and len(strategy) != 1:
        raise ConfigError(
            f"strategy {_shown(strategy)}: {kind} takes one entry, for its input and its output"
        )
    equation = _EQUATIONS.get(kind, _ANY_EQUATION)
    cut, out = strategy_dims(strategy, equation, axes, out_strategy=out_strategy)
    match kind:
        case "Linear":
            params: dict[str, Dims] = {"weight": cut[1], "bias": [cut[1][0]]}
            return ModuleDims(params=params, inputs=_stretched(cut[0]), out=_stretched(out))
        case "Embedding":
            return ModuleDims(params={"weight": cut[0]}, inputs=cut[1], out=out)
        case _:
            return ModuleDims(params={}, inputs=cut[0], out=out)


def check_strategy(
    strategy: Strategy, axes: Mapping[str, int] | None, *, out_strategy: Strategy | None = None
) -> None:
    """Refuse a strategy that no class of modules can have.

    Args:
        strategy: As of `module_dims`.
        axes: As of `module_dims`; None leaves the mesh out.
        out_strategy: As of `module_dims`.

    Raises:
        ConfigError: No module can have it.
    """
    where = f"strategy {_shown(strategy)}"
    of_length: dict[int, Mapping[str, str]] = {1: {"module": _ANY_EQUATION}, 2: _EQUATIONS}
    if len(strategy) not in of_length:
        kinds = " or ".join(_EQUATIONS)
        raise ConfigError(f"{where}: a module takes one entry, and {kinds} two")
    faults: dict[str, UsageError] = {}
    for kind, equation in of_length[len(strategy)].items():
        try:
            if axes is None:
                _check_parts(strategy, where)
                _merge(strategy, _letters(strategy, equation, where)[0], equation, where)
            else:
                strategy_dims(strategy, equation, axes, out_strategy=out_strategy)
        except UsageError as error:
            faults[kind] = error
        else:
            return
    first = next(iter(faults.values()))
    if len({error.message for error in faults.values()}) == 1:
        raise first
    reasons = [
        f"no {kind} ({error.message.removeprefix(f'{where}: ')})" for kind, error in faults.items()
    ]
    raise ConfigError(f"{where} is for {' and '.join(reasons)}", hint=first.hint)


def strategy_dims(
    strategy: Strategy,
    equation: str,
    axes: Mapping[str, int],
    *,
    shapes: Sequence[Sequence[int]] | None = None,
    out_strategy: Strategy | None = None,
) -> tuple[list[Dims], Dims]:
    """Return the axis names of each input and of the output of an operator.

    Args:
        strategy: Number of parts of each dim of each input.
        equation: The dims of the operator as in `torch.einsum`, such as `mk,kn->mn`.
        axes: Mesh axis -> size, the slowest-varying first.
        shapes: Of the inputs, if they are to be checked.
        out_strategy: Number of parts of the output; None takes what the inputs give.  The parts
            of what is summed can also cut a dim of the output, not the last: ((A * B, C),) for
            ((A, B), (B, C)).

    Raises:
        ConfigError: The strategy does not fit the operator, its shapes, or the mesh.
    """
    where = f"strategy {_shown(strategy)}"
    _check_parts(strategy, where)
    inputs, out_letters = _letters(strategy, equation, where)
    if shapes is not None:
        _check_shapes(strategy, shapes, where)
    names, parts = _merge(strategy, inputs, equation, where)
    try:
        taken = consecutive_axes({names[letter]: parts[letter] for letter in parts}, axes)
    except UsageError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    axes_of = {letter: taken[name] for letter, name in names.items()}
    cut: list[Dims] = [
        [
            dim_of(axes_of[letter]) if count > 1 else None
            for letter, count in zip(*pair, strict=True)
        ]
        for pair in zip(inputs, strategy, strict=True)
    ]
    out = [list(axes_of[letter]) for letter in out_letters]
    if out_strategy is not None:
        summed = [axis for letter in parts if letter not in out_letters for axis in axes_of[letter]]
        _scatter(out, summed, axes, out_strategy)
    return cut, [dim_of(dim) for dim in out]


def _stretched(dims: Dims) -> Dims:
    """Return two entries for a tensor of any number of dims."""
    if len(dims) != 2:  # noqa: PLR2004 - a matrix
        return dims
    return [REST_OF_DIMS, dims[1]] if dims[0] is None else [dims[0], REST_OF_DIMS, dims[1]]


def _check_parts(strategy: Strategy, where: str) -> None:
    for counts in strategy:
        for count in counts:
            if type(count) is not int or count < 1:
                raise ConfigError(f"{where}: {count!r} is no number of parts")


def _letters(strategy: Strategy, equation: str, where: str) -> tuple[list[str], str]:
    """Return one letter for each dim of each input and of the output."""
    written, _, out = equation.partition("->")
    terms = written.split(",")
    if len(terms) != len(strategy):
        raise ConfigError(
            f"{where}: {equation} takes {len(terms)} of such entries, not {len(strategy)}"
        )
    inputs: list[str] = []
    longest = 0
    for index, (term, counts) in enumerate(zip(terms, strategy, strict=True)):
        leading = len(counts) - len(term.replace("...", ""))
        if leading < 0 or (leading and "..." not in term):
            raise ConfigError(
                f"{where}: input {index} is {term}, which takes other than {len(counts)} numbers"
            )
        longest = max(longest, leading)
        inputs.append(term.replace("...", _LEADING[len(_LEADING) - leading :]))
    return inputs, out.replace("...", _LEADING[len(_LEADING) - longest :])


def _check_shapes(strategy: Strategy, shapes: Sequence[Sequence[int]], where: str) -> None:
    for index, (counts, shape) in enumerate(zip(strategy, shapes, strict=True)):
        if len(counts) != len(shape):
            raise ConfigError(f"{where}: input {index} is of shape {list(shape)}")
        for dim, (count, size) in enumerate(zip(counts, shape, strict=True)):
            if size % count:
                raise ConfigError(
                    f"{where}: dim {dim} of input {index}, of size {size}, "
                    f"can not be split into {count} parts"
                )


def _merge(
    strategy: Strategy, inputs: Sequence[str], equation: str, where: str
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the name of each letter, for messages, and the number of its parts."""
    names: dict[str, str] = {}
    parts: dict[str, int] = {}
    for index, (letters, counts) in enumerate(zip(inputs, strategy, strict=True)):
        for dim, (letter, count) in enumerate(zip(letters, counts, strict=True)):
            name = f"dim {dim} of input {index}"
            known = parts.setdefault(letter, count)
            names.setdefault(letter, name)
            # A dim that broadcasts has one part, or as many as the others.
            if known != count and not (letter in _LEADING and 1 in (known, count)):
                raise ConfigError(
                    f"{where}: {name} has {count} parts and {names[letter]} has {known}, "
                    f"and both are {letter} of {equation}"
                )
            parts[letter] = max(known, count)
    return names, parts


def _scatter(
    out: list[list[str]], summed: list[str], axes: Mapping[str, int], wanted: Strategy
) -> None:
    """Let the axes of summed dims shard the dim of `out` for which `wanted` asks it."""
    plain = [math.prod(axes[name] for name in dim) for dim in out]
    factor = math.prod(axes[name] for name in summed)
    choices = [plain]
    if summed:
        choices += [
            [*plain[:dim], plain[dim] * factor, *plain[dim + 1 :]] for dim in range(len(out) - 1)
        ]
    given = [list(counts) for counts in wanted]
    if len(given) != 1 or given[0] not in choices:
        names = " or ".join(_shown([choice]) for choice in choices)
        raise ConfigError(f"out_strategy {_shown(wanted)}: the inputs give {names}")
    if given[0] != plain:
        out[choices.index(given[0]) - 1] += summed


def _shown(strategy: Strategy) -> str:
    """Return `strategy` as MindSpore writes it."""
    return repr(tuple(tuple(counts) for counts in strategy))
