"""Names functions that make one number of the batch in a way that no watch sees.

A `torch.autograd.Function` or an operator of a library may compute a mean, a sum, or a mean over
targets that count.  `LossWatch` sees functions of torch, and not these; but autograd has a node for
each, with the shapes of its results.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

from torch import Tensor

from msrun.parallel.config import ROOT
from msrun.parallel.torch_compat import function_of, passes_straight, result_shapes

# Packages whose functions hand on what others computed.
_PASSED = ("msrun.", "torch.distributed.", "torch.nn.", "torch.utils.")


def warn_of_unknown(loss: Tensor) -> None:
    """Say which function made a loss of the batch, if it is not known what it computes."""
    if name := unknown_function(loss):
        warnings.warn(
            f"msrun: the loss comes from {name}, of which msrun does not know whether it is a mean "
            "or a sum: it counts as a mean over samples, which is wrong for a sum and for targets "
            "that do not count; return (sum, count) from the loss function to be sure, and "
            f"`{ROOT}: {{verify: first_step}}` compares the step with one process",
            stacklevel=2,
        )


def is_unseen(x: Tensor) -> bool:
    """Return whether a `torch.autograd.Function` of a script or a library computed `x`."""
    kind = function_of(x.grad_fn)
    return kind is not None and not kind.__module__.startswith(_PASSED)


def unknown_function(loss: Tensor) -> str:
    """Return the name of the function of a script that made a number, which `loss` depends on.

    Functions of numbers alone are passed by, as they follow the one that made these.
    """
    seen: set[Any] = set()
    waiting = [(loss.grad_fn, loss.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        given = list(node.next_functions)
        if passes_straight(node):
            given = given[output : output + 1]
        numbers = [pair for pair in given if pair[0] is not None and _is_number(*pair)]
        if len(numbers) < sum(step is not None for step, _ in given) and (name := _name(node)):
            return name
        waiting += numbers
    return ""


def _is_number(node: Any, output: int) -> bool:
    shapes = result_shapes(node)
    return output < len(shapes) and prod(shapes[output]) == 1


def _name(node: Any) -> str:
    """Return the name of a node's function, if it is none of torch's or ours."""
    kind = function_of(node)
    if kind is None:
        name: str = node.name()
        return name if "::" in name else ""  # of an extension in C++
    if kind.__module__.startswith(_PASSED):
        return ""
    name = kind.__name__
    if name.startswith("GeneratedBackwardFor_"):  # of torch.library
        return name.removeprefix("GeneratedBackwardFor_").removesuffix("_default")
    return name
