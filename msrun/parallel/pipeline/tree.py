"""The module tree of one stage: its own modules, under the names that they had.

A list that several stages divide has the members of one.  Torch counts these, so `layers[-1]` and
`layers[:6]` would be other layers than those of the model: the lists here count all members, and
what another stage has is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import DividedModelError, ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.pipeline.plan import PipelineCut

_HINT = (
    "named_parameters() and named_modules() of the stage have what it has, under the names of the "
    "whole model"
)


def of_other_stage(name: str) -> DividedModelError:
    """Return why a stage does not give out `name`."""
    return DividedModelError(
        f"{ROOT}.pipeline: this rank has one stage of the model, and {name} is of another one",
        hint=_HINT,
    )


def members(module: nn.Module) -> frozenset[str]:
    """Return the names of modules, parameters, buffers and plain attributes of `module`."""
    own = (module.named_children(), module.named_parameters(recurse=False))
    names = {name for named in own for name, _ in named}
    names |= {name for name, _ in module.named_buffers(recurse=False)}
    return frozenset(names | {name for name in vars(module) if not name.startswith("_")})


class StagePart(nn.Module):
    """A module of which stages have some members each; nothing calls it."""

    def __init__(self, original: nn.Module, path: str) -> None:
        super().__init__()
        self._kind, self._members, self._path = type(original), members(original), path

    def __getattr__(self, name: str) -> Any:
        """Return a member.

        Raises:
            DividedModelError: Another stage has it.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = vars(self)
            is_of_whole = name in own.get("_members", ()) or hasattr(own.get("_kind"), name)
            if name.startswith("_") or not is_of_whole:
                raise
        raise of_other_stage(f"{self._path}.{name}")


class _NumberedPart(nn.Module):
    """Members of a list by their numbers in the whole list."""

    def divide(self, original: nn.Module, path: str) -> None:
        """Count as `original` does, whose name is `path`."""
        vars(self).update(_whole_length=len(dict(original.named_children())), _path=path)

    def __len__(self) -> int:
        return int(vars(self).get("_whole_length", len(self._modules)))

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or those of a slice that this stage has.

        Raises:
            DividedModelError: Another stage has it.
        """
        if isinstance(index, slice):
            numbers = map(str, range(*index.indices(len(self))))
            return nn.ModuleList([self._modules[n] for n in numbers if n in self._modules])  # type: ignore[misc]  # none is None
        number = range(len(self))[index]
        if str(number) not in self._modules:
            raise of_other_stage(f"{self._path}[{number}]")
        return self._modules[str(number)]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over all members.

        Raises:
            DividedModelError: Another stage has some: they would have other numbers here.
        """
        if len(self) != len(self._modules):
            missing = next(n for n in range(len(self)) if str(n) not in self._modules)
            raise of_other_stage(f"{self._path}[{missing}]")
        return iter(self._modules.values())

    def __contains__(self, module: object) -> bool:
        return any(module is own for own in self._modules.values())

    __repr__ = nn.Module.__repr__


class StageList(_NumberedPart, nn.ModuleList):
    """A list that stages divide."""


class StageSequence(_NumberedPart, nn.Sequential):
    """A sequence that stages divide; nothing calls it."""


class StageDict(nn.ModuleDict):
    """A mapping that stages divide."""

    def divide(self, original: nn.Module, path: str) -> None:
        """Know the names of `original`, whose name is `path`."""
        vars(self).update(_members=members(original), _path=path)

    def __getitem__(self, key: str) -> nn.Module:
        """Return a member.

        Raises:
            DividedModelError: Another stage has it.
        """
        if key not in self._modules and key in vars(self).get("_members", ()):
            raise of_other_stage(f"{self._path}[{key!r}]")
        return super().__getitem__(key)


_CONTAINERS = {nn.ModuleList: StageList, nn.ModuleDict: StageDict, nn.Sequential: StageSequence}


def graft(tree: nn.Module, model: nn.Module, plan: PipelineCut, stage: int) -> None:
    """Put the modules of `stage` into the empty `tree`; nothing is copied."""
    for name in sorted(plan.modules(stage), key=lambda name: name.count(".")):
        parent, _, last = name.rpartition(".")
        holder = _holder(tree, model, parent)
        if last not in dict(holder.named_children()):  # else it came with its parent
            holder.add_module(last, model.get_submodule(name))
    persistent = model.state_dict(keep_vars=True)
    for name in plan.attributes(stage):
        parent, _, last = name.rpartition(".")
        holder = _holder(tree, model, parent)
        if hasattr(holder, last):
            continue
        match _find(model, plan.constants, name):
            case Parameter() as param:
                holder.register_parameter(last, param)
            case Tensor() as buffer if name in dict(model.named_buffers(remove_duplicate=False)):
                holder.register_buffer(last, buffer, persistent=name in persistent)
            case value:
                setattr(holder, last, value)


def check_names(kind: type[nn.Module], model: nn.Module) -> None:
    """Refuse members of `model` whose names `kind` has for something else.

    Raises:
        ModelError: There is one.
    """
    taken = set(dir(kind)) - set(dir(nn.Module))
    members = [
        name for name, _ in (*model.named_children(), *model.named_parameters(recurse=False))
    ]
    for name in taken.intersection(members):
        raise ModelError(
            f"{ROOT}.pipeline: {type(model).__name__}.{name} has a name that the pipeline needs"
        )


def release(model: nn.Module, plan: PipelineCut, stage: int) -> None:
    """Free the memory of other stages' modules, even if something still refers to `model`."""
    ours: set[nn.Module | Parameter] = set(plan.stage_params[stage].values())
    for name in plan.modules(stage):
        ours |= set(model.get_submodule(name).modules())
    for other in range(plan.chunks.stages):
        for name in plan.modules(other):
            module = model.get_submodule(name)
            if ours.isdisjoint([*module.modules(), *module.parameters()]):
                module.to("meta")


def _holder(tree: nn.Module, model: nn.Module, name: str) -> nn.Module:
    """Return the module called `name` in `tree`, which may have to be made."""
    holder, original, path = tree, model, ""
    for part in filter(None, name.split(".")):
        path = f"{path}.{part}" if path else part
        original = original.get_submodule(part)
        if part not in dict(holder.named_children()):
            holder.add_module(part, _empty(original, path).train(original.training))
        holder = holder.get_submodule(part)
    return holder


def _empty(original: nn.Module, path: str) -> nn.Module:
    """Return what has the members of `original` that this stage has; none yet."""
    kind = _CONTAINERS.get(type(original))
    if kind is None:
        return StagePart(original, path)
    made: StageList | StageDict | StageSequence = kind()
    made.divide(original, path)
    return made


def _find(model: nn.Module, constants: Mapping[str, Tensor], name: str) -> Any:
    if name in constants:
        return constants[name]
    parent, _, last = name.rpartition(".")
    return getattr(model.get_submodule(parent), last)
