"""Expert parallelism: ranks of the axis `ep` share the experts of a module among them.

The problem.  A mixture of experts has most of its weights in the experts, and each token uses few
of them.  Replicas of all experts on each data-parallel rank take memory for weights that see few
tokens; shards of each expert, as `style: experts` over `tp` makes them, have every rank compute on
every token.

The idea.  The experts of transformers, and of most models, are one module with the weights of all
as dim 0 of its parameters, and its forward takes tokens, the experts of each token, and their
weights.  Each rank keeps the forward and a run of experts.  Tokens travel to the ranks of their
experts and the results travel back (`dispatch`).  On the way the module's own forward runs on the
tokens that arrived, each with one expert, so the model is unmodified, and a grouped product stays
the model's own.

Which ranks.  The ranks of `ep` have samples of their own, as those of `dp`: the batch is divided
over both, and all other parameters are replicated or sharded (ZeRO) over both together.  In the
layout `ep` is part of `dp` (`layout.MeshLayout`).

Gradients.  The backward pass of the exchange brings the gradients of all tokens of an expert to its
rank, which adds them up.  So nothing is reduced over `ep`: what is left is the sum over the copies
of the expert, `dp` / `ep` of them, by plain data parallelism or by ZeRO.  These take the mean over
the copies where a mean over all data-parallel ranks is due, so gradients are divided by `ep` here.

Invariants:

- Every rank joins every exchange, forward and backward, also if no token came to its experts:
  then the result depends on the weights by a factor of 0, so that their gradients are zeros, as in
  one process, and the backward pass passes here.
- A module that the mixture calls beside its experts, such as a shared expert, computes while rows
  travel (`shared_path`).
- Under autocast rows travel in its type, in which the experts multiply them.
- The forward sees its own number of experts where an attribute has the number of all, such as
  `num_experts`.
- Parameters are DTensors, sharded in dim 0 over `ep`: so checkpoints, norms and optimizers know
  their parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.autocast.casts import as_factor
from msrun.parallel.config import DATA_AXIS, ParallelConfig
from msrun.parallel.experts import listed
from msrun.parallel.experts.arguments import TAKEN, Arguments
from msrun.parallel.experts.dispatch import ExpertPiece, route, sent, sent_back, summed, taken
from msrun.parallel.experts.probe import Probe
from msrun.parallel.experts.shared_path import SharedPath
from msrun.parallel.foreach.lists import support_lists
from msrun.parallel.layout import EXPERT_COPIES
from msrun.parallel.local import replace_parameter
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.rank_context import RankContext
from msrun.parallel.tensor.placements import part_of
from msrun.parallel.tensor.plan import ModulePlan


def apply(
    config: ParallelConfig,
    context: RankContext,
    model: nn.Module,
    plans: Mapping[str, ModulePlan],
) -> list[nn.Module]:
    """Share out the experts of the planned modules of `model`, in place; return these modules.

    Every rank must have the same parameters.
    """
    names = [name for name, plan in plans.items() if plan.is_routed]
    if not names or context.layout.ep == 1:
        return []
    support_lists()
    copies = context.layout.size(DATA_AXIS) // context.layout.ep
    # `fully_shard` adds its own axis to that of the experts; without it theirs shows the copies.
    is_gathered = config.optimizer.zero and copies > 1
    whole_mesh = context.root_mesh[EXPERT_COPIES, EXPERT_AXIS]
    mesh = context.root_mesh[(EXPERT_AXIS,) if is_gathered else (EXPERT_COPIES, EXPERT_AXIS)]
    share = 1.0 if config.reduce.op == "sum" else 1.0 / context.layout.ep
    is_kept = bool(config.recompute and config.recompute.save)
    found: list[nn.Module] = []
    for name in names:
        module = model.get_submodule(name)
        if not plans[name].params:
            found += listed.divide(
                model, name, whole_mesh, context.device, share=share, is_kept=is_kept
            )
            continue
        check_module(name, module)
        experts = next(iter(module.parameters())).size(0)
        for param, tensor in list(module.named_parameters(recurse=False)):
            setattr(module, param, _shard(tensor, mesh))
        shared = None if context.sequence else _shared_path(model, name, mesh)
        module.forward = _Routed(name, module, mesh, shared, experts=experts, share=share)
        found.append(module)
    return found


def _shared_path(model: nn.Module, name: str, mesh: DeviceMesh) -> SharedPath | None:
    """Return what runs beside the experts `name` in the forward that calls them, in its place."""
    mixture = model.get_submodule(name.rpartition(".")[0])
    others = (nn.Module.forward, nn.Sequential.forward)
    if not name or type(mixture).forward in others:
        return None
    if isinstance(mixture.forward, SharedPath):  # of other experts in the same forward
        return None
    mixture.forward = shared = SharedPath(mixture, model.get_submodule(name), mesh)
    return shared


def check_module(name: str, module: nn.Module) -> None:
    """Refuse a module whose forward needs more than the weights of experts."""
    for child, inside in module.named_children():
        if any(True for _ in inside.parameters()):
            raise ModelError(
                f"{name} of style experts over {EXPERT_AXIS} has parameters in {child}, which "
                "belong to no expert, or to one alone",
                hint="keep the weights of all experts in 3-D parameters of the module itself",
            )
    if type(module).forward is nn.Module.forward:
        raise ModelError(
            f"{name} of style experts over {EXPERT_AXIS} has no forward that takes {TAKEN}"
        )


def _shard(param: Parameter, mesh: DeviceMesh) -> Parameter:
    placed: list[Placement] = [Replicate()] * mesh.ndim
    placed[-1] = Shard(0)
    part = distribute_tensor(param.data, mesh, placed, src_data_rank=None)
    sharded = Parameter(part, requires_grad=param.requires_grad)
    replace_parameter(param, sharded)
    return sharded


class _Routed:
    """The forward of a module of experts: the module's own, on the experts of this rank.

    Args:
        name: Name of the module.
        module: The module, whose parameters are sharded over the last axis of `mesh`.
        mesh: Its last axis is that of experts.
        shared: What runs while rows travel; None if nothing may.
        experts: Of all ranks.
        share: Factor of the gradients of experts.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        mesh: DeviceMesh,
        shared: SharedPath | None,
        *,
        experts: int,
        share: float,
    ) -> None:
        self._name = name
        self._module = module
        self._mesh = mesh
        self._shared = shared
        self._experts = experts
        self._share = share
        self._probe = Probe(name, module)
        self.__wrapped__ = module.forward  # `inspect.signature` follows it

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = Arguments(self._name, args, kwargs)
        tokens, index, weights = arguments.routed
        group = self._mesh.get_group(EXPERT_AXIS)
        rows = as_factor(tokens)
        nbytes = rows.size(1) * rows.element_size()
        shared = self._shared
        offered = shared.offered(tokens) if shared else 0
        index = index.reshape(len(index), -1)
        way = route(index, self._experts, group, nbytes, offered=offered)
        pairs = weights.reshape(-1).index_select(0, way.order)
        given = zip(way.split(taken(rows, way)), way.split(pairs), way.pieces, strict=True)
        arriving = [sent(*each, group, self._share) for each in given]
        if shared:
            shared.begin(way.agreed, tokens)
        own = _own_weights(self._module, [piece.size for piece in way.pieces])
        returning = []
        for wait, piece, part in zip(arriving, way.pieces, own, strict=True):
            # The forward meets the type that it has in one process.
            arrived, factors = wait()
            output = self._compute(arguments, (arrived.to(tokens.dtype), factors), piece, part)
            returning.append(sent_back(as_factor(output), piece, group, self._share))
        result = summed([back.to(tokens.dtype) for wait in returning for back in wait()], way)
        if shared:
            shared.end(result)
        return result

    def _compute(
        self,
        arguments: Arguments,
        given: tuple[Tensor, Tensor],
        piece: ExpertPiece,
        own: dict[str, Tensor],
    ) -> Tensor:
        """Return what the experts of a piece make of the rows that are given with their weights."""
        tokens, index, weights = arguments.routed
        arrived, factors = given
        output = arrived
        with (
            torch_compat.parameters_replaced(self._module, own),
            _own_number(self._module, self._experts, piece.size),
        ):
            call = partial(arguments.call, self.__wrapped__)
            if not self._probe.is_done:
                self._probe.run(call, tokens, index, weights, piece.size)
            if len(arrived):
                output = call(arrived, piece.experts.to(index.dtype), factors).to(arrived.dtype)
        return output if output.requires_grad and len(arrived) else bound(output, own)


def _own_weights(module: nn.Module, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Return the weights of this rank's experts, of `sizes` of them one after the other."""
    own = {
        name: part_of(param) if isinstance(param, DTensor) else param
        for name, param in torch_compat.parameters_of(module).items()
        if param is not None
    }
    if len(sizes) == 1:
        return [own]
    parts = {name: weight.split([*sizes]) for name, weight in own.items()}
    return [{name: part[at] for name, part in parts.items()} for at in range(len(sizes))]


@contextlib.contextmanager
def _own_number(module: nn.Module, experts: int, number: int) -> Iterator[None]:
    """Have attributes with the number of all `experts` say the `number` of this rank's, inside."""
    attributes = vars(module)
    names = [
        name
        for name, value in attributes.items()
        if type(value) is int and value == experts and "expert" in name
    ]
    attributes.update(dict.fromkeys(names, number))
    try:
        yield
    finally:
        attributes.update(dict.fromkeys(names, experts))


def bound(output: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Return `output`, which depends on `own` by a factor of 0, so that all have gradients."""
    trained = [weight for weight in own.values() if weight.requires_grad]
    for weight in trained:
        output = output + (weight.reshape(-1)[0] * 0).to(output.dtype)
    return output
