"""Steps of an optimizer whose groups hold plain and sharded parameters side by side.

The problem.  With an operator plan, or with a `threshold`, some parameters of a model are DTensors
and others are not.  `foreach` and fused optimizers pass all parameters of a group to one operator,
and DTensor accepts no list that also holds plain tensors, or tensors of another mesh.

The idea.  The groups belong to the script: schedulers, edits of `param_groups` and lists with one
value a group rely on their number and order.  So they are split during the update alone, after the
hooks before the step and before the hooks after it, and the script never sees the parts.

Sharded parameters are updated with `foreach`, as torch does on accelerators, and once they have a
state, the update gets this rank's parts: on a small part the dispatch of a DTensor operator costs
more than its arithmetic.  Large parts on a host are updated one by one: its cache has room for one,
and not for all.  The state stays that of DTensors.  Results are equal to the last bit.

Rejected: a function mode around the step that splits the lists of each operator.  An optimizer
reads attributes of each parameter a dozen times, and each read would pass through the mode: a step
of 130 parameters took 1.5 ms longer.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.data_parallel.joint_updates import check_split
from msrun.parallel.local import is_sharded

# Optimizers whose `foreach` results tests compare with the plain ones, and the largest number of
# mesh axes with which the first `foreach` step is quick.
_OF_LISTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_LIST_AXES_MAX = 2
# Mean size of parts from which a host updates them faster one by one, as measured.
_LARGE_BYTES = 2**17
_MARK = "updates_mixed_groups"
# Words of torch's errors about DTensors.
_OF_SHARDS = ("DTensor", "placement", "sharding strategy", "Sharding propagation")

Update = Callable[..., Any]


def support_mixed_groups(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizer.step` update plain and sharded parameters of one group; groups stay.

    Schedulers made before and after find the step that they expect.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    if hasattr(optimizer.step, _MARK) or not any(map(is_sharded, params)):
        return
    # A scheduler, or another library, has put a function of its own in place of the method.
    replaced: Update | None = vars(optimizer).get("step")
    if replaced is None or torch_compat.is_step_of_scheduler(replaced):
        update = _split_inside(type(optimizer))
    else:
        update = _split_around(lambda _, *args, **kwargs: replaced(*args, **kwargs))
    own = weakref.ref(optimizer)

    def step_of(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        torch_compat.note_step(self)
        with _named_errors(self):
            return update(self, *args, **kwargs)

    @functools.wraps(replaced or type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        return step_of(own(), *args, **kwargs)  # type: ignore[arg-type]  # its caller holds it

    setattr(step_of, _MARK, True)
    setattr(step, _MARK, True)
    # A scheduler that is made later takes the function of the bound method.
    step.__func__ = step_of  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def update_alone(optimizer: torch.optim.Optimizer) -> None:
    """Update plain and sharded parameters of `optimizer` without the hooks around a step.

    Hooks of all optimizers of the process are a script's: they are not for those that it has not
    made.
    """
    kind: Any = type(optimizer)
    with _named_errors(optimizer), _split(optimizer) as of_lists, _on_parts(optimizer, of_lists):
        kind.step.__wrapped__(optimizer)


def _split_inside(kind: type[torch.optim.Optimizer]) -> Update:
    """Return the step of `kind` with groups split between its hooks."""
    hooked: Any = kind.step
    if not getattr(hooked, "hooked", False):  # a wrapper that never was set up as an optimizer
        return _split_around(hooked)
    plain = hooked.__wrapped__

    def split(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _split(self) as of_lists, _on_parts(self, of_lists):
            return plain(self, *args, **kwargs)

    def behind_closure(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        if closure is None:
            return split(self)
        # It computes the gradients, of which the update gets this rank's parts.
        with torch.enable_grad():
            loss = closure()
        split(self)
        return loss

    update = functools.wraps(plain)(behind_closure if kind in _OF_LISTS else split)
    return torch.optim.Optimizer.profile_hook_step(update)


def _split_around(step: Update) -> Update:
    def update(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _split(self):
            return step(self, *args, **kwargs)

    return update


@contextlib.contextmanager
def _named_errors(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say in one sentence that an optimizer needs an operation which DTensor does not have."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        is_of_shards = any(word in str(error) for word in _OF_SHARDS)
        is_write = torch_compat.is_of_sharded_write(error)
        if not (is_of_shards or is_write):
            raise
        operator = re.search(r"aten\.(\w+)", str(error))
        shown = f" ({operator[1]})" if operator else ""
        is_mixed = is_write or "mixed" in str(error)
        what = "plain and sharded tensors together" if is_mixed else "whole tensors"
        raise ModelError(
            f"{type(optimizer).__name__} cannot update sharded parameters: it needs an operation "
            f"of {what}{shown}",
            hint="choose another such as AdamW, leave out fused=True, or give it only replicated "
            "parameters",
        ) from None


def _split(optimizer: torch.optim.Optimizer) -> AbstractContextManager[list[dict[str, Any]]]:
    """Give `optimizer` groups whose parameters are all plain, or all of one mesh.

    Returns:
        A context, with the groups that are updated with `foreach` by our choice.

    Raises:
        ModelError: The update of a parameter depends on the others of its group.
    """
    kinds = [_kinds(group["params"]) for group in optimizer.param_groups]
    if any(len(each) > 1 for each in kinds):
        check_split(optimizer, lambda made: _split_into(made, list(map(_halves, _lists(made)))))
    return _split_into(optimizer, kinds)


def _lists(optimizer: torch.optim.Optimizer) -> list[list[Parameter]]:
    return [group["params"] for group in optimizer.param_groups]


def _halves(params: list[Parameter]) -> list[list[Parameter]]:
    return [params[::2], params[1::2]]


@contextlib.contextmanager
def _split_into(
    optimizer: torch.optim.Optimizer, kinds: Sequence[list[list[Parameter]]]
) -> Iterator[list[dict[str, Any]]]:
    """Give `optimizer` a group for each of the `kinds` of parameters of each of its groups."""
    groups, lists = optimizer.param_groups, _lists(optimizer)
    can_choose = type(optimizer) in _OF_LISTS
    chosen: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for group, of_group in zip(groups, kinds, strict=True):
        first, *others = of_group or [group["params"]]
        # The first part stays in the script's own group, where an optimizer may keep state.
        copies = [{**group, "params": params} for params in others]
        if others:
            group["params"] = first
        parts += [group, *copies]
        chosen += [part for part in (group, *copies) if can_choose and _gains(part)]
    for part in chosen:
        part["foreach"] = True
    optimizer.param_groups = parts
    try:
        yield chosen
    finally:
        optimizer.param_groups = groups
        for part in chosen:
            part["foreach"] = None
        for group, params in zip(groups, lists, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _on_parts(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Give `groups` of a split `optimizer` this rank's parts of parameters, gradients and state."""
    states: dict[Tensor, dict[str, Any]] = {}
    updated: list[Parameter] = []
    for group in groups:
        trained = [param for param in group["params"] if param.grad is not None]
        found = _parts(trained, optimizer.state)
        if found:
            group["params"] = [*found]
            group["foreach"] = not _are_large(found)
            updated += trained
            states |= found
    optimizer.state.update(states)
    try:
        yield
    finally:
        for part in states:
            del optimizer.state[part]
    # Autograd looks here for what was written since the forward.
    torch.autograd.graph.increment_version(updated)


def _are_large(parts: Collection[Tensor]) -> bool:
    """Return whether a host updates `parts` faster one by one than with `foreach`."""
    on_host = [part.nbytes for part in parts if part.device.type == "cpu"]
    return sum(on_host) > _LARGE_BYTES * len(parts)


def _parts(params: list[Parameter], states: Mapping[Tensor, Any]) -> dict[Tensor, dict[str, Any]]:
    """Return this rank's part of each of `params`, with its gradient and parts of its state.

    Nothing if a parameter has no state yet, which is made as that of a DTensor, or if a gradient or
    a state is divided in another way.
    """
    from torch.distributed.tensor import DTensor

    found: dict[Tensor, dict[str, Any]] = {}
    for param in params:
        placed, gradient = param.placements, param.grad  # type: ignore[attr-defined]  # a DTensor
        if not isinstance(gradient, DTensor) or gradient.placements != placed:
            return {}
        own, has_part = dict(states.get(param, ())), False
        for key, value in own.items():
            if isinstance(value, DTensor):
                if value.placements != placed:
                    return {}
                own[key], has_part = torch_compat.local_tensor(value), True
        if not has_part:
            return {}
        part = torch_compat.local_tensor(param).detach()  # type: ignore[arg-type]
        part.grad = torch_compat.local_tensor(gradient)
        found[part] = own
    return found


def _kinds(params: list[Parameter]) -> list[list[Parameter]]:
    """Return the plain parameters and those of each mesh, the first kind first."""
    from torch.distributed.tensor import DTensor

    kinds: dict[object, list[Parameter]] = {}
    # Meshes compare by their ranks, which takes longer than all else here.
    known: dict[int, list[Parameter]] = {}
    for param in params:
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        kind = known.get(id(mesh))
        if kind is None:
            kind = known[id(mesh)] = kinds.setdefault(mesh, [])
        kind.append(param)
    return list(kinds.values())


def _gains(group: dict[str, Any]) -> bool:
    """Return whether `foreach` updates `group` faster, and the script has not chosen."""
    params = group["params"]
    if not params or not is_sharded(params[0]) or params[0].device_mesh.ndim > _LIST_AXES_MAX:
        return False
    # torch refuses `foreach` with options that are tensors.
    options = (group["lr"], *group.get("betas", ()))
    has_tensor = any(isinstance(option, Tensor) for option in options)
    is_chosen = group["foreach"] is not None or group["fused"] or group["differentiable"]
    return not (is_chosen or has_tensor)
