"""A copy of the model as it was before `rt.shard`, which computes a step as one process would.

Rank 0 alone has it.  It takes weights, buffers, modes and plain attributes from the sharded model
at each step, so it has what `rt.load` and the script changed after `rt.shard`.

The other ranks wait meanwhile, so a collective would wait for ever.  Every operator is seen, and a
collective raises instead; `rt.gather` returns the whole batch (`BatchWeight.is_whole`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import MsrunError
from msrun.parallel import torch_compat
from msrun.parallel.data_parallel.parameter_hooks import of_script
from msrun.parallel.losses.batch import StepBatch, map_leaves, own_loss
from msrun.parallel.sharded_model import ShardedModel
from msrun.parallel.verify.randomness import GeneratorStates
from msrun.parallel.verify.script_changes import PLAIN, OfStage, ScriptChanges

_LETTERS = 200


class CannotRunError(Exception):
    """One process cannot compute this step."""


class Reference:
    """A model as one process has it.

    Args:
        model: The model before `rt.shard`.

    Attributes:
        model: The copy; None if it cannot be copied.
        problem: Why it cannot; empty if it was.
        loss: Of the last run.
        state: Random generators before the last run.
        has_drawn: Whether the last run drew random numbers.
        dtypes: Types in which the runs computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copy: nn.Module | None = None
        self.problem = ""
        self.loss = torch.zeros(())
        self.has_drawn = False
        self.dtypes: set[torch.dtype] = set()
        self._before: dict[str, Tensor] = {}
        self._hooks = {name: of_script(param) for name, param in model.named_parameters()}
        try:
            self._copy = copy.deepcopy(model)
        except Exception as error:  # noqa: BLE001 - whatever a model does when it is copied
            self.problem = f"{type(model).__name__} cannot be copied: {first_line(error)}"
            return
        pairs = zip(model.parameters(), self._copy.parameters(), strict=True)
        for old, new in pairs:
            vars(new).update(vars(old))

    @property
    def model(self) -> nn.Module:
        """The copy."""
        if self._copy is None:
            raise CannotRunError(self.problem)
        return self._copy

    def prepare(
        self,
        sharded: ShardedModel,
        changes: ScriptChanges,
        of_others: OfStage,
        device: torch.device,
    ) -> None:
        """Take everything but tensors from the sharded model, and give all tensors memory.

        Args:
            sharded: The model.
            changes: Of the script since `rt.shard`.
            of_others: Those in other stages.
            device: Of this rank.

        Raises:
            CannotRunError: Other stages have what the copy needs.
        """
        model = self.model
        give_memory(model, device)
        model.to(device)
        model.training = sharded.model().training
        if sharded.is_pipeline:
            model.train(model.training)
        take_attributes(model, sharded.model())
        changes.hand_on(sharded.model(), model)
        if of_others.hooked:
            raise CannotRunError(
                f"the script changed the hooks of {of_others.hooked[0]} after rt.shard, and rank 0 "
                "has another stage (register them before rt.shard)"
            )
        for name, module in model.named_modules():
            vars(module).update(of_others.values.get(name, {}))
        params = dict(model.named_parameters())
        for name, param in sharded.model().named_parameters():
            if name in params:
                params[name].requires_grad_(param.requires_grad)
                self._hooks[name] = of_script(param)

    @torch.no_grad()
    def take(self, name: str, value: Tensor) -> None:
        """Give a parameter or buffer its value; names that the model lacks are left out."""
        holder, _, key = name.rpartition(".")
        try:
            module = self.model.get_submodule(holder)
        except AttributeError:
            return
        tensor = getattr(module, key, None)
        if not isinstance(tensor, Tensor):
            return
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            tensor.copy_(value)
        elif not isinstance(tensor, Parameter):
            setattr(module, key, value.to(tensor.device, copy=True))

    def keep_buffers(self) -> None:
        """Begin each run with the buffers of now."""
        self._before = {name: b.clone() for name, b in self.model.named_buffers()}

    def run(
        self, loss_fn: Callable[[Any, Any], Any] | None, batch: StepBatch, device: torch.device
    ) -> None:
        """Compute loss and gradients of `batch`; random generators continue as if it had not.

        Raises:
            CannotRunError: One process cannot.
        """
        model = self.model
        model.zero_grad(set_to_none=True)
        for name, value in self._before.items():
            self.take(name, value)
        state = GeneratorStates(device)
        try:
            with self._hooked(), alone(self.dtypes), torch.enable_grad():
                self.loss = _loss(model, loss_fn, batch)
                if self.loss.requires_grad:
                    self.loss.backward()
        except torch.OutOfMemoryError:
            raise
        except MsrunError as error:
            raise CannotRunError(error.message) from None
        except CannotRunError:
            raise
        except Exception as error:  # noqa: BLE001 - of the script's model and loss
            raise CannotRunError(f"one process cannot compute it: {first_line(error)}") from None
        finally:
            self.has_drawn = not state.is_equal(GeneratorStates(device))
            state.restore()

    @torch.no_grad()
    def evaluate(self, batch: StepBatch, loss_fn: Callable[[Any, Any], Any] | None = None) -> Any:
        """Return the loss of `batch`, or without a loss function the output."""
        for name, value in self._before.items():
            self.take(name, value)
        state = GeneratorStates(next(self.model.parameters()).device)
        try:
            with alone(set()):
                if loss_fn is None:
                    return self.model(*batch.inputs, **batch.named)
                return _loss(self.model, loss_fn, batch).item()
        finally:
            state.restore()

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        """Have gradient hooks of the script run on the parameters of the copy."""
        handles = []
        for name, param in self.model.named_parameters():
            before, after = self._hooks.get(name, ((), ()))
            if param.requires_grad:
                handles += [param.register_hook(hook) for hook in before]
                handles += [param.register_post_accumulate_grad_hook(hook) for hook in after]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def hooked(self, name: str) -> bool:
        """Return whether the script has a gradient hook on a parameter."""
        return any(self._hooks.get(name, ()))

    def gradients(self) -> dict[str, Tensor | None]:
        """Return gradients by all names of parameters."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: param.grad for name, param in named}

    def buffers(self) -> dict[str, Tensor]:
        """Return buffers by all their names."""
        return dict(self.model.named_buffers(remove_duplicate=False))

    def doubled(self, batch: StepBatch) -> tuple[Reference, StepBatch]:
        """Return a reference that computes in float64, and its batch."""
        other = copy.copy(self)
        other._copy = copy.deepcopy(self.model).double()  # noqa: SLF001 - of this class
        other._before = {name: _wide(value) for name, value in self._before.items()}  # noqa: SLF001
        return other, StepBatch(*map_leaves(_wide, tuple(batch)))


def take_attributes(model: nn.Module, source: nn.Module) -> None:
    """Give the modules of `model` the plain attributes, such as modes, that those of `source` have.

    Modules have the same names in both; those that only one has are left out.
    """
    own = dict(model.named_modules())
    for name, module in source.named_modules():
        values = vars(own[name]) if name in own else {}
        for key, value in vars(module).items():
            if not key.startswith("_") and key in values and type(value) in PLAIN:
                setattr(own[name], key, value)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give tensors of `init_on_meta` memory; shared ones stay shared, unlike by `to_empty`."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        params = list(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = list(module.named_buffers(recurse=False, remove_duplicate=False))
        for key, tensor in (*params, *buffers):
            if not tensor.is_meta:
                continue
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device=device)
                is_param = isinstance(tensor, Parameter)
                made[id(tensor)] = Parameter(empty, tensor.requires_grad) if is_param else empty
            setattr(module, key, made[id(tensor)])


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def alone(seen: set[torch.dtype]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which collectives raise; `seen` gets the types that are computed in.

    Operators that need other ranks raise a `CannotRunError`, since these wait meanwhile.
    """
    stack = contextlib.ExitStack()
    stack.enter_context(torch_compat.without_dispatch_in_branches())
    stack.enter_context(torch_compat.dispatching(partial(_alone, seen)))
    return stack


def _alone(
    seen: set[torch.dtype],
    func: Any,
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an operator, unless other ranks would have to take part."""
    if any(issubclass(kind, Tensor) and kind.__name__ == "DTensor" for kind in types):
        raise CannotRunError("the loss or the model reads sharded parameters of rt.shard")
    if "c10d" in func.namespace:
        name = func.name().partition("::")[2].partition(".")[0].strip("_")
        raise CannotRunError(f"the loss or the model calls {name}, in which all ranks take part")
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and result.is_floating_point():
        seen.add(result.dtype)
    return result


def _loss(model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, batch: StepBatch) -> Tensor:
    output = model(*batch.inputs, **batch.named)
    loss = own_loss(output, is_whole=True) if loss_fn is None else loss_fn(output, batch.target)
    if isinstance(loss, tuple):  # its sum and count
        loss = loss[0] / loss[1]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise CannotRunError("the loss is not one number")
    return loss.reshape(())


def first_line(error: Exception) -> str:
    """Return the kind of `error` and the first line of its message."""
    text = str(error).strip().partition("\n")[0][:_LETTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
