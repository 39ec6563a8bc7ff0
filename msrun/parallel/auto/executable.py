"""Whether an executor can stand in for a model's own forward: it calls no module and no hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.auto.tracing.plain_values import PlainValues
from msrun.parallel.auto.tracing.trace import Evaluation, Traced, trace
from msrun.parallel.torch_compat import count_hooks, has_own_call, hooks_of

_HINT = "choose a configuration without mode: auto, under which the model's own forward runs"


def _check(model: nn.Module, traced: Traced, *, forwards: int, stages: int) -> None:
    """Refuse a model whose forward an executor would not repeat.

    Args:
        model: The model.
        traced: Its forward.
        forwards: How often a step runs it, for one micro-batch after the other.
        stages: Of a pipeline.

    Raises:
        ModelError: There is something that only the model's own forward does.
    """
    if traced.refused:
        raise _refusal(f"a forward that {traced.refused}")
    if reason := _statistics(traced, is_whole=forwards == 1 and stages == 1):
        raise _refusal(reason)
    if traced.written and (forwards > 1 or stages > 1):
        name = next(iter(traced.written))
        raise _refusal(f"a forward that writes to buffer {name} in micro-batches or stages")
    if has_own_call(model):
        raise _refusal(f"the __call__ of {type(model).__name__}, the model itself,")
    own = hooks_of(model)
    if "forward_pre" in own:
        raise _refusal(f"the forward pre-hook of {type(model).__name__}, the model itself,")
    if "forward" in own and stages > 1:
        raise _refusal(f"the forward hook of {type(model).__name__}, the model itself, in stages")
    for name, module in model.named_modules():
        if "backward" in hooks_of(module):
            raise _refusal(f"the backward hook of {name or type(model).__name__}")


def _refusal(what: str) -> ModelError:
    return ModelError(f"parallel.mode: auto cannot run {what}", hint=_HINT)


class TracedBehaviour:
    """What must stay as it was when a model was traced.

    Args:
        model: The model, as it was traced.
        traced: Its forward in training.
        sample: What it was traced with.
        forwards: How often a step runs the forward, for one micro-batch after the other.
        stages: Of a pipeline.

    Attributes:
        evaluation: What the model does in evaluation.

    Raises:
        ModelError: There is something that only the model's own forward does.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Traced,
        sample: Sequence[Any],
        *,
        forwards: int,
        stages: int,
    ) -> None:
        _check(model, traced, forwards=forwards, stages=stages)
        self._values = PlainValues(model)
        modules = {} if stages > 1 else dict(model.named_modules())
        # The model itself is called, and runs its own hooks.  What stages hold runs none.
        self._hooks = [(name, part, count_hooks(part)) for name, part in modules.items() if name]
        self._has_stages = stages > 1
        self._modes = [(name, part, part.training) for name, part in modules.items()]
        self.evaluation = _evaluation(model, traced, sample)

    def check(self, stage: nn.Module) -> None:
        """Refuse a call whose forward would not be the one that was traced.

        Args:
            stage: What is called, which is the model itself without stages.

        Raises:
            ModelError: A plain value changed, or modules are in another mode.
        """
        self._values.check(stage)
        hooks = self._hooks
        if self._has_stages:
            hooks = [(name, part, 0) for name, part in stage.named_modules() if name]
        for name, part, count in hooks:
            if count_hooks(part) != count:
                raise _refusal(f"hooks of {name} that were registered or removed after rt.shard")
        is_training = stage.training
        if not is_training and (difference := self.evaluation.difference):
            raise ModelError(
                f"the forward does something else in evaluation ({difference}), and mode "
                "auto runs the one of training",
                hint="evaluate in another process, from a checkpoint",
            )
        for name, part, was_training in self._modes:
            if part.training != (is_training and was_training):
                now, before = (("eval", "train")[flag] for flag in (part.training, was_training))
                raise ModelError(
                    f"{name or 'the model'} was in {before} mode when mode auto traced it, and "
                    f"now is in {now} mode beside a model in {('eval', 'train')[is_training]} mode",
                    hint="set the modes of modules before rt.shard",
                )


def check_outputs(model: nn.Module, whole: Traced, batch: int, local: Callable[[], Traced]) -> None:
    """Refuse outputs of which a rank has another part than its own forward would make.

    Args:
        model: The model.
        whole: Its forward of all samples.
        batch: How many these are.
        local: Returns its forward of the samples of one rank.

    Raises:
        ModelError: An output has samples in more than its first dim, such as scores of pairs.
    """
    values = whole.program.values
    shapes = [values[name].shape for name in whole.program.outputs]
    if not any(batch in shape[1:] for shape in shapes):
        return
    other = local().program
    for shape, name in zip(shapes, other.outputs, strict=True):
        part = other.values[name].shape
        if part[1:] != shape[1:]:
            raise ModelError(
                "parallel.mode: auto gives a rank samples of the whole batch, and an output of "
                f"{type(model).__name__} has the shape {list(part)} for those of one rank and "
                f"{list(shape)} for all",
                hint="compute the loss inside of the model, or choose a configuration without "
                "mode: auto",
            )


def _evaluation(model: nn.Module, traced: Traced, sample: Sequence[Any]) -> Evaluation:
    """Return what a model does otherwise in evaluation than in training."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        return traced.evaluation(trace(model, sample))
    except ModelError as error:
        return Evaluation(error.message)
    finally:
        for part, mode in modes:
            part.training = mode


def _statistics(traced: Traced, *, is_whole: bool) -> str:
    """Return why a batch norm cannot have the statistics of one process; empty if all can."""
    for step in traced.program.steps:
        if step.packet != "batch_norm" or not step.attrs.get("training"):
            continue
        name = step.module or "the model"
        if not is_whole:
            return f"a batch norm in micro-batches or stages, as {name} has"
        running = [value for slot, value in step.inputs.items() if slot.startswith("running")]
        buffers = [traced.buffers.get(value, "") for value in running]
        if not all(buffers) or not traced.written.keys().isdisjoint(buffers):
            return f"a batch norm with statistics that the forward computes, as {name} has"
    return ""
