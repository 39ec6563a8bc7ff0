"""Where the dim of samples goes in functions of torch, and which of them mix samples.

Theory of operation.  Of a tensor that is computed from the batch a `Mark` knows which dim has the
samples, alone or together with dims behind it: (samples, tokens) flattened has samples in its dim
0.  `result_of` says for one function what its result is:

- A `Mark`: every sample is still by itself.
- A `Mark` with a statistic: values depend linearly on a mean or sum over samples.  That is right in
  a loss that is linear in them: the mean over parts of the batch of `x.mean(0)` is that of the
  batch.  Any function that is not linear makes it a `Mixture`.
- A `Mixture`: the values are other ones in each part of the batch, and those of the batch do not
  follow from them.
- None: not known.

So dims follow from the functions, never from sizes that are equal.  Only of functions without a
rule, and of what was computed where nobody sees it, `guesses` says where samples may be.  Maxima of
integers are not noticed, since they crop padding, nor are maxima that are subtracted.  Samples in
another order are right until they meet those in the first one, or a part of them is taken;
`pairs.orders` knows.  Pairs of samples are the business of `mixing`, as a model may have all and
use those of a sample with itself, and pairs of rows of different inputs that of
`pairs.input_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.contractions import CONTRACTIONS, contraction
from msrun.parallel.losses.calls.extremes import along, of_extremes
from msrun.parallel.losses.calls.joined import joined
from msrun.parallel.losses.calls.marks import Known, Mark, Mixture, Outcome, Rule, TorchCall
from msrun.parallel.losses.calls.sequences import over_sequence
from msrun.parallel.losses.calls.statistics import of_statistic, of_targets, reduced
from msrun.parallel.losses.calls.whole_numbers import whole_numbers
from msrun.parallel.losses.calls.writes import written_at_index
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import dim_order, name_of, over_samples
from msrun.parallel.torch_compat import is_pointwise

__all__ = ["PROPERTIES", "Known", "has_rule", "is_elementwise", "result_of"]


def result_of(call: TorchCall) -> Outcome:
    """Return what is known of the result of `call`, some of whose arguments have a mark."""
    rule = _RULES.get(call.name) or (_of_elements if is_elementwise(call.name) else None)
    try:
        if rule is None and (mixture := over_sequence(call)):
            return mixture
        return whole_numbers(call) or (of_extremes(call, rule) if rule else None)
    except (TypeError, ValueError, IndexError, RuntimeError):
        return None  # a form of arguments, or a kind of tensor, that the rule does not know


def _own(call: TorchCall) -> Mark | None:
    return call.mark(call.x)


def _aligned(call: TorchCall) -> list[tuple[Tensor, Mark, int | None]]:
    """Return the arguments with a mark, and where in the result they have their samples."""
    found = []
    for arg in (*call.args, *call.kwargs.values()):
        if isinstance(arg, Tensor) and (mark := call.mark(arg)):
            at = None if mark.dim is None else mark.dim + call.result.dim() - arg.dim()
            found.append((arg, mark, at))
    return found


def _elementwise(call: TorchCall, *, is_linear: bool) -> Outcome:
    found = _aligned(call)
    dims = {at for _, _, at in found if at is not None}
    statistics = [mark.statistic for _, mark, _ in found if mark.statistic]
    if len(dims) > 1:  # pairs of samples
        return None
    if statistics and not is_linear and (call.result.dim() or call.result.requires_grad):
        return of_statistic(call, statistics[0])
    is_chosen = not dims and any(mark.is_chosen for _, mark, _ in found)
    return Mark(next(iter(dims), None), next(iter(statistics), ""), is_chosen=is_chosen)


def pairs_of_numbers(call: TorchCall) -> Mixture | None:
    """Return that flags or whole numbers are of pairs of samples, if they are."""
    if takes_gradients(call.result) or not is_elementwise(call.name):
        return None
    dims = {at for _, _, at in _aligned(call) if at is not None}
    return Mixture("pairs of samples" + call.line()) if len(dims) > 1 else None


# A function of each element that torch alone knows.
_of_elements = partial(_elementwise, is_linear=False)


def _product(call: TorchCall) -> Outcome:
    """A product is linear in a statistic unless the other factor is of the samples as well."""
    return _elementwise(call, is_linear=len(_aligned(call)) < 2)  # noqa: PLR2004 - two factors


def _quotient(call: TorchCall) -> Outcome:
    """As a product; and no quotient is linear in its divisor."""
    divisor = call.value(1, "other")
    by = call.mark(divisor) if isinstance(divisor, Tensor) else None
    return _elementwise(
        call,
        is_linear=not (by and by.statistic) and len(_aligned(call)) < 2,  # noqa: PLR2004
    )


def _maximum(call: TorchCall) -> Outcome:
    """`max` of one tensor, or of each element of two."""
    if isinstance(call.value(1, "other"), Tensor):
        return _elementwise(call, is_linear=False)
    return reduced(call, "extreme")


def _normalized(call: TorchCall) -> Outcome:
    """Softmax and its like: values of one dim depend on each other."""
    mark = _own(call)
    if mark is None:
        return None
    dims = dims_of(call.name, call.args, call.kwargs, call.x.dim())
    if call.name == "normalize" and not dims:
        dims = {1}
    if mark.dim is not None and mark.dim in dims:
        return call.mixture(call.name)
    if mark.statistic:
        return Mixture(mark.statistic)
    return mark if dims else None


def _moved(call: TorchCall) -> Outcome:
    """Flip and roll: each sample gets the place of another."""
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    given = call.args[1:] if call.name == "flip" else (call.value(2, "dims"),)
    named = call.kwargs.get("dims", given[0] if len(given) == 1 else given)
    dims = named if isinstance(named, tuple | list) else [named]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    if mark.dim in {dim % call.x.dim() for dim in dims}:
        return call.mixture(call.name) if call.x.is_floating_point() else None
    return mark


def _layer_norm(call: TorchCall) -> Outcome:
    mark = _own(call)
    if mark is None:
        return None
    if mark.statistic:
        return Mixture(mark.statistic)
    shape = call.value(1, "normalized_shape")
    return mark if mark.dim is not None and mark.dim < call.x.dim() - len(shape) else None


def _dense(call: TorchCall) -> Outcome:
    """A linear layer: it keeps all dims but the last."""
    mark = _own(call)
    if call.mark(call.value(1, "weight")):
        return _contracted(call)
    return None if mark is None or mark.dim == call.x.dim() - 1 else mark


def _of_samples(call: TorchCall) -> Outcome:
    """A function of each row in dim 0, such as a convolution."""
    mark = _own(call)
    if mark is None or mark.dim or call.result.dim() != call.x.dim():
        return None
    if mark.dim == 0 and len(call.result) != len(call.x):
        return None
    if mark.statistic and not call.name.startswith("conv"):
        return Mixture(mark.statistic)
    return mark if mark.dim == 0 else None


def _attention(call: TorchCall) -> Outcome:
    if mixture := over_sequence(call):
        return mixture
    mark = _own(call)
    if mark is None or mark.dim is None or mark.dim >= call.x.dim() - 2:
        return None
    return Mixture(mark.statistic) if mark.statistic else mark


def _contracted(call: TorchCall) -> Outcome:
    """A product that adds up over dims."""
    found = contraction(call.name, call.args, call.kwargs)
    if found is None:
        return None
    marks = [(mark, labels) for x, labels in found.operands if (mark := call.mark(x))]
    held = [labels[mark.dim] for mark, labels in marks if mark.dim is not None]
    dims = {found.result.index(label) for label in held if label in found.result}
    is_over = any(label not in found.result for label in held)
    statistics = [mark.statistic for mark, _ in marks if mark.statistic]
    if is_over and dims and not any(mark.is_guess for mark, _ in marks):
        return call.mixture(call.name)
    if is_over:
        name = over_samples(call.name) + call.line()
        is_known = call.result.dim() and not (dims or statistics)
        return Mark(None, name) if is_known else None
    if len(dims) > 1:  # pairs of samples
        return None
    if statistics and len(marks) > 1:
        return Mixture(statistics[0])
    return Mark(next(iter(dims), None), next(iter(statistics), ""))


def _loss(call: TorchCall) -> Outcome:
    """No loss of values and targets is linear in them."""
    for value in call.args[:2]:
        if (mark := call.mark(value)) and mark.statistic:
            return Mixture(mark.statistic, of_number=not value.dim())
    mark = _own(call)
    if mark and (mark.dim is not None or mark.is_chosen) and not call.result.dim():
        return of_targets(call, mark)
    return mark if mark and mark.dim == 0 and len(call.result) == len(call.x) else None


def _picked(call: TorchCall) -> Outcome:
    """Some samples by their values, or sums of samples by numbers that they have."""
    source, dim = call.x, call.value(2, "dim", -1)
    if call.name not in ("topk", "kthvalue"):
        source, dim = call.value(3, "source", call.kwargs.get("src")), call.value(1, "dim")
    mark = call.mark(source)
    if source is call.x and mark and mark.is_chosen and dim % source.dim() == 0:
        return call.by_position()
    if mark is None or mark.dim is None or dim % source.dim() != mark.dim:
        return None
    kept, given = call.result.shape[mark.dim : mark.dim + 1], source.shape[mark.dim]
    index = call.value(2, "index")
    if isinstance(index, Tensor) and (own := call.mark(index)) and own.dim is not None:
        return call.mixture(call.name)  # by numbers that samples have, such as classes
    # All are in another order; but of one sample, others may have been left out.
    return None if kept == (given,) and given > 1 else call.mixture(call.name)


def _of_matrices(call: TorchCall) -> Outcome:
    """A function of matrices: each value depends on all those of two dims."""
    mark = _own(call)
    if mark is None or mark.dim is None or mark.statistic:
        return Mixture(mark.statistic) if mark and mark.statistic else mark
    return mark if mark.dim < call.x.dim() - 2 else call.mixture(call.name)


def _chosen(call: TorchCall) -> Outcome:
    """Some values of a matrix of statistics."""
    mark = _own(call)
    return mark if mark and mark.dim is None else None


def _viewed(call: TorchCall) -> Outcome:
    """A view of the same values in the same order in another shape."""
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    old, new = call.x.shape, call.result.shape
    before, size = prod(old[: mark.dim]), old[mark.dim]
    for dim, length in enumerate(new):
        is_there = prod(new[:dim]) == before and length > 1
        if is_there and length % call.samples == 0 and (length % size == 0 or size % length == 0):
            return Mark(dim, mark.statistic)
    return None


def _permuted(call: TorchCall) -> Outcome:
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    order = dim_order(call.name, call.x.dim(), call.args, call.kwargs)
    return Mark(order.index(mark.dim), mark.statistic)


def _unsqueezed(call: TorchCall) -> Outcome:
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    at = call.value(1, "dim") % call.result.dim()
    return Mark(mark.dim + (at <= mark.dim), mark.statistic)


def _squeezed(call: TorchCall) -> Outcome:
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    at = call.value(1, "dim")
    if at is None:
        gone = [dim for dim, length in enumerate(call.x.shape) if length == 1]
    elif isinstance(at, int):
        gone = [at % call.x.dim()] if call.x.shape[at] == 1 else []
    else:
        return None
    if mark.dim in gone:
        return None
    return Mark(mark.dim - sum(dim < mark.dim for dim in gone), mark.statistic)


def _expanded(call: TorchCall) -> Outcome:
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    return Mark(mark.dim + call.result.dim() - call.x.dim(), mark.statistic)


def _split(call: TorchCall) -> Outcome:
    """Parts along one dim."""
    mark = _own(call)
    at = call.value(1, "dim") if call.name == "narrow" else call.value(2, "dim", 0)
    if mark and mark.is_chosen and at == 0:
        return call.by_position()
    if mark is None or mark.dim is None:
        return mark
    return mark if isinstance(at, int) and at % call.x.dim() != mark.dim else None


def _one_of_dim(call: TorchCall) -> Outcome:
    """`select` and `unbind`: the results have one dim less."""
    mark = _own(call)
    if mark and mark.is_chosen and call.value(1, "dim", 0) == 0:
        return call.by_position() if call.name == "select" else Mark(None)  # each of them
    if mark is None or mark.dim is None:
        return mark
    at = call.value(1, "dim", 0) % call.x.dim()
    return Mark(mark.dim - (at < mark.dim), mark.statistic) if at != mark.dim else None


def _gated(call: TorchCall) -> Outcome:
    """`glu`: a product of the halves of a dim."""
    mark = _own(call)
    if mark is None:
        return None
    if mark.statistic:
        return Mixture(mark.statistic)
    return mark if call.value(1, "dim", -1) % call.x.dim() != mark.dim else None


def _padded(call: TorchCall) -> Outcome:
    """More values at the ends of the last dims."""
    mark = _own(call)
    if mark is None or mark.dim is None:
        return mark
    return mark if mark.dim < call.x.dim() - len(call.value(1, "pad")) // 2 else None


def _copied(call: TorchCall) -> Outcome:
    """`copy_`: the first argument is the second one now."""
    source = call.value(1, "src")
    mark = call.mark(source) if isinstance(source, Tensor) else None
    if mark is None or mark.dim is None:
        return mark
    return Mark(mark.dim + call.result.dim() - source.dim(), mark.statistic)


def _collected(call: TorchCall) -> Outcome:
    """A collective: of a layer of a plan, unless a script adds up statistics of all ranks."""
    mark = _own(call)
    return mark if mark and not mark.statistic and call.result.shape == call.x.shape else None


def _taken(call: TorchCall) -> Outcome:
    """`x[...]` by slices, None, numbers and one `...`."""
    mark = _own(call)
    given = call.args[1] if len(call.args) > 1 else None
    items = list(given) if isinstance(given, tuple) else [given]
    if mark and mark.is_chosen and isinstance(items[0], int | slice) and items[0] != slice(None):
        return call.by_position()
    if mark and mark.dim is None and mark.statistic:
        return mark  # some values of a matrix of statistics, which samples may choose
    if mark is None or not all(item is None or type(item) in _PLAIN for item in items):
        return None
    if mark.dim is None:
        return mark
    used = sum(item is not None and item is not ... for item in items)
    rest = [slice(None)] * (call.x.dim() - used)
    at = next((index for index, item in enumerate(items) if item is ...), len(items))
    items[at : at + 1] = rest
    old = new = 0
    for item in items:
        if item is None:
            new += 1
            continue
        if old == mark.dim:
            whole = isinstance(item, slice) and call.result.shape[new] == call.x.shape[old]
            in_order = isinstance(item, slice) and (item.step or 1) > 0
            return Mark(new, mark.statistic) if whole and in_order else None
        old += 1
        new += not isinstance(item, int)
    return None


_PLAIN = (int, slice, type(...))
_SPARSE = "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_dense coalesce"
_BROADCASTING = (_elementwise, _product, _quotient)


def _rules() -> dict[str, Rule]:
    """Return the rule of each function that is known."""
    found: dict[str, Rule] = {}

    def add(rule: Rule, names: str) -> None:
        found.update(dict.fromkeys(names.split(), rule))

    linear, curved = (partial(_elementwise, is_linear=flag) for flag in (True, False))
    signed = "sub subtract __sub__ __rsub__ __isub__ rsub neg real imag lerp"
    dropped = "dropout dropout1d dropout2d dropout3d where masked_fill"
    kept = "to float double half bfloat16 long int type type_as clone contiguous detach cpu cuda"
    add(linear, f"add __add__ __radd__ __iadd__ __neg__ negative {signed} {kept} {dropped}")
    add(_product, "mul multiply __mul__ __rmul__ __imul__")
    add(_quotient, "div divide true_divide __truediv__ __itruediv__")
    # Of others torch says that they are pointwise.
    activations = "logsigmoid hardswish softsign tanhshrink prelu absolute complex polar"
    compared = "__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __and__ __or__ __xor__ __invert__ bool"
    add(curved, f"__pow__ __ipow__ __abs__ __rtruediv__ __mod__ {compared} {activations}")
    add(partial(reduced, kind="mean"), "mean nanmean")
    add(partial(reduced, kind="sum"), "sum nansum")
    opaque = "std var std_mean var_mean norm vector_norm matrix_norm logsumexp prod quantile mode"
    add(partial(reduced, kind="opaque"), f"{opaque} median nanmedian nanquantile")
    add(_maximum, "max min amax amin aminmax")
    add(along, "sort msort cumsum cumprod logcumsumexp cummax cummin diff")
    add(_picked, "topk kthvalue index_add scatter_add scatter_reduce index_reduce")
    add(_normalized, "softmax log_softmax normalize")
    add(_moved, "flip roll")
    add(_layer_norm, "layer_norm rms_norm")
    pooled = "max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d"
    add(_of_samples, f"conv1d conv2d conv3d group_norm instance_norm batch_norm {pooled}")
    add(_own, f"embedding one_hot view_as_real view_as_complex {_SPARSE}")
    add(_contracted, " ".join(CONTRACTIONS))
    binary = "binary_cross_entropy binary_cross_entropy_with_logits gaussian_nll_loss"
    add(_loss, f"cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div {binary}")
    solved = "svd svdvals qr pinv lstsq eigh eigvalsh eig eigvals inv slogdet logdet det cholesky"
    add(_of_matrices, f"cov corrcoef pdist {solved} matrix_exp matrix_power")
    add(_chosen, "diagonal triu tril trace diag")
    add(_viewed, "view reshape flatten unflatten view_as reshape_as")
    add(
        _permuted,
        "permute transpose swapaxes swapdims t T mT H mH numpy_T adjoint movedim moveaxis",
    )
    add(_expanded, "expand expand_as broadcast_to")
    add(joined, "cat concat concatenate stack")
    add(_split, "chunk split tensor_split narrow")
    add(_one_of_dim, "select unbind")
    add(_collected, "all_reduce wait_tensor _wrap_tensor_autograd.default")
    return found | {
        "linear": _dense,
        "unsqueeze": _unsqueezed,
        "squeeze": _squeezed,
        "__getitem__": _taken,
        "__setitem__": written_at_index,
        "glu": _gated,
        "pad": _padded,
        "copy": _copied,
        "scaled_dot_product_attention": _attention,
    }


_RULES = _rules()
_ELEMENTWISE = {key for key, rule in _RULES.items() if getattr(rule, "func", rule) in _BROADCASTING}


def is_elementwise(name: str) -> bool:
    """Return whether a function computes each element of its result from one of each argument."""
    if name in _ELEMENTWISE or name in _RULES:
        return name in _ELEMENTWISE
    return is_pointwise(name)


def has_rule(name: str) -> bool:
    """Return whether it is known what a function does with samples."""
    return name in _RULES or is_elementwise(name)


# What attributes of tensors are, as functions.
PROPERTIES: Mapping[Any, str] = {
    getattr(torch.Tensor, name).__get__: name for name in ("T", "mT", "H", "mH", "real", "imag")
}


def plain_name(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, also of one that writes in place."""
    name = PROPERTIES.get(func) or name_of(func)
    return name if name.endswith("__") else name.removesuffix("_")
