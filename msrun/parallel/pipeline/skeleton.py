"""A copy of a model that has shapes and no values.

Nothing of the real model runs: no statistics move, nobody communicates.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.func import functional_call
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.local import is_equal, is_image, on_parts
from msrun.parallel.losses.batch import StepBatch, input_names, map_leaves, tensors_in
from msrun.parallel.losses.sample_watch import SampleWatch
from msrun.parallel.losses.sequence_first import refusing_sequences_first
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.record.follower import Follower
from msrun.parallel.pipeline.record.guard import CopyGuard, PythonRandom
from msrun.parallel.pipeline.record.modes import closing
from msrun.parallel.pipeline.record.recorder import ForwardRecorder, where
from msrun.parallel.pipeline.record.structure import leaves, map_structure
from msrun.parallel.pipeline.record.watch import WatchedValues
from msrun.parallel.pipeline.trace import Memory, Trace, bound, program_of
from msrun.parallel.torch_compat import (
    fake_mode,
    fake_tensors,
    is_fake,
    reads_values,
    with_values,
    write_count,
)

META = torch.device("meta")

# What a skeleton does not refer to: it would keep the memory of other stages.
_UNKEPT = (nn.Module, Tensor, dict, list, tuple, set)


class Skeleton:
    """A copy of `model` without values.

    Args:
        model: Nothing in it changes.
        is_unit: Whether the module of this name is one step.
        device: Of the model.

    Attributes:
        parts: Micro-batches of a batch.
        follower: Follows recordings.
    """

    def __init__(
        self, model: nn.Module, is_unit: Callable[[str], bool], device: torch.device
    ) -> None:
        self._fake = fake_mode()
        self.device = device
        self._recorder: ForwardRecorder | None = None
        self._samples: SampleWatch | None = None
        with fake_tensors(self._fake):
            memo: dict[int, Any] = {id(p): self._parameter(p) for p in model.parameters()}
            memo |= {id(b): self._without_values(b) for b in model.buffers()}
        # A copy of a tensor that has a gradient function is refused, and is not needed.
        for module in model.modules():
            for value in vars(module).values():
                _keep_uncopied(value, memo)
        self._copy: nn.Module = copy.deepcopy(model, memo)
        # Modules and tensors would keep the memory of other stages.
        kept = [x for x in memo[id(memo)] if not isinstance(x, _UNKEPT)] if id(memo) in memo else []
        self._originals = {id(memo[id(original)]): original for original in kept}
        self._tensors = dict(_named_tensors(self._copy))
        self._opened: dict[str, nn.Module] = {}
        self.watched = WatchedValues()
        self.parts = 2
        self.follower = Follower()
        originals = dict(model.named_modules())
        for name, module in list(self._copy.named_modules()):
            if name and is_unit(name):
                self._make_unit(name, module)
            else:
                self._opened[name] = module
                self.watched.watch_module(name, originals[name], module, memo)

    @property
    def whole(self) -> nn.Module:
        """The copy."""
        return self._copy

    def record(
        self, inputs: Sequence[Any], *, counts: bool = False, samples: int | None = None
    ) -> Trace:
        """Return the steps of the forward for `inputs`, in the modes of now.

        Args:
            inputs: Their values do not matter, but those of numbers, strings and flags do.
            counts: Whether operations are counted.
            samples: In `inputs`, to notice what mixes them; None does not look.

        Raises:
            ModelError: The forward cannot be recorded.
        """
        guard = CopyGuard(self._opened)
        trace = self._record(inputs, counts=counts, samples=samples)
        if changed := guard.changed():
            # A flag that the first call sets is no matter if the next one is the same.
            once = CopyGuard(self._opened)
            try:
                again = self._record(inputs, counts=counts, samples=samples)
            except ModelError:  # it got what the first one made
                again = None
            if again is None or once.changed() or not _is_same(again, trace):
                guard.restore()
                self._refuse_change(changed)
        return trace

    def _record(self, inputs: Sequence[Any], *, counts: bool, samples: int | None) -> Trace:
        recorder = ForwardRecorder(
            self._tensors, self._originals, self.device, self._materialize, counts=counts
        )
        with fake_tensors(self._fake):
            values = map_leaves(self._without_values, list(inputs))
            for tensor in leaves(values):
                recorder.add_input(tensor)
            args, named = bound(self._copy, values)
            self._recorder = recorder
            states = PythonRandom()
            watch = None if samples is None else self._watch(args, named, samples, inputs)
            self._samples = watch
            first: AbstractContextManager[None] = nullcontext()
            if watch:
                first = refusing_sequences_first(self._copy, watch)
            around = self.follower.around_recording(tensors_in(values))
            in_recording = self.follower.in_recording()
            finding = self.watched.finding(recorder.note)
            try:
                with first, watch or nullcontext(), around, finding, recorder, in_recording:
                    output = self._copy.forward(*args, **named)
                self._check(self.watched.changed(), states.changed())
                recorder.finish(output)
                known = watch.known(tensors_in(output)) if watch else ()
            except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
                raise recorder.refusal or self._refusal(error) from None
            finally:
                self._recorder = self._samples = None
        return Trace(
            recorder.graph,
            (),
            recorder.constants,
            recorder.values,
            recorder.flops,
            Memory(recorder.memory, recorder.writes),
            recorder.outside,
            known,
        )

    def _watch(
        self, args: Sequence[Any], named: Mapping[str, Any], samples: int, inputs: Sequence[Any]
    ) -> SampleWatch:
        """Return a watch of the forward for arguments, which stand for `inputs`."""
        names = input_names(self._copy, StepBatch(*bound(self._copy, inputs), None))
        given = StepBatch(args, named, None)
        watch = SampleWatch(given, samples, names=names, parts=self.parts)
        watch.numbers.is_alone = True
        return watch

    def adopt(self, name: str, module: nn.Module, part: nn.Module) -> None:
        """Give `part`, which stands for the opened `module`, its plain attributes, and watch them.

        Scripts read and set them on the model that they train.
        """
        for key, value in vars(module).items():
            if not (key.startswith("_") or isinstance(value, _UNKEPT[:2]) or hasattr(part, key)):
                vars(part)[key] = value
        self.watched.watch_module(name, part, self._opened[name], {})

    def _check(self, value: str, drawn: str) -> None:
        """Refuse a forward that changes what no stage would change."""
        if value:
            self._refuse_change(value)
        if drawn:
            raise ModelError(
                f"{STAGES}: the forward of {type(self._copy).__name__} draws numbers of {drawn}, "
                "and is divided",
                hint="draw in a module that has a stage, or pass the numbers as inputs",
            )

    def _refuse_change(self, name: str) -> NoReturn:
        raise ModelError(
            f"{STAGES}: the forward of {type(self._copy).__name__} sets {name}, and is divided",
            hint="count and keep in a module that has a stage",
        )

    def _refusal(self, error: Exception) -> ModelError:
        if isinstance(error, ModelError):
            return error
        problem = str(error).partition("\n")[0] or type(error).__name__
        line = where(traceback.extract_tb(error.__traceback__))
        return ModelError(
            f"{STAGES}: the forward of {type(self._copy).__name__} cannot be recorded: "
            f"{problem}{line}",
            hint="it runs once on a copy of the model, on tensors without values",
        )

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        """Put the model into training or evaluation, and each module that `modes` names.

        Modules whose mode was another from the start keep it until the model changes its own.
        """
        if self._copy.training != modes[""]:
            self._copy.train(modes[""])
        for name, module in self._copy.named_modules(remove_duplicate=False):
            if name in modes:
                module.training = modes[name]

    @contextmanager
    def running(
        self, graph: fx.Graph, inputs: Sequence[Tensor], constants: Mapping[str, Tensor]
    ) -> Iterator[tuple[list[Tensor], Callable[[], Any]]]:
        """Yield inputs without values for the chunk `graph`, and what runs it on them."""
        vars(self._copy).update(constants)
        with fake_tensors(self._fake), torch.enable_grad():
            values = [
                on_parts(x, self._without_values) if is_image(x) else self._without_values(x)
                for x in inputs
            ]
            yield values, partial(closing(program_of(self._copy, graph)), self._copy, *values)

    def run(
        self, graph: fx.Graph, inputs: Sequence[Tensor], constants: Mapping[str, Tensor]
    ) -> Sequence[Any]:
        """Return what the chunk `graph` yields for inputs, which may be parts of images.

        Raises:
            ModelError: It cannot run without values.
        """
        has_gradient = torch.is_grad_enabled()
        try:
            with (
                self.running(graph, inputs, constants) as (_, run),
                torch.set_grad_enabled(has_gradient),
                PythonRandom.unchanged(),
            ):
                found: Sequence[Any] = run()
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
            if not reads_values(error):
                raise self._refusal(error) from None
            line = where(traceback.extract_tb(error.__traceback__))
            raise ModelError(
                f"{STAGES}: what stages send of parts is found on tensors without values, and the "
                f"model reads a value{line}",
                hint="train without a pipeline, or without parts",
            ) from None
        return found

    def saved_bytes(
        self, graph: fx.Graph, inputs: Sequence[Tensor], constants: Mapping[str, Tensor]
    ) -> int:
        """Return the bytes that a run of the chunk `graph` saves for its backward.

        Parameters and buffers do not count.

        Raises:
            Exception: The model needs values to run.
        """
        # Storages are kept alive: an id must not be used again.
        saved: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[id(storage)] = storage
            return tensor

        with (
            self.running(graph, inputs, constants) as (_, run),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            run()
        for tensor in (*self._copy.parameters(), *self._copy.buffers()):
            saved.pop(id(tensor.untyped_storage()), None)
        return sum(storage.nbytes() for storage in saved.values())

    def _make_unit(self, name: str, module: nn.Module) -> None:
        """Have calls of `module` recorded as one step; instances are told apart by their class."""
        kind = type(module)

        def set_attribute(unit: nn.Module, key: str, value: Any) -> None:
            if self._recorder is not None:
                self._recorder.check_outside(f"{name}.{key}")
            kind.__setattr__(unit, key, value)

        def call(unit: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            run = partial(kind.__call__, unit)
            if (recorder := self._recorder) is None:
                return run(*args, **kwargs)
            if any(id(param) not in self._tensors for param in unit.parameters()):
                recorder.refuse_weights(name)
            return recorder.call(name, run, *args, **kwargs)

        members = {"__call__": call, "__setattr__": set_attribute, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), members)

    def _materialize(
        self, name: str, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what the unit `name` yields for zeros, without values.

        A unit may need values, for a route through experts; the shapes of its outputs rarely
        depend on them, and what is sent is checked.
        """
        if isinstance(error, ModelError):  # a refusal, also of values
            raise error
        unit = self._copy.get_submodule(name)
        recorder, self._recorder = self._recorder, None
        try:
            with with_values(), torch.random.fork_rng():
                weights = {
                    key: torch.zeros(
                        tensor.shape, dtype=tensor.dtype, device=tensor.device
                    ).requires_grad_(tensor.requires_grad)
                    for key, tensor in (*unit.named_parameters(), *unit.named_buffers())
                }
                inputs = map_structure(self._zeros, (list(args), dict(kwargs)), Tensor)
                given = [
                    (tensor, copied, write_count(copied))
                    for tensor, copied in zip(leaves((args, kwargs)), leaves(inputs), strict=True)
                ]
                value = functional_call(unit, weights, tuple(inputs[0]), inputs[1])
        except Exception:  # noqa: BLE001 - the model's own code may raise anything
            raise error from None
        finally:
            self._recorder = recorder
        for tensor, copied, count in given:
            if write_count(copied) != count:
                increment_version(tensor)
            self._copy_notes(copied, tensor)
        returned = {id(copied): tensor for tensor, copied, _ in given}
        return map_structure(
            lambda x: returned[id(x)] if id(x) in returned else self._result(x), value, Tensor
        )

    def _result(self, tensor: Tensor) -> Tensor:
        result = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return self._like_known(result, tensor)

    def _zeros(self, tensor: Tensor) -> Tensor:
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self._like_known(zeros, tensor)

    def _like_known(self, copied: Tensor, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            copied = copied.requires_grad_()
            copied = copied if tensor.is_leaf else copied.clone()  # which may be written in place
        self._copy_notes(tensor, copied)
        return copied

    def _copy_notes(self, tensor: Tensor, copied: Tensor) -> None:
        if self._samples:
            self._samples.copy_notes(tensor, copied)

    def _parameter(self, param: Parameter) -> Parameter:
        return Parameter(_like(param, self.device), requires_grad=param.requires_grad)

    def _without_values(self, tensor: Tensor) -> Tensor:
        if is_fake(tensor):
            return tensor
        device = self.device if tensor.is_meta else tensor.device
        return _like(tensor, device).requires_grad_(tensor.requires_grad)


def _is_same(one: Trace, other: Trace) -> bool:
    """Return whether two recordings have the same steps, in the same modes."""
    modes = [[node.meta.get("modes") for node in each.graph.nodes] for each in (one, other)]
    same_steps = str(one.graph) == str(other.graph) and modes[0] == modes[1]
    if not same_steps or one.constants.keys() != other.constants.keys():
        return False
    return all(is_equal(value, other.constants[name]) for name, value in one.constants.items())


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor like `tensor`, to which torch's mode then keeps no weak reference.

    With one, a parameter of `init_on_meta` could not be given memory in place.
    """
    if tensor.layout != torch.strided:
        return torch.empty_like(tensor, device=device, requires_grad=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _keep_uncopied(value: Any, memo: dict[int, Any]) -> None:
    """Add to `memo` what cannot be copied, and tensors that are neither parameters nor buffers."""
    if isinstance(value, Tensor):
        memo.setdefault(id(value), value.detach().clone())
    elif not isinstance(value, (nn.Module, dict)):
        try:
            copy.deepcopy(value, dict(memo))
        except Exception:  # noqa: BLE001 - an object may raise anything
            memo[id(value)] = value


def _named_tensors(model: nn.Module) -> Iterator[tuple[int, str]]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield id(value), f"{prefix}.{name}".lstrip(".")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield id(tensor), name
