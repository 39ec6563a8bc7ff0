"""The likely cause of a difference between a sharded step and one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.parallel.config import ParallelConfig
from msrun.parallel.losses.batch import StepBatch, batch_size, own_loss, split_batch, tensors_in
from msrun.parallel.verify.comparison import Differences
from msrun.parallel.verify.reference import Reference

_MIXES = 1e-3


class Cause(NamedTuple):
    """Why, and what to do."""

    sentence: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One step that differs.

    Args:
        config: The configuration.
        reference: The model of one process.
        found: What differs.
        whole: The batch of all ranks.
        part: The first micro-batch of rank 0.
        loss_fn: Of the step.
        loss: Of the ranks.
        loss_hint: What to do if the loss is no mean of its parts; empty without a loss.
        may_draw: Whether random numbers may be the cause.
    """

    config: ParallelConfig
    reference: Reference
    found: Differences
    whole: StepBatch
    part: StepBatch
    loss_fn: Callable[[Any, Any], Any] | None
    loss: float
    loss_hint: str
    may_draw: bool


def find_cause(seen: Evidence) -> Cause:
    """Return the likely cause of a difference."""
    found, reference = seen.found, seen.reference
    is_split = batch_size(seen.part) < batch_size(seen.whole)
    if is_split and (mixing := _mixing_module(reference, seen.whole, seen.part)):
        return Cause(
            f"{mixing} computes from all samples of a batch, and a rank or micro-batch has a part",
            "average over ranks what it computes with all_reduce of msrun.parallel.collectives, "
            "or take a module of torch such as nn.BatchNorm2d",
        )
    factor = found.is_scaled()
    if is_split and seen.loss_hint and (_is_mean_of_parts(seen) if found.loss else factor):
        scaled = f", so gradients are {factor:.4g} times as large" if factor else ""
        return Cause(
            f"the loss of the batch is not the mean of the losses of its parts{scaled}",
            seen.loss_hint,
        )
    if found.buffers and not found.gradients and not found.loss:
        return Cause(
            f"forward writes {found.buffers[0].name} from the samples of one rank or micro-batch",
            "average it over ranks with all_reduce of msrun.parallel.collectives",
        )
    if seen.may_draw:
        return Cause(
            "the model draws random numbers, and the ranks may draw other ones",
            "verify without randomness, or with dropout: exact",
        )
    return _of_parameter(seen.config, reference, found)


def _is_mean_of_parts(seen: Evidence) -> bool:
    """Return whether the ranks have the mean of the losses that one process has for the parts."""
    count = round(batch_size(seen.whole) / batch_size(seen.part))
    loss_fn = seen.loss_fn or (lambda output, _: own_loss(output))
    try:
        parts = [StepBatch(*part) for part in split_batch(tuple(seen.whole), count)]
        losses = [seen.reference.evaluate(part, loss_fn) for part in parts]
    except Exception:  # noqa: BLE001 - the model does not compute a part alone
        return True
    gap = abs(sum(losses) / count - seen.loss)
    return bool(
        gap <= _MIXES * max(abs(seen.loss), 1.0)
        and gap < abs(seen.reference.loss.item() - seen.loss)
    )


def _of_parameter(config: ParallelConfig, reference: Reference, found: Differences) -> Cause:
    """Return the cause of a difference by what is special about the first parameter."""
    name = found.gradients[0].name if found.gradients else ""
    if name and found.gradients[0].is_between_ranks:
        return Cause(
            f"ranks have copies of {name}, and compute other gradients of it",
            "let hooks, forward and loss do the same on every rank",
        )
    if name and reference.hooked(name):
        return Cause(
            f"{name} has a gradient hook", "remove the hook, or register it after rt.shard"
        )
    others = _names(reference.model).get(name, [])
    if len(others) > 1:
        return Cause(f"{others[0]} and {others[1]} share a weight", "report this with the model")
    if config.pipeline:
        return Cause(
            "a stage runs what was traced: attributes, contexts and random numbers in forward "
            "may be frozen",
            "move what changes between steps into an input, or take another configuration",
        )
    if config.plan:
        return Cause(
            "a rule of parallel.plan shards what forward does not compute in parts",
            f"leave out the rule of {name.rpartition('.')[0]}" if name else "leave out its rules",
        )
    return Cause(
        "forward may write in place, keep a state, or depend on the rank",
        "report this with the model, if none of these is true",
    )


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a parameter, all names of it."""
    of_tensor: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        of_tensor.setdefault(id(param), []).append(name)
    return {name: names for names in of_tensor.values() for name in names}


def _mixing_module(reference: Reference, whole: StepBatch, part: StepBatch) -> str:
    """Return the first module whose output for some samples depends on the others; "" if none."""
    rows = batch_size(part)
    try:
        on_whole = _outputs(reference, whole)
        on_part = _outputs(reference, part)
    except Exception:  # noqa: BLE001 - the model does not compute the part alone, so it is unknown
        return ""
    for (name, one), (other, few) in zip(on_whole, on_part, strict=False):
        if name != other:
            return ""
        if few.shape[:1] != (rows,) or one.shape[1:] != few.shape[1:] or len(one) <= rows:
            continue
        gap, norm = (one[:rows] - few).norm(), few.norm()
        if not gap <= _MIXES * norm:
            kind = type(reference.model.get_submodule(name)).__name__
            return f"{name} ({kind})" if name else kind
    return ""


@torch.no_grad()
def _outputs(reference: Reference, batch: StepBatch) -> list[tuple[str, Tensor]]:
    """Return the first output of every module, innermost first."""
    found: list[tuple[str, Tensor]] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        tensors: Sequence[Tensor] = tensors_in(output)
        if tensors and tensors[0].dim() and tensors[0].is_floating_point():
            found.append((name, tensors[0].detach().clone()))

    named: Mapping[str, nn.Module] = dict(reference.model.named_modules())
    handles = [module.register_forward_hook(_noting(note, name)) for name, module in named.items()]
    try:
        reference.evaluate(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _noting(
    note: Callable[[str, nn.Module, Any, Any], None], name: str
) -> Callable[[nn.Module, Any, Any], None]:
    return partial(note, name)
