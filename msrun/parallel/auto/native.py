"""A model under a plan that the runtime executes by itself: its configuration, and its means.

Ranks of the data axis compute means over their own samples; the plan, like one process, has means
over all samples.  The two differ where ranks have different numbers of targets that count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from msrun.parallel.auto.tracing.function_mode import FunctionMode
from msrun.parallel.auto.tracing.trace import Traced
from msrun.parallel.config import ParallelConfig, Pipeline
from msrun.parallel.local import full_tensor
from msrun.parallel.search.graph.program import Step
from msrun.parallel.search.plan.lowering import Lowering

_BY_CLASS = (functional.cross_entropy, functional.nll_loss)


def configuration(
    config: ParallelConfig,
    mesh: dict[str, int],
    lowering: Lowering,
    microbatches: int,
    pipeline: Pipeline | None = None,
) -> ParallelConfig:
    """Return the configuration with which the runtime executes a plan of mode auto."""
    return msgspec.structs.replace(
        config,
        mode=None,
        mesh=mesh,
        search=None,
        memory=None,
        topology=None,
        plan=lowering.rules,
        optimizer=lowering.optimizer,
        accumulate=1 if pipeline else microbatches,
        pipeline=pipeline,
        dropout="local",
    )


def return_means(
    model: nn.Module, traced: Traced, lowering: Lowering, group: dist.ProcessGroup
) -> None:
    """Make `model` return means over the samples of all ranks of `group`, in place.

    Gradients stay those of each rank's share; their mean over the ranks is right.
    """
    losses = _CountedLosses(group)
    mean = partial(_mean, group=group)
    model.forward = partial(_run, losses, traced, lowering.means, mean, model.forward)


def loss_sum(step: Step, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """Return the sum of the losses by class that `step` computes the mean of."""
    if step.packet == "cross_entropy_loss":
        return functional.cross_entropy(
            logits,
            target,
            label_smoothing=float(step.attrs.get("label_smoothing", 0.0)),
            ignore_index=ignored,
            reduction="sum",
        )
    return functional.nll_loss(logits, target, ignore_index=ignored, reduction="sum")


def _run(
    losses: _CountedLosses,
    traced: Traced,
    means: Collection[int],
    mean: Callable[[Tensor], Tensor],
    forward: Callable[..., Any],
    /,  # names of arguments are the model's
    *args: Any,
    **kwargs: Any,
) -> Any:
    with losses:
        output = forward(*args, **kwargs)
    return traced.changed(output, means, mean)


def _mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of `x` over the ranks, with the gradient of this rank's share."""
    x = full_tensor(x)
    own = x.detach()
    total = own.clone()
    dist.all_reduce(total, group=group)
    return x + (total / group.size() - own)


class _CountedLosses(FunctionMode):
    """While it is active, mean losses by class are shares of the mean over all ranks' targets.

    Args:
        group: Ranks that have the targets.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `function`; see the class."""
        if function in _BY_CLASS and _is_mean(kwargs) and not args[1].is_floating_point():
            return self._share(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _share(
        self, func: Callable[..., Tensor], logits: Tensor, target: Tensor, **options: Any
    ) -> Tensor:
        """Return the sum of this rank's losses over the mean number of targets that count."""
        count = (full_tensor(target) != options.get("ignore_index", -100)).sum().to(logits.dtype)
        dist.all_reduce(count, group=self._group)
        options |= {"size_average": None, "reduce": None, "reduction": "sum"}
        mean = count / self._group.size()
        share: Tensor = func(logits, target, **options) / mean
        return share


def _is_mean(options: dict[str, Any]) -> bool:
    """Return whether a loss is a mean, by its arguments or the deprecated ones."""
    old = [options.get(key) for key in ("size_average", "reduce")]
    return options.get("reduction", "mean") == "mean" if old == [None, None] else False not in old
