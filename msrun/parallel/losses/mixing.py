"""Functions of torch whose result mixes the samples of a batch before the loss is one number.

Two of a part of the batch have no counterpart in the whole one:

- Pairs: a matrix of all samples with all samples, such as similarities of a contrastive loss.
  Parts have the pairs within parts alone.
- Columns: a reduction over the dim of samples that leaves a vector.  A mean of each column is
  right in a loss that is linear in it; its square is not the mean of the squares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

_MEANS = frozenset(["mean", "nanmean"])
_SUMS = frozenset(["sum", "nansum"])
# Where other functions have their dim, among positional arguments.
_DIM_AT = {
    "norm": 2,
    "vector_norm": 2,
    "matrix_norm": 2,
    "quantile": 2,
    "nanquantile": 2,
    "normalize": 2,
    "roll": 2,
    "topk": 2,
    "kthvalue": 2,
    "renorm": 2,
}
# Their result has another value in each part of the batch if the dim is that of samples.
_OPAQUE = frozenset(
    ["std", "var", "std_mean", "var_mean", "max", "min", "amax", "amin", "aminmax", "argmax"]
)
_OPAQUE |= {"argmin", "median", "nanmedian", "mode", "prod", "logsumexp", "softmax", "log_softmax"}
_OPAQUE |= {"softmin", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"}
_OPAQUE |= {"flip", "diff", *_DIM_AT}
# Without a dim these take the last one, and these all.
_OF_LAST = frozenset(["topk", "sort", "argsort", "kthvalue", "mode", "diff"])
_OF_EVERY = frozenset(["std_mean", "var_mean", "aminmax"])
# They add up or place rows of one tensor in another by numbers, such as those of classes.
_SCATTERING = frozenset(["index_add", "index_add_", "scatter_add", "scatter_add_", "index_reduce"])
_SCATTERING |= {"index_reduce_", "scatter_reduce", "scatter_reduce_", "segment_reduce", "bincount"}
# Of a matrix with samples in its rows or columns.
_OF_ALL = frozenset(["cov", "corrcoef", "pdist", "svd", "svdvals", "qr", "pinv", "lstsq"])
_OF_ALL |= {"eigh", "eigvalsh", "eig", "eigvals", "inv", "slogdet", "cholesky", "matrix_exp"}
# Those of which `columns` says more than nothing.
_COLUMN_FUNCTIONS = _MEANS | _SUMS | _OPAQUE | _OF_ALL
_PRODUCTS = frozenset(["matmul", "mm", "__matmul__", "__rmatmul__", "inner", "einsum"])
# Of two matrices they have a value for each pair of rows.
_OF_ROWS = _PRODUCTS | {"cdist"}
# Their result takes places from an argument, and no pair of samples.
_PLACING = frozenset(["__getitem__", "expand", "expand_as", "broadcast_to", "repeat", "new_zeros"])
_PLACING |= {"gather", "index_select", "take_along_dim", "scatter", "zeros_like", "ones_like"}

Columns = Literal["", "mean", "sum", "opaque"]


def has_pairs(
    name: str,
    args: Sequence[Any],
    shape: tuple[int, ...],
    samples: int,
    is_sample: Callable[[Tensor], bool],
    *,
    in_model: bool,
) -> bool:
    """Return whether the result has a value for each pair of samples.

    Args:
        name: Of the function.
        args: What it got.
        shape: Of its result.
        samples: Samples of this part of the batch.
        is_sample: Whether a tensor is computed from samples.
        in_model: Whether the function may be of the model itself, where dims may be equal by
            chance: of products and distances only those of matrices count, of others those of
            trained values with samples in their first and in their second dim.
    """
    if shape[:2] != (samples, samples) or name in _PLACING:
        return False
    if samples == 1 and (name not in _PRODUCTS or len(shape) > 2):  # noqa: PLR2004 - a matrix
        return False
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if in_model and name in _OF_ROWS and len(shape) > 2:  # noqa: PLR2004 - a matrix
        return False
    if in_model and name not in _OF_ROWS:
        dims = {tuple(tensor.shape[:2]) for tensor in tensors if tensor.requires_grad}
        if not {(samples, 1), (1, samples)} <= dims:
            return False
    if any(tuple(tensor.shape[:2]) == (samples, samples) for tensor in tensors):
        return False  # with one sample, also a product of single numbers
    return sum(map(is_sample, tensors)) > 1


def moves_samples(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function moves the dim of samples behind a new one, as for pairs of them.

    Of one sample, pairs have the shape of the sample.
    """
    at = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if name == "unsqueeze":
        return bool(at == 0)
    first = at[0] if isinstance(at, tuple) and at else at
    return name == "__getitem__" and len(args) > 1 and first is None


def columns(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> Columns:
    """Return how a function reduces or orders the samples of its first argument.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
        samples: Samples of this part of the batch.
    """
    x = args[0] if args else kwargs.get("input")
    if name not in _COLUMN_FUNCTIONS or not isinstance(x, Tensor) or not x.dim():
        return ""
    length = len(x)
    # Rows may be tokens of all samples.
    has_tokens = samples > 1 and length > samples and length % samples == 0
    if name in _OF_ALL:
        return "opaque" if x.dim() <= 2 and samples in x.shape else ""  # noqa: PLR2004 - a matrix
    if not (length == samples or (has_tokens and name not in _SUMS)):
        return ""
    if 0 not in (dims_of(name, args, kwargs, x.dim()) or _default_dims(name, x)):
        return ""
    if name in _MEANS:
        return "mean"
    return "sum" if name in _SUMS else "opaque" if name in _OPAQUE else ""


def _default_dims(name: str, x: Tensor) -> set[int]:
    return {0} if name in _OF_EVERY else {x.dim() - 1} if name in _OF_LAST else set()


def scattered(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, samples: int
) -> Columns:
    """Return "opaque" if a function adds up samples by numbers that they have, such as classes.

    Args:
        name: Of the function.
        args: What it got.
        kwargs: What it got by name.
        result: What it returned.
        samples: Samples of this part of the batch.
    """
    if name not in _SCATTERING or not isinstance(result, Tensor) or not result.dim():
        return ""
    if name not in ("bincount", "segment_reduce"):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(dim, int) or dim % result.dim():
            return ""
    rows = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, Tensor) and arg.dim()]
    is_of_all = len(result) != samples and any(len(row) == samples for row in rows)
    return "opaque" if is_of_all else ""


def dims_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> set[int]:
    """Return the dims that a function of a tensor with `count` dims is told."""
    place = _DIM_AT.get(name, 1)
    given = args[place] if len(args) > place else None
    for key in ("dim", "dims", "axis"):
        given = kwargs.get(key, given)
    if name == "matrix_norm" and given is None:
        given = (-2, -1)
    dims = given if isinstance(given, tuple | list) else [given]
    return {dim % count for dim in dims if isinstance(dim, int) and not isinstance(dim, bool)}
