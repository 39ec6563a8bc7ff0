"""Where a tensor may have its samples, where no rule of `sample_dims` says it.

torch has more functions than there are rules, and others are not seen at all: of TorchScript, of
extensions, inside `torch.func.vmap` or a checkpoint.  Most keep samples in the dim where they were.
So sizes tell where the dim of samples may be; the functions that a result comes from are those
that were called with it, or, where nobody saw the call, those in the graph of autograd up to the
first tensors of which something is known.  A guess that is wrong refuses a model that is right,
and the sentence names `verify`; without a guess a model that mixes samples trains on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.notes import PASSING, grad_fn_of
from msrun.parallel.losses.torch_calls import of_values, tensors_of
from msrun.parallel.torch_compat import function_of, passes_straight

# Their result has values of their first argument in another form, or some of them.
_MOVING = frozenset(["repeat", "tile", "repeat_interleave", "__get__"])  # as of `x.data`
_MOVING |= {"index_select", "gather", "take_along_dim", "unfold", "ravel", "rot90", "diag_embed"}
_MOVING |= {"hstack", "vstack", "dstack", "column_stack", "row_stack"}
_REPEATING = frozenset(["repeat", "tile"])
# They put values of samples that were chosen by a mask or indices to where these samples are.
PUTTING_BACK = frozenset(["__setitem__", "index_add", "index_copy", "index_put", "index_reduce"])
PUTTING_BACK |= {"masked_scatter", "scatter", "scatter_add", "scatter_reduce"}


def guess(result: Tensor, marks: Sequence[Mark], samples: int, name: str = "") -> Outcome:
    """Return what may be known of `result`, which was computed from tensors with `marks`.

    Args:
        result: Of a function that is not known.
        marks: Of what it got.
        samples: In this part of the batch.
        name: Of the function, if it was seen.
    """
    statistic = next((mark.statistic for mark in marks if mark.statistic), "")
    if statistic and name not in _MOVING:
        return Mixture(statistic)  # the function may well not be linear
    before = {mark.dim for mark in marks if mark.dim is not None}
    if name in _REPEATING and any(result.shape[dim] > samples for dim in before):
        return Mark(None)  # the batch several times: its samples are no longer side by side
    dim = _dim_of(result.shape, before, samples)
    if dim is None:
        return Mark(None, statistic) if statistic else None
    orders = {mark.order for mark in marks if mark.dim is not None}
    names = dict.fromkeys(name for mark in marks for name in mark.inputs)
    order = orders.pop() if len(orders) == 1 else 0
    return Mark(dim, statistic, inputs=(*names,), is_guess=True, order=order)


def _dim_of(shape: Sequence[int], before: set[int], samples: int) -> int | None:
    """Return where the samples are that were in the dims `before`."""
    kept = [dim for dim in before if shape[dim : dim + 1] and shape[dim] % samples == 0]
    if kept:  # each sample once, or several rows of each
        return min(kept)
    fitting = [dim for dim, length in enumerate(shape) if length == samples]
    return fitting[0] if before and samples > 1 and len(fitting) == 1 else None


def marks_of_values(call: TorchCall) -> list[Mark]:
    """Return what is known of the tensors whose values the result of `call` has."""
    given = tensors_of(of_values(call.name, call.args, call.kwargs))
    marks = [mark for x in given if (mark := call.mark(x))]
    # Gradients by samples are those of each; `own_gradients` knows which are others in parts.
    return [mark._replace(statistic="") for mark in marks] if call.name == "grad" else marks


def marks_behind(tensor: Tensor, known: Callable[[Any, int], list[Mark] | None]) -> list[Mark]:
    """Return what is known of the tensors that `tensor` was computed from, each way the first.

    Nothing is known of what came from other ranks: rows that were exchanged, statistics of all.

    Args:
        tensor: With a graph.
        known: Returns what is known of an output of a node of autograd.
    """
    found: list[Mark] = []
    seen: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = [(grad_fn_of(tensor), tensor.output_nr)]
    while waiting:
        step, output = waiting.pop()
        if step is None:
            continue
        if (marks := known(step, output)) is not None:
            found += marks
            continue
        is_straight = passes_straight(step)
        node = (step, output if is_straight else 0)
        if node in seen or _is_of_ranks(step):
            continue
        seen.add(node)
        given = step.next_functions
        waiting += given[output : output + 1] if is_straight else given
    return found


def _is_of_ranks(step: Any) -> bool:
    """Return whether a node of autograd is of a function of ours or of a collective."""
    if passes_straight(step) or step.name() in PASSING:
        return False
    kind = function_of(step)
    is_own = kind is not None and kind.__module__.startswith(("msrun.", "torch.distributed."))
    return is_own or "c10d" in step.name()
