"""Functions of a model with a gradient of their own, which a trace does not show.

`torch.export` follows the forward of a `torch.autograd.Function` and drops its backward, so an
executor would differentiate the steps of the forward.  While the trace is made, tensors still have
the graph of autograd, with the function in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from msrun.parallel.torch_compat import function_of


def own_gradient(outputs: Iterable[Tensor]) -> str:
    """Return the name of a function with its own gradient that `outputs` depend on; or nothing.

    Those of torch do not count: checkpoints have the gradient of what they run.
    """
    pending = [tensor.grad_fn for tensor in outputs]
    seen = set(pending)
    while pending:
        step = pending.pop()
        if step is None:
            continue
        kind = function_of(step)
        if kind is not None and kind.__module__.partition(".")[0] != "torch":
            return str(kind.__name__)
        following = {after for after, _ in step.next_functions} - seen
        seen |= following
        pending += following
    return ""
