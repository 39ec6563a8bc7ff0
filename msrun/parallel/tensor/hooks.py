"""Operator-level parallelism: shards parameters and activations over mesh axes, module by module.

The problem.  A plan names modules, but the model's own code computes between them.  Hand-written
tensor parallelism has plain local tensors there.  In an unmodified model these fail at a view with
the whole number of heads, and a norm over a sharded dim is wrong without an error.

The idea.  Activations stay `DTensor`s between planned modules, since a DTensor knows its layout.
DTensor is itself wrong for some functions, so a function mode, the guard, decides for each function
whether it runs on shards (`guard`; docs/decisions/0014).  This module does the rest: parameters
become DTensors, and two hooks a module place its inputs and outputs.

Life of one forward:

1. `_Guarded` enters the guard around the model's forward.
2. `before` redistributes the first tensor input, or those that the rule names, to the plan's
   `in`.  A plain tensor counts as replicated, since ranks of these axes get the same batch.
3. The module computes on DTensors.
4. `after` redistributes outputs to the plan's `out`, likewise.  A replicated output leaves as a
   plain tensor, so the code up to the next planned module runs without DTensor.
5. At the end, outputs that are still sharded are gathered, unless the guarded loss of `rt.step`
   takes them as they are (style `vocab`).

Invariants:

- Siblings share an input.  Query, key and value read the same tensor: if each placed it for itself,
  the backward pass would all-reduce one gradient for each, where Megatron-LM has one for all, and a
  sharded sequence would be gathered three times.  The input that was placed last is kept for the
  rest of a forward, until somebody writes it (`Placed`).
- A module that writes its input in place writes what others see: its result is copied back.
- Gradients of sharded parameters are complete before anybody reads them: a partial one, the summand
  of a rank, is reduced once it is accumulated (`watch`).
- Axes that shard one dim together are joined into one process group, so that DTensor sends once,
  and not once for each axis.

Placements are worked out once for each shape (`WantedPlacement`), as the Python of it showed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.copies import turns
from msrun.parallel.foreach.lists import support_lists
from msrun.parallel.local import local_gradient, on_accumulation, replace_parameter
from msrun.parallel.settings.plan_rules import Dims
from msrun.parallel.tensor.compiled.leaves import Followed, FollowedHooks
from msrun.parallel.tensor.computed_weight import shard_computed
from msrun.parallel.tensor.grids import GridProduct
from msrun.parallel.tensor.guard import Guard
from msrun.parallel.tensor.interleaved import Interleaved
from msrun.parallel.tensor.local_module import make_local
from msrun.parallel.tensor.outputs import (
    find_arguments,
    given,
    placed_arguments,
    placed_first,
    placed_outputs,
    plain,
    tensor_named,
)
from msrun.parallel.tensor.placements import (
    Placed,
    WantedPlacement,
    joined_axes,
    packed,
    placements,
)
from msrun.parallel.tensor.plan import ModulePlan


def apply(
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
    mesh: DeviceMesh,
    *,
    guard: Guard | None = None,
    around: Callable[[Any, str, ModulePlan], Any] = lambda hooks, *_: hooks,
) -> Guard:
    """Make the planned modules of `model` compute on `mesh`, in place.

    Args:
        model: Every rank must have the same unsharded parameters.
        plans: By module.
        mesh: Of the plans.
        guard: Of the model; None makes one.
        around: Returns the hooks of a planned module, for tensors that are no plain ones.

    Returns:
        The guard of the model, which must also be active in its loss and in recomputations.
    """
    support_lists()
    torch_compat.move_shards_by_all_to_all()
    torch_compat.apply_own_functions_by_modes()
    for axes in joined_axes(plans.values(), mesh.mesh_dim_names or ()):
        torch_compat.join_axes(mesh[axes])
    # By identity, old and new: modules that share a parameter must share its DTensor.
    sharded: dict[int, Parameter] = {}
    guard = guard or Guard(mesh)
    guard.followed = followed = Followed(guard)
    for name, plan in plans.items():
        module = model.get_submodule(name)
        for param, tensor in list(module.named_parameters(recurse=False)):
            if id(tensor) not in sharded:
                dims, parts = plan.params.get(param, ["..."]), plan.packed.get(param, 1)
                sharded[id(tensor)] = _shard(tensor, dims, mesh, parts)
                sharded[id(sharded[id(tensor)])] = sharded[id(tensor)]
            setattr(module, param, sharded[id(tensor)])
        for param, dims in plan.computed.items():
            shard_computed(module, param, placing(dims, mesh, f"{plan.key}: {name}.{param}"))
        if plan.is_local:
            make_local(module, name, mesh, _only_axis(plan))
        if plan.copies > 1:
            inputs = WantedPlacement(plan.inputs, mesh, f"{plan.key}.in of {name}")
            out = WantedPlacement(plan.out, mesh, f"{plan.key}.out of {name}")
            module.forward = Interleaved(name, module, plan, mesh, guard, inputs=inputs, out=out)
            continue
        if plan.product is not None:
            out = WantedPlacement(plan.out, mesh, f"{plan.key}, output of {name}")
            module.forward = GridProduct(name, module, plan.product, mesh, out=out, guard=guard)
        hooks = around(_Hooks(name, module, plan, mesh, followed), name, plan)
        module.register_forward_pre_hook(hooks.before, with_kwargs=True)
        module.register_forward_hook(hooks.after, prepend=True)
    for name in _with_owners(plans):
        torch_compat.never_compile(model.get_submodule(name), f"parallel.plan divides {name}")
    model.forward = _Guarded(guard, model.forward)
    return guard


def _with_owners(names: Iterable[str]) -> set[str]:
    """Return `names` and those of the modules around them, without the model itself."""
    parts = (name.split(".") for name in names)
    return {".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)} - {""}


def apply_parameters(module: nn.Module, params: Mapping[str, Dims], mesh: DeviceMesh) -> None:
    """Shard parameters of `module`, in place.

    Args:
        module: Every rank must have the same one.
        params: Name -> axes of each dim, which `placing` accepts for its shape.
        mesh: The mesh.
    """
    support_lists()
    for name, dims in params.items():
        owner, _, attribute = name.rpartition(".")
        sharded = _shard(module.get_parameter(name), dims, mesh, 1)
        setattr(module.get_submodule(owner), attribute, sharded)
    watch(module, lambda: None)


def _only_axis(plan: ModulePlan) -> str:
    """Return the one axis that the style of `plan` shards over."""
    return next(dim for dims in plan.params.values() for dim in dims if isinstance(dim, str))


def _shard(param: Parameter, dims: Dims, mesh: DeviceMesh, parts: int) -> Parameter:
    """Return `param` as a DTensor with this rank's shard, which has a piece of each of `parts`."""
    placed = packed(placements(dims, mesh, param.dim()), parts)
    # Every rank has the same values, so nothing is sent.
    part = distribute_tensor(param.data, mesh, placed, src_data_rank=None)
    sharded = Parameter(part, requires_grad=param.requires_grad)
    replace_parameter(param, sharded)
    return sharded


def watch(model: nn.Module, check: Callable[[], None]) -> None:
    """Have partial gradients of sharded parameters reduced when they are accumulated.

    Call it once the parameters have memory, after `fully_shard` and `init_on_meta`.

    Args:
        model: The model.
        check: Called if the script has hooks on gradients before accumulation, which saw part of
            one; raises unless they are off.
    """

    def reduce_partial(param: Tensor) -> None:
        if torch_compat.gradient_hooks(param)[0]:
            check()
        # MindSpore's mirror operator does this.
        local_gradient(param)  # type: ignore[arg-type]  # a hook of a Parameter gets it

    for param in model.parameters():
        if isinstance(param, DTensor):
            _, hooks = torch_compat.gradient_hooks(param)
            earlier = dict(hooks)
            hooks.clear()
            # Frozen ones too, which may be thawed.
            on_accumulation(param, reduce_partial)
            hooks.update(earlier)


def placing(dims: Dims, mesh: DeviceMesh, where: str) -> Callable[[Tensor], DTensor]:
    """Return what puts a tensor in the placement that a plan wants; `where` names it in errors."""
    return WantedPlacement(dims, mesh, where).put


class _Hooks:
    """Places inputs and outputs of one planned module: the first of each, or those by name."""

    def __init__(
        self, name: str, module: nn.Module, plan: ModulePlan, mesh: DeviceMesh, followed: Followed
    ) -> None:
        self._guard = followed.guard
        self._missing = f"{plan.key}: {name} was called without a tensor among its arguments"
        self._where = [partial(tensor_named, end, plan, name) for end in ("in", "out")]
        self._input = WantedPlacement(plan.inputs, mesh, f"{plan.key}.in of {name}")
        self._output = WantedPlacement(
            plan.out, mesh, f"{plan.key}.out of {name}", parts=plan.out_parts
        )
        self._has_input, self._has_output = plan.inputs is not None, plan.out is not None
        self._arguments = find_arguments(module, name, plan)
        self._each_input, self._each_out = (
            {
                key: None if dims is None else WantedPlacement(dims, mesh, where(key))
                for key, dims in each.items()
            }
            for where, each in zip(self._where, (plan.each_input, plan.each_out), strict=True)
        )
        self._has_each_out = plan.has_each_out
        self._followed = followed.hooks[name] = FollowedHooks(
            followed,
            self._input,
            self._output if self._has_output else None,
            is_new=isinstance(module, nn.Embedding),
        )
        # Of each thread: copies compute a module at the same time.
        self._taken: dict[int, list[tuple[weakref.ref[Tensor], weakref.ref[DTensor], int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A forward that failed leaves weak references, which cannot be pickled.
        return {**self.__dict__, "_taken": {}}

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch.compiler.is_compiling():
            return self._followed.before(args, kwargs)
        self._guard.resume()
        self._taken.pop(threading.get_ident(), None)  # of a forward that failed
        with torch_compat.unseen_by(self._guard):
            return self._placed(args, kwargs)

    def _placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._arguments:
            return self._take_each(args, kwargs)
        for at, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:at], self._take_first(value), *args[at + 1 :]), kwargs
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, {**kwargs, key: self._take_first(value)}
        if self._has_input:
            raise ModelError(
                self._missing,
                hint="tensors in tuples and mappings stay as they come: pass the one that is "
                "placed as an argument, or leave out `in`",
            )
        return args, kwargs

    def _take_first(self, x: Tensor) -> DTensor:
        kept: list[Placed] = []
        placed = self._take(x, self._input, kept)
        # One entry is enough: siblings follow each other, and more would keep activations alive.
        if kept and self._guard.shared is not None:
            self._guard.shared[:] = kept
        return placed

    def _take_each(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of a call with those that the rule names placed."""
        kept: list[Placed] = []
        places = []
        for argument in self._arguments:
            wanted = self._each_input[argument.key]
            take = partial(self._take, wanted=wanted, kept=kept) if wanted else None
            places.append((argument, take))
        placed = placed_arguments(places, args, kwargs, self._where[0])
        if kept and self._guard.shared is not None:
            self._guard.shared[:] = kept
        return placed

    def _take(self, x: Tensor, wanted: WantedPlacement, kept: list[Placed]) -> DTensor:
        """Return `x` in the layout that the module wants, shared with siblings that want it too.

        Query, key and value then give one gradient, which is all-reduced once.

        Args:
            x: An input.
            wanted: Its layout.
            kept: Gets what siblings may find.
        """
        placed = self._put(x, wanted, kept)
        # `after` compares the count of writes, which inference tensors do not have.
        if placed is not x and not placed.is_inference():
            taken = weakref.ref(x), weakref.ref(placed), torch_compat.write_count(placed)
            self._taken.setdefault(threading.get_ident(), []).append(taken)
        return placed

    def _put(self, x: Tensor, wanted: WantedPlacement, kept: list[Placed]) -> DTensor:
        shared = self._guard.shared
        if shared is None or not torch.is_grad_enabled() or x.is_inference():
            return wanted.put(x)
        known = next((each for each in (*kept, *shared) if each.is_right(x, wanted)), None)
        if known is None:
            if x.requires_grad and wanted.is_to_change(x):
                turns.mark()
            known = Placed(x, wanted)
        kept.append(known)
        placed: DTensor = known.result
        return placed

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        if torch.compiler.is_compiling():
            return self._followed.after(output)
        if self._taken:
            for taken in self._taken.pop(threading.get_ident(), ()):
                self._write_back(*taken)
        if not torch_compat.is_active(self._guard):  # the script calls a submodule directly
            return plain(output, may_be_sharded=False)
        with torch_compat.unseen_by(self._guard):
            return self._returned(module, output)

    def _returned(self, module: nn.Module, output: Any) -> Any:
        if self._each_out:
            places = {
                key: partial(self._give, module, wanted) if wanted else None
                for key, wanted in self._each_out.items()
            }
            return placed_outputs(output, places, self._where[1], is_all=self._has_each_out)
        if not self._has_output:
            return output
        return placed_first(output, partial(self._give, module, self._output), self._where[1])

    def _give(self, module: nn.Module, wanted: WantedPlacement, output: Tensor) -> Tensor:
        # An embedding is replicated by the guard, where it was looked up.
        return given(output, wanted, is_new=isinstance(module, nn.Embedding))

    def _write_back(self, x: weakref.ref[Tensor], placed: weakref.ref[DTensor], count: int) -> None:
        """Copy the module's writes to its placed input back to the input that others see."""
        target, written = x(), placed()
        if target is None or written is None or torch_compat.write_count(written) == count:
            return
        if isinstance(target, DTensor):
            target.copy_(written.redistribute(placements=target.placements))
        else:
            target.copy_(written.full_tensor())


class _Guarded:
    """A model's forward under the guard; returns plain tensors, or shards for a guarded loss.

    Compilers leave it alone: they know neither the guard nor hooks that shard.
    """

    def __init__(self, guard: Guard, forward: Callable[..., Any]) -> None:
        self._guard = guard
        self.__wrapped__ = forward  # `inspect.signature` follows it
        self._run = torch.compiler.disable(self._run_guarded)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._run = torch.compiler.disable(self._run_guarded)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _run_guarded(self, *args: Any, **kwargs: Any) -> Any:
        with self._guard.active():
            output = self.__wrapped__(*args, **kwargs)
            self._guard.check_returned(output)
        return plain(output, may_be_sharded=self._guard.has_loss)
