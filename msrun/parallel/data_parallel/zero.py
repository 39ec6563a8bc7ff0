"""Optimizer parallel (ZeRO): shards parameters, gradients and optimizer state over `dp`.

The work is done by `torch.distributed.fsdp.fully_shard`; this module decides its units and options.
A unit is a module whose parameters are gathered with one all-gather and reduced with one
reduce-scatter.

Levels are what is sharded, and when:

- 1: parameters are gathered in the first forward of a step and stay so until its last backward, and
  gradients accumulate unsharded.  Sharded are the optimizer state, and parameters between steps.
- 2: like 1, but each backward pass reduces its gradients at once, so that they accumulate sharded.
- 3: parameters are also released after forward and gathered again in backward.  Parameters of no
  unit belong to the whole model, which needs them last in forward and first in backward: they stay
  gathered in between, which saves one gather a step.

The optimizer sees DTensors and updates the shard of its rank, so its state is sharded by itself.

Invariants:

- A parameter is in one unit.  A module that shares a parameter with the rest of the model is no
  unit, since the other user would find the parameter released; it stays with the whole model.
- A module with a rule of `plan` is no unit: its output may be a view, on which torch would lose its
  hooks.  A module around it may be one.
- Parameters are released after a forward without gradients and before the optimizer steps, so no
  forward computes with what was gathered before a change.
- Ignored parameters stay as they were: those below `threshold`, scalars, those of a rare type in
  their unit, those whose first dim packs several projections that a plan shards, and those that
  `reduce.exclude` matches.  `reducer` reduces all but the last like
  plain data parallelism.
- A member of a list of which the module around takes a part is no unit (`used_outside`).
- `zero_grad` of a module drops the gradients of its shards too, also between forward and backward,
  when its parameters are the gathered ones.  So does `param.grad = None`.
- A unit refuses tensors in the places of its parameters, as of `torch.func.functional_call`: it
  would overwrite them by what it gathers.
- A module without a forward, such as a list, is no unit: nothing would gather its parameters.
- All ranks must run units in the same order; `collective_order` checks that.

With `shard_size`, `dp` is split in two mesh axes: `fully_shard` shards over `dp_shard` and
all-reduces over `dp_replicate`.  A pipeline schedule runs several backward passes and reduces
afterwards (`reduce`), for which level 1 needs private names of torch
(`torch_compat.reduce_sharded`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.data_parallel.gathered import types as gathered_types
from msrun.parallel.data_parallel.gathered.several_passes import SeveralPasses
from msrun.parallel.data_parallel.gathered.used_outside import units_used_outside
from msrun.parallel.foreach.lists import support_lists
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import is_sharded, local_part, replace_parameter
from msrun.parallel.match import matching
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.rank_context import RankContext
from msrun.parallel.settings.steps import PRECISIONS
from msrun.parallel.tensor.plan import ModulePlan

SUM_LEVEL = 1
RESHARD_LEVEL = 3
_NAMES_SHOWN = 3
# Attributes and keys of configurations that drop whole layers in training.
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def units(config: ParallelConfig, model: nn.Module, planned: Collection[str]) -> list[str]:
    """Return the names of the units, outermost first.

    Without patterns, units are the members of each outermost `ModuleList` or `Sequential`, or the
    children of the model if it has none; not members whose inside other modules use.

    Args:
        config: The parallel configuration.
        model: The model.
        planned: Names of modules with a rule of `plan`, which cannot be units.

    Raises:
        ModelError: A pattern matches no module, or a planned one.
    """
    modules = dict(model.named_modules())
    if config.optimizer.modules:
        chosen = matching(config.optimizer.modules, list(modules), "optimizer.modules") - {""}
    else:
        # A module at several places has one name among them.
        chosen = set(_blocks(model)) & modules.keys() or {n for n, _ in model.named_children()}
    for name in sorted(chosen) if config.optimizer.modules else ():
        if name in planned:
            raise ModelError(
                f"{ROOT}.optimizer.modules: {name} has a rule of {ROOT}.plan",
                hint="name the module around it",
            )
        if not _is_called(modules[name]):
            kind = type(modules[name]).__name__
            raise ModelError(
                f"{ROOT}.optimizer.modules: {name} is a {kind}, which has no forward",
                hint="name its members",
            )
    chosen = {inside for name in chosen for inside in _called_in(modules, name)}
    if not config.optimizer.modules:
        chosen -= units_used_outside(model, chosen)
    return [
        name
        for name in modules
        if name in chosen - set(planned)
        and any(True for _ in modules[name].parameters())
        and not _is_shared(modules[name], model)
    ]


def _blocks(model: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost members of lists of modules."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and name not in inside:
            prefix = f"{name}." if name else ""
            for child, _ in module.named_children():
                yield prefix + child
            inside += [f"{prefix}{below}" for below, _ in module.named_modules() if below]


def _is_called(module: nn.Module) -> bool:
    """Return whether `module` has a forward: a list of modules has none."""
    return type(module).forward is not nn.Module.forward


def _called_in(modules: Mapping[str, nn.Module], name: str) -> Iterator[str]:
    """Yield `name`, or in its place the outermost modules in it that have a forward."""
    if _is_called(modules[name]):
        yield name
        return
    for child, _ in modules[name].named_children():
        # A module with two names has only the first of them here.
        if f"{name}.{child}" in modules:
            yield from _called_in(modules, f"{name}.{child}")


def _is_shared(part: nn.Module, model: nn.Module) -> bool:
    own = {id(module) for module in part.modules()}
    others = {
        id(param)
        for module in model.modules()
        if id(module) not in own
        for param in module.parameters(recurse=False)
    }
    return any(id(param) in others for param in part.parameters())


def check_dropped_layers(model: nn.Module) -> None:
    """Refuse layers that a rank drops at random, as encoders of transformers do in training.

    Raises:
        ModelError: A rate is above 0, so ranks would gather different layers.
    """
    for name, module in model.named_modules():
        for owner in (module, getattr(module, "config", None)):
            for key in _LAYER_DROPS:
                rate = getattr(owner, key, 0.0)
                if isinstance(rate, int | float) and rate > 0:
                    raise ModelError(
                        f"{ROOT}.optimizer.zero: {name or type(model).__name__} drops layers at "
                        f"random ({key} {rate}), and all ranks must gather the same ones",
                        hint=f"set {key} to 0, or choose zero 0",
                    )


def small_parameters(config: ParallelConfig, model: nn.Module) -> set[Parameter]:
    """Return the parameters of fewer bytes than the threshold, and scalars, which have no dim."""
    return {
        param
        for param in model.parameters()
        if local_part(param).nbytes < int(config.optimizer.threshold) or not param.dim()
    }


def packed_parameters(
    config: ParallelConfig, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> set[Parameter]:
    """Return the parameters whose first dim packs several projections, each of which is sharded.

    `fully_shard` shards the first dim once more, and knows no order of shards for these.

    Raises:
        ModelError: They would have to be cast to `optimizer.dtype`, and only gathered ones are.
    """
    found: set[Parameter] = set()
    for name, plan in plans.items():
        module = model.get_submodule(name)
        for param in plan.packed:
            if plan.params[param][0] is not None:
                found.add(module.get_parameter(param))
                if config.optimizer.dtype:
                    raise ModelError(
                        f"{ROOT}.optimizer.dtype: {name}.{param} packs several projections, and "
                        "stays replicated and in its own type",
                        hint="leave out optimizer.dtype, or the module out of the plan",
                    )
    return found


def rare_types(
    config: ParallelConfig,
    model: nn.Module,
    names: Sequence[str],
    replicated: Collection[Parameter],
) -> set[Parameter]:
    """Return parameters whose type is not that of most bytes of their unit.

    A unit gathers one type.  In common models the others are small, such as norms in float32.

    Args:
        config: The parallel configuration.
        model: The model.
        names: The units, outermost first.
        replicated: Parameters that stay replicated anyway.

    Raises:
        ModelError: They would have to be cast to `optimizer.dtype`, and only gathered ones are.
    """
    known = set(replicated)
    rare: set[Parameter] = set()
    for name in (*reversed(names), ""):  # the innermost first, at last the model itself
        of_type: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
        for own, param in model.get_submodule(name).named_parameters(name):
            if param not in known:
                of_type.setdefault(param.dtype, []).append((own, param))
        sizes = {dtype: sum(p.nbytes for _, p in named) for dtype, named in of_type.items()}
        most = max(sizes, key=sizes.__getitem__, default=None)
        for dtype, named in of_type.items():
            if dtype != most:
                rare |= {param for _, param in named}
                if config.optimizer.dtype:
                    raise ModelError(
                        f"{ROOT}.optimizer.dtype: {named[0][0]} is {dtype} and other parameters "
                        f"of {name or type(model).__name__} are {most}",
                        hint="give all parameters one type, or leave out optimizer.dtype",
                    )
            known |= {param for _, param in named}
    return rare


def apply(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    names: Sequence[str],
    replicated: Collection[Parameter],
    *,
    experts: Collection[nn.Module] = (),
) -> FSDPModule:
    """Shard the parameters of `model` in place; those in `replicated` stay as they are.

    The parameters of `experts`, which ranks of `ep` share, are sharded over their copies.
    """
    if not _is_called(model):
        raise ModelError(
            f"{ROOT}.optimizer.zero: {type(model).__name__} has no forward, before which its "
            "parameters could be gathered",
            hint="give it one, or rt.shard each member",
        )
    support_lists()
    options = _options(config, context, set(replicated))
    for param in model.parameters():
        if param not in options["ignored_params"] and not is_sharded(param):
            # `fully_shard` takes no other memory format, such as channels last.
            param.data = param.data.contiguous()
    for module in experts:
        _shard_experts(module, options, context.root_mesh)
    # The innermost first: `fully_shard` gives a module the parameters that no inner unit has.
    for name in reversed(names):
        module = model.get_submodule(name)
        if any(param not in options["ignored_params"] for param in module.parameters()):
            _shard_unit(module, options)
    if config.optimizer.zero == RESHARD_LEVEL:
        # Parameters of no unit are needed last in forward and first in backward, so they stay.
        options["reshard_after_forward"] = False
    sharded = _shard_unit(model, options)
    gathered_types.as_autocast(model, config.precision)
    model.register_forward_hook(_release_after_evaluation)
    _follow_scripts(model, config.optimizer.zero, is_stage=config.pipeline is not None)
    torch_compat.share_attributes(sharded)
    # torch divides by the number of ranks unless told otherwise, for each unit apart.
    if config.reduce.op == "sum":
        for unit in gathering(model):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(enable=True)
    return sharded


def _follow_scripts(model: nn.Module, zero: int, *, is_stage: bool) -> None:
    """Have units do what scripts do to gradients and weights by hand, or refuse it."""
    if zero < RESHARD_LEVEL and not is_stage:  # whose backward passes are those of a schedule
        SeveralPasses().watch(model)
    for unit in gathering(model):
        both: Any = unit  # a module, too
        both.register_forward_pre_hook(_check_places, prepend=True)
        both.zero_grad = _ZeroGrad(both)


class _ZeroGrad:
    """The `zero_grad` of a module, which also drops gradients of shards.

    While parameters are gathered, as between forward and backward, `parameters()` has others than
    those with the gradients of the step before.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.__wrapped__ = module, module.zero_grad

    def __call__(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch has it
        torch_compat.hide_gradients(self._module)
        self.__wrapped__(set_to_none)
        for shard in torch_compat.shards_of_gathered(self._module).values():
            if set_to_none:
                shard.grad = None
            elif shard.grad is not None:
                shard.grad.detach_().zero_()


def _check_places(unit: FSDPModule, *_: object) -> None:
    """Refuse tensors that take the place of parameters, before these are gathered over them."""
    if torch_compat.has_shards_in_place(unit):
        unit.reshard()
    if name := torch_compat.replaced_parameter(unit):
        raise ModelError(
            f"{ROOT}.optimizer.zero: {name} is another tensor than in rt.shard, or has another "
            "type, as in torch.func.functional_call or after model.to(dtype), and its module would "
            "compute with the one that is gathered",
            hint="choose zero 0; change values in place, and types before rt.shard",
        )


def _release_after_evaluation(model: nn.Module, *_: object) -> None:
    """Release gathered parameters after a forward that no backward pass follows.

    They would stay what the script sees and writes, and what the next forward computes with, also
    once the optimizer or the script has changed the parameters of this rank.
    """
    if not torch.is_grad_enabled():
        release(model)


def release(model: nn.Module) -> None:
    """Release the gathered parameters of `model`; the next forward gathers them anew."""
    for module in gathering(model):
        module.reshard()


def gathering(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules of `model` that gather parameters."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _of_expert(copies: int, param: Parameter) -> Shard:
    """Return the dim that copies of experts shard: not that of experts, if they divide another."""
    return Shard(1) if param.dim() > 1 and param.size(1) % copies == 0 else Shard(0)


def _shard_experts(module: nn.Module, options: dict[str, Any], root_mesh: DeviceMesh) -> None:
    if any(param not in options["ignored_params"] for param in module.parameters()):
        copies = root_mesh[EXPERT_COPIES]
        by = {"mesh": copies, "shard_placement_fn": partial(_of_expert, copies.size())}
        _shard_unit(module, options | by)


def _shard_unit(module: nn.Module, options: dict[str, Any]) -> FSDPModule:
    # Whole parameters of one unit at a time are kept for this, and their memory with them.
    places = [
        (part, name, param)
        for part in module.modules()
        for name, param in part.named_parameters(recurse=False)
    ]
    sharded = fully_shard(module, **options)
    for part, name, param in places:
        replace_parameter(param, part.get_parameter(name))
    return sharded


def _options(
    config: ParallelConfig, context: RankContext, replicated: set[Parameter]
) -> dict[str, Any]:
    settings, reduce = config.optimizer, config.reduce
    options: dict[str, Any] = {
        "mesh": _data_mesh(context.root_mesh),
        "reshard_after_forward": settings.zero == RESHARD_LEVEL,
        "ignored_params": replicated,
    }
    dtype, reduce_dtype = _dtype(settings.dtype), _dtype(reduce.dtype)
    if config.precision:
        dtype = _dtype(PRECISIONS[config.precision])
        reduce_dtype = reduce_dtype or torch.float32
    if dtype or reduce_dtype:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=reduce_dtype,
            # Autocast casts what goes into its operators, and nothing else.
            cast_forward_inputs=not config.precision,
        )
    if settings.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
    return options


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _data_mesh(root_mesh: DeviceMesh) -> DeviceMesh:
    """Return the axis to shard over, preceded by the axis of the copies if there are several."""
    names = root_mesh.mesh_dim_names or ()
    if EXPERT_COPIES in names:
        return torch_compat.joined(root_mesh[EXPERT_COPIES, EXPERT_AXIS], DATA_AXIS)
    return root_mesh[tuple(name for name in names if name.startswith("dp"))]


@contextlib.contextmanager
def paused(sharded: FSDPModule, zero: int) -> Iterator[None]:
    """Accumulate gradients over micro-batches: unsharded at level 1, sharded at levels 2 and 3.

    Below level 3 parameters stay gathered from one micro-batch to the next.
    """
    _set(sharded, zero, is_last=False)
    try:
        yield
    finally:
        _set(sharded, zero, is_last=True)


def reduce(sharded: nn.Module, zero: int) -> None:
    """Complete the step after paused backward passes.

    Level 1 reduces the accumulated gradients, level 2 releases the gathered parameters; at level 3
    each backward pass has done both.
    """
    if zero == SUM_LEVEL:
        torch_compat.reduce_sharded(sharded)  # type: ignore[arg-type]  # it is both
    elif zero < RESHARD_LEVEL:
        release(sharded)


def forget_raised(sharded: FSDPModule) -> None:
    """Forget a backward pass that raised, and that the script caught; before each forward pass.

    Raises:
        ModelError: This version of torch cannot.
    """
    if not torch_compat.has_raised_pass(sharded):
        return
    if not hasattr(sharded, "reset_iter_state"):
        raise ModelError(
            f"{ROOT}.optimizer.zero: a backward pass raised, and torch {torch.__version__} cannot "
            "go on with sharded parameters",
            hint="let the script end, and start from a checkpoint; choose zero 0, or torch 2.13",
        )
    torch_compat.drop_gathered_gradients(cast("nn.Module", sharded))
    sharded.reset_iter_state()


def _set(sharded: FSDPModule, zero: int, *, is_last: bool) -> None:
    if zero == SUM_LEVEL:
        sharded.set_requires_gradient_sync(is_last)
    if zero < RESHARD_LEVEL:
        sharded.set_reshard_after_backward(is_last)
