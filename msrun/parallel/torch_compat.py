"""Every private name of torch that msrun uses, each behind one function with a test of its own.

A new torch release may change these names.  `scripts/tidy.py` refuses them in other files, so the
tests of this one file show what broke.
"""
# tidy: long file, all private names of torch are in one place

from __future__ import annotations

import inspect
import io
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import cache, lru_cache, partial, wraps
from pathlib import Path
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.autograd.variable import Variable
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from msrun.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from torch.overrides import TorchFunctionMode

# Their functions of autograd know what they get.
_NOT_OWN = ("torch.", "msrun.")
_REENTRANT = checkpoint.CheckpointFunction.forward.__code__
_FROM_VECTOR = nn.utils.vector_to_parameters.__code__
# How the file names of programs begin that torch writes for graphs.
GENERATED = "<eval_with_key>"


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` run at the end of the running backward pass, on the thread that started it.

    Raises:
        RuntimeError: No backward pass is running.
    """
    Variable._execution_engine.queue_callback(call)  # noqa: SLF001 - there is no public form


def keeps_graph() -> bool:
    """Return whether the running backward pass keeps its graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # noqa: SLF001


def strided_shard(dim: int, parts: int) -> Placement:
    """Return the placement of a mesh axis that shards `dim` after later axes have sharded it.

    Args:
        dim: Dim of the tensor.
        parts: Number of parts that the later axes made, more than 1.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def parts_before(placement: Placement) -> int | None:
    """Return how many parts later axes make before `placement`; None if it shards no dim."""
    if not hasattr(placement, "dim"):
        return None
    return int(getattr(placement, "split_factor", 1))  # of a strided shard alone


def ordered_group(groups: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup:
    """Return this rank's of `groups`, in which ranks have the order of the list; all ranks call it.

    torch sorts the ranks of the groups that it makes for a mesh.  A rank's index in its group would
    then differ from that on the mesh, and a gather would join shards in the order of the group.

    Args:
        groups: Ranks of each group.
        name: Of all of them, in torch's records of collectives.

    Raises:
        ConfigError: This torch can only sort them.
    """
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ConfigError(
            f"parallel.rank_list: torch {torch.__version__} makes groups of sorted ranks alone "
            "(choose torch 2.13)"
        )
    for ranks in groups:
        group: Any = dist.new_group([*ranks], group_desc=name, sort_ranks=False)
        if dist.get_rank() in ranks:
            own: dist.ProcessGroup = group
    return own


def join_axes(mesh: DeviceMesh) -> None:
    """Have DTensor send data for all axes of `mesh` in one collective, not in one for each axis.

    It makes a process group: all ranks call it, in one order.
    """
    joined(mesh, "+".join(mesh.mesh_dim_names or ()))


def joined(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the axes of `mesh` as one axis `name`; all ranks call it, in one order."""
    with outside_of_tracing():  # meshes have values
        # Of all ranks.  An older torch, whose meshes have no such list, sorts them.
        ranks = getattr(mesh, "_rank_map", torch.empty(0)).tolist()
        if ranks != sorted(ranks):
            _join_in_order(mesh, name)
        return mesh._flatten(name)  # noqa: SLF001 - there is no public form


def _join_in_order(mesh: Any, name: str) -> None:
    """Have `_flatten` find the axes of `mesh` as one axis `name`, with ranks in their order."""
    root = mesh._get_root_mesh()  # noqa: SLF001
    if name in root._flatten_mapping:  # noqa: SLF001
        return
    layout = type(mesh._layout)([mesh._layout.collapse()])  # noqa: SLF001
    groups = layout.remap_to_tensor(root._rank_map).tolist()  # noqa: SLF001
    group = ordered_group(groups, f"mesh_{name}")
    made = type(root)(
        root.device_type,
        mesh_dim_names=(name,),
        _layout=layout,
        _rank_map=root._rank_map,  # noqa: SLF001
        _root_mesh=root,
        _init_backend=False,
    )
    made._dim_group_names = [group.group_name]  # noqa: SLF001
    root._pg_registry[group.group_name] = group  # noqa: SLF001
    root._flatten_mapping[name] = made  # noqa: SLF001


def move_shards_by_all_to_all() -> None:
    """Have DTensor move shards from one dim to another by an all-to-all on the CPU, too.

    torch gathers the whole tensor there, since gloo had no all-to-all once: each rank received as
    many bytes from every other rank as it needs from all of them.  It applies to the process.
    """
    from torch.distributed.tensor import placement_types

    found: Any = placement_types  # which exports no such name
    if not isinstance(found.shard_dim_alltoall, _ShardMove):
        found.shard_dim_alltoall = _ShardMove(found.shard_dim_alltoall)


class _ShardMove:
    """Takes the place of torch's function, which it calls for everything but CPUs."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self._original = original

    def __call__(
        self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, axis: int
    ) -> Tensor:
        from torch.distributed._local_tensor import local_tensor_mode

        size = mesh.size(axis)
        if mesh.device_type != "cpu" or local_tensor_mode() or x.size(shard_dim) % size:
            return self._original(x, gather_dim, shard_dim, mesh, axis)
        parts = torch.cat(x.tensor_split(size, shard_dim)) if shard_dim else x.contiguous()
        rows = [parts.size(0) // size] * size
        group = mesh.get_group(axis)
        moved = functional_collective("all_to_all_single", parts, rows, rows, group=group)
        return torch.cat(moved.tensor_split(size), gather_dim) if gather_dim else moved


def apply_own_functions_by_modes() -> None:
    """Have a mode with `apply_own` run each `torch.autograd.Function` of a script or a library.

    torch tells modes of functions nothing of these.  It applies to the process.
    """
    kind: Any = torch.autograd.Function
    original = vars(kind)["apply"].__func__
    if not hasattr(original, "applies_by_modes"):
        kind.apply = classmethod(_by_modes(original))


def _by_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch import overrides

    @wraps(original)
    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        # No mode asks for most of them, and this is hot.
        has_modes = torch._C._len_torch_function_stack()  # noqa: SLF001 - there is no public form
        if not has_modes or kind.__module__.startswith(_NOT_OWN):
            return original(kind, *args, **kwargs)
        run = partial(original, kind)
        for mode in reversed(overrides._get_current_function_mode_stack()):  # noqa: SLF001
            if (apply_own := getattr(mode, "apply_own", None)) is not None:
                return apply_own(kind, run, args, kwargs)
        return run(*args, **kwargs)

    vars(apply)["applies_by_modes"] = True
    return apply


def functional_collective(name: str, x: Tensor, *options: Any, group: dist.ProcessGroup) -> Tensor:
    """Run the functional collective `name` on `x` and return its result, a new tensor.

    The public collectives write into a tensor that they are given.  A recomputation that saves the
    results of communication would skip them and continue with the unwritten tensor.

    Args:
        name: Name of the operator, such as `all_reduce`.
        x: Contiguous tensor on the device of the group.
        options: Arguments between the tensor and the group in the operator's schema.
        group: Group whose ranks all call this.
    """
    operators = torch.ops._c10d_functional  # noqa: SLF001 - the public operators are in place
    with _below_autograd(x):
        begun = getattr(operators, name)(x, *options, group.group_name)
        found: Tensor = operators.wait_tensor(begun)
    return found


def begin_collective(
    name: str, x: Tensor, *options: Any, group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Start `functional_collective`, and return what waits for it and returns its result."""
    operators = torch.ops._c10d_functional  # noqa: SLF001 - the public operators are in place
    with _below_autograd(x):
        begun = getattr(operators, name)(x, *options, group.group_name)
    return partial(_waited, begun)


def _waited(begun: Tensor) -> Tensor:
    with _below_autograd(begun):
        found: Tensor = torch.ops._c10d_functional.wait_tensor(begun)  # noqa: SLF001
    return found


def _below_autograd(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which operators go past autograd, if it records nothing of `x` anyway.

    torch has formulas of collectives in Python, which take longer than to begin one.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return nullcontext()
    below: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()  # noqa: SLF001
    return below


def is_pending(tensor: Tensor) -> bool:
    """Return whether the local part of a `DTensor` is the result of a collective under way."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(tensor._local_tensor, AsyncCollectiveTensor)  # type: ignore[attr-defined]  # noqa: SLF001


def wait(tensor: Tensor) -> None:
    """Wait for the local part of a `DTensor` for which `is_pending` is true."""
    pending = tensor._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001
    tensor._local_tensor = pending.trigger_wait()  # type: ignore[attr-defined]  # noqa: SLF001


def unseen_by(mode: TorchFunctionMode) -> AbstractContextManager[Any]:
    """Return a context in which functions do not pass through `mode`, if no other mode is on."""
    # As a loop: this is hot, and there is hardly ever another mode.
    for index in range(torch._C._len_torch_function_stack()):  # noqa: SLF001
        if torch._C._get_function_stack_at(index) is not mode:  # noqa: SLF001
            return nullcontext()
    return without_functions()


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the part of `tensor` on this rank, outside of autograd and without a copy."""
    return tensor._local_tensor  # noqa: SLF001 - `to_local` is 10 times as slow with autograd


_UNKNOWN = (None, None, None, None)


class ShardSpecs:
    """What DTensor knows of a tensor beside its part on this rank, by that part's shape.

    torch works it out for each tensor, which takes longer than an addition of small ones.
    """

    # A program may have any number of shapes.
    _COUNT_MAX = 2000

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}
        self._quick: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._kind: Any = None

    def tensor(
        self,
        part: Tensor,
        mesh: DeviceMesh,
        placed: tuple[Placement, ...],
        like: tuple[torch.Size, tuple[Placement, ...]] | None = None,
    ) -> DTensor:
        """Return the DTensor of `part`, for the forward or backward of an autograd function.

        Args:
            part: This rank's part.
            mesh: Mesh of the tensor.
            placed: Its placements, of dims that count from 0.
            like: Shape of the tensor, and placements that give parts of this shape; None is a
                tensor that `placed` divides evenly.
        """
        shape, cut = like or (None, placed)
        # By identity first: the hash of placements takes longer than all else here.
        quick = (id(mesh), id(placed), id(cut), shape, part.shape, part.stride(), part.dtype)
        known, *same = self._quick.get(quick, _UNKNOWN)
        if not (same[0] is mesh and same[1] is placed and same[2] is cut):
            known = self._spec(part, mesh, placed, like)
            self._note(self._quick, quick, (known, mesh, placed, cut))
        kind = self._kind
        if kind is None:
            from torch.distributed.tensor import DTensor

            kind = self._kind = DTensor
        # A copy, as torch may write to that of a tensor.
        spec = object.__new__(type(known))
        vars(spec).update(vars(known))
        # What its `__init__` does beside this is for exported programs.
        found: DTensor = kind.__new__(kind, part, spec, requires_grad=part.requires_grad)
        return found

    def _spec(
        self,
        part: Tensor,
        mesh: DeviceMesh,
        placed: tuple[Placement, ...],
        like: tuple[torch.Size, tuple[Placement, ...]] | None,
    ) -> Any:
        key = (id(mesh), placed, like, part.shape, part.stride(), part.dtype)
        known = self._known.get(key)
        if known is None or known.mesh is not mesh:
            known = _spec(part, mesh, placed, like)
            self._note(self._known, key, known)
        return known

    def _note(self, known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
        if len(known) >= self._COUNT_MAX:
            known.clear()
        known[key] = value


def _spec(
    part: Tensor,
    mesh: DeviceMesh,
    placed: tuple[Placement, ...],
    like: tuple[torch.Size, tuple[Placement, ...]] | None,
) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_global_tensor_info

    shape, cut = like or (None, placed)
    even, stride = compute_global_tensor_info(part, mesh, cut)
    size = torch.Size(even) if shape is None else shape
    return DTensorSpec(mesh, placed, tensor_meta=TensorMeta(size, tuple(stride), part.dtype))


def next_node_number() -> int:
    """Return the number that the next node of autograd of this thread gets."""
    number: int = torch._C._autograd._get_sequence_nr()  # noqa: SLF001
    return number


def node_number(node: Any) -> int:
    """Return the number of a node of autograd: backward runs the highest that is ready."""
    return int(node._sequence_nr())  # noqa: SLF001


def set_node_number(node: Any, number: int) -> None:
    """Have backward run `node` as if it had been made as `number`."""
    node._set_sequence_nr(number)  # noqa: SLF001


def modes() -> tuple[list[Any], list[Any]]:
    """Return the function modes and the dispatch modes of this thread, the outermost first."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(active_modes()), list(_get_current_dispatch_mode_stack())


@contextmanager
def with_modes(found: tuple[list[Any], list[Any]]) -> Iterator[None]:
    """Have `modes` of another thread be active in this one, too; they are not entered again."""
    from torch.overrides import _pop_mode, _push_mode
    from torch.utils import _python_dispatch

    functions, dispatched = found
    for mode in functions:
        _push_mode(mode)
    for mode in dispatched:
        _python_dispatch._push_mode(mode)  # noqa: SLF001
    try:
        yield
    finally:
        for _ in dispatched:
            _python_dispatch._pop_mode()  # noqa: SLF001
        for _ in functions:
            _pop_mode()


def empty_wrapper(kind: type[Any], shape: Sequence[int], part: Tensor) -> Any:
    """Return a tensor of the subclass `kind` without memory, with the type and device of `part`.

    Autograd takes it for a leaf, which needs a gradient if `part` does.
    """
    make = Tensor._make_wrapper_subclass  # noqa: SLF001
    return make(kind, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad)


def of_class(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """Return `tensor`, in the same memory, as one of the subclass `kind`, which has no other."""
    return Tensor._make_subclass(kind, tensor)  # noqa: SLF001 - `as_subclass` keeps a reference


def of_subclass() -> AbstractContextManager[None]:
    """Return a context in which functions take a tensor of a subclass as torch made it."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
    return context


def is_active(mode: TorchFunctionMode) -> bool:
    """Return whether functions that are called now pass through `mode`.

    Inside a backward pass the modes around it are not active.
    """
    for index in range(torch._C._len_torch_function_stack()):  # noqa: SLF001 - as `unseen_by`
        if torch._C._get_function_stack_at(index) is mode:  # noqa: SLF001
            return True
    return False


def active_modes() -> list[TorchFunctionMode]:
    """Return the modes that functions pass through which are called now."""
    from torch import overrides

    found: list[TorchFunctionMode] = overrides._get_current_function_mode_stack()  # noqa: SLF001
    return found


def as_plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which functions take subclasses of tensors as plain tensors."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
    return disabled


def is_transforming() -> bool:
    """Return whether torch.func transforms the code that runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def is_differentiated(model: nn.Module) -> bool:
    """Return whether a transform of torch.func takes gradients by parameters of `model`."""
    is_tracked = torch._C._functorch.is_gradtrackingtensor  # noqa: SLF001
    return is_transforming() and any(map(is_tracked, model.parameters()))


@contextmanager
def transforming_whole(whole: Callable[[Any], Any]) -> Iterator[None]:
    """Have transforms of torch.func, inside, replace each of their arguments by `whole` of it."""
    from torch._functorch import apis, eager_transforms
    from torch.utils import _pytree as pytree

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map(whole, (args, kwargs))
            return function(*args, **kwargs)

        return call

    places = [
        (apis, "vmap_impl"),
        (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "_vjp_with_argnums"),
        (eager_transforms, "_jvp_with_argnums"),
    ]
    before = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, before, strict=True):
        setattr(module, name, wrapped(function))
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


def mapped(call: Callable[[Any], Any], tree: Any) -> Any | None:
    """Return `tree`, of containers, with `call` of each leaf; None if that changes no leaf."""
    from torch.utils import _pytree as pytree

    leaves, form = pytree.tree_flatten(tree)
    found = [call(leaf) for leaf in leaves]
    if all(one is other for one, other in zip(leaves, found, strict=True)):
        return None
    return pytree.tree_unflatten(found, form)


_SHOWN = "msrun_shown"  # the gradient that a gathered parameter shows for that of its shard


def reduce_sharded(model: FSDPModule) -> None:
    """Reduce the gradients that accumulated in `model` while its reduction was switched off.

    Afterwards `model` is as after a backward pass: gradients are sharded, nothing is gathered.

    Args:
        model: The outermost module of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    for member in state._state_ctx.all_states:  # noqa: SLF001 - backward alone does it
        for group in member._fsdp_param_groups:  # noqa: SLF001
            group.post_backward()
    state._root_post_backward_final_callback()  # noqa: SLF001


_RELEASES_COMPARED, _EVERY_RELEASES = 4, 100
# By the bytes of an element.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_left_alone: list[bool] = []  # while something else than a step is differentiated


def watch_units(
    model: FSDPModule,
    gathered: Callable[[str], None],
    reduced: Callable[[list[str]], None],
    sparse: Callable[[str], None],
    differentiated: Callable[[], None],
    *,
    changed: Callable[[str], None] = lambda _: None,
    completed: Callable[[list[str], list[str]], None] = lambda *_: None,
    written: Callable[[str], None] = lambda _: None,
    kept: Callable[[Tensor], None] = lambda _: None,
    gathering: Callable[[str], None] = lambda _: None,
) -> None:
    """Call back when modules of `fully_shard` in `model` gather or reduce.

    A module that has gradients of some parameters reduces zeros for the others: ranks that have
    gradients of different ones then send the same.

    Args:
        model: The outermost module of `fully_shard`.
        gathered: Called with the name of a module when the gather of its parameters starts.
        reduced: Called before a module reduces, with the names of its parameters that have a
            gradient.  Without any, torch sends nothing.
        sparse: Called with the name of a parameter that has a sparse gradient, before torch fails.
        differentiated: Called when a backward pass makes gradients of gradients possible, before
            torch fails.
        changed: Called with the name of a parameter whose type, or that of its gradient, is
            another one than before the first forward, before torch fails.
        completed: Called before a module reduces, with the names of its parameters that get zeros
            and had no gradient before, and of those that have one.
        written: Called with the name of a parameter that a script wrote while it was gathered in
            another type; others keep what was written.
        kept: Called with such a parameter before it is released.
        gathering: Called with the name of a module before its gather starts.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for name, module in model.named_modules():  # type: ignore[attr-defined]  # it is both
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            state._pre_backward = _unless_left_alone(state._pre_backward)  # noqa: SLF001
            for group in state._fsdp_param_groups:  # noqa: SLF001
                check = partial(_check_gradients, group, sparse, changed, completed)
                _before_gather(group, partial(gathering, name))
                _watch_unit(group, partial(gathered, name), reduced, check, differentiated)
                group.post_backward = _unless_left_alone(group.post_backward)
                _keep_what_is_written(group, written, kept)


@contextmanager
def units_left_alone() -> Iterator[None]:
    """Differentiate inside without a gather or reduction: it is no backward pass of a step.

    Outputs of units of `fully_shard` have hooks that begin one, also those inside of a model.
    """
    _left_alone.append(True)
    try:
        yield
    finally:
        _left_alone.pop()


def are_units_left_alone() -> bool:
    """Return whether something else than a step is differentiated now."""
    return bool(_left_alone)


def _unless_left_alone(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: (*given, None)[0] if _left_alone else hook(*given)


class _SinceGather(NamedTuple):
    """What is known of parameters since they were gathered.

    Args:
        counts: Of writes.
        memories: What is gathered into; `param.data = tensor` takes another one.
        sums: Of the values, to compare these where no count says so; or nothing.
    """

    counts: list[tuple[int, int]]
    memories: list[Tensor]
    sums: list[Tensor]


def _keep_what_is_written(
    group: Any, written: Callable[[str], None], kept: Callable[[Tensor], None]
) -> None:
    """Have shards get what a script writes to gathered parameters, as in its forward.

    A write through `param.data` counts for no tensor, so sums of values are compared in the first
    releases, and now and then later: on an accelerator the host waits for that.  They are sums of
    whole parameters, so all ranks find the same.
    """
    wait_for_unshard, to_sharded = group.wait_for_unshard, group._to_sharded  # noqa: SLF001
    own = _SinceGather([], [], [])
    released = [0]
    wrote: list[bool] = []

    def counting_wait_for_unshard() -> None:
        is_gathered_anew = group._all_gather_result is not None  # noqa: SLF001
        wait_for_unshard()
        if is_gathered_anew:
            own.counts[:] = _write_counts(group)
            is_due = released[0] < _RELEASES_COMPARED or not (released[0] + 1) % _EVERY_RELEASES
            is_due |= bool(wrote)
            is_due &= not torch.is_inference_mode_enabled()  # which writes none
            params = group.fsdp_params if is_due else ()
            own.sums[:] = [_sum_of_bits(param._unsharded_param) for param in params]  # noqa: SLF001
        # What an evaluation in inference mode gathered may still be there for the next step.
        if own.counts and not (own.memories or torch.is_inference_mode_enabled()):
            own.memories[:] = [param._unsharded_param.data for param in group.fsdp_params]  # noqa: SLF001

    def keeping_to_sharded() -> None:
        # Evaluation in inference mode writes no parameter, and its tensors take no other memory.
        if not group.is_sharded and own.memories and not torch.is_inference_mode_enabled():
            released[0] += 1
            if _keep_writes(group, own, written, kept):
                wrote[:] = [True]
        to_sharded()

    group.wait_for_unshard, group._to_sharded = counting_wait_for_unshard, keeping_to_sharded  # noqa: SLF001


def _write_counts(group: Any) -> list[tuple[int, int]]:
    """Return how often gathered parameters were written, and their shards."""
    return [
        (write_count(param._unsharded_param), write_count(local_tensor(param.sharded_param)))  # noqa: SLF001
        for param in group.fsdp_params
    ]


def writes_to_frozen(model: nn.Module) -> dict[str, int]:
    """Return how often frozen parameters of `fully_shard` in `model` were written, by name."""
    found = {}
    for param in _gathered(model):
        if not param.sharded_param.requires_grad:
            whole = getattr(param, "_unsharded_param", None)
            count = 0 if whole is None else write_count(whole)
            # A function of a DTensor counts for the DTensor, and one of its shard for that.
            shards = (param.sharded_param, param.sharded_param.to_local())
            found[param._param_fqn] = count + sum(map(write_count, shards))  # noqa: SLF001
    return found


@torch.no_grad()
def _keep_writes(
    group: Any,
    gathered: _SinceGather,
    written: Callable[[str], None],
    kept: Callable[[Tensor], None],
) -> bool:
    """Give shards what was written to gathered parameters, which are released next.

    Args:
        group: Of parameters.
        gathered: What is known since they were gathered.
        written: Gets the name of one in another type than its shard.
        kept: Gets each that was written.

    Returns:
        Whether one was written that no count is of.
    """
    found, sums, counts = False, gathered.sums, _write_counts(group)
    every = zip(group.fsdp_params, gathered.counts, counts, gathered.memories, strict=True)
    for index, (param, before, now, memory) in enumerate(every):
        whole = param._unsharded_param.detach()  # noqa: SLF001
        is_exchanged = whole.data_ptr() != memory.data_ptr()
        if is_exchanged:
            param._unsharded_param.data = memory  # noqa: SLF001
        elif before == now and not sums:
            continue
        if before[0] == now[0] and not is_exchanged:
            # Else the script, or an optimizer of shards, has written those.
            is_of_shard = before[1] != now[1]
            if is_of_shard or not sums or torch.equal(_sum_of_bits(whole), sums[index]):
                continue
            found = True
        part = local_tensor(param.sharded_param)
        if whole.dtype != part.dtype or not part.is_floating_point():
            written(param._param_fqn)  # noqa: SLF001
            continue
        local = _local(whole)
        own = local.chunk(param.mesh_info.shard_mesh_size, param.fsdp_placement.dim)
        if param.mesh_info.shard_mesh_rank < len(own):
            part.copy_(own[param.mesh_info.shard_mesh_rank])
        kept(local)
        found |= is_exchanged
    gathered.counts[:] = _write_counts(group)
    return found


@torch.no_grad()
def _sum_of_bits(gathered: Tensor) -> Tensor:
    """Return a number of the values of a gathered parameter, and of where they are."""
    flat = _local(gathered.detach()).reshape(-1)
    bits = flat.view(_INTEGERS[min(flat.element_size(), 8)])
    return torch.stack([part.sum(dtype=torch.int64) for part in (bits[::2], bits[1::2])])


def _local(gathered: Tensor) -> Tensor:
    part: Tensor = gathered.to_local() if hasattr(gathered, "to_local") else gathered
    return part


def before_gathers(model: nn.Module, call: Callable[[list[Any]], None]) -> None:
    """Have `call` run before modules of `fully_shard` in `model` gather, with what they gather.

    Args:
        model: The model, of which some modules may be of `fully_shard`.
        call: Gets the sharded parameters of a module.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
        for group in state._fsdp_param_groups:  # noqa: SLF001
            plain = group.unshard

            def unshard(*options: Any, group: Any = group, plain: Any = plain, **named: Any) -> Any:
                call([param.sharded_param for param in group.fsdp_params])
                return plain(*options, **named)

            group.unshard = unshard


def is_first_of_step_hooks(optimizer: torch.optim.Optimizer, handle: Any) -> bool:
    """Put the hook of `handle` before all others after steps; return whether there are others."""
    hooks: Any = optimizer._optimizer_step_post_hooks  # noqa: SLF001 - there is no public form
    hooks.move_to_end(handle.id, last=False)
    return len(hooks) > 1


def _watch_unit(
    group: Any,
    gathered: Callable[[], None],
    reduced: Callable[[list[str]], None],
    check: Callable[[], None],
    differentiated: Callable[[], None],
) -> None:
    # Methods of the object are replaced, not of the class: other models in the process stay as
    # they are.
    unshard, post_backward = group.unshard, group.post_backward
    post_forward = group.post_forward
    pre_backward, wait_for_unshard = group.pre_backward, group.wait_for_unshard

    def watched_unshard(*options: Any, **named: Any) -> None:
        # `unshard` returns early if parameters are gathered already; only a new result is a gather.
        had_result = group._all_gather_result is not None  # noqa: SLF001
        with _no_inference():
            unshard(*options, **named)
        if not had_result and group._all_gather_result is not None:  # noqa: SLF001
            gathered()

    def watched_pre_backward(*options: Any) -> None:
        if torch.is_grad_enabled():
            differentiated()
        _settle_gradients(group)
        pre_backward(*options)

    def watched_post_backward(*unused: Any) -> None:
        _settle_gradients(group)  # of a unit whose outputs were not used
        check()
        if group.reduce_grads:
            names = [p._param_fqn for p in group.fsdp_params if _has_gradient(p)]  # noqa: SLF001
            reduced(names)
            _widen_gradients(group)
        _place_gradients(group)
        post_backward(*unused)

    def plain_wait_for_unshard() -> None:
        with _no_inference():
            wait_for_unshard()

    def watched_post_forward(*passed: Any) -> Any:
        output = post_forward(*passed)
        if torch.is_grad_enabled() and group.is_unsharded and not is_in_backward():
            _settle_gradients(group)  # of a forward that no backward pass followed
            _show_gradients(group)
        return output

    group.unshard, group.post_backward = watched_unshard, watched_post_backward
    group.post_forward = watched_post_forward
    group.pre_backward, group.wait_for_unshard = watched_pre_backward, plain_wait_for_unshard


def keep_types(model: nn.Module, is_kept: Callable[[list[tuple[nn.Module, str]]], bool]) -> None:
    """Have modules of `fully_shard` gather some parameters in their own type, not in the policy's.

    Args:
        model: The model, before its first forward.
        is_kept: Gets the modules that have a parameter, with its names there.
    """
    for param in _gathered(model):
        info, plain = param._module_info, param.init_dtype_attrs  # noqa: SLF001
        places = [(info.module, info.param_name)]
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
        is_cast = not is_kept(places)

        def init(
            policy: Any, *, param: Any = param, plain: Any = plain, is_cast: bool = is_cast
        ) -> None:
            plain(policy if is_cast else replace(policy, param_dtype=None))
            # torch leaves it out where it is that of gradients, but one unit reduces in one type.
            param.reduce_dtype = policy.reduce_dtype

        param.init_dtype_attrs = init


def gathers_in_policy_type(model: nn.Module) -> bool:
    """Return whether a module of `fully_shard` in `model` gathers in another type than it has."""
    # Parameters have no such attribute before the first forward.
    return any(getattr(param, "param_dtype", None) for param in _gathered(model))


def is_of_two_types(error: BaseException) -> bool:
    """Return whether `error` is that of a product whose factors have two types, one narrow."""
    text = str(error)
    is_narrow = "BFloat16" in text or "Half" in text
    return is_narrow and ("have the same dtype" in text or "expected scalar type" in text)


def _widen_gradients(group: Any) -> None:
    """Have the gradients of a unit one type, that of the reduction, if they have several."""
    params = list(filter(_has_gradient, group.fsdp_params))
    if len({_gradient(param).dtype for param in params}) > 1:
        for param in params:
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


def _place_gradients(group: Any) -> None:
    """Put gradients that a penalty on parameters left where the parameters are.

    torch leaves that of one element whole on all ranks, and `fully_shard` adds to it by shards.
    """
    for param in (each.sharded_param for each in group.fsdp_params):
        gradient = param.grad
        if gradient is not None and gradient.placements != param.placements:
            param.grad = gradient.redistribute(placements=param.placements)


def has_raised_pass(model: FSDPModule) -> bool:
    """Return whether a backward pass of `fully_shard` raised, so that its end never came.

    torch ends no later one then: parameters stay gathered, and forward passes compute with those of
    before the optimizer's step.

    Args:
        model: The outermost module of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    is_waiting: bool = state._state_ctx.post_backward_final_callback_queued  # noqa: SLF001
    return is_waiting and not is_in_backward()


def drop_gathered_gradients(model: nn.Module) -> None:
    """Drop gradients that modules of `fully_shard` in `model` have not reduced."""
    for param in _gathered(model):
        if hasattr(param, "_unsharded_param"):
            vars(param).pop(_SHOWN, None)
            param._unsharded_param.grad = param.unsharded_accumulated_grad = None  # noqa: SLF001


def hide_gradients(model: nn.Module) -> None:
    """Let gathered parameters have no gradient until a backward pass, whatever scripts dropped."""
    for param in _gathered(model):
        mark = vars(param).pop(_SHOWN, None)
        if mark is not None and param._unsharded_param.grad is mark:  # noqa: SLF001
            param._unsharded_param.grad = None  # noqa: SLF001


def _show_gradients(group: Any) -> None:
    """Let a gathered parameter have a gradient, of nothing, where its shard has one.

    So a script that drops it (`param.grad = None`) is seen to.
    """
    for param in group.fsdp_params:
        whole: Any = getattr(param, "_unsharded_param", param)
        is_shown = _has_gradient(param) or param.sharded_param.grad is None
        if is_shown or whole is param:
            continue
        if whole.device.type in ("cpu", "cuda") and not hasattr(whole, "device_mesh"):
            # It takes no memory.
            mark = torch.zeros_like(whole, layout=torch.sparse_coo, requires_grad=False)
            vars(param)[_SHOWN] = whole.grad = mark


def _settle_gradients(group: Any) -> None:
    """Drop the gradients of shards of which a script dropped what `_show_gradients` left."""
    for param in group.fsdp_params:
        mark = vars(param).pop(_SHOWN, None)
        if mark is None:
            continue
        gradient = param._unsharded_param.grad  # noqa: SLF001
        if gradient is mark:
            param._unsharded_param.grad = None  # noqa: SLF001
        elif gradient is None:
            param.sharded_param.grad = None


def _before_gather(group: Any, call: Callable[[], None]) -> None:
    unshard = group.unshard

    def calling_unshard(*options: Any, **named: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:  # noqa: SLF001 - else no gather
            call()
        unshard(*options, **named)

    group.unshard = calling_unshard


def _check_gradients(
    group: Any,
    sparse: Callable[[str], None],
    changed: Callable[[str], None],
    completed: Callable[[list[str], list[str]], None],
) -> None:
    """Call back for each gradient that `group` cannot reduce, and for those that it lacks."""
    for param in filter(_has_gradient, group.fsdp_params):
        gradient, type_of = _gradient(param), param.orig_dtype
        if gradient.is_sparse:
            sparse(param._param_fqn)  # noqa: SLF001
        types = gradient.dtype, param.sharded_param.dtype
        expected = param.param_dtype or type_of
        if param.unsharded_accumulated_grad is not None:  # over micro-batches
            expected = param.reduce_dtype or expected
        if types != (expected, type_of):
            changed(param._param_fqn)  # noqa: SLF001
    having = [p._param_fqn for p in group.fsdp_params if _has_gradient(p)]  # noqa: SLF001
    if not (group.reduce_grads and having):
        return
    lacking = [
        param
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
        and param.sharded_param.requires_grad
        and not _has_gradient(param)
    ]
    completed([p._param_fqn for p in lacking if p.sharded_param.grad is None], having)  # noqa: SLF001
    for param in lacking:
        param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)


@contextmanager
def _no_inference() -> Iterator[None]:
    """Leave `torch.inference_mode`: memory of gathered parameters made there cannot train later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _has_gradient(param: Any) -> bool:
    return hasattr(param, "_unsharded_param") and _gradient(param) is not None


def _gradient(param: Any) -> Any:
    added = param.unsharded_accumulated_grad
    return param.unsharded_param.grad if added is None else added


def dispatching(handle: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a context in which operators go to `handle`, below autograd.

    Operators that `handle` itself calls run as they do outside of the context.

    Args:
        handle: Called with the operator, the types of tensor subclasses, positional and named
            arguments.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        is_ours = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return handle(func, types, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]


@contextmanager
def eagerly() -> Iterator[None]:
    """Have functions of `torch.compile` run as they were before, inside.

    The public form would import the compiler, which a process without compiled functions lacks.
    Higher-order operators such as `torch.cond` compile what they call, and need it: run as it was
    before, it would lose the gradients of tensors that it does not get as arguments.  The compiler
    cannot follow function modes whose class has `is_watch`, so these do not see the inside.
    """
    if "torch._dynamo" not in sys.modules or _EAGER:
        yield
        return

    _EAGER.append(True)
    try:
        with _compiling_in(_normally), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _EAGER.pop()


_Called = TypeVar("_Called", bound=Callable[..., Any])


def off_compiler(function: _Called) -> _Called:
    """Have torch's compiler follow neither `function` nor what it calls, and return it.

    `torch.compiler.disable` would import the compiler, which a process without compiled functions
    lacks.  A mode outlives the moment at which a script first compiles something.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    frames = torch._C._dynamo.eval_frame  # noqa: SLF001
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.7
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        skips = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001 - the frame, what it calls
        frames.set_code_exec_strategy(function.__code__, skips)
    return function


# Not empty inside of `eagerly`, which replaces what there is once in a process: threads that take
# turns would put it back in another order.
_EAGER: list[bool] = []


def compiled_again() -> AbstractContextManager[None]:
    """Return a context in which functions of `torch.compile` run compiled, unseen by watches.

    Also inside of `eagerly`.
    """
    return _normally() if _watches() else nullcontext()


@contextmanager
def _normally() -> Iterator[None]:
    """Have functions of `torch.compile` run compiled, inside, unseen by watches."""
    with torch.compiler.set_stance("default"), unwatched():
        yield


def without_dispatch_in_branches() -> AbstractContextManager[None]:
    """Return a context in which `torch.cond` and its like leave modes of `dispatching`.

    The compiler, which they use, cannot follow these.
    """
    return _compiling_in(outside_of_tracing)


@contextmanager
def _compiling_in(make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Have higher-order operators compile and run inside of a context that `make` returns."""
    from torch._higher_order_ops import utils

    plain = utils.setup_compilation_env
    utils.setup_compilation_env = _compiling(make, plain)
    try:
        yield
    finally:
        utils.setup_compilation_env = plain


@lru_cache(maxsize=8)  # every loss of a step replaces the same one
def _compiling(make: Callable[[], AbstractContextManager[Any]], plain: Callable[[], Any]) -> Any:
    @contextmanager
    def compiling() -> Iterator[Any]:
        with make(), plain() as backend:
            yield backend

    return compiling


@contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave the function mode `mode` inside, and no other."""
    modes = active_modes()
    if not any(active is mode for active in modes):
        yield
        return
    _replace_modes([active for active in modes if active is not mode])
    try:
        yield
    finally:
        _replace_modes(modes)


def add_mode_below(mode: TorchFunctionMode) -> None:
    """Have functions pass through `mode` behind all modes that are on, until `remove_mode`.

    Code around ends the modes that it began, whatever is added in between: it takes the top one.
    The mode of `torch.set_default_device` insists on being the last of all.
    """
    modes = active_modes()
    at = sum("old_device" in vars(active) for active in modes[:1])
    _replace_modes([*modes[:at], mode, *modes[at:]])


def remove_mode(mode: TorchFunctionMode) -> None:
    """Have functions pass through `mode` no more, wherever it is among those that are on."""
    modes = active_modes()
    if any(active is mode for active in modes):
        _replace_modes([active for active in modes if active is not mode])


def compiled_whole(
    forward: Callable[..., Any],
    mode: str,
    look: Callable[[Any], Callable[[Sequence[Any]], Sequence[Any]] | None],
    *,
    is_dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return `forward`, compiled to one graph, each of which `look` gets before torch's compiler.

    `torch.compile` takes a mode for its own compiler alone.

    Args:
        forward: The forward.
        mode: As of `torch.compile`.
        look: Looks at a graph, and may return what its results become when it runs.
        is_dynamic: Whether graphs are for any shapes; None follows from the shapes of calls.
    """
    compile_graph = torch._TorchCompileInductorWrapper(mode, None, None)  # noqa: SLF001

    def looking(graph: Any, inputs: Any) -> Any:
        change = look(graph)
        run: Callable[..., Any] = compile_graph(graph, inputs)
        return run if change is None else lambda *values: change(run(*values))

    return torch.compile(forward, backend=looking, fullgraph=True, dynamic=is_dynamic)


def is_graph_read() -> bool:
    """Return whether a mode is active that follows samples by the graph of autograd."""
    return any(getattr(mode, "reads_graph", False) for mode in _watches())


def _watches() -> list[Any]:
    """Return the active function modes that only watch."""
    if not torch._C._len_torch_function_stack():  # noqa: SLF001 - as `unseen_by`
        return []
    modes = active_modes()
    return [mode for mode in modes if getattr(mode, "is_watch", False)]


def is_watched() -> bool:
    """Return whether a function mode is active that only watches."""
    return bool(_watches())


@contextmanager
def unwatched() -> Iterator[None]:
    """Leave function modes that only watch."""
    modes = active_modes()
    kept = [mode for mode in modes if not getattr(mode, "is_watch", False)]
    _replace_modes(kept)
    try:
        yield
    finally:
        _replace_modes(modes)


def _replace_modes(modes: list[Any]) -> None:
    from torch import overrides

    for _ in overrides._get_current_function_mode_stack():  # noqa: SLF001 - no public form
        overrides._pop_mode()  # noqa: SLF001
    for mode in modes:
        overrides._push_mode(mode)  # noqa: SLF001


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass.

    At the end of each autograd node torch restores the modes that were active at its start.
    """
    return backward_number() != -1


def backward_number() -> int:
    """Return the number of the backward pass that this thread runs, each with its own; else -1."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001 - there is no public form


def is_to_run(step: Any) -> bool:
    """Return whether the running backward pass runs a step of autograd, or has run it."""
    return bool(torch._C._will_engine_execute_node(step))  # noqa: SLF001 - there is no public form


def checkpointed() -> object | None:
    """Return an object that identifies the innermost `torch.utils.checkpoint`; None outside of one.

    The object supports weak references.
    """
    if torch.is_grad_enabled():
        ignores_tracing = False
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001
        pack = (top(ignores_tracing) or [None])[0]
        return pack if getattr(pack, "__module__", "") == checkpoint.__name__ else None
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - a reentrant one has no other trace
    while frame is not None:
        if frame.f_code is _REENTRANT:
            return frame.f_locals["ctx"]  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


def is_dispatching() -> bool:
    """Return whether operators that are called now go to some dispatch mode."""
    return int(torch._C._len_torch_dispatch_stack()) > 0  # noqa: SLF001 - no public form


def is_tracing() -> bool:
    """Return whether operators go to a dispatch mode that is none of `dispatching`."""
    if not is_dispatching():
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(not getattr(mode, "is_ours", False) for mode in _get_current_dispatch_mode_stack())


@cache
def is_pointwise(name: str) -> bool:
    """Return whether torch has an operator `name`, or `special_name`, and says it is pointwise."""
    names = (name, f"special_{name}") if name.isidentifier() and not name.startswith("_") else ()
    found = [getattr(torch.ops.aten, each, None) for each in names]
    packets = [each for each in found if isinstance(each, torch._ops.OpOverloadPacket)]  # noqa: SLF001
    operators = [getattr(packet, each) for packet in packets for each in packet.overloads()]
    return any(torch.Tag.pointwise in operator.tags for operator in operators)


def written_arguments(operator: Any) -> tuple[list[int], list[str]]:
    """Return the arguments that `operator` writes: positions, and names of keyword-only ones."""
    arguments = operator._schema.arguments  # noqa: SLF001 - there is no public form
    written = [
        (position, argument)
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return (
        [position for position, argument in written if not argument.kwarg_only],
        [argument.name for _, argument in written if argument.kwarg_only],
    )


def has_gradient_hooks(param: Tensor) -> bool:
    """Return whether hooks were ever registered on the gradient of `param`; it takes no time."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # noqa: SLF001


def gradient_hook_numbers(params: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Return the numbers of the hooks on the gradient of each parameter.

    torch gives each hook of the process a number of its own.
    """
    return [
        (*(param._backward_hooks or ()), *(param._post_accumulate_grad_hooks or ()))  # noqa: SLF001
        for param in params
    ]


def gradient_hooks(param: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks on the gradient of `param`, before and after it is accumulated.

    Autograd and the handles of the hooks use the same dicts.  Without hooks a dict is a new one.
    """
    before: Any = param._backward_hooks  # noqa: SLF001 - there is no public form
    after: Any = param._post_accumulate_grad_hooks  # noqa: SLF001 - there is no public form
    return before if before is not None else {}, after if after is not None else {}


def share_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Give `target` the hooks of `source`; handles remove them from both."""
    if source._backward_hooks:  # noqa: SLF001 - there is no public form
        target._backward_hooks = source._backward_hooks  # noqa: SLF001
    after: Any = source._post_accumulate_grad_hooks  # noqa: SLF001
    if after:
        target._post_accumulate_grad_hooks = after  # noqa: SLF001


def _gathered(model: nn.Module) -> Iterator[Any]:
    """Yield what torch keeps of each parameter of `fully_shard` in `model`."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in _modules_at_places(model):
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:  # noqa: SLF001
                yield from group.fsdp_params


def releases_gathered(model: nn.Module) -> bool:
    """Return whether a unit of `fully_shard` has gathered, and its backward pass would release.

    Args:
        model: With such units.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    units: Any = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [
        group
        for unit in units
        for group in fully_shard.state(unit)._fsdp_param_groups  # type: ignore[attr-defined]  # noqa: SLF001
    ]
    return any(group.reshard_after_backward and group.is_unsharded for group in groups)


def show_shards(unit: FSDPModule) -> None:
    """Have a unit of `fully_shard` have its shards, and leave what it gathered in memory."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for param in group.fsdp_params:
            param._setattr_on_modules(param.sharded_param)  # noqa: SLF001
            param.sharded_state = type(param.sharded_state).SHARDED
        group._sharded_state = type(group._sharded_state).SHARDED  # noqa: SLF001


def parts_with_parameters(unit: FSDPModule) -> list[nn.Module]:
    """Return the modules inside of a unit of `fully_shard` that hold its own parameters."""
    from torch.distributed.fsdp import fully_shard

    found: dict[Any, None] = {}
    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for param in group.fsdp_params:
            place = param._module_info  # noqa: SLF001
            found.update(dict.fromkeys([place.module, *place.shared_modules]))
    found.pop(unit, None)
    return [*found]


def begin_units(model: FSDPModule) -> None:
    """Make `model` the outermost unit of `fully_shard`, whichever is called first.

    Its parameters must have memory by now.
    """
    from torch.distributed.fsdp import fully_shard

    fully_shard.state(model)._lazy_init()  # type: ignore[attr-defined]  # noqa: SLF001


def notes_of_forward(model: nn.Module) -> list[tuple[object, str]]:
    """Return what units of `fully_shard` note while a forward runs: objects, names of attributes.

    The outermost unit has begun.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    found: list[tuple[object, str]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            found += [(part, "_training_state") for part in (state, *state._fsdp_param_groups)]  # noqa: SLF001
            if (root := (state._state_ctx, "iter_forward_root")) not in found:  # noqa: SLF001
                found.append(root)
    return found


def is_gathered(unit: FSDPModule) -> bool:
    """Return whether the parameters of a unit of `fully_shard` are whole on this rank."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    return all(group.is_unsharded for group in state._fsdp_param_groups)  # noqa: SLF001


def gathered_with_gradient(model: nn.Module) -> set[Tensor]:
    """Return the parameters of `fully_shard` in `model` that have a gradient, reduced or not.

    Each in both forms: as modules have it while it is gathered, and as its shard.
    """
    return {
        form
        for param in _gathered(model)
        if param.sharded_param.grad is not None or _has_gradient(param)
        for form in (param.sharded_param, param._unsharded_param)  # noqa: SLF001
    }


def unreduced_gradients(model: nn.Module) -> list[str]:
    """Return the names of gathered parameters with a gradient that is not that of their shard."""
    return [
        param._param_fqn  # noqa: SLF001
        for param in _gathered(model)
        if _has_gradient(param) and _gradient(param) is not vars(param).get(_SHOWN)
    ]


def shards_of_gathered(model: nn.Module) -> dict[Tensor, Any]:
    """Return the shard of each parameter of `fully_shard` in `model`, by its gathered form."""
    return {
        param._unsharded_param: param.sharded_param  # noqa: SLF001
        for param in _gathered(model)
        if hasattr(param, "_unsharded_param")
    }


def replaced_parameter(unit: FSDPModule) -> str:
    """Return the name of a parameter in whose place a module has another tensor; empty if none.

    A parameter of another type than `fully_shard` got is another one, too.

    Args:
        unit: Gathers the parameter, and would overwrite what is in its place.
    """
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for param in group.fsdp_params:
            place = param._module_info  # noqa: SLF001
            found = place.module._parameters.get(place.param_name)  # noqa: SLF001
            forms = (param.sharded_param, getattr(param, "_unsharded_param", None))
            is_known = any(found is form for form in forms)
            if not is_known or param.sharded_param.dtype != param.orig_dtype:
                return str(param._param_fqn or place.param_name)  # noqa: SLF001
    return ""


def has_shards_in_place(unit: FSDPModule) -> bool:
    """Return whether modules have shards, though the parameters of their unit are gathered.

    So `torch.func.functional_call` leaves them, if shards were there before it.
    """
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
    return any(
        param._module_info.module._parameters.get(param._module_info.param_name)  # noqa: SLF001
        is param.sharded_param
        for group in state._fsdp_param_groups  # noqa: SLF001
        if group.is_unsharded
        for param in group.fsdp_params
    )


def watch_joined_inputs(
    model: FSDPModule, watch: Callable[[list[Tensor]], Sequence[Tensor]]
) -> None:
    """Have modules of `fully_shard` in `model` use what `watch` returns for their joined inputs.

    Such a module passes its inputs through one step of autograd.

    Args:
        model: The outermost module of `fully_shard`.
        watch: Called in each forward with the inputs that need gradients, if there are several.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():  # type: ignore[attr-defined]  # it is both
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:  # noqa: SLF001
                _watch_joined_inputs(group, watch)


def _watch_joined_inputs(group: Any, watch: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
    from torch.utils._pytree import tree_flatten, tree_unflatten

    register = group._register_post_backward_hook  # noqa: SLF001

    def registered(args: Any, kwargs: Any) -> Any:
        result = register(args, kwargs)
        values, structure = tree_flatten(result)
        joined = [
            at
            for at, value in enumerate(values)
            if isinstance(value, Tensor) and passes_straight(value.grad_fn)
        ]
        if len(joined) <= 1:
            return result
        for at, value in zip(joined, watch([values[at] for at in joined]), strict=True):
            values[at] = value
        return tree_unflatten(values, structure)

    group._register_post_backward_hook = registered  # noqa: SLF001


def open_inputs(
    model: FSDPModule, opened: Callable[[Any], tuple[Any, Callable[[Any], Any]]]
) -> None:
    """Have modules of `fully_shard` in `model` pass through autograd what `opened` returns.

    Args:
        model: The outermost module of `fully_shard`.
        opened: Returns its argument without wrappers, and a function that puts them back.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():  # type: ignore[attr-defined]  # it is both
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:  # noqa: SLF001
                _open_inputs(group, opened)


def _open_inputs(group: Any, opened: Callable[[Any], tuple[Any, Callable[[Any], Any]]]) -> None:
    register = group._register_post_backward_hook  # noqa: SLF001

    def registered(args: Any, kwargs: Any) -> Any:
        values, close = opened((args, kwargs))
        return close(register(*values))

    group._register_post_backward_hook = registered  # noqa: SLF001


def passes_straight(step: Any) -> bool:
    """Return whether a step of autograd hands each gradient to the input of the same number.

    Such is the one by which a module of `fully_shard` knows that its backward pass has ended.
    """
    kind = function_of(step)
    name = getattr(kind, "__name__", "")
    return name == "RegisterPostBackwardFunction" or getattr(kind, "passes_straight", False)


def share_attributes(model: FSDPModule) -> None:
    """Give gathered parameters of `model` the attributes that their shards have now.

    Modules read them in forward.  Torch makes the gathered parameters in the first one.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in model.modules():  # type: ignore[attr-defined]  # it is both
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            for group in state._fsdp_param_groups:  # noqa: SLF001
                for member in group.fsdp_params:
                    if vars(member.sharded_param):
                        _share_attributes(member)


def _share_attributes(member: Any) -> None:
    make = member.init_unsharded_param

    def make_and_share() -> None:
        make()
        for name, value in vars(member.sharded_param).items():
            vars(member._unsharded_param).setdefault(name, value)  # noqa: SLF001

    member.init_unsharded_param = make_and_share


def is_step_of_scheduler(step: Callable[..., Any]) -> bool:
    """Return whether `step` is what a scheduler put in place of the method of its optimizer."""
    return hasattr(step, "_wrapped_by_lr_sched")


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that `optimizer` takes a step; they warn if theirs come first."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - no public form


def replace_list_functions(
    kind_of: Callable[[Tensor], object | None],
    norm_of: Callable[[list[Tensor], float], Tensor | None],
    unscaled: Callable[[Callable[..., None], list[Tensor], Tensor, Tensor], None],
) -> None:
    """Have torch's clipping, averages of models and loss scales take lists of several kinds.

    A second call does nothing.

    Args:
        kind_of: Returns the kind of a tensor beside its device and type; None for plain ones.
        norm_of: Returns a norm of tensors; None leaves it to torch.
        unscaled: Takes torch's function that unscales gradients in place, and what it takes: they,
            the number that tells of one that is not finite, and the inverse scale.
    """
    from torch.nn import utils
    from torch.nn.utils import clip_grad
    from torch.optim import swa_utils

    total: Any = clip_grad._get_total_norm  # noqa: SLF001 - there is no public form
    if getattr(total, "of_msrun", False):
        return
    group: Any = clip_grad._group_tensors_by_device_and_dtype  # type: ignore[attr-defined]  # noqa: SLF001

    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - as torch's
        foreach: bool | None = None,  # noqa: FBT001
    ) -> Any:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with torch.no_grad():
            norm = norm_of(listed, float(norm_type))
        if norm is None:
            return total(listed, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite:
            total([norm], norm_type, error_if_nonfinite=True)
        return norm

    total_norm.of_msrun = True  # type: ignore[attr-defined]
    unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_
    torch._amp_foreach_non_finite_check_and_unscale_ = partial(unscaled, unscale)
    clip_grad._get_total_norm = total_norm  # noqa: SLF001
    utils.get_total_norm = total_norm
    for module in (clip_grad, swa_utils):
        module._group_tensors_by_device_and_dtype = _grouping(group, kind_of)  # type: ignore[attr-defined]  # noqa: SLF001


def _grouping(plain: Any, kind_of: Callable[[Tensor], object | None]) -> Callable[..., Any]:
    """Return a function that groups tensors as `plain` does, and by kind."""

    def grouped(lists: Any, with_indices: bool = False) -> Any:  # noqa: FBT001, FBT002 - as torch's
        kinds: dict[object, list[int]] = {}
        for index, tensor in enumerate(lists[0]):
            kinds.setdefault(None if tensor is None else kind_of(tensor), []).append(index)
        if with_indices or set(kinds) <= {None}:
            return plain(lists, with_indices)
        result = {}
        for number, indices in enumerate(kinds.values()):
            parts = [[each[index] for index in indices] for each in lists]
            for (device, dtype), found in plain(parts, with_indices).items():
                result[device, (dtype, number)] = found
        return result

    return grouped


def watch_sharded_values(
    check_value: Callable[[Any], None], name_error: Callable[[RuntimeError], BaseException | None]
) -> None:
    """Have values and backward passes of DTensors pass two functions; a second call does nothing.

    torch's `item()` returns what this rank has of a sum, and its `format` fails.

    Args:
        check_value: Called with each DTensor whose value Python reads.
        name_error: Returns the error to raise for one of `backward()` of a DTensor; None lets it.
    """
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    handlers = kind._op_dispatcher._custom_op_handlers  # noqa: SLF001 - there is no public form
    read = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001
    if read in handlers:
        return

    def value(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_value(args[0])
        return operator(args[0].to_local(), **kwargs)

    run: Any = kind.backward

    def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
        try:
            run(loss, *args, **kwargs)
        except RuntimeError as error:
            if (named := name_error(error)) is None:
                raise
            raise named from None

    def text(tensor: Any, spec: str) -> str:
        return format(tensor.item() if tensor.dim() == 0 else str(tensor), spec)

    handlers[read] = value
    kind.backward, kind.__format__ = backward, text


_ELEMENT_METHODS = """
    add add_ addcdiv addcdiv_ addcmul addcmul_ copy_ div div_ lerp lerp_ mul mul_ sub sub_ where
    __add__ __iadd__ __imul__ __isub__ __itruediv__ __mul__ __radd__ __rmul__ __rsub__ __rtruediv__
    __sub__ __truediv__
"""
_PRODUCT_METHODS = "__matmul__ __rmatmul__ matmul mm"


def _reflected_product(second: Tensor, first: Tensor) -> Tensor:
    return Tensor.__matmul__(first, second)


def _element_method(
    kind: Any,
    name: str,
    take: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    number: Callable[[Any, Any], None],
) -> Callable[..., Any]:
    """Return a method of Tensor for DTensors; see `replace_element_methods`."""
    # Python asks a DTensor behind a plain tensor first; nobody else knows that function.
    plain = _reflected_product if name == "__rmatmul__" else getattr(Tensor, name)
    is_write = name.startswith("__i") or (name.endswith("_") and name[0] != "_")

    @wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, kind):
                if value.device_mesh != self.device_mesh:
                    take(self, value)
                continue
            if isinstance(value, Tensor) and value.numel() > 1:
                self, whole = take(self, value)
                args = tuple(whole if given is value else given for given in args)
                kwargs = {key: whole if v is value else v for key, v in kwargs.items()}
            elif is_write and isinstance(value, Tensor | float | int):
                number(self, value)
        return plain(self, *args, **kwargs)

    return method


def replace_element_methods(
    take: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
    draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    number: Callable[[Any, Any], None],
    whole: Callable[[Any], Tensor],
    *,
    multiply: Callable[[Any, Tensor], tuple[Tensor, Tensor]],
) -> bool:
    """Have methods of DTensors take plain tensors, and functions draw whole ones.

    `tensor.data = ...` of a DTensor is without effect in torch.  Here it writes, except to a
    parameter that would have memory in common with another tensor.  A DTensor as the data of a
    plain parameter would end the process at the next look at it.

    Args:
        take: Returns what a method gets for a DTensor and a plain tensor; also gets those of two
            meshes, for which torch raises.
        draw: Returns what a function draws that is to look like a DTensor among its arguments, or
            to fill the first.
        number: Gets a DTensor and a number, or a tensor of one, that it is written with.
        whole: Returns the whole of a DTensor, which is to be the data of a plain parameter.
        multiply: As `take`, for products of matrices.

    Returns:
        Whether this is the first call; others do nothing.
    """
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    if "add_" in vars(kind):
        return False

    for name in _ELEMENT_METHODS.split():
        setattr(kind, name, _element_method(kind, name, take, number))
    for name in _PRODUCT_METHODS.split():
        setattr(kind, name, _element_method(kind, name, multiply, number))
    handlers = kind._op_dispatcher._custom_op_handlers  # noqa: SLF001 - there is no public form
    for operator in _overloads("rand_like randn_like randint_like bernoulli normal"):
        handlers[operator] = draw

    def fill(op: Any, args: Any, kwargs: Any) -> Any:
        drawn = draw(op, args, kwargs)
        return args[0].copy_(drawn)

    in_place = "normal_ uniform_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ random_"
    for operator in _overloads(in_place):
        handlers[operator] = fill
    _write_data(kind, whole)
    return True


def _write_data(kind: Any, whole: Callable[[Any], Tensor]) -> None:
    """Have `tensor.data = ...` write to DTensors; see `replace_element_methods`."""
    data: Any = Tensor.data

    def write(self: Any, value: Tensor) -> None:
        is_param = isinstance(self, torch.nn.Parameter) or self.requires_grad
        # It gives parameters slices of a vector that it leaves alone.
        is_param &= sys._getframe(1).f_code is not _FROM_VECTOR  # noqa: SLF001 - imported by name
        is_param &= (self.dtype, self.device) != (value.dtype, value.device) or _is_shared(value)
        if is_param or self.shape != value.shape:
            data.__set__(self, value)
            return
        with torch.no_grad():
            self.copy_(value)

    def become(self: Any, value: Tensor) -> None:
        is_plain = isinstance(value, kind) and not isinstance(self, kind)
        data.__set__(self, whole(value) if is_plain else value)

    kind.data = property(data.__get__, write)
    torch.nn.Parameter.data = property(data.__get__, become)  # type: ignore[assignment]


def _is_shared(tensor: Tensor) -> bool:
    """Return whether another tensor, such as a parameter, has memory in common with `tensor`."""
    from torch.distributed.tensor import DTensor

    own = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return tensors_in(own.untyped_storage()) > 1


def make_plain(is_plain: Callable[[Any, torch.Size], bool]) -> None:
    """Have `new_zeros` and the like of DTensors return plain tensors where `is_plain` says so.

    Args:
        is_plain: Gets the DTensor, and the shape of what is made.
    """
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    for name in ("new_zeros", "new_ones", "new_full", "new_empty"):
        setattr(kind, name, _making_method(name, is_plain))


def _making_method(name: str, is_plain: Callable[[Any, torch.Size], bool]) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    @wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with without_functions():  # and without memory: it may be as large as the whole of `self`
            shape = plain(
                torch.empty(0, device="meta"), *args, **{**kwargs, "device": "meta"}
            ).shape
        like = self.to_local().detach() if is_plain(self, shape) else self
        return plain(like, *args, **kwargs)

    return method


def watch_written_views(keep: Callable[[Any, Any], None]) -> None:
    """Call `keep(view, base)` for each DTensor that a function wrote, if that is lost for its base.

    A view along a sharded dim, such as `param[0]`, is gathered: what is written to it would go to a
    copy.  Where autograd follows the write it is left alone.

    Args:
        keep: Gets the view, and the DTensor that it is of.
    """
    from torch.distributed.tensor import DTensor

    kind: Any = DTensor
    dispatcher = kind._op_dispatcher  # noqa: SLF001 - there is no public form
    # Where C++ dispatches, it calls the first for functions that write; older torch has the other.
    tail_name = "_dispatch_fast_path_python_tail"
    name = tail_name if hasattr(dispatcher, tail_name) else "dispatch"
    function: Any = getattr(type(dispatcher), name)
    plain = _copied(function)

    def tail(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
        result = plain(dispatcher, operator, args, kwargs, *rest)
        for written in _written(operator, args, kwargs):
            if (base := lost_base(written)) is not None:
                keep(written, base)
        return result

    dispatcher.msrun_tail = tail
    # C++ looks the method up once, at the first write to a DTensor, which may have been before.
    function.__code__ = _to_tail.__code__
    # As `param[0] = 1.0` has it.
    fill = torch.ops.aten.fill_
    dispatcher._custom_op_handlers[fill.Tensor] = lambda _, args, __: fill.Scalar(  # noqa: SLF001
        args[0], args[1].item()
    )


def _copied(function: Any) -> Any:
    """Return a function of the same code."""
    code, values = function.__code__, function.__globals__
    return FunctionType(code, values, function.__name__, function.__defaults__)


def _to_tail(self: Any, *args: Any) -> Any:
    return self.msrun_tail(*args)


def replace_refused(names: str, compute: Callable[..., Any]) -> None:
    """Have a function compute what operators refuse for DTensors.

    Args:
        names: Of operators, all of their overloads that return what they compute.
        compute: Gets an operator that raised or lost what it wrote, its arguments, and the DTensors
            among them that it writes; returns `NotImplemented` where the error is right.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher  # noqa: SLF001 - there is no public form
    handlers = dispatcher._custom_op_handlers  # noqa: SLF001

    def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written(operator, args, kwargs)
        specs = [each._spec for each in written]  # noqa: SLF001 - there is no public form
        handlers.pop(operator, None)  # so that the call below is torch's own, in any thread
        try:
            result = operator(*args, **kwargs)
        except (RuntimeError, IndexError):
            result = compute(operator, args, kwargs, written)
            if result is NotImplemented:
                raise
        else:
            lost = list(map(_is_replaced, written, specs))
            for each, spec in zip(written, specs, strict=True):
                each._spec = spec  # noqa: SLF001 - there is no public form
            if any(lost):
                result = compute(operator, args, kwargs, written)
                if result is NotImplemented:
                    raise RuntimeError(f"{operator} writes copies of sharded tensors")
        finally:
            handlers[operator] = handle
        return result

    for operator in _overloads(names):
        handlers[operator] = handle


def _is_replaced(written: Any, spec: Any) -> bool:
    """Return whether torch gathered `written`, which had `spec`, and wrote what it gathered.

    So it does, without an error, in `index_add_` of sharded tensors alone (2.13).
    """
    is_same: bool = written._spec.placements == spec.placements  # noqa: SLF001
    return not is_same


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the DTensors that a call of `operator` writes."""
    from torch.distributed.tensor import DTensor

    found: list[Any] = []
    for place, key in _written_arguments(operator):
        value = args[place] if place < len(args) else kwargs.get(key)
        found += value if isinstance(value, list | tuple) else (value,)
    return [value for value in found if isinstance(value, DTensor)]


def lost_base(written: Any) -> Any | None:
    """Return the DTensor of which `written` is a view, if what is written to it is lost there."""
    base = written._base if written._is_view() else None  # noqa: SLF001 - there is no public form
    return base if isinstance(base, type(written)) and _is_copy(written, base) else None


@cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return the places and names of the arguments that `operator` writes."""
    arguments = operator._schema.arguments  # noqa: SLF001 - there is no public form
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info and argument.alias_info.is_write
    )


def replicated(tensor: Any) -> Any:
    """Return a DTensor with a copy of all of `tensor` on each rank, of the same strides."""
    whole = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=local_tensor(tensor).device
    )
    whole.copy_(tensor.full_tensor())
    return as_replicated(whole, tensor.device_mesh)


def as_replicated(whole: Tensor, mesh: DeviceMesh) -> Any:
    """Return a DTensor of which each rank of `mesh` has all, which is `whole`."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(
        whole,
        mesh,
        [Replicate()] * mesh.ndim,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def view_like(view: Tensor, base: Tensor) -> Tensor:
    """Return the view of `base` that `view` is of its own base."""
    found: Tensor = view._view_func_unsafe(base)  # noqa: SLF001
    return found


def _is_copy(view: Any, base: Any) -> bool:
    """Return whether a view of a DTensor has other memory, and autograd does not follow writes."""
    if torch.is_grad_enabled() and base.requires_grad:
        return False
    own, whole = (local_tensor(each).untyped_storage() for each in (view, base))
    return own.data_ptr() != whole.data_ptr() and not any(p.is_partial() for p in base.placements)


@cache
def draws_by_values() -> frozenset[Any]:
    """Return the operators that draw by the values of tensors, such as means."""
    aten = torch.ops.aten
    normals = aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor
    return frozenset([aten.bernoulli.default, *normals])


def _overloads(names: str) -> Iterator[Any]:
    """Yield the overloads of operators, by names, that have no argument `out`."""
    for packet in (getattr(torch.ops.aten, name) for name in names.split()):
        overloads = (getattr(packet, name) for name in packet.overloads())
        yield from (each for each in overloads if not each._schema.arguments[-1].is_out)  # noqa: SLF001 - there is no public form


def takes_device(operator: Any) -> bool:
    """Return whether `operator` takes the device of its result as an argument."""
    arguments = operator._schema.arguments  # noqa: SLF001 - there is no public form
    return any(argument.name == "device" for argument in arguments)


def write_count(tensor: Tensor) -> int:
    """Return how often `tensor` was written in place; a tensor and its views share the count."""
    return int(tensor._version)  # noqa: SLF001 - there is no public form


def write_counter(tensor: Tensor) -> Tensor:
    """Return a tensor that has the `write_count` of `tensor`, and none of its memory."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def viewed(tensor: Tensor) -> Tensor | None:
    """Return the tensor that `tensor` is a view of; None if it is none."""
    return tensor._base  # noqa: SLF001 - there is no public form


def tensors_in(memory: UntypedStorage) -> int:
    """Return how many tensors use `memory`, including views and tensors that only torch holds."""
    users = torch._C._storage_Use_Count(memory._cdata)  # noqa: SLF001 - there is no public form
    return int(users) - 1  # `memory` itself is one


def replace_tensors(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of `module` by the result of `make`.

    It works like `module.to_empty`, which offers no choice of the new tensor: modules that keep
    their parameters in further places, such as a recurrent one, update these too.
    """
    module._apply(make)  # noqa: SLF001 - there is no public form


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Have traces leave out the Python stack of each node, which takes time to record."""
    from torch.fx import config

    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def is_higher_order(target: object) -> bool:
    """Return whether a target of a graph is an operator that calls other graphs."""
    from torch._ops import HigherOrderOperator

    return isinstance(target, HigherOrderOperator)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module` is what `torch.compile` returns for a module."""
    return hasattr(module, "_orig_mod")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return module._compiled_call_impl is not None  # noqa: SLF001 - there is no public form


_TORCH = Path(torch.__file__).parent
_KEEP_OFF_COMPILER = frozenset(map(str, (_TORCH / "_compile.py", _TORCH / "_dynamo/eval_frame.py")))


def keeps_off_compiler(code: CodeType) -> bool:
    """Return whether a function only calls another one, off which it keeps torch's compiler.

    torch decorates `manual_seed` so, and `checkpoint`: both have the code of the decorator.
    """
    return code.co_filename in _KEEP_OFF_COMPILER


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Return what a call of `module` runs: its hooks and its forward."""
    found: Callable[..., Any] = module._compiled_call_impl or module._call_impl  # noqa: SLF001
    return found


@contextmanager
def calls_replaced(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Have a call of each module run something else in place of hooks and forward, inside."""
    kept = {module: vars(module).get("_compiled_call_impl") for module in calls}
    for module, call in calls.items():
        vars(module)["_compiled_call_impl"] = call
    try:
        yield
    finally:
        for module, own in kept.items():
            vars(module).pop("_compiled_call_impl", None)
            if own is not None:
                vars(module)["_compiled_call_impl"] = own


def never_compile(module: nn.Module, reason: str) -> None:
    """Have `module` run as it is written, also where a script compiles it now or later.

    Modules inside of it may be compiled.
    """
    own: Any = module
    own._compiled_call_impl = None  # noqa: SLF001 - what `module.compile()` sets
    own._call_impl = _Uncompiled(own._call_impl, reason)  # noqa: SLF001 - what it compiles


class _Uncompiled:
    """A function that no compiler follows."""

    def __init__(self, plain: Callable[..., Any], reason: str) -> None:
        self._plain, self._reason = plain, reason
        self._run = torch.compiler.disable(plain, reason=reason)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._run = torch.compiler.disable(self._plain, reason=self._reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and _FOLLOWING:
            return self._plain(*args, **kwargs)
        return self._run(*args, **kwargs)


# Not empty inside of `following`.
_FOLLOWING: list[bool] = []


@contextmanager
def following() -> Iterator[None]:
    """Have the compiler read modules of `never_compile`, inside."""
    _FOLLOWING.append(True)
    try:
        yield
    finally:
        _FOLLOWING.pop()


@contextmanager
def parameters_replaced(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Have `module` find plain `tensors` under the names of its parameters, inside."""
    own: dict[str, Any] = module._parameters  # noqa: SLF001 - the setter takes parameters alone
    kept = {name: own[name] for name in tensors}
    own.update(tensors)
    try:
        yield
    finally:
        own.update(kept)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of `module` itself by name, in less time than `named_parameters`."""
    found: dict[str, nn.Parameter | None] = module._parameters  # noqa: SLF001
    return found


def own_parameters(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return each module that has parameters with these by name, at each place that it has.

    `named_parameters` takes ten times as long, which counts in every step.
    """
    places = _modules_at_places(model)
    return [(module, module._parameters) for module in places if module._parameters]  # noqa: SLF001


def _modules_at_places(model: nn.Module) -> list[nn.Module]:
    """Return each module at each place that it has, in less time than `modules` takes."""
    found = [model]
    for module in found:
        if children := module._modules:  # noqa: SLF001 - most have none
            found += [child for child in children.values() if child is not None]
    return found


def unoptimized_scripts() -> AbstractContextManager[None]:
    """Return a context in which functions of TorchScript run as written, on this thread."""
    jit: Any = torch.jit  # whose types leave it out
    context: AbstractContextManager[None] = jit.optimized_execution(should_optimize=False)
    return context


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, have calls of `module` itself run no forward hook; pre-hooks stay."""
    before = module._forward_hooks  # noqa: SLF001 - there is no public form
    module._forward_hooks = type(before)()  # noqa: SLF001
    try:
        yield
    finally:
        module._forward_hooks = before  # noqa: SLF001


def has_own_call(module: nn.Module) -> bool:
    """Return whether a class of the script says what calling `module` does, beside its forward."""
    owner = next(kind for kind in type(module).__mro__ if "__call__" in vars(kind))
    return not f"{owner.__module__}.".startswith("torch.")


def hooks_of(module: nn.Module) -> set[str]:
    """Return the kinds of hooks of a module: of `forward_pre`, `forward` and `backward`."""
    kinds = {
        "forward_pre": module._forward_pre_hooks,  # noqa: SLF001 - there is no public form
        "forward": module._forward_hooks,  # noqa: SLF001
        "backward": {**module._backward_pre_hooks, **module._backward_hooks},  # noqa: SLF001
    }
    return {kind for kind, hooks in kinds.items() if hooks}


def has_global_hooks() -> bool:
    """Return whether hooks are registered that every module of the process calls."""
    from torch.nn.modules import module

    return bool(module._has_any_global_hook())  # noqa: SLF001 - there is no public form


def is_of_compiler(error: BaseException) -> bool:
    """Return whether the compiler raised `error`: it cannot follow what it was to compile."""
    exc = sys.modules.get("torch._dynamo.exc")
    if exc is None:
        return False
    return isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit)


def is_of_sharded_write(error: BaseException) -> bool:
    """Return whether `error` is the assertion that a plain number was written by a DTensor.

    Torch asserts without a word in its dispatcher.
    """
    from torch.distributed.tensor import _dispatch

    if not isinstance(error, AssertionError) or error.args:
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename == _dispatch.__file__


def breaks_graph(error: BaseException) -> bool:
    """Return whether the compiler raised `error` where it was to make a single graph."""
    exc = sys.modules.get("torch._dynamo.exc")
    return exc is not None and isinstance(error, exc.Unsupported)


def is_of_reader(error: BaseException) -> bool:
    """Return whether `error` is about the Python that the compiler reads, not what it makes."""
    exc = sys.modules.get("torch._dynamo.exc")
    return is_of_compiler(error) and not isinstance(error, exc.BackendCompilerFailed)  # type: ignore[union-attr]


def count_hooks(module: nn.Module) -> int:
    """Return how many hooks of the kinds of `hooks_of` a module has."""
    return (
        len(module._forward_pre_hooks)  # noqa: SLF001 - there is no public form
        + len(module._forward_hooks)  # noqa: SLF001
        + len(module._backward_pre_hooks)  # noqa: SLF001
        + len(module._backward_hooks)  # noqa: SLF001
    )


class ModuleHook(NamedTuple):
    """A hook of a module.

    Args:
        kind: Of `forward_pre`, `forward`, `backward_pre`, `backward`.
        function: What is called.
        options: Of the method that registers it.
    """

    kind: str
    function: Callable[..., Any]
    options: dict[str, bool]

    @property
    def is_of_script(self) -> bool:
        """Whether neither torch nor msrun registered it."""
        function: Any = self.function
        while isinstance(function, partial):
            function = function.func
        module = getattr(function, "__module__", None) or ""
        return not f"{module}.".startswith(("msrun.", "torch."))

    def register(self, module: nn.Module) -> RemovableHandle:
        """Register the same hook on another module."""
        name = self.kind if "forward" in self.kind else f"full_{self.kind}"
        handle: RemovableHandle = getattr(module, f"register_{name}_hook")(
            self.function, **self.options
        )
        return handle


def registered_hooks(module: nn.Module) -> dict[int, ModuleHook]:
    """Return the hooks of a module by numbers, which copies of the module keep."""
    found: dict[int, ModuleHook] = {}
    for kind, hooks in _hook_tables(module).items():
        for key, function in hooks.items():
            options = {}
            if "forward" in kind:
                options["with_kwargs"] = key in getattr(module, f"_{kind}_hooks_with_kwargs")
            if kind == "forward":
                options["always_call"] = key in module._forward_hooks_always_called  # noqa: SLF001
            found[key] = ModuleHook(kind, function, options)
    return found


def forget_hook(module: nn.Module, key: int) -> None:
    """Remove a hook of `registered_hooks`, if the module has it."""
    for hooks in _hook_tables(module).values():
        hooks.pop(key, None)


def _hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    return {kind: getattr(module, f"_{kind}_hooks") for kind in kinds}


def function_of(step: Any) -> type | None:
    """Return the `torch.autograd.Function` that a step of autograd's graph runs; None if none."""
    kind: type | None = getattr(type(step), "_forward_cls", None)
    return kind


def result_shapes(step: Any) -> list[tuple[int, ...]]:
    """Return the shapes of what a step of autograd's graph computed in the forward pass."""
    return [tuple(each.shape) for each in step._input_metadata]  # noqa: SLF001


@contextmanager
def fake_tensors(mode: Any) -> Iterator[None]:
    """Inside, new tensors have shapes and devices, and no values.

    Args:
        mode: Of `fake_mode`; tensors of one mode can be used in it again.
    """
    from torch._subclasses.fake_tensor import log

    before = log.disabled
    log.disabled = True  # an operator that has no kernel for such tensors is logged at length
    try:
        with mode:
            yield
    finally:
        log.disabled = before


def fake_mode() -> Any:
    """Return a mode for `fake_tensors`, which takes tensors with values, too."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is `rank` of `count` ranks, whose collectives send nothing.

    Process groups that are there before stay as they are: nothing is sent, and the numbers by which
    torch names further groups, alike on all ranks, go on as without this.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world, hook = c10d._world, sys.excepthook  # noqa: SLF001
    before, number, there = world.default_pg, world.group_count, set(world.pg_map)
    method, backend = c10d._default_pg_init_method, c10d._backend  # noqa: SLF001
    c10d._update_default_pg(None)  # noqa: SLF001
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
        yield
    finally:
        # First: torch ends all groups together with the default one.
        c10d._update_default_pg(before)  # noqa: SLF001
        for group in set(world.pg_map) - there:
            dist.destroy_process_group(group)
        c10d._default_pg_init_method, c10d._backend = method, backend  # noqa: SLF001
        world.group_count, sys.excepthook = number, hook


def without_functions() -> AbstractContextManager[Any]:
    """Return a context in which no mode and no subclass sees what functions of torch are called."""
    disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunction()  # noqa: SLF001
    return disabled


def of_plain(*values: Any) -> AbstractContextManager[Any]:
    """Return a context in which no mode sees functions, if `values` are plain tensors alone."""
    return without_functions() if all(type(value) is Tensor for value in values) else nullcontext()


def with_values() -> AbstractContextManager[Any]:
    """Return a context that leaves the mode of `fake_tensors`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def outside_of_tracing() -> AbstractContextManager[Any]:
    """Return a context in which functions compute values, inside of modes without them."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Inside, have checkpoints with `use_reentrant=True` call their function and save all.

    They run it in the forward of an autograd function, where gradients are off.  The graph of
    `torch.export` turns them off at its begin, and not on again behind it.
    """
    module: Any = checkpoint
    before = module.CheckpointFunction
    module.CheckpointFunction = SimpleNamespace(apply=lambda run, _, *args: run(*args))
    try:
        yield
    finally:
        module.CheckpointFunction = before


@contextmanager
def without_graph_dumps() -> Iterator[None]:
    """Inside, keep `torch.export` from printing the graph that a forward had before an error."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    printed, before, dump = io.StringIO(), log.disabled, ""
    log.disabled = True
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        dump = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        log.disabled = before
        sys.stderr.write(printed.getvalue().replace(dump, ""))


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` was made in the mode of `fake_tensors`."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def reads_values(error: BaseException) -> bool:
    """Return whether `error` says that a tensor of `fake_tensors` has no values."""
    from torch._subclasses import fake_tensor as fakes

    kinds = (
        fakes.DataDependentOutputException,
        fakes.DynamicOutputShapeException,
        fakes.UnsupportedOperatorException,
        fakes.UnsupportedFakeTensorException,
    )
    return isinstance(error, kinds) or "fake" in f"{type(error).__name__} {error}".lower()


def follow_log_variables() -> None:
    """Set torch's logs up again, as TORCH_LOGS and TORCH_LOGS_OUT say now."""
    from torch._logging import _internal

    _internal.log_state.clear()  # the variable may be gone
    _internal._init_logs()  # noqa: SLF001 - `set_logs` gives way to the variable, which it read before


def collectives_entered() -> list[tuple[str, int, str]]:
    """Return the latest collective of each process group that this rank has entered.

    Group, number and name each; none where torch keeps no record of its flight.  NCCL has a record
    and numbers of its own, also in a group that uses gloo too, so its groups have ` (nccl)` behind
    their names.  What is enqueued on a device counts as entered.
    """
    from torch._C import _distributed_c10d as c10d

    latest: dict[str, tuple[str, int, str]] = {}
    for recorder, mark in (("_dump_fr_trace_json", ""), ("_dump_nccl_trace_json", " (nccl)")):
        dump = getattr(c10d, recorder, None)  # NCCL's only in builds for CUDA
        entries = json.loads(dump()).get("entries") if dump else None
        for entry in entries or ():
            group, number = entry["process_group"][0] + mark, entry["collective_seq_id"]
            if not entry["is_p2p"] and number >= latest.get(group, ("", 0, ""))[1]:
                latest[group] = (group, number, entry["profiling_name"].rpartition(":")[2])
    return list(latest.values())


def follow_jit_variable() -> None:
    """Turn scripting on or off, as PYTORCH_JIT says now."""
    from torch.jit import _state

    _state._enabled.__init__()  # type: ignore[misc]  # noqa: SLF001 - it reads the variable there
