"""Bytes of each stage of a pipeline, from one pass of each chunk on tensors without values.

Stage s of S holds activations of min(S - s, M) micro-batches at a time (1F1B), each as many bytes
as its forward leaves; during a backward pass it also has what that takes.  torch receives into
buffers that it makes for each micro-batch of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.advise.simulate import LiveBytes, loss_of
from msrun.parallel.auto.offline_model import resized
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.config import Pipeline
from msrun.parallel.layers import recompute
from msrun.parallel.losses.batch import StepBatch, read_batch
from msrun.parallel.pipeline.border import Border
from msrun.parallel.pipeline.plan import SplitPlan, plan_split
from msrun.parallel.pipeline.recordings import Recording, Recordings
from msrun.parallel.pipeline.trace import NamedInputs


class StageBytes(NamedTuple):
    """What one stage takes.

    Args:
        params: Bytes of its trained parameters.
        fixed: Of other parameters, and buffers.
        largest: Of its largest parameter.
        saved: Of what a micro-batch leaves for its backward pass.
        activations: The most of one micro-batch, without finished gradients.
        received: Of what it gets from the stage before, for one micro-batch.
        sent: Of what it sends to the next one, for one micro-batch.
    """

    params: int
    fixed: int
    largest: int
    saved: int
    activations: int
    received: int
    sent: int


def stages_of(
    model: nn.Module,
    sample: Sequence[Any],
    samples: int,
    *,
    microbatches: int,
    count: int,
    recomputed: Sequence[str],
) -> list[StageBytes]:
    """Return what each stage of `pipeline: {stages: auto}` takes.

    Args:
        model: On the device `meta`; it stays as it is.
        sample: Inputs on the device `meta`.
        samples: Of a local batch.
        microbatches: Of a step, which divide them.
        count: Stages.
        recomputed: Modules that recompute.

    Raises:
        ModelError: The model cannot be cut so.
    """
    settings = Pipeline(stages="auto", microbatches=microbatches)
    whole = resized(sample, samples)
    by_name = whole[0] if len(whole) == 1 and isinstance(whole[0], Mapping) else whole
    plan = plan_split(model, settings, count, by_name, torch.device("cpu"))
    recordings = Recordings(plan, plan.skeleton)
    piece = resized(sample, samples // microbatches)
    inputs = _inputs(read_batch(model, [*piece, None], has_loss=True))
    modes = dict.fromkeys(plan.opened, True)
    recording = recordings.find(inputs, modes, samples // microbatches)
    if recomputed:
        recompute.apply(recordings.whole, recomputed, [], contextlib.nullcontext, {})
    passes = [
        _pass(plan, recording, inputs, chunk, is_last=chunk == count - 1) for chunk in range(count)
    ]
    borders = [sum(map(_nbytes, sent)) for sent in (*recording.borders, ())]
    found = [
        _stage(model, plan, stage, one, (borders[stage - 1] if stage else 0, borders[stage]))
        for stage, one in enumerate(passes)
    ]
    if not all(one.params for one in found):
        raise ModelError(f"{count} stages are more than the model has parts with parameters")
    return found


def _stage(
    model: nn.Module, plan: SplitPlan, stage: int, passed: tuple[int, int], borders: tuple[int, int]
) -> StageBytes:
    own = list({id(param): param for param in plan.stage_params[stage].values()}.values())
    trained = [param.nbytes for param in own if param.requires_grad]
    others = [param.nbytes for param in own if not param.requires_grad]
    names = {*plan.modules(stage), *plan.attributes(stage)}
    buffers = [
        buffer.nbytes
        for name, buffer in model.named_buffers()
        if any(name == one or name.startswith(f"{one}.") for one in names)
    ]
    return StageBytes(
        params=sum(trained),
        fixed=sum(others) + sum(buffers),
        largest=max(trained, default=0),
        saved=passed[0],
        activations=passed[1],
        received=borders[0],
        sent=borders[1],
    )


def _inputs(batch: StepBatch) -> list[Any]:
    return [*batch.inputs, NamedInputs(batch.named)] if batch.named else list(batch.inputs)


def _nbytes(border: Border) -> int:
    return int(torch.empty(border.shape, dtype=border.dtype, device="meta").nbytes)


def _pass(
    plan: SplitPlan, recording: Recording, inputs: Sequence[Any], chunk: int, *, is_last: bool
) -> tuple[int, int]:
    """Return the bytes that a forward of `chunk` leaves, and the most of forward and backward."""
    live = LiveBytes()
    received = recording.borders[chunk - 1] if chunk else ()
    meta = torch.device("meta")
    values = [*leaf_tensors(list(inputs)), *(border.empty(meta) for border in received)]
    graph = recording.programs[chunk].graph
    try:
        with plan.skeleton.running(graph, values, recording.constants) as (given, run):
            net = plan.skeleton.whole
            live.know([*net.parameters(), *net.buffers(), *given])
            hooks = [
                param.register_post_accumulate_grad_hook(lambda p: live.finished(p.grad))
                for param in net.parameters()
                if param.requires_grad
            ]
            with live.counted():
                output = run()
                ends = [loss_of(output)] if is_last else _with_gradient(output)
                saved = live.now
                torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
            for hook in hooks:
                hook.remove()
            for param in net.parameters():
                param.grad = None
    except ModelError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"a stage cannot run without values: {reason}") from error
    return saved, live.peak_without


def _with_gradient(output: Any) -> list[Tensor]:
    return [tensor for tensor in leaf_tensors([output]) if tensor.requires_grad]
