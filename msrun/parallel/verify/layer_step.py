"""Verification of sampled layers, for a model of which rank 0 has no memory for a copy.

Hooks record what the layers get, return and receive as gradients while the ranks compute the step.
Then, one layer after the other, the first rank of its stage gathers weights, gradients and calls,
computes them as one process would, and compares.  So a rank needs memory for one whole layer, and
for what was recorded.

Not compared: other layers, the loss, what the model computes between layers, and gradients of a
parameter that the model uses outside of its layer too, or that has a gradient hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ParallelConfig
from msrun.parallel.data_parallel.parameter_hooks import of_script
from msrun.parallel.exchange.messages import SentTensor, gather_all
from msrun.parallel.local import full_tensor, local_gradient
from msrun.parallel.rank_context import RankContext
from msrun.parallel.torch_compat import eagerly
from msrun.parallel.verify.comparison import tolerance
from msrun.parallel.verify.gather import any_rank, complete_flags, first_rank, whole
from msrun.parallel.verify.layer_record import LayerCall, LayerRecorder
from msrun.parallel.verify.layer_replay import LayerGaps, LayerState, RankCall, compare
from msrun.parallel.verify.layers import Layer, LayerSample
from msrun.parallel.verify.put_back import put_back
from msrun.parallel.verify.randomness import rates_of_dropout, without_dropout
from msrun.parallel.verify.reference import CannotRunError, take_attributes
from msrun.parallel.verify.verified_step import VerifiedStep

_NAMES_SHOWN = 3
# Functions of a tensor that compute nothing from its values.
_READERS = """
    __get__ __hash__ __repr__ __set__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point nelement numel register_hook register_post_accumulate_grad_hook
    requires_grad_ size stride untyped_storage
"""
_READING = frozenset(_READERS.split())
_HINT_OF_MIXING = (
    "average over ranks what it computes with all_reduce of msrun.parallel.collectives, or take a "
    "module of torch such as nn.BatchNorm2d"
)
_NOT_COMPARED = "the loss, and what the model computes between layers, were not compared"


class _SentCall(msgspec.Struct, frozen=True):
    """A call that one rank recorded; a tensor without shape and data stands for none."""

    inputs: list[SentTensor]
    outputs: list[SentTensor]
    of_inputs: list[SentTensor | None]
    of_outputs: list[SentTensor | None]


class LayerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison of a layer came to.

    Args:
        layer: Its name and class.
        problem: Why it was not compared; empty if it was.
        difference: What differs; empty if nothing does.
        cause: Likely cause of the difference, and what to do.
        gradients: Gradients that were compared.
        apart: Names of parameters whose gradients were not.
    """

    layer: str
    problem: str = ""
    difference: str = ""
    cause: tuple[str, str] = ("", "")
    gradients: int = 0
    apart: list[str] = []


class LayerVerifier:
    """Compares sampled layers of one model.

    Args:
        config: The configuration.
        context: This rank.
        sample: The layers, equal on all ranks.
    """

    def __init__(self, config: ParallelConfig, context: RankContext, sample: LayerSample) -> None:
        self._config, self._context, self._sample = config, context, sample

    def run(self, step: VerifiedStep, *, trains: bool) -> tuple[Tensor, list[LayerResult]]:
        """Return the loss of `step`, and how its layers compare; all ranks call it.

        Args:
            step: The step.
            trains: Whether the gradients that it leaves are those that train; else whatever it
                changes is put back.
        """
        model = step.sharded.model()
        # Ranks draw other masks than one process, so it is compared in a run without them.
        is_quiet = any_rank(self._context, flag=bool(rates_of_dropout(model)))
        if trains and not is_quiet:
            return self._compute(step)
        with put_back(model, self._context.device), without_dropout(model):
            loss, results = self._compute(step)
        if trains and not any(result.difference for result in results):
            loss = step.compute()
        return loss, results

    def sentence(self, results: Sequence[LayerResult], number: int) -> str:
        """Return what was compared and what not.

        Raises:
            ModelError: A layer is not that of one process.
        """
        if wrong := [result for result in results if result.difference]:
            # The smallest: what a layer has inside makes it wrong, too.
            result = max(wrong, key=lambda each: each.layer.partition(" (")[0].count("."))
            sentence, hint = result.cause
            others = f" (and {len(wrong) - 1} other layers)" if len(wrong) > 1 else ""
            raise ModelError(
                f"step {number} is not that of one process: layer {result.layer}: "
                f"{result.difference}{others}; likely cause: {sentence}; no weight was changed",
                hint=hint,
            )
        right = [result for result in results if not result.problem]
        left = [f"{result.layer}: {result.problem}" for result in results if result.problem]
        left += [f"{name}: {reason}" for name, reason in self._sample.left_out.items()]
        apart = [name for result in right for name in result.apart]
        parts = [f"{self._sample.reason}, so layers were compared"]
        if right:
            gradients = sum(result.gradients for result in right)
            parts[0] += (
                f": {', '.join(result.layer for result in right)}, with their outputs, {gradients} "
                "gradients of parameters, those of inputs, and buffers"
            )
        if self._sample.others:
            parts.append(f"{self._sample.others} layers like these were not")
        if left:
            parts.append(f"not compared: {_few(left)}")
        if apart:
            parts.append(f"gradients not compared: {_few(apart)}")
        return "; ".join([*parts, _NOT_COMPARED])

    def _compute(self, step: VerifiedStep) -> tuple[Tensor, list[LayerResult]]:
        model = step.sharded.model()
        # Of a pipeline, modules that no stage calls as a whole take no hook.
        own = {
            name: module
            for name, module in model.named_modules()
            if "register_forward_hook" not in vars(module)
        }
        layers = [layer for layer in self._sample.layers if layer.name in own]
        # Rank 0 of the layer gets what all data-parallel ranks recorded.
        limit = self._sample.limit // self._context.layout.size(DATA_AXIS)
        recorder = LayerRecorder(
            {layer.name: own[layer.name] for layer in layers},
            self._context.device,
            limit,
            adds=not step.sharded.is_pipeline,
        )
        uses = _OutsideUses({layer.name: own[layer.name] for layer in layers})
        self._context.batch.scale = 1.0
        with eagerly(), recorder, uses:
            loss = step.compute()
        compared = (
            self._compare(step, layer, own[layer.name], recorder, uses.found[layer.name])
            for layer in layers
        )
        results = [result for result in compared if result]
        every = gather_all(results, list[LayerResult], None, self._context.device)
        unique = {result.layer: result for each in reversed(every) for result in each}
        missing = [layer for layer in self._sample.layers if str(layer) not in unique]
        for layer in missing:
            unique[str(layer)] = LayerResult(layer=str(layer), problem="no stage has it as a whole")
        return loss, [unique[str(layer)] for layer in self._sample.layers]

    def _compare(
        self,
        step: VerifiedStep,
        layer: Layer,
        module: nn.Module,
        recorder: LayerRecorder,
        used: set[str],
    ) -> LayerResult | None:
        """Compare one layer; all ranks of the stage call it, and its first rank has the result."""
        calls = [call for call in recorder.calls[layer.name] if call.of_outputs]
        problem = self._problem(layer.name, calls, recorder)
        if problem:
            return LayerResult(layer=str(layer), problem=problem)
        apart = used | set(layer.shared) | self._not_held(step, module)
        state = self._state(layer, module, calls, apart)
        if state is None:
            return None
        dtypes = [*(value.dtype for value in state.weights.values()), *_types(calls)]

        def allowed(seen: Collection[torch.dtype]) -> float:
            # What a layer computes in less, float64 cannot tell from rounding.
            narrow = seen if torch.float64 in dtypes else ()
            return tolerance(self._config, [*dtypes, *narrow], self._context.device)

        try:
            gaps = compare(state, allowed, self._context.device)
        except (CannotRunError, torch.OutOfMemoryError) as error:
            is_known = isinstance(error, CannotRunError)
            problem = str(error) if is_known else "it does not fit this device"
            return LayerResult(layer=str(layer), problem=problem)
        return self._result(layer, gaps, calls, (len(state.gradients), apart))

    def _result(
        self,
        layer: Layer,
        gaps: LayerGaps,
        calls: Sequence[LayerCall],
        gradients: tuple[int, Collection[str]],
    ) -> LayerResult:
        """Return what the comparison came to.

        Args:
            layer: The layer.
            gaps: What differs.
            calls: Its calls.
            gradients: How many were compared, and the names of parameters whose were not.
        """
        problem = ""
        if not gaps.is_right:
            if opaque := next((call.opaque for call in calls if call.opaque), ""):
                # What it holds may come from other layers, or of other samples.
                problem = f"it computes something else with another {opaque}"
            elif gaps.mixes and not _is_clear(calls):
                problem = "which dim of its tensors has the samples is not clear"
            else:
                cause = self._cause(layer, gaps)
                return LayerResult(layer=str(layer), difference=_words(gaps), cause=cause)
        count, apart = gradients
        names = sorted(f"{layer.name}.{name}" for name in apart)
        return LayerResult(layer=str(layer), problem=problem, gradients=count, apart=names)

    def _problem(self, name: str, calls: Sequence[LayerCall], recorder: LayerRecorder) -> str:
        """Return why ranks have nothing to compare of a layer, the same on all of them."""
        [is_dropped] = complete_flags(self._context, [name in recorder.dropped])
        if is_dropped:
            return f"what it computes takes more than {self._sample.limit} bytes"
        shape = [len(calls), *(len(call.inputs) + 1000 * len(call.outputs) for call in calls)]
        key = sum((index + 1) * number for index, number in enumerate(shape))
        found = torch.tensor([key, -key], device=self._context.device)
        for axis, size in self._context.layout.axes.items():
            if axis != PIPELINE_AXIS and size > 1:
                dist.all_reduce(found, dist.ReduceOp.MIN, group=self._context.group(axis))
        if found[0] != -found[1]:
            return "ranks call it with other numbers of tensors, or other times"
        return "" if calls else "no call of it had gradients"

    def _not_held(self, step: VerifiedStep, module: nn.Module) -> set[str]:
        """Return the names of parameters whose gradients are not those of one process's backward.

        They have hooks of the script, are not reduced, or have no optimizer.
        """
        held = {id(param) for group in step.optimizer.param_groups for param in group["params"]}
        held -= {id(param) for param in step.sharded.excluded()}
        named = module.named_parameters(remove_duplicate=False)
        return {
            name
            for name, param in named
            if param.requires_grad and (id(param) not in held or any(of_script(param)))
        }

    def _state(
        self, layer: Layer, module: nn.Module, calls: Sequence[LayerCall], apart: set[str]
    ) -> LayerState | None:
        """Gather a layer to the first rank of its stage; return None on others."""
        context = self._context
        params = list(module.named_parameters(remove_duplicate=False))
        compared = [(n, p) for n, p in params if p.requires_grad and n not in apart]
        has_any = complete_flags(context, [param.grad is not None for _, param in compared])
        weights = {name: whole(context, param) for name, param in params}
        gradients: dict[str, Tensor] = {}
        for (name, param), has_gradient in zip(compared, has_any, strict=True):
            if has_gradient:
                local_gradient(param)  # completes one of which ranks hold summands
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            gradients[name] = whole(context, gradient)
        before = {name: whole(context, value) for name, value in calls[0].buffers.items()}
        after = {name: whole(context, value) for name, value in module.named_buffers()}
        ranks = self._of_ranks([_whole_call(call) for call in calls])
        if ranks is None:
            return None
        take_attributes(layer.module, module)
        for name, param in layer.module.named_parameters(remove_duplicate=False):
            param.requires_grad_(dict(params)[name].requires_grad if name in weights else False)
        return LayerState(
            module=layer.module,
            weights=weights,
            buffers=(before, after),
            gradients=gradients,
            factor=context.batch.scale / context.layout.size(DATA_AXIS),
            calls=calls,
            ranks=ranks,
            narrow=getattr(torch, self._config.optimizer.dtype or "", None),
        )

    def _of_ranks(self, own: list[RankCall]) -> list[list[RankCall]] | None:
        """Return the calls of all data-parallel ranks on the first rank of the stage, else None."""
        context = self._context
        stage = context.coordinate.get(PIPELINE_AXIS, 0)
        is_first = context.rank == first_rank(context, stage)
        if context.layout.size(DATA_AXIS) == 1:
            return [own] if is_first else None
        group = context.group(DATA_AXIS)
        if dist.get_process_group_ranks(group)[0] != first_rank(context, stage):
            return None  # these ranks have copies
        sent = [
            _SentCall(
                list(map(SentTensor.of, call.inputs)),
                list(map(SentTensor.of, call.outputs)),
                list(map(_sent, call.of_inputs)),
                list(map(_sent, call.of_outputs)),
            )
            for call in own
        ]
        every = gather_all(sent, list[_SentCall], group, context.device)
        if not is_first:
            return None

        def received(tensor: SentTensor | None) -> Any:
            return None if tensor is None else tensor.tensor().to(context.device)

        return [
            [
                RankCall(
                    *(
                        list(map(received, part))
                        for part in (call.inputs, call.outputs, call.of_inputs, call.of_outputs)
                    )
                )
                for call in calls
            ]
            for calls in every
        ]

    def _cause(self, layer: Layer, outcome: LayerGaps) -> tuple[str, str]:
        """Return the likely cause of a difference, and what to do."""
        differs = outcome.output
        if differs.buffers and not (differs.loss or differs.gradients or outcome.inputs):
            return (
                f"forward writes {differs.buffers[0].name} from the samples of one rank",
                "average it over ranks with all_reduce of msrun.parallel.collectives",
            )
        if outcome.mixes:
            return (
                f"{layer} computes from all samples of a batch, and a rank has a part",
                _HINT_OF_MIXING,
            )
        if self._config.plan:
            return (
                "a rule of parallel.plan shards what forward does not compute in parts",
                f"leave out the rules of {layer.name}",
            )
        return (
            "forward may write in place, keep a state, or depend on the rank",
            "report this with the model, if none of these is true",
        )


class _OutsideUses(TorchFunctionMode):
    """Notes parameters of layers that functions get outside of the forward of their layer.

    Args:
        layers: Modules by name.

    Attributes:
        found: Layer -> names of such parameters in it.
    """

    is_watch = True

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.found: dict[str, set[str]] = {name: set() for name in layers}
        self._layers = layers
        self._inside: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for name, module in self._layers.items():
            enter, leave = partial(self._entered, name), partial(self._left, name)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(leave))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at the arguments of a function that computes, and run it."""
        del types
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _READING and torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, Parameter):
                    self._note(value)
        return func(*args, **kwargs)

    def _note(self, param: Parameter) -> None:
        for layer, module in self._layers.items():
            if layer not in self._inside:
                named = module.named_parameters(remove_duplicate=False)
                self.found[layer] |= {name for name, own in named if own is param}

    def _entered(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside.append(name)

    def _left(self, name: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._inside.remove(name)


def _whole_call(call: LayerCall) -> RankCall:
    """Return a call with whole tensors; ranks that have parts of them call it together."""
    kept = [[call.of_inputs.get(index) for index in range(len(call.inputs))]]
    kept += [[call.of_outputs.get(index) for index in range(len(call.outputs))]]
    of_inputs, of_outputs = (
        [None if gradient is None else full_tensor(gradient) for gradient in gradients]
        for gradients in kept
    )
    return RankCall(
        [full_tensor(tensor) for tensor in call.inputs],
        [full_tensor(tensor) for tensor in call.outputs],
        of_inputs,
        of_outputs,
    )


def _sent(tensor: Tensor | None) -> SentTensor | None:
    return None if tensor is None else SentTensor.of(tensor)


def _types(calls: Sequence[LayerCall]) -> Iterator[torch.dtype]:
    """Yield the types that calls had outputs and autocast in."""
    for call in calls:
        yield from (tensor.dtype for tensor in call.outputs)
        if call.autocast:
            yield call.autocast


def _is_clear(calls: Sequence[LayerCall]) -> bool:
    """Return whether in each tensor one dim at most can be that of samples."""
    for call in calls:
        count = next((tensor.size(0) for tensor in call.inputs if tensor.dim()), 0)
        if any(list(tensor.shape).count(count) > 1 for tensor in (*call.inputs, *call.outputs)):
            return False
    return True


def _words(outcome: LayerGaps) -> str:
    """Return what differs."""
    parts = []
    if outcome.output.loss:
        parts.append(f"its output differs by {outcome.output.loss.share:.2g} of its norm")
    for what, gaps in (
        ("gradients of parameters", outcome.output.gradients),
        ("gradients of inputs", outcome.inputs.gradients),
        ("buffers", outcome.output.buffers),
    ):
        if gaps:
            parts.append(f"{what} that differ: {_few([str(gap) for gap in gaps])}")
    return "; ".join(parts)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
