"""`msrun.shard`: a function, or a module, that computes on shards and gives the whole result.

As under an operator plan, the tensors of the function are DTensors and a guard decides for each
function of torch whether it runs on shards (`tensor.guard`).  So the result is that of one process,
whatever the function computes; what no rule covers runs on whole tensors, with a warning.

What torch.func transforms (`vmap`, `grad`, `vjp`, `jvp` and those made of them) hides its tensors
from the guard.  So their arguments are gathered first, and the transform runs whole on each rank.
What `torch.compile` compiled runs as it was before: the compiler would see no guard.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from msrun.errors import ConfigError, ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.layout import plan_axes
from msrun.parallel.local import is_image, local_part
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.notation.rules import batch_free
from msrun.parallel.rank_context import RankContext
from msrun.parallel.settings.plan_rules import UNSHARDED_DIMS, Dims
from msrun.parallel.tensor import hooks
from msrun.parallel.tensor.guard import Guard
from msrun.parallel.tensor.outputs import plain
from msrun.parallel.torch_compat import write_count

_PLACE = "msrun.shard"
Function = Callable[..., Any]


def shard(
    context: RankContext,
    function: Function,
    in_: Sequence[Dims | None] | None,
    out: Dims | Sequence[Dims | None] | None,
    params: Mapping[str, Dims] | None,
) -> Function:
    """Return `function` on shards; see `msrun.shard`."""
    if not callable(function):
        raise ConfigError(f"{_PLACE}: {type(function).__name__} is no function")
    if context.world_size == 1:
        return function
    axes = plan_axes(context.layout)
    inputs = [_dims(dims, f"in_[{i}]", context.layout) for i, dims in enumerate(in_ or ())]
    outputs = _outputs(out, context.layout)
    named = {
        name: _dims(dims, f"params.{name}", context.layout) for name, dims in (params or {}).items()
    }
    if math.prod(map(context.layout.size, axes)) == 1:
        return function
    return _Sharded(function, context.root_mesh[axes], inputs, outputs, named)


def _outputs(out: Any, layout: MeshLayout) -> Dims | tuple[Dims | None, ...] | None:
    """Return the dims of the one output, or of each of several."""
    is_one = isinstance(out, list) and all(_is_entry(entry) for entry in out)
    if out is None or is_one:
        return _dims(out, "out", layout)
    if not isinstance(out, tuple):
        raise ConfigError(
            f"{_PLACE}: out: {out!r} is neither a list of axes, one for each dim, nor a tuple of "
            "such lists"
        )
    return tuple(_dims(dims, f"out[{index}]", layout) for index, dims in enumerate(out))


def _is_entry(entry: object) -> bool:
    return entry is None or isinstance(entry, str | list | tuple)


def _dims(dims: Any, key: str, layout: MeshLayout) -> Dims | None:
    """Return the axes of each dim of a tensor, without `dp`, which divides the batch.

    Raises:
        ConfigError: They name an axis that the mesh has not, or one twice.
    """
    where = f"{_PLACE}: {key}"
    if dims is None:
        return None
    if not isinstance(dims, list | tuple) or not all(map(_is_entry, dims)):
        raise ConfigError(f"{where}: {dims!r} is no list of axes, one for each dim")
    found: Dims = [list(dim) if isinstance(dim, tuple) else dim for dim in dims]
    seen: set[str] = set()
    for dim in found:
        for axis in [dim] if isinstance(dim, str) else dim or []:
            if axis == UNSHARDED_DIMS:
                continue
            if axis not in (*plan_axes(layout), DATA_AXIS) or axis not in layout.axes:
                choices = ", ".join(plan_axes(layout)) or "the mesh has none beside dp and pp"
                raise ConfigError(f"{where}: axis {axis!r} shards no operator (choose {choices})")
            if axis in seen:
                raise ConfigError(f"{where}: axis {axis!r} stands there twice")
            seen.add(axis)
    return batch_free(found, where)


class _Sharded:
    """A function on shards.

    Args:
        function: The function, or a module.
        mesh: Axes that shard its tensors.
        inputs: Dims of each positional argument.
        outputs: Dims of the output, or of each.
        named: Dims of arguments by name; of a module also of parameters.
    """

    def __init__(
        self,
        function: Function,
        mesh: DeviceMesh,
        inputs: Sequence[Dims | None],
        outputs: Dims | tuple[Dims | None, ...] | None,
        named: Mapping[str, Dims | None],
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._mesh = function, mesh
        given = {"in_": inputs, "params": named, "out": outputs}
        keys = [key for key, value in given.items() if value]
        self._guard = Guard(mesh, f"{_PLACE}: {', '.join(keys)}" if keys else _PLACE)
        torch_compat.move_shards_by_all_to_all()
        self._name = getattr(function, "__name__", type(function).__name__)
        self._outputs = outputs
        arguments = _arguments(function)
        self._order = list(arguments)
        self._inputs = [_counted(self._placing(dims, f"in_[{i}]")) for i, dims in enumerate(inputs)]
        self._named = {
            name: _counted(self._placing(dims, f"params.{name}"))
            for name, dims in named.items()
            if name in arguments
        }
        rest = {name: dims for name, dims in named.items() if name not in arguments and dims}
        if isinstance(function, nn.Module):
            rest = _shard_parameters(function, rest, mesh)
        for name in rest:
            warnings.warn(
                f"msrun: {_PLACE}: {self._name} has no argument or parameter {name}", stacklevel=4
            )
        self._run = torch.compiler.disable(self._run_sharded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _placing(self, dims: Dims | None, key: str) -> Callable[[Tensor], DTensor] | None:
        where = f"{_PLACE}: {key} of {self._name}"
        return None if dims is None else hooks.placing(dims, self._mesh, where)

    def _run_sharded(self, *args: Any, **kwargs: Any) -> Any:
        if torch_compat.is_transforming():
            raise ModelError(
                f"{_PLACE}: torch.func transforms {self._name} from outside, and ranks share what "
                "it would transform",
                hint="transform inside of the function, or the function before msrun.shard",
            )
        if any(map(is_image, tensors_in((args, kwargs)))):
            raise ModelError(
                f"{_PLACE}: {self._name} gets an image, of which ranks have parts",
                hint="shard modules of the model by parallel.plan",
            )
        if len(self._inputs) > len(args):
            raise ModelError(
                f"{_PLACE}: in_ has {len(self._inputs)} entries, and {self._name} was called with "
                f"{len(args)} arguments by position"
            )
        given = [self._placed(i, value) for i, value in enumerate(args)]
        named = {name: self._put(self._named.get(name), name, v) for name, v in kwargs.items()}
        pairs = [*zip(args, given, strict=True), *((v, named[name]) for name, v in kwargs.items())]
        names = [*map(self._argument, range(len(args))), *kwargs]
        copies = [_Placed(*pair, name) for pair, name in zip(pairs, names, strict=True)]
        with (
            torch_compat.eagerly(),
            torch_compat.transforming_whole(_gathered),
            self._guard.active(),
        ):
            output = self._function(*given, **named)
            self._guard.check_returned(output)
            self._check_arguments(copies)
            return self._returned(output)

    def _placed(self, index: int, value: Any) -> Any:
        name = self._argument(index)
        by_place = self._inputs[index] if index < len(self._inputs) else None
        return self._put(by_place or self._named.get(name), name, value)

    def _argument(self, index: int) -> str:
        return self._order[index] if index < len(self._order) else f"argument {index}"

    def _check_arguments(self, copies: Sequence[_Placed]) -> None:
        """Refuse a write to an argument that what the caller gave does not have.

        Raises:
            ModelError: There is one.
        """
        for copy in copies:
            if copy.misses_write():
                raise ModelError(
                    f"{_PLACE}: {self._name} writes its argument {copy.name} in place, and the "
                    "caller's tensor, of which ranks have shards there, would not have it",
                    hint=f"return the new {copy.name}, or leave it out of in_ and params",
                )

    def _put(self, placing: Callable[[Tensor], DTensor] | None, name: str, value: Any) -> Any:
        if isinstance(value, DTensor) and value.device_mesh != self._mesh:
            value = value.full_tensor()
        if placing is None:
            return value
        if not isinstance(value, Tensor):
            raise ModelError(
                f"{_PLACE}: {name} of {self._name} is a {type(value).__name__}, and no tensor that "
                "ranks could share"
            )
        return placing(value)

    def _returned(self, output: Any) -> Any:
        """Return outputs in the layout of `out`, and those without one whole."""
        if self._outputs is None:
            return plain(output, may_be_sharded=False)
        if isinstance(self._outputs, list):
            return self._put(self._placing(self._outputs, "out"), "the output", output)
        if not isinstance(output, tuple | list) or len(output) != len(self._outputs):
            shown = f"{len(output)}" if isinstance(output, tuple | list) else type(output).__name__
            raise ModelError(
                f"{_PLACE}: out has {len(self._outputs)} entries, and {self._name} returns {shown}"
            )
        found = []
        for index, (dims, value) in enumerate(zip(self._outputs, output, strict=True)):
            whole = plain(value, may_be_sharded=dims is not None)
            key = f"out[{index}]"
            found.append(self._put(self._placing(dims, key), key, whole))
        return type(output)(*found) if hasattr(output, "_fields") else type(output)(found)


def _counted(placing: Callable[[Tensor], DTensor] | None) -> Callable[[Tensor], DTensor] | None:
    """Return what places a tensor, so that torch counts writes to it in inference, too."""
    if placing is None:
        return None

    def placed(x: Tensor) -> DTensor:
        if not torch.is_inference_mode_enabled():
            return placing(x)
        with torch.inference_mode(mode=False), torch.no_grad():
            found = placing(x)
            is_whole = all(placement.is_replicate() for placement in found.placements)
            if is_whole or not local_part(found).is_inference():
                return found
            copy: Any = found.clone()
            return copy  # type: ignore[no-any-return]

    return placed


class _Placed:
    """An argument, and what the function gets for it.

    Args:
        value: The argument.
        placed: What the function gets.
        name: Of the argument.
    """

    def __init__(self, value: Any, placed: Any, name: str) -> None:
        self._value, self._placed, self.name = value, placed, name
        is_other = isinstance(placed, Tensor) and placed is not value
        self._writes = _writes(placed) if is_other else 0

    def misses_write(self) -> bool:
        """Return whether the function wrote the placed one, and that is not in the argument."""
        if self._placed is self._value or not isinstance(self._placed, Tensor):
            return False
        if _writes(self._placed) == self._writes:
            return False
        if isinstance(self._placed, DTensor) and not all(
            placement.is_replicate() for placement in self._placed.placements
        ):
            return True
        return not _shares_memory(self._placed, self._value)


def _writes(x: Tensor) -> int:
    """Return how often `x` was written, or the part of it that this rank has."""
    if local_part(x).is_inference():
        return 0
    return write_count(x) + write_count(local_part(x))


def _shares_memory(x: Tensor, other: Tensor) -> bool:
    parts = [local_part(each).untyped_storage().data_ptr() for each in (x, other)]
    return parts[0] == parts[1]


def _arguments(function: Function) -> tuple[str, ...]:
    """Return the names of the arguments of `function`, in order; none if it does not say."""
    with contextlib.suppress(TypeError, ValueError):
        return tuple(inspect.signature(function).parameters)
    return ()


def _shard_parameters(
    module: nn.Module, dims: Mapping[str, Dims], mesh: DeviceMesh
) -> dict[str, Dims]:
    """Shard parameters of `module`; return the names that are none of its parameters.

    Raises:
        ModelError: A parameter is not divided evenly, or has another number of dims.
    """
    known = dict(module.named_parameters())
    for name in known.keys() & dims.keys():
        hooks.placing(dims[name], mesh, f"{_PLACE}: params.{name}")(known[name].detach())
    own = {name: each for name, each in dims.items() if name in known}
    hooks.apply_parameters(module, own, mesh)
    return {name: each for name, each in dims.items() if name not in known}


def _gathered(value: Any) -> Any:
    """Return all of a sharded tensor, as a plain one, and a function that has such in its closure.

    Every other value is returned as it is.
    """
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    kept = [_contents(cell) for cell in value.__closure__]
    found = [None if each is value else torch_compat.mapped(_gathered, each) for each in kept]
    if all(each is None for each in found):
        return value
    pairs = zip(kept, found, strict=True)
    cells = tuple(CellType(old if new is None else new) for old, new in pairs)
    copied = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copied.__kwdefaults__ = value.__kwdefaults__
    return copied


def _contents(cell: CellType) -> Any:
    """Return what a closure has; None of a variable that is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
