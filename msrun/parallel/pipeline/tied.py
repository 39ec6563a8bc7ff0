"""Weights that several stages have: each its own copy, with the sum of all gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.data_parallel import sparse_embedding
from msrun.parallel.exchange import messages
from msrun.parallel.local import is_sharded, local_gradient, local_part, set_local_gradient
from msrun.parallel.pipeline.chunks import STAGES
from msrun.parallel.pipeline.plan import PipelineCut, SplitPlan


@dataclass(frozen=True, slots=True)
class Tie:
    """One weight of the model that is in several stages.

    Args:
        names: Stage -> its names there.
        is_trained: Whether it was in `rt.shard`; later no stage would know of a change in another.
    """

    names: dict[int, tuple[str, ...]]
    is_trained: bool


def find_ties(plan: PipelineCut) -> list[Tie]:
    """Return the weights of several stages, in one order on all ranks."""
    stages_of: dict[int, dict[int, list[str]]] = {}
    trained = {id(p): p.requires_grad for params in plan.stage_params for p in params.values()}
    for stage, params in enumerate(plan.stage_params):
        for name, param in params.items():
            stages_of.setdefault(id(param), {}).setdefault(stage, []).append(name)
    return [
        Tie({stage: tuple(names) for stage, names in stages.items()}, trained[key])
        for key, stages in stages_of.items()
        if len(stages) > 1
    ]


def check_tables(
    model: nn.Module, plan: SplitPlan, ties: Sequence[Tie], placed: Collection[str]
) -> None:
    """Refuse tables that stages cannot share.

    Args:
        model: The whole model.
        plan: Of its cut.
        ties: Its weights of several stages.
        placed: Its tables on the host.

    Raises:
        ModelError: Stages would send each other all rows of a sparse gradient; or one computes
            with the weight of a table on the host, on its device.
    """
    sparse = sparse_embedding.sparse(model)
    for tie in ties:
        names = list(dict.fromkeys(chain(*tie.names.values())))
        if tie.is_trained and not sparse.isdisjoint(map(model.get_parameter, names)):
            raise ModelError(
                f"{STAGES}: {' and '.join(names)} has sparse gradients, and is a weight of several "
                "stages",
                hint="make it with sparse=False, or name a stage for what uses it",
            )
    for chunk, program in enumerate(plan.programs):
        for name in placed:
            if f"{name}.weight" in program.attributes:
                raise ModelError(
                    f"{ROOT}.place: {name}.weight is used by {plan.chunks.shown(chunk)} without "
                    f"{name}, which computes with the whole table",
                    hint="make two parameters of them, or leave it out",
                )


class TiedWeights:
    """Sums gradients of tied weights over the stages that have them.

    Args:
        model: This stage's part; names are looked up when they are needed, so parameters
            may be replaced.
        ties: Of the whole model.
        group: The pipeline axis.
        device: Device of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        ties: Sequence[Tie],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._model = model
        self._device = device
        self._group = group
        self._stage = group.rank()
        self._frozen = [tie for tie in ties if not tie.is_trained]
        self._ties = [tie for tie in ties if tie.is_trained]
        self._is_checked = not self._ties

    def reduce(self) -> None:
        """Give each copy the sum of the gradients of all.

        All add in the order of stages, so copies that were equal stay equal to the last bit.
        """
        if not self._is_checked:
            self._check_layouts()
            self._is_checked = True
        for tie in [tie for tie in self._ties if self._stage in tie.names]:
            copies = self._copies(tie)
            own = _sum([_gradient(param) for param in copies])
            total = _sum(self._exchange(own, sorted(tie.names)))
            for param in copies:
                set_local_gradient(param, total.clone())

    def names(self) -> list[str]:
        """Return the names of the parameters here that other stages have too, frozen ones too."""
        ties = (*self._ties, *self._frozen)
        return [name for tie in ties for name in tie.names.get(self._stage, ())]

    def trained(self) -> set[Parameter]:
        """Return the trained parameters here that other stages have too."""
        here = [tie for tie in self._ties if self._stage in tie.names]
        return {param for tie in here for param in self._copies(tie)}

    def needed_elsewhere(self, gone: AbstractSet[Parameter]) -> set[Parameter]:
        """Return those of `gone` that have a gradient by another copy of theirs.

        All ranks of the axis take part.

        Args:
            gone: Parameters here without a gradient of their own.
        """
        if not self._ties:
            return set()
        copies = {
            number: self._copies(tie)
            for number, tie in enumerate(self._ties)
            if self._stage in tie.names
        }
        own = [number for number, params in copies.items() if not gone >= set(params)]
        every = messages.gather_all(own, list[int], self._group, self._device)
        needed = {number for numbers in every for number in numbers}
        return {param for number in needed.intersection(copies) for param in copies[number]}

    def borrowed(self) -> set[Parameter]:
        """Return the parameters here that an earlier stage has too."""
        return {
            param
            for tie in self._ties
            if self._stage in tie.names and self._stage != min(tie.names)
            for param in self._copies(tie)
        }

    def _copies(self, tie: Tie) -> list[Parameter]:
        params = [self._model.get_parameter(name) for name in tie.names[self._stage]]
        return list(dict.fromkeys(params))

    def _exchange(self, own: Tensor, stages: Sequence[int]) -> list[Tensor]:
        """Return the gradient of each of `stages`, in their order."""
        gradients = [own if stage == self._stage else torch.empty_like(own) for stage in stages]
        messages = []
        for stage, part in zip(stages, gradients, strict=True):
            if stage != self._stage:
                peer = dist.get_global_rank(self._group, stage)
                messages.append(dist.P2POp(dist.isend, own, peer, self._group))
                messages.append(dist.P2POp(dist.irecv, part, peer, self._group))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return gradients

    def _check_layouts(self) -> None:
        """Refuse weights that stages shard differently; all ranks of the axis take part."""
        own = {
            number: sorted({_layout(param) for param in self._copies(tie)})
            for number, tie in enumerate(self._ties)
            if self._stage in tie.names
        }
        all_layouts = messages.gather_all(own, dict[int, list[str]], self._group, self._device)
        for number, tie in enumerate(self._ties):
            layouts = {layout for each in all_layouts for layout in each.get(number, [])}
            if len(layouts) > 1:
                names = dict.fromkeys(name for names in tie.names.values() for name in names)
                raise ModelError(
                    f"{ROOT}.plan: {' and '.join(names)} are one weight of several stages, "
                    f"and are divided in different ways ({' and '.join(sorted(layouts))})"
                )


def _layout(param: Parameter) -> str:
    if is_sharded(param):
        return f"{tuple(param.shape)} as {', '.join(map(str, param.placements))}"
    return f"{tuple(param.shape)} whole"


def _gradient(param: Parameter) -> Tensor:
    gradient = local_gradient(param)
    if gradient is None:
        return torch.zeros_like(local_part(param)).contiguous()
    return gradient.contiguous()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
