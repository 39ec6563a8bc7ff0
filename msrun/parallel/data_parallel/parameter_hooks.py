"""Gradient hooks of the script on parameters: `register_hook` and the one after accumulation.

The problem.  In one process a hook gets the gradient of the global batch, complete and whole.
Autograd of a rank has less: the gradient of its own samples, of one micro-batch, or of a shard.
Under ZeRO autograd never even sees the parameter that the script holds.  A hook is any code, so a
result from a part cannot be turned into that of the whole.

What `rt.step` does.  Hooks are off during forward and backward (`suspended`).  Once gradients are
reduced, `run` calls them: with the whole gradient, which is gathered for parameters that have a
hook, and after accumulation with the parameter, as torch does.  The dicts in which torch keeps
hooks stay in place, so handles that remove hooks work.  A gradient by such a parameter that a loss
takes by itself would have its hook run at once, so `_OwnGradients` refuses it.

A plain loop calls backward itself, so hooks run inside it, too early.  The reductions then refuse
them by name (`check`), before any weight has changed.  With ZeRO torch itself runs hooks after
accumulation when they are due.

Parameters that are replaced hand their hooks on (`local.replace_parameter`).  A hook that holds
such a parameter itself would compute with the old values for ever: `check_references` refuses it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.local import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OWN = "msrun."
# Nested containers in which a hook may keep parameters.
_DEPTH_MAX = 4

Hooks = dict[int, Callable[..., Any]]


class ParameterHooks:
    """Gradient hooks on the parameters of one model after `rt.shard`.

    Args:
        model: The model.
        is_after_reduction: Parameters whose hooks after accumulation torch runs when they are due.
        can_run: Whether the model can run hooks at all.
        is_once: Whether torch runs hooks once where parts of a batch accumulate.
    """

    def __init__(
        self,
        model: nn.Module,
        is_after_reduction: Collection[Parameter] = (),
        *,
        can_run: bool = True,
        is_once: bool = False,
    ) -> None:
        self._named = list(model.named_parameters())
        self._params = [param for _, param in self._named]
        self._is_after_reduction = is_after_reduction
        self._can_run = can_run
        self._is_once = is_once
        self._due: list[tuple[str, Parameter]] = []
        self._without_scripts: list[tuple[int, ...]] = []

    def _has_none(self) -> bool:
        """Return whether the script has no hook, by their numbers alone if none came or went."""
        numbers = torch_compat.gradient_hook_numbers(self._params)
        if numbers == self._without_scripts:
            return True
        has_none = not any(any(of_script(param)) for param in self._params)
        if has_none:
            self._without_scripts = numbers
        return has_none

    def check(self) -> None:
        """Refuse hooks that autograd runs, or would have to run, on a part of a gradient.

        Raises:
            ModelError: A parameter has such a hook.
        """
        for name, param in () if self._has_none() else self._named:
            before, after = of_script(param)
            if before or (after and param not in self._is_after_reduction):
                raise ModelError(
                    f"{name} has a gradient hook, which a plain loop runs before the gradient is "
                    "reduced",
                    hint="train with rt.step, which runs hooks on reduced gradients",
                )

    def check_parts(self) -> None:
        """Refuse hooks after accumulation that one process runs after each part of a batch.

        Raises:
            ModelError: A parameter has one that runs once here.
        """
        for name, param in self._named if self._is_once else ():
            if param in self._is_after_reduction and of_script(param)[1]:
                raise ModelError(
                    f"{name} has a hook after accumulation, which ZeRO runs once for all parts of "
                    "a batch, and one process after each part",
                    hint="train with rt.step, or without rt.no_sync",
                )

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep autograd from running the hooks; `run` runs them afterwards."""
        self._due = []
        if self._has_none():
            yield
            return
        if not self._can_run:
            refuse([name for name, param in self._named if any(of_script(param))])
        taken: list[tuple[Hooks, Hooks]] = []
        run_early: dict[int, str] = {}
        for name, param in self._named:
            if not torch_compat.has_gradient_hooks(param):
                continue
            own = [(hooks, _scripts(hooks)) for hooks in torch_compat.gradient_hooks(param)]
            taken += own
            if any(found for _, found in own):
                self._due.append((name, param))
            if own[0][1]:
                run_early[id(param)] = name
        for hooks, found in taken:
            for key in found:
                del hooks[key]
        try:
            with _OwnGradients(run_early):
                yield
        finally:
            for hooks, found in taken:
                hooks.update(found)

    def run(self) -> None:
        """Run the hooks that were suspended, on the complete gradients."""
        due, self._due = self._due, []
        for name, param in due:
            if param.grad is None:
                continue
            try:
                with torch.no_grad():
                    _run(param, *of_script(param))
            except RuntimeError as error:
                if "DTensor" not in str(error):
                    raise
                raise ModelError(
                    f"the gradient hook of {name} mixes whole and sharded tensors: {error}",
                    hint="call full_tensor() of a sharded parameter in the hook",
                ) from None


class _OwnGradients(TorchFunctionMode):
    """Refuses gradients by parameters whose hooks one process runs on them at once.

    Args:
        names: Of these parameters, by the id of each.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func is torch.autograd.grad:
            self._check(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _check(self, outputs: Any, inputs: Any, *others: Any, **options: Any) -> None:
        del outputs, others, options
        for tensor in (inputs,) if isinstance(inputs, Tensor) else inputs:
            if name := self._names.get(id(tensor)):
                raise ModelError(
                    f"a loss takes a gradient by {name}, which has a gradient hook: one process "
                    "runs the hook on that gradient too, and rt.step on reduced gradients alone",
                    hint="remove the hook, or compute the term without torch.autograd.grad",
                )


def _run(param: Any, before: Iterable[Any], after: Iterable[Any]) -> None:
    if before:
        whole = _whole(param.grad)
        for hook in before:
            returned = hook(whole)
            whole = whole if returned is None else returned
        param.grad = _part_of(whole, param) if is_sharded(param) else whole
    for hook in after:
        hook(param)


def of_script(param: Parameter) -> tuple[list[Any], list[Any]]:
    """Return the script's hooks before and after accumulation."""
    if not torch_compat.has_gradient_hooks(param):
        return [], []
    before, after = torch_compat.gradient_hooks(param)
    return list(_scripts(before).values()), list(_scripts(after).values())


def _scripts(hooks: Hooks) -> Hooks:
    return {
        key: hook
        for key, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith(_OWN)
    }


def _whole(gradient: Tensor | None) -> Any:
    """Return all of `gradient`, on the device of its mesh, which may not be that of its part."""
    if gradient is None or not is_sharded(gradient):
        return gradient
    from torch.distributed.tensor import DTensor

    mesh = gradient.device_mesh
    local = gradient.to_local().to(mesh.device_type)
    moved = DTensor.from_local(
        local,
        mesh,
        gradient.placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )
    return moved.full_tensor().to(gradient.device)


def _part_of(whole: Tensor, param: DTensor) -> DTensor:
    """Return `whole` as a gradient of a sharded parameter."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    replicated = DTensor.from_local(
        whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return DTensor.from_local(
        replicated.redistribute(placements=param.placements).to_local().to(param.device),
        mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def hooked(model: nn.Module) -> list[str]:
    """Return the names of parameters of `model` with gradient hooks of the script."""
    return [name for name, param in model.named_parameters() if any(of_script(param))]


def refuse(names: Sequence[str]) -> None:
    """Refuse hooks on the parameters `names` of a model that runs a searched plan.

    Raises:
        ModelError: There are some.
    """
    if names:
        raise ModelError(
            f"{names[0]} has a gradient hook, which the executor of mode auto does not run",
            hint="remove the hook, or choose another mode",
        )


def check_references(model: nn.Module, replaced: Collection[int]) -> None:
    """Refuse hooks that hold a parameter which `rt.shard` replaced.

    Args:
        model: The model after `rt.shard`.
        replaced: Identities of these parameters.

    Raises:
        ModelError: A hook would compute with values that are never updated.
    """
    for name, param in model.named_parameters():
        for hook in itertools.chain(*of_script(param)):
            if any(id(found) in replaced for found in _parameters_in(hook, _DEPTH_MAX)):
                raise ModelError(
                    f"the gradient hook of {name} holds a parameter that rt.shard replaced",
                    hint="register the hook after rt.shard(model)",
                )


def _parameters_in(value: Any, depth: int) -> Iterator[Parameter]:
    """Yield the parameters that a function or container refers to, without running anything."""
    if isinstance(value, Parameter):
        yield value
    elif depth and not isinstance(value, str | bytes | int | float | Tensor | nn.Module):
        for item in _parts(value):
            yield from _parameters_in(item, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    parts: Iterable[Any] = ()
    match value:
        case Mapping():
            parts = [*value.keys(), *value.values()]
        case list() | tuple() | set() | frozenset():
            parts = value
        case functools.partial():
            parts = [value.func, *value.args, *value.keywords.values()]
        case torch.optim.Optimizer():
            parts = [param for group in value.param_groups for param in group["params"]]
        case _ if inspect.ismethod(value):
            parts = [value.__func__, value.__self__]
        case _ if inspect.isfunction(value):
            used = inspect.getclosurevars(value)
            parts = [*used.nonlocals.values(), *used.globals.values(), *(value.__defaults__ or ())]
        case _ if not inspect.ismodule(value):
            parts = getattr(value, "__dict__", {}).values()
    return parts
