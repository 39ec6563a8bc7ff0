"""Inputs and outputs of modules by name or position, and outputs of a model as plain tensors again.

A rule of the plan names arguments of `forward`, or positions.  A script may give an argument either
way, so both mean the same: the signature tells the position of a name.  Outputs may be in any
container, which keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from msrun.errors import ConfigError, ModelError
from msrun.parallel.settings.plan_rules import tensor_path
from msrun.parallel.tensor.placements import WantedPlacement
from msrun.parallel.tensor.plan import ModulePlan

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def plain(value: Any, *, may_be_sharded: bool) -> Any:
    """Return `value` with its sharded tensors gathered and replicated ones as plain tensors.

    Containers keep their type: named tuples, mappings such as the outputs of transformers,
    dataclasses and namespaces.  One without a sharded tensor is returned itself.

    Args:
        value: What a model returned.
        may_be_sharded: Leave sharded tensors, for a loss that is guarded.
    """
    inner = partial(plain, may_be_sharded=may_be_sharded)
    match value:
        case DTensor():
            is_replicated = all(placement.is_replicate() for placement in value.placements)
            return value if may_be_sharded and not is_replicated else value.full_tensor()
        case tuple() | list():
            return _with_members(value, [inner(item) for item in value])
        case Mapping():
            return _with_items(value, {key: inner(item) for key, item in value.items()})
        case SimpleNamespace():
            return _with_attributes(value, {key: inner(item) for key, item in vars(value).items()})
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [
                field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
            ]
            return _with_attributes(value, {name: inner(getattr(value, name)) for name in fields})
        case _:
            return value


def members(value: Any) -> dict[str, Any] | None:
    """Return what `value` holds by position in digits, key or field; None if it is no container.

    Optional fields of an output of transformers are there, too, with None.
    """
    match value:
        case tuple() | list():
            found = {str(index): item for index, item in enumerate(value)}
            return found | dict(zip(getattr(value, "_fields", ()), value, strict=False))
        case Mapping():
            return _fields(value) | {str(key): item for key, item in value.items()}
        case SimpleNamespace():
            return dict(vars(value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _fields(value)
        case _:
            return None


def replaced(value: Any, changed: Mapping[str, Any]) -> Any:
    """Return `value` with some of its `members` changed; containers keep their type."""
    match value:
        case tuple() | list():
            names = getattr(value, "_fields", ())
            by_index = {names.index(n) if n in names else int(n): x for n, x in changed.items()}
            return _with_members(value, [by_index.get(i, item) for i, item in enumerate(value)])
        case Mapping():
            return _with_items(value, {k: changed.get(str(k), item) for k, item in value.items()})
        case _:
            return _with_attributes(value, dict(changed))


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass; nothing of anything else."""
    if not dataclasses.is_dataclass(value):
        return {}
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}


def _with_members(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _with_items(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    new = {key: item for key, item in changed.items() if item is not value[key]}
    if not new:
        return value
    if type(value) is dict or not isinstance(value, MutableMapping):
        return changed
    result = copy.copy(value)
    for key, item in new.items():
        result[key] = item  # outputs of transformers set the attribute too
    return result


def _with_attributes(value: Any, changed: dict[str, Any]) -> Any:
    new = {name: item for name, item in changed.items() if item is not getattr(value, name)}
    if not new:
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # a frozen one too
    return result


class Argument(msgspec.Struct, frozen=True):
    """One argument of a forward.

    Args:
        key: As the rule names it: a name, or a position in digits.
        name: Its name; empty of one that only `*args` takes.
        position: Among those given by position; None if it is given by name alone.
    """

    key: str
    name: str
    position: int | None


def check_arguments(model: nn.Module, plans: Mapping[str, ModulePlan], *, is_cut: bool) -> None:
    """Refuse rules with inputs that the forwards of their modules do not take.

    Args:
        model: The whole model.
        plans: Of its modules.
        is_cut: Whether stages of a pipeline share it.

    Raises:
        ConfigError: There is one.
    """
    for name, plan in plans.items():
        if is_cut and not name and (plan.each_input or plan.each_out):
            key = "in" if plan.each_input else "out"
            raise ConfigError(
                f"{plan.key}.{key}: no stage of a pipeline has the inputs and outputs of the whole "
                "model (name those of a module in it)"
            )
        find_arguments(model.get_submodule(name), name, plan)


def find_arguments(module: nn.Module, name: str, plan: ModulePlan) -> list[Argument]:
    """Return the arguments of `module` that `plan` names, in the order of the rule.

    Raises:
        ConfigError: Its forward has no such argument.
    """
    if not plan.each_input:
        return []
    try:
        params = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # of a forward that is not Python
        params = inspect.signature(lambda *args, **kwargs: (args, kwargs)).parameters
    by_position = [each for each, param in params.items() if param.kind in _BY_POSITION]
    names = [each for each, param in params.items() if param.kind not in _ANY]
    takes_more = any(param.kind == inspect.Parameter.VAR_POSITIONAL for param in params.values())
    found: list[Argument] = []
    for key in plan.each_input:
        where, shown = f"{plan.key}.{tensor_path('in', key)}", name or "the model"
        if key.isdigit():
            position = int(key)
            if position >= len(by_position) and not takes_more:
                raise ConfigError(
                    f"{where}: forward of {shown} takes {len(by_position)} inputs by position "
                    f"({', '.join(by_position) or 'none'})"
                )
            own = by_position[position] if position < len(by_position) else ""
            argument = Argument(key, own, position)
        elif key in names:
            argument = Argument(key, key, by_position.index(key) if key in by_position else None)
        else:
            raise ConfigError(_no_argument(where, shown, key, params))
        twin = next((each for each in found if argument.name and each.name == argument.name), None)
        if twin is not None:
            raise ConfigError(f"{where}: is {tensor_path('in', twin.key)}, which stands there, too")
        found.append(argument)
    return found


def _no_argument(where: str, shown: str, key: str, params: Mapping[str, inspect.Parameter]) -> str:
    """Return why `key` is no argument."""
    names = [name for name, param in params.items() if param.kind not in _ANY]
    choices = f"choose {', '.join(names)}" if names else "it names none"
    if key in params:
        stars = "*" if params[key].kind == inspect.Parameter.VAR_POSITIONAL else "**"
        return f"{where}: {stars}{key} of {shown} stands for any number of inputs ({choices})"
    rest = [n for n, param in params.items() if param.kind == inspect.Parameter.VAR_KEYWORD]
    also = f" beside **{rest[0]}" if rest else ""
    return f"{where}: forward of {shown} has no argument of this name{also} ({choices})"


def placed_arguments(
    places: Sequence[tuple[Argument, Callable[[Tensor], Tensor] | None]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: Callable[[str], str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with those of `places` in their placements.

    One that is not given, or is None, stays so.

    Raises:
        ModelError: One is something else than a tensor.
    """
    by_position, by_name = list(args), dict(kwargs)
    for argument, place in places:
        if place is None:
            continue
        at, name = argument.position, argument.name
        if at is not None and at < len(args):
            value = by_position[at]
            if value is not None:
                by_position[at] = place(_tensor(value, where(argument.key)))
        elif (value := by_name.get(name)) is not None:
            by_name[name] = place(_tensor(value, where(argument.key)))
    return tuple(by_position), by_name


def placed_outputs(
    output: Any,
    places: Mapping[str, Callable[[Tensor], Any] | None],
    where: Callable[[str], str],
    *,
    is_all: bool,
) -> Any:
    """Return `output` with the members that `places` names in their placements.

    Args:
        output: Of a module.
        places: Key, field or position in digits -> what places it; None leaves it as it comes.
        where: Returns how messages name one of these, or all of an empty key.
        is_all: Whether `places` has all positions of a sequence.

    Raises:
        ModelError: It has no such member, or that is no tensor.
    """
    found = members(output)
    if found is None:
        raise ModelError(f"{where('')}: names several outputs, and it returns {_kind(output)}")
    is_sequence = isinstance(output, tuple | list)
    if is_all and (not is_sequence or len(output) != len(places)):
        there = f"{len(output)} outputs" if is_sequence else f"outputs {', '.join(found)}"
        raise ModelError(
            f"{where('')}: has {len(places)} entries, and it returns {there}",
            hint="give one entry for each output, null for one that stays as it comes, or name the "
            "outputs that are placed: {0: [...]}",
        )
    changed = {}
    for key, place in places.items():
        if key not in found:
            raise ModelError(f"{where(key)}: it returns no such output (choose {', '.join(found)})")
        if place is not None and found[key] is not None:
            changed[key] = place(_tensor(found[key], where(key)))
    return replaced(output, changed)


def placed_first(output: Any, place: Callable[[Tensor], Any], where: Callable[[str], str]) -> Any:
    """Return `output`, a tensor or a container, with its first tensor placed.

    Raises:
        ModelError: There is none.
    """
    if isinstance(output, Tensor):
        return place(output)
    for key, value in (members(output) or {}).items():
        if isinstance(value, Tensor):
            return replaced(output, {key: place(value)})
    raise ModelError(
        f"{where('')}: it returns {_kind(output)} without a tensor that ranks could share",
        hint="leave out the rule, or `out` in it",
    )


def tensor_named(end: str, plan: ModulePlan, name: str, key: str) -> str:
    """Return how messages name an input or output `key` of the module `name`; empty is all.

    Args:
        end: `in` or `out`.
        plan: Of the module.
        name: Of the module.
        key: A name, or a position in digits.
    """
    path = tensor_path(end, key) if key else end
    return f"{plan.key}.{path} of {name or 'the model'}"


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    raise ModelError(
        f"{where}: is {_kind(value)}, and no tensor that ranks could share",
        hint="leave it as it comes (null)",
    )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def given(output: Tensor, wanted: WantedPlacement, *, is_new: bool) -> Tensor:
    """Return the output of a module in its placement; a plain tensor if that is whole.

    Args:
        output: As the module returned it.
        wanted: Its placement.
        is_new: Whether nothing else has its memory, although its placement was right.
    """
    placed = wanted.put(output)
    if not all(placement.is_replicate() for placement in placed.placements):
        return placed
    is_new = (placed is not output or is_new) and isinstance(output, DTensor)
    own: Tensor = placed.to_local()
    return _Owned.apply(own) if is_new else own  # type: ignore[no-untyped-call]  # as torch has it


class _Owned(Function):
    """Takes a tensor that is only its caller's for one that may be written in place.

    To torch, what `to_local` returns is a view, which it lets nobody write.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.detach()  # with the count of writes of x, and without a copy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient
