"""Notices a model that uses in one micro-batch what it computed from another.

One process has no micro-batches: a recurrent layer that continues from the state of the last call
would begin the second half of a batch with the state of the first.  `DecisionTrace` notes what the
first micro-batch computes.  `CarriedWatch` is active in the second, in the first step, and finds
functions that get such tensors.  It counts only if the loss depends on them, so a model may keep
what it likes, such as outputs for a plot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.decided.decisions import Decisions, DecisionTrace
from msrun.parallel.losses.notes import grad_fn_of, graph_of, node_of
from msrun.parallel.losses.terms import PartLoss
from msrun.parallel.losses.torch_calls import of_values, script_line, tensors_of
from msrun.parallel.torch_compat import eagerly


class CarriedWatch(TorchFunctionMode):
    """While it is active, uses of what another micro-batch computed are noticed.

    Args:
        trace: Of the other one.
        batch: Tensors of this one, some of which both may have.
    """

    is_watch = True

    def __init__(self, trace: DecisionTrace, batch: Iterable[Tensor]) -> None:
        super().__init__()
        self._trace = trace
        self._found: dict[Any, str] = {}
        for tensor in batch:
            trace.forget(tensor)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        kwargs = kwargs or {}
        given = tensors_of(of_values(getattr(func, "__name__", ""), args, kwargs))
        is_carried = any(not isinstance(x, Parameter) and self._trace.made(x) for x in given)
        result = func(*args, **kwargs)
        for tensor in tensors_of((result,)) if is_carried else ():
            if grad_fn_of(tensor) is None:
                self._trace.extend(tensor)
            else:
                self._found[node_of(grad_fn_of(tensor), tensor.output_nr)] = script_line()
        return result

    def problem(self, loss: Tensor) -> ModelError | None:
        """Return why `loss` is not that of a part of the batch."""
        nodes = graph_of(loss) if self._found else set()
        line = next((line for node, line in self._found.items() if node in nodes), None)
        if line is None:
            return None
        return ModelError(
            f"the loss of a micro-batch depends on what the model computed from another{line}; one "
            "process has one batch",
            hint="begin each call without state of the last one, or train without micro-batches",
        )


def uncarried(
    decisions: Decisions,
    batch: Any,
    compute: Callable[[], PartLoss],
    refuse: Callable[[ModelError | None], None],
) -> PartLoss:
    """Return the loss of a micro-batch, and `refuse` it if it needs what another one computed.

    Args:
        decisions: Of the model; after the first micro-batch of the first step it has its trace.
        batch: The micro-batch.
        compute: Returns the loss.
        refuse: Gets what is wrong, or None.
    """
    trace, decisions.trace = decisions.trace, None
    if trace is None:
        return compute()
    watch = CarriedWatch(trace, tensors_in(batch))
    with eagerly(), watch:
        loss = compute()
    refuse(watch.problem(loss.value))
    return loss
