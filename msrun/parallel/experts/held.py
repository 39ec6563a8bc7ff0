"""Parameters of experts of a list, which one rank has and the others have without a row.

A list of experts has a module, and so parameters, for each expert.  Their names are those of one
process on every rank, so optimizers have the same groups everywhere.  The rank of an expert has all
rows of its parameters and the other ranks none: in the words of `uneven_rows`, a table with all of
its rows on one rank.  So checkpoints, weights, state dicts and norms know their parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.foreach.lists import refuse_norms_of, refuse_scaling_of
from msrun.parallel.local import replace_parameter
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.uneven_rows.rows import RowRange, TablePart


class ExpertPart(TablePart):
    """A parameter of one expert: all of it on the rank of the expert, no row on the others."""

    def refuse_values(self, name: str) -> None:
        """Refuse the function `name` of the parameter, outside of a call of its expert.

        Raises:
            ModelError: A model computes with it.
        """
        try:
            super().refuse_values(name)
        except ModelError:
            raise ModelError(
                f"{self.rows.name} is of an expert of a list, which one rank of {EXPERT_AXIS} has: "
                f"{name} of it would be another on each rank",
                hint="call the expert, in the forward of the module that has the list",
            ) from None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertPart:
        if id(self) not in memo:
            with torch_compat.as_plain_tensors():
                copied = ExpertPart(self.detach().clone(), requires_grad=self.requires_grad)
            copied.rows = self.rows
            memo[id(self)] = copied
        found: ExpertPart = memo[id(self)]
        return found


def hold(
    names: Sequence[str],
    members: Sequence[nn.Module],
    owners: Sequence[int],
    mesh: DeviceMesh,
    is_running: Callable[[], bool],
) -> None:
    """Leave each expert's parameters on its rank alone, in place.

    Args:
        names: Of the experts.
        members: The experts.
        owners: Rank of each, along the last axis of `mesh`.
        mesh: Its last axis is that of experts.
        is_running: Whether the forward around the experts runs now.
    """
    index, group = mesh.get_local_rank(EXPERT_AXIS), mesh.get_group(EXPERT_AXIS)
    for name, member, owner in zip(names, members, owners, strict=True):
        for path, part in list(member.named_modules(prefix=name)):
            for key, param in list(part.named_parameters(recurse=False)):
                counts = [0] * group.size()
                counts[owner] = len(param)
                rows = RowRange(
                    name=f"{path}.{key}",
                    counts=tuple(counts),
                    index=index,
                    group=group,
                    axis=DATA_AXIS,
                    is_guarded=is_running,
                )
                setattr(part, key, _part(param, rows))


def _part(param: Parameter, rows: RowRange) -> ExpertPart:
    # A view would keep the memory of all rows.
    own = param.data if rows.count else rows.cut(param.data).clone()
    part = ExpertPart(own, requires_grad=param.requires_grad)
    part.rows = rows
    replace_parameter(param, part)
    return part


def refuse_torchs_own(members: Sequence[nn.Module]) -> None:
    """Have clipping and scalers of torch refuse gradients of experts, once these have memory.

    The parameters of a model without memory cannot be filled while something refers to them.
    """
    for member in members:
        for param in member.parameters():
            if isinstance(param, ExpertPart):
                refuse_norms_of(param, param.rows.name)
                refuse_scaling_of(param, param.rows.name)


@contextlib.contextmanager
def readable(members: Sequence[nn.Module]) -> Iterator[None]:
    """Have experts of this rank compute with plain tensors for their parameters, inside."""
    with contextlib.ExitStack() as stack:
        for member in members:
            for module, own in torch_compat.own_parameters(member):
                plain = {name: _plain(param) for name, param in own.items() if param is not None}
                stack.enter_context(torch_compat.parameters_replaced(module, plain))
        yield


def _plain(param: Tensor) -> Tensor:
    with torch_compat.as_plain_tensors():
        return param.as_subclass(Tensor)
