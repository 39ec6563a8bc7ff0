"""Plain tensors that a script computes with sharded parameters and gradients, outside of the model.

Noise for gradients, a mask of weights, the weights of a step before: the script has such a tensor
whole, on all ranks, and torch computes no plain tensor with a DTensor.  In a function of each
element a rank needs its own part of it, so it takes that.  A number of sharded tensors, such as
their norm, is a plain one beside plain tensors.  Ranks must have been given the same:
what they were given is summed up, and compared with the replicas (`take_given`).  Noise as
`torch.randn_like(param)` and `param.normal_()` is drawn whole too, by all ranks from the generator
of the first one, so that all parts are those of one process.

What the model itself computes is left alone: there a plain tensor has samples, of which each rank
has others.  So is what autograd would differentiate, where ranks have samples of their own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.exchange.generators import set_torch_states, torch_states
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import full_tensor, is_sharded, local_part
from msrun.worker.bootstrap import record_error

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PartOf = Callable[[Tensor, Tensor], Tensor]

# Of meshes over which ZeRO divides.
_DATA_AXES = (DATA_AXIS, "dp_shard", EXPERT_COPIES)
_ELEMENTS = 4096
# Ranks compare every thousand steps at last, and a step may take hundreds.
_GIVEN_MAX = 256
_MODULE = nn.Module.__call__.__code__.co_filename
_FUNCTION = str(Path(__file__).parents[1] / "functions" / "sharded.py")
# Functions that call a module, or one of `msrun.shard`, and that of a step of an optimizer.
_IN_MODEL = frozenset(
    [("_call_impl", _MODULE), ("_wrapped_call_impl", _MODULE), ("_run_sharded", _FUNCTION)]
)
_IN_STEP = frozenset([("wrapper", torch.optim.Optimizer.__init__.__code__.co_filename)])
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])
_SHARDED = "sharded parameter, gradient or activation"
# What torch says of a script that computes with sharded tensors -> what it cannot do.
_PROBLEMS = {
    "mixed torch.Tensor and DTensor": f"torch computes no plain tensor with a {_SHARDED} here",
    "does not have a sharding strategy": f"torch has no rule for this operator on a {_SHARDED}",
    ".numpy() is not supported for tensor subclasses": f"numpy takes no {_SHARDED}",
    ".tolist() is not supported for tensor subclasses": f"a rank has a part of a {_SHARDED}",
}
_HINT = (
    "call full_tensor() of the sharded ones on all ranks, and write results with "
    "param.copy_(whole) or param.grad.copy_(whole) under torch.no_grad(); make a copy that follows "
    "the model, such as an average, after rt.shard, or with torch.optim.swa_utils.AveragedModel; "
    "compute with what a hook keeps of a sharded layer in the loss function of rt.step"
)
# Functions of torch.nn.init that are none of each element.
_WHOLE_FILLS = ("dirac_", "eye_", "orthogonal_", "sparse_", "trunc_normal_")
_MESHES = (
    "the script computes with sharded tensors of different axes, such as parameters that tp divides"
    " and others"
)
_given: list[Tensor] = []
_written: list[Tensor] = []
_numbers: list[Tensor] = []
_part_of: list[PartOf] = []


def support_values(part_of: PartOf) -> bool:
    """Have sharded tensors take plain ones from now on; a second call does nothing.

    Args:
        part_of: Returns this rank's part of a whole tensor, placed like a sharded one.

    Returns:
        Whether this is the first call.
    """
    _part_of[:] = [part_of]
    is_first = torch_compat.replace_element_methods(
        _take, _drawn, _note_number, full_tensor, multiply=_take_factor
    )
    if is_first:
        torch_compat.watch_written_views(keep_written)
        torch_compat.make_plain(_is_made_plain)
        for name in _WHOLE_FILLS:
            _fill_whole(name)
        before = sys.excepthook

        def show(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            said = str(error) if isinstance(error, RuntimeError) else ""
            problem = next((why for text, why in _PROBLEMS.items() if text in said), None)
            if problem:
                named = ModelError(f"{_line(trace)}{problem}", hint=_HINT)
                record_error(named, is_closer=True)
                before(type(named), named, trace)
            else:
                before(kind, error, trace)

        sys.excepthook = show
    return is_first


def take_given() -> Tensor | None:
    """Return a number of each tensor that was taken since the last call; None without one."""
    return _take_sum(_given)


def note_written(whole: Tensor) -> None:
    """Note what a forward wrote to a parameter, of which each rank keeps its part."""
    _note(_written, whole)


def take_written() -> Tensor | None:
    """Return a number of each parameter that was written since the last call; None without one."""
    return _take_sum(_written)


def _take_sum(numbers: list[Tensor]) -> Tensor | None:
    if not numbers:
        return None
    total = torch.stack(numbers).sum()  # in any order
    numbers.clear()
    return total.reshape(1)


def _note(numbers: list[Tensor], value: Tensor) -> None:
    """Add a number of the values of a tensor."""
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _ELEMENTS)].to(torch.float64)
    places = torch.arange(1, some.numel() + 1, device=some.device, dtype=torch.float64)
    numbers.append((some * places.cos()).sum().view(torch.int64))
    if len(numbers) == _GIVEN_MAX:
        numbers[:] = [torch.stack(numbers).sum()]


def take_numbers() -> Tensor | None:
    """Return one for the numbers that sharded tensors were written with; None without one."""
    if not _numbers:
        return None
    total = torch.stack([number.cpu() for number in _numbers]).sum()  # in any order
    _numbers.clear()
    return total.reshape(1)


def give_gradient(param: DTensor) -> None:
    """Replace a plain gradient of a sharded parameter, which the script has set, by its part."""
    gradient = param.grad
    if gradient is None or is_sharded(gradient) or gradient.shape != param.shape:
        return
    param.grad = _as_part(gradient, param)


def _take(like: DTensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of a sharded and a plain tensor gets.

    Args:
        like: The sharded tensor of a function.
        value: A plain tensor that it gets, too.

    Returns:
        Both as they are, where torch says why it refuses them.  Of a number, such as a norm, its
        value over all ranks; of another tensor this rank's part of `value`.

    Raises:
        ModelError: Both are sharded, over other ranks each.
    """
    if is_sharded(value) and is_sharded(like) and not is_in_model():
        raise ModelError(_MESHES, hint=_HINT)
    has_graph = torch.is_grad_enabled() and (like.requires_grad or value.requires_grad)
    if is_sharded(value) or not is_sharded(like) or is_in_model():
        return like, value
    if has_graph:
        return (like, value) if is_of_samples(like) else _take_factor(like, value)
    if not like.dim():
        return like.full_tensor(), value
    is_partial = any(placement.is_partial() for placement in like.placements)
    if is_partial or not _fits(value.shape, like.shape):
        return like, value
    return like, _as_part(value.expand(like.shape), like)


def _take_factor(like: DTensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As `_take`, for a product of matrices: each rank has all of `value`."""
    if not is_sharded(like) or is_sharded(value) or is_in_model():
        return like, value
    if is_of_samples(like):
        if torch.is_grad_enabled() and (like.requires_grad or value.requires_grad):
            return like, value
        note_given(value)
    return like, torch_compat.as_replicated(value, like.device_mesh)


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    """Return whether a tensor of `shape` has a value for each element of one of `whole`."""
    sizes = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in sizes)


def _note_number(like: DTensor, value: Tensor | float) -> None:
    """Note what a script writes to what data-parallel ranks have parts of.

    Each rank may have computed it from its own samples, as a loss, and no replicas would differ.
    """
    has_graph = torch.is_grad_enabled() and like.requires_grad
    if has_graph or not _is_divided(like) or is_in_model():
        return
    number = torch.as_tensor(value).detach().reshape(()).to(torch.float64, copy=True)
    _numbers.append(number.view(torch.int64))
    if len(_numbers) == _GIVEN_MAX:
        _numbers[:] = [torch.stack([number.cpu() for number in _numbers]).sum()]


def is_of_samples(tensor: DTensor) -> bool:
    """Return whether ranks of `tensor` have samples, and so gradients, of their own."""
    return any(name in _DATA_AXES for name in tensor.device_mesh.mesh_dim_names or ())


def _is_divided(tensor: DTensor) -> bool:
    """Return whether data-parallel ranks have parts of `tensor`."""
    names = tensor.device_mesh.mesh_dim_names or ()
    placed = zip(names, tensor.placements, strict=False)
    return any(name in _DATA_AXES and placement.is_shard() for name, placement in placed)


def _as_part(value: Tensor, like: DTensor) -> DTensor:
    note_given(value)
    return placed(value.detach(), like)


def note_given(value: Tensor) -> None:
    """Note a plain tensor that this rank was given, to compare it with those of other ranks."""
    _note(_given, value)


def placed(whole: Tensor, like: DTensor) -> DTensor:
    """Return `whole`, of which this rank has all, placed as `like`."""
    from torch.distributed.tensor import DTensor

    part = _part_of[0](whole, like)
    return DTensor.from_local(
        part.to(local_part(like).device).contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _drawn(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Return this rank's part of what `operator` draws for the whole of its first sharded tensor.

    That one gives its values, as a mean does, or its shape alone.
    """
    like = next(value for value in args if isinstance(value, Tensor) and is_sharded(value))
    given = list(args)
    if operator not in torch_compat.draws_by_values():
        given[0] = torch.empty(like.shape, dtype=like.dtype, device=local_part(like).device)
    given = [full_tensor(value) if isinstance(value, Tensor) else value for value in given]
    with _as_first(like, kwargs):
        return placed(operator(*given, **kwargs), like)


def _as_first(like: DTensor, kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Draw numbers inside that are the same on all ranks of `like`."""
    has_own = kwargs.get("generator") is not None
    is_alike = has_own or not _is_divided(like) or is_in_model()
    return contextlib.nullcontext() if is_alike else _generators_of_first(like)


def _fill_whole(name: str) -> None:
    """Have a function of torch.nn.init fill sharded tensors with their parts of what it makes."""
    plain = getattr(nn.init, name)

    @functools.wraps(plain)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_sharded(tensor):
            result: Tensor = plain(tensor, *args, **kwargs)
            return result
        own = local_part(tensor)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=own.device)
        with _as_first(tensor, kwargs):
            plain(whole, *args, **kwargs)
        with torch.no_grad():
            own.copy_(local_part(placed(whole, tensor)))
        return tensor

    setattr(nn.init, name, fill)


def keep_written(view: DTensor, base: DTensor) -> None:
    """Write what `view` has to `base`, of which it is a view and has a copy."""
    with torch.no_grad():
        whole = torch_compat.replicated(base)
        torch_compat.view_like(view, whole).copy_(view)
        local_part(base).copy_(local_part(placed(local_part(whole), base)))


@contextlib.contextmanager
def _generators_of_first(like: DTensor) -> Iterator[None]:
    """Draw inside as the first rank of the mesh of `like`; all of them enter it together.

    After `rt.shard` ranks of other samples have other generators, and the first has that of one
    process.
    """
    device, mesh = local_part(like).device, like.device_mesh
    own = torch_states(device)
    states = []
    for state in own:
        sent = state.to(device if mesh.device_type != "cpu" else "cpu", copy=True)
        for axis in range(mesh.ndim):
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
        states.append(sent.cpu())
    is_alike = all(map(torch.equal, own, states))
    set_torch_states(states, device)
    try:
        yield
    finally:
        if not is_alike:
            set_torch_states(own, device)


def _is_made_plain(like: DTensor, shape: torch.Size) -> bool:
    """Return whether what is made of the kind of `like` is for samples, as a first hidden state is.

    An optimizer makes its state so.  Activations of a model have other axes than those of ZeRO.
    """
    if shape == like.shape or _runs(_IN_STEP):
        return False
    names = like.device_mesh.mesh_dim_names or ()
    return all(name in _DATA_AXES for name in names) or not is_in_model()


def is_in_model() -> bool:
    """Return whether a module is running, or a function of `msrun.shard`."""
    return _runs(_IN_MODEL)


def _runs(functions: frozenset[tuple[str, str]]) -> bool:
    """Return whether one of some functions is running, each given by its name and file."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - a traceback would cost more
    while frame is not None:
        if (frame.f_code.co_name, frame.f_code.co_filename) in functions:
            return True
        frame = frame.f_back
    return False


def _line(trace: TracebackType | None) -> str:
    """Return the line of the script in which `trace` was raised."""
    found = ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if not any(library in path.parents for library in _LIBRARIES):
            found = f"{path.name}, line {trace.tb_lineno}: "
        trace = trace.tb_next
    return found
