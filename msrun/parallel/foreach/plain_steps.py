"""Steps of optimizers that never came through `rt.optimizer` or `rt.step`, as a plain loop has.

Torch calls a global hook before each step of every optimizer of the process.  The first step of one
that the runtime does not know is looked at:

- It holds parameters that `rt.shard` replaced, or its kind is wrong on shards: refused, as
  `rt.optimizer` would.
- It holds parameters of a model: the replicas of this model are compared before its steps.
- It holds parameters of no model, such as learned weights of losses: nothing reduces their
  gradients.  A script may do so by itself, or have equal gradients on all ranks, so these
  parameters are compared with the replicas, which all ranks do in the same step.  Where no step of
  a model's optimizer compares, as with a frozen model and a head of the script, there is a warning:
  an optimizer may step on one rank alone, so its step is no place for a collective.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from msrun.errors import ModelError
from msrun.parallel.foreach.frames import variables_of
from msrun.parallel.local import is_sharded

_TORCH, _OWN = Path(torch.__file__).parent, Path(__file__).parents[2]
# By so many steps of its own, a step of a model's optimizer would have compared replicas.
_STEPS_COMPARED = 4
_NAMES_SHOWN = 4
_OF_SCRIPT = "the script's "  # the model may have a parameter of the same name
_ALONE = "each data-parallel rank trains"
_HINT = (
    "shard its module too, with rt.shard or as part of the model: nn.ModuleDict({'model': model, "
    "'head': head}); or average its gradient over the ranks before the step"
)


class OutsideParameters:
    """Trained parameters that are in no model of `rt.shard`, by the names of the script."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[weakref.ref[Parameter], str]] = {}

    def note(self, params: Mapping[str, Parameter], where: str) -> None:
        """Note parameters that an optimizer `where` steps."""
        for name, param in params.items():
            self._named[name] = weakref.ref(param), where

    def tensors(self) -> Iterator[tuple[str, Parameter]]:
        """Return those that exist and are trained."""
        for name, (reference, _) in self._named.items():
            param = reference()
            if param is not None and param.requires_grad:
                yield name, param

    @staticmethod
    def is_name(name: str) -> bool:
        """Return whether a name is of such a parameter, of this rank or of another one."""
        return name.startswith(_OF_SCRIPT)

    def problem(self, names: Collection[str]) -> str | None:
        """Return a sentence on those of `names` that are of these; None without one."""
        own = [name for name in names if name in self._named]
        return _sentence(own, self._named[own[0]][1]) if own else None

    @staticmethod
    def hint_for(sentence: str) -> str | None:
        """Return what to do if `sentence` is of a problem of these; else None."""
        return _HINT if sentence.startswith(_ALONE) else None


class _Replicas(Protocol):
    """What compares the replicas of a model."""

    outside: OutsideParameters
    has_compared: bool


class _Model(Protocol):
    """A model of `rt.shard`."""

    @property
    def replicas(self) -> _Replicas | None: ...

    def parameters(self) -> list[Parameter]: ...

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None: ...

    def watch(self, optimizer: torch.optim.Optimizer) -> None: ...


class PlainSteps:
    """Looks at optimizers that step without the runtime's knowledge.

    Args:
        models: Returns the states of the models of `rt.shard`.
        check: Refuses an optimizer of a model's parameters.
        has_replicas: Whether there are data-parallel ranks.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[_Model]],
        check: Callable[[torch.optim.Optimizer], None],
        has_replicas: Callable[[], bool],
    ) -> None:
        self._models, self._check, self._has_replicas = models, check, has_replicas
        # How many parameters an optimizer held when it was looked at.
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        # Steps of those that may have to be told of, and what to say.
        self._untold: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Look from now on; a second call does nothing."""
        if self._handle is None:
            own = weakref.ref(self)

            def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if (steps := own()) is not None:
                    steps.look(optimizer)

            self._handle = register_optimizer_step_pre_hook(look)

    def end(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def know(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave `optimizer`, which the runtime has checked, alone until it gets parameters."""
        self._counts[optimizer] = _count(optimizer)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at `optimizer`, which is about to step.

        Raises:
            ModelError: The runtime would refuse it.
        """
        if optimizer in self._untold:
            self._tell(optimizer)
        count = _count(optimizer)
        if self._counts.get(optimizer) == count:
            return
        frame = _caller()
        if frame is None:  # an optimizer of ours
            return
        models = self._models()
        for model in models:
            model.check_optimizer(optimizer)
        known = {id(param) for model in models for param in model.parameters()} | _ignored(frame)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        outside = [param for param in params if id(param) not in known]
        if len(outside) < len(params):
            self._check(optimizer)
            for model in models:
                model.watch(optimizer)
        self._counts[optimizer] = count
        if outside and self._has_replicas():
            self._note(optimizer, outside, models, frame)

    def _note(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Parameter],
        models: Sequence[_Model],
        frame: FrameType,
    ) -> None:
        named = _names(optimizer, params, frame)
        where = f"{type(optimizer).__name__}, {Path(frame.f_code.co_filename).name}, line "
        where += str(frame.f_lineno)
        replicas = next((model.replicas for model in models if model.replicas), None)
        if replicas:
            replicas.outside.note(named, where)
        if any(param.requires_grad for param in params):
            trained = [name for name, param in named.items() if param.requires_grad]
            self._untold[optimizer] = [0, replicas, _sentence(trained, where)]

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn where no step of a model's optimizer has compared what this one trains."""
        entry = self._untold[optimizer]
        entry[0] += 1
        replicas: _Replicas | None = entry[1]
        if replicas and replicas.has_compared:
            del self._untold[optimizer]
        elif entry[0] == _STEPS_COMPARED:
            del self._untold[optimizer]
            warnings.warn(f"msrun: {entry[2]}: {_HINT}", stacklevel=6)


def check_lists(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that passes plain and sharded parameters to one operator.

    Raises:
        ModelError: It does, and `rt.optimizer` would have its groups divided.
    """
    for group in optimizer.param_groups:
        params = group["params"]
        meshes = {id(param.device_mesh) if is_sharded(param) else 0 for param in params}
        if len(meshes) == 1 or group.get("foreach") is False:
            continue
        is_default = not (group.get("foreach") or group.get("fused"))
        if not (is_default and params[0].device.type == "cpu"):
            raise ModelError(
                f"{type(optimizer).__name__} updates plain and sharded parameters of a group in "
                "one operation, which torch does not have",
                hint="make it with rt.optimizer: optimizer = rt.optimizer(optimizer)",
            )


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _caller() -> FrameType | None:
    """Return who called the step, outside of torch; None if we did."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - a traceback would cost more
    while frame is not None:
        parents = Path(frame.f_code.co_filename).parents
        if _TORCH not in parents and frame.f_code.co_filename != __file__:
            return None if _OWN in parents else frame
        frame = frame.f_back
    return None


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Return the variables of `frame` and its callers, with their names."""
    while frame is not None:
        yield from [*variables_of(frame).items(), *frame.f_globals.items()]
        frame = frame.f_back


def _ignored(frame: FrameType | None) -> set[int]:
    """Return parameters that `DistributedDataParallel` was told to ignore: each rank has its own.

    Experts that a script shares out by itself are such.
    """
    found: set[int] = set()
    for _, value in _variables(frame):
        for module in value.modules() if isinstance(value, nn.Module) else ():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                named = module.module.named_parameters()
                found |= {id(param) for name, param in named if name in module.parameters_to_ignore}
    return found


def _names(
    optimizer: torch.optim.Optimizer, params: Sequence[Parameter], frame: FrameType | None
) -> dict[str, Parameter]:
    """Return `params` by the names of the script's variables; others by number and shape."""
    found: dict[int, str] = {}
    for name, value in _variables(frame):
        if isinstance(value, Parameter):
            found.setdefault(id(value), name)
        elif isinstance(value, nn.Module):
            for inner, param in value.named_parameters():
                found.setdefault(id(param), f"{name}.{inner}")
    kind = type(optimizer).__name__
    names = (
        found.get(id(param), f"parameter {number} of {kind}, of shape {tuple(param.shape)}")
        for number, param in enumerate(params)
    )
    return {f"{_OF_SCRIPT}{name}": param for name, param in zip(names, params, strict=True)}


def _sentence(names: Sequence[str], where: str) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    is_one = len(names) == 1
    return (
        f"{_ALONE} {shown}{more} alone ({where}): "
        f"{'it is' if is_one else 'they are'} in no model of rt.shard, so nothing averages the "
        f"gradient{'s' * (not is_one)}"
    )
