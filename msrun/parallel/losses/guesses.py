"""Where a tensor may have its samples, where no rule of `sample_dims` says it.

torch has more functions than there are rules, and others are not seen at all: of TorchScript, of
extensions, inside `torch.func.vmap` or a checkpoint.  Most keep samples in the dim where they were.
So sizes tell where the dim of samples may be; the functions that a result comes from are those
that were called with it, or, where nobody saw the call, those in the graph of autograd up to the
first tensors of which something is known.  A guess that is wrong refuses a model that is right,
and the sentence names `verify`; without a guess a model that mixes samples trains on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.torch_calls import of_values, tensors_of
from msrun.parallel.torch_compat import passes_straight

# They put values of samples that were chosen by a mask or indices to where these samples are.
PUTTING_BACK = frozenset(["__setitem__", "index_add", "index_copy", "index_put", "index_reduce"])
PUTTING_BACK |= {"masked_scatter", "scatter", "scatter_add", "scatter_reduce"}


def guess(result: Tensor, marks: Iterable[Mark], samples: int) -> Outcome:
    """Return what may be known of `result`, which was computed from tensors with `marks`.

    Args:
        result: Of a function that is not known.
        marks: Of what it got.
        samples: In this part of the batch.
    """
    marks = list(marks)
    statistic = next((mark.statistic for mark in marks if mark.statistic), "")
    if statistic and result.dim():
        return Mixture(statistic)  # the function may well not be linear
    dim = _dim_of(result.shape, {mark.dim for mark in marks if mark.dim is not None}, samples)
    if dim is None:
        return None
    orders = {mark.order for mark in marks if mark.dim is not None}
    names = dict.fromkeys(name for mark in marks for name in mark.inputs)
    order = orders.pop() if len(orders) == 1 else 0
    return Mark(dim, inputs=(*names,), is_guess=True, order=order)


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
    return [mark for x in given if (mark := call.mark(x))]


def marks_behind(tensor: Tensor, known: Callable[[Any, int], list[Mark] | None]) -> list[Mark]:
    """Return what is known of the tensors that `tensor` was computed from, each way the first.

    Args:
        tensor: With a graph.
        known: Returns what is known of an output of a node of autograd.
    """
    found: list[Mark] = []
    seen: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while waiting:
        step, output = waiting.pop()
        node = (step, output if passes_straight(step) else 0) if step is not None else None
        if node is None or node in seen:
            continue
        if (marks := known(step, output)) is not None:
            found += marks
            continue
        seen.add(node)
        given = list(step.next_functions)
        waiting += given[output : output + 1] if passes_straight(step) else given
    return found
