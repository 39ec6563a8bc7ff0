"""What one technique takes of a model: bytes of a rank, bytes that it sends, and its configuration.

`msrun advise` and the search for whole modules (`module_search`) both ask here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
from torch import nn

from msrun.errors import ModelError
from msrun.parallel.advise.combined import CombinedPass, combined_pass, whole_work
from msrun.parallel.advise.host_memory import OnHost, large_tables
from msrun.parallel.advise.rank_work import RankWork
from msrun.parallel.advise.ranks import (
    expert_rules,
    grid_divided,
    images_divided,
    operators_divided,
    tokens_divided,
)
from msrun.parallel.advise.simulate import Peaks, batch_norms, simulate
from msrun.parallel.advise.stages import stages_of
from msrun.parallel.advise.techniques import (
    ACTIVATIONS,
    IMAGES,
    OPTIMIZER,
    PLACE,
    Divisible,
    ModelBytes,
    Technique,
    rank_bytes,
    stage_bytes,
    to_host,
    traffic,
)
from msrun.parallel.auto.left_out import expert_modules, long_sequences
from msrun.parallel.auto.offline_model import resized
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.config import Optimizer, ParallelConfig, Recompute
from msrun.parallel.data_parallel.zero import units
from msrun.parallel.experts.outline import listed_experts
from msrun.parallel.experts.routed import check_module
from msrun.parallel.experts.rules import check as check_experts
from msrun.parallel.host import activations
from msrun.parallel.layers.recompute import find
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS, MeshLayout
from msrun.parallel.search.alternatives.one_rank import Alternative
from msrun.parallel.search.cost.topology import Topology, Wire
from msrun.parallel.search.modules.seconds import ExpertExchange, of_experts
from msrun.parallel.settings.host import Offload
from msrun.parallel.settings.plan_rules import PlanRule
from msrun.parallel.tensor.describe import describe_modules
from msrun.parallel.tensor.plan import plan_modules

# States of the optimizer for each element of a parameter.
STATES = {"adam": 2, "momentum": 1, "sgd": 0}


class Estimator:
    """Estimates one technique after the other; passes that several share run once.

    Args:
        model: On the device `meta`.
        sample: Inputs of any batch.
        batch: Samples of a step.
        world: Ranks.
        states: Tensors of the optimizer for each parameter.
        is_host: Whether ranks train on hosts.
        blocks: Patterns of the modules that recompute where a technique does; None finds them.

    Attributes:
        blocks: These patterns; empty without any.
        experts: Modules of experts, with their number.
        is_outline: Whether some are lists, of which the model has outlines.
        can_cut: Whether a batch may be cut into micro-batches.
        tables: Tables that are worth a place on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Sequence[Any],
        *,
        batch: int,
        world: int,
        states: int,
        is_host: bool,
        blocks: Sequence[str] | None = None,
    ) -> None:
        self._model, self._sample = model, sample
        self._batch, self._world = batch, world
        self._states, self._is_host = states, is_host
        self.blocks = list(_blocks(model) if blocks is None else blocks)
        self.experts = expert_modules(model)
        self._lists = listed_experts(model)
        self.is_outline = bool(self._lists)
        self.can_cut = not batch_norms(model)
        self.tables = large_tables(model)
        self._known: dict[Technique, Peaks] = {}
        self._works: dict[Technique, CombinedPass] = {}
        self._turns: dict[Technique, RankWork] = {}
        self._whole: dict[tuple[int, bool], RankWork] = {}
        self._kinds: dict[int, str] = {}
        self._sizes: dict[tuple[int, int], ModelBytes] = {}
        self._wholes: dict[Technique, Alternative] = {}

    def divisible(self, per_node: int) -> Divisible:
        """Return what the model can be divided by, operators within nodes of `per_node` ranks."""
        return Divisible(
            world=self._world,
            per_node=per_node,
            batch=self._batch,
            experts=math.gcd(*self.experts.values()),
            tokens=long_sequences(self._sample),
            can_recompute=bool(self.blocks),
            can_cut=self.can_cut,
        )

    def has_run(self, one: Technique) -> bool:
        """Return whether the pass of a technique has run already."""
        return _pass(one) in self._known

    def know(self, one: Technique, found: Alternative) -> None:
        """Estimate a division of the whole model from now on as the search has found it."""
        self._wholes[one] = found

    def nbytes(self, one: Technique) -> tuple[int, float]:
        """Return the bytes of a rank, and those that it sends in a step.

        Raises:
            ModelError: The technique is not for this model.
        """
        self._check_outline(one)
        ranks = self._world // (one.tp * one.pp)
        if one.whole:
            ranks = self._world // one.apart * one.averaging
        local = self._batch // (self._world // one.apart)
        again = self._recomputed() if one.recompute else []
        if one.pp > 1:
            return self._of_stages(one, ranks, local, again)
        peaks = self.peaks(one)
        placed = [f"{name}.weight" for name in self.tables] if PLACE in one.on_host else []
        sizes = self.sizes(one, {**peaks.parts, **dict.fromkeys(placed, 0.0)})
        batch = sum(x.nbytes for x in leaf_tensors(resized(self._sample, local)))
        nbytes = rank_bytes(one, sizes, peaks, batch, world=ranks, is_host=self._is_host)
        if one.whole:
            return nbytes, self._wholes[one].sent
        sent = traffic(one, sizes, ranks) + peaks.sent * one.accumulate
        # Whole tables are reduced on the host.
        sent += sum(self._model.get_parameter(name).nbytes for name in placed) * _twice(ranks)
        if one.ep > 1:
            nbytes += peaks.routed
            sent += 4 * peaks.routed * (one.ep - 1) / one.ep
        return nbytes, sent

    def moved(self, one: Technique) -> float:
        """Return the bytes that travel to the host and back in a step of what `on_host` has."""
        peaks = self.peaks(one)
        return to_host(one, self.sizes(one), peaks, self._world)

    def exchange(self, one: Technique, wire: Wire, topology: Topology) -> ExpertExchange:
        """Return the seconds of tokens on their way to experts and back in a pass.

        Args:
            one: A technique with experts on ranks.
            wire: Of their axis.
            topology: What it runs on.
        """
        calls = self.peaks(one).calls
        if min(self.experts.values()) == one.ep:  # one expert has no second piece
            calls = tuple(call._replace(is_in_pieces=False) for call in calls)
        return of_experts(calls, len(self.experts), wire, topology)

    def beside(self, one: Technique, topology: Topology) -> float:
        """Return the share of the time of tokens on their way in which experts compute."""
        sizes = (self._world // (one.ep * one.tp), one.ep, one.tp)
        seconds, hidden = self.exchange(one, topology.wires(sizes)[1], topology)
        return hidden / (seconds + hidden)

    def hidden(self, one: Technique, topology: Topology) -> float:
        """Return the share of the time of a step that copies of divided operators save at most."""
        plain = msgspec.structs.replace(one, copies=1)
        *_, wire = topology.wires((self._world // one.tp, one.tp))
        self.peaks(one)
        self.peaks(plain)
        alone, in_turns = self._turns[_pass(plain)], self._turns[_pass(one)]
        least = max(in_turns.computed(topology), in_turns.sent(wire))
        return max(0.0, 1 - least / (alone.computed(topology) + alone.sent(wire)))

    def peaks(self, one: Technique) -> Peaks:
        """Return what one pass of a technique without stages takes.

        Raises:
            ModelError: The technique is not for this model.
        """
        self._check_outline(one)
        key = _pass(one)
        if key not in self._known:
            local = self._batch // (self._world // one.apart)
            sample = resized(self._sample, local // one.accumulate // one.copies)
            again = self._recomputed() if one.recompute else []
            if one.whole:
                divided = images_divided if one.whole == IMAGES else grid_divided
                config = self._wholes[one].config
                peaks = divided(self._model, sample, dict(one.axes), config)
            elif one.is_combined:
                run = combined_pass(self._model, sample, again, one, self.experts.keys())
                self._works[key], peaks = run, run.peaks
            elif one.tp > 1:
                peaks, self._turns[key] = operators_divided(
                    self._model, sample, again, one.tp, copies=one.copies
                )
            elif one.cp > 1:
                peaks, kind, sent = tokens_divided(self._model, sample, again, one.cp, one.kind)
                self._kinds[one.cp] = kind
                peaks = peaks._replace(sent=sent)
            else:
                on_host = self._on_host(one)
                routed = list(self.experts)
                peaks = simulate(self._model, sample, again, routed=routed, on_host=on_host)
            self._known[key] = peaks
        return self._known[key]

    def _on_host(self, one: Technique) -> OnHost:
        """Return what is on the host.

        Raises:
            ModelError: The runtime has no way there for the blocks.
        """
        names: list[str] = []
        if ACTIVATIONS in one.on_host:
            config = ParallelConfig(offload=Offload(activations=self.blocks))
            names = activations.find(config, self._model, [])
        return OnHost(self.tables if PLACE in one.on_host else [], names)

    def _check_outline(self, one: Technique) -> None:
        """Refuse what divides operators or tokens around a list of experts.

        Raises:
            ModelError: `one` does.
        """
        if self._lists and one.apart > 1:
            raise ModelError(
                f"the experts {next(iter(self._lists))} are a list, beside which data parallelism "
                f"and {EXPERT_AXIS} alone are estimated"
            )

    def combined(self, one: Technique) -> tuple[CombinedPass, RankWork]:
        """Return what a pass of a combination takes, and what one takes that shares nothing.

        Raises:
            ModelError: The technique is not for this model.
        """
        self.peaks(one)
        local = self._batch // (self._world // one.apart) // one.accumulate
        if (local, one.recompute) not in self._whole:
            again = self._recomputed() if one.recompute else []
            sample = resized(self._sample, local)
            self._whole[local, one.recompute] = whole_work(self._model, sample, again)
        return self._works[_pass(one)], self._whole[local, one.recompute]

    def sizes(
        self, one: Technique, parts: Mapping[str, float] = MappingProxyType({})
    ) -> ModelBytes:
        """Return what the parameters of a rank take, under a technique without stages.

        Args:
            one: The technique.
            parts: Parameter -> the share of it that a rank has; others are whole, but for experts.
        """
        key = one.tp, one.ep
        if parts:
            return self._made_sizes(one, parts)
        if key not in self._sizes:
            self._sizes[key] = self._made_sizes(one, parts)
        return self._sizes[key]

    def _made_sizes(self, one: Technique, parts: Mapping[str, float]) -> ModelBytes:
        ranks = self._world // one.tp
        if one.ep == 1:
            return _sizes(self._model, self._states, ranks, parts)
        prefixes = tuple(f"{name}." for name in self.experts)
        own = {
            name: param.nbytes / one.ep
            for name, param in self._model.named_parameters()
            if name.startswith(prefixes)
        }
        trained = {name for name, param in self._model.named_parameters() if param.requires_grad}
        shares = {**parts, **dict.fromkeys(own, 1 / one.ep)}
        sizes = _sizes(self._model, self._states, ranks, shares)
        return msgspec.structs.replace(
            sizes,
            experts=math.ceil(sum(size for name, size in own.items() if name in trained)),
            copies=ranks // one.ep,
            is_list=self.is_outline,
        )

    def least(self, one: Technique) -> int:
        """Return bytes that a rank has in any case, under a technique without stages."""
        nothing = Peaks(0, 0)
        sizes = self.sizes(one)
        return rank_bytes(one, sizes, nothing, 0, world=self._world, is_host=self._is_host)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [param for param in self._model.parameters() if param.requires_grad]

    @cached_property
    def units(self) -> int:
        """The number of units of ZeRO, what is in none included."""
        return 1 + len(units(ParallelConfig(optimizer=Optimizer(zero=1)), self._model, ()))

    def check(self, config: ParallelConfig, layout: MeshLayout) -> None:
        """Refuse rules that the runtime would refuse for the model.

        Raises:
            ModelError: A rule is not for a module that it matches.
        """
        rules = [rule for rule in config.plan if isinstance(rule, PlanRule)]
        plans = plan_modules(rules, layout, describe_modules(self._model), None)
        for name, plan in plans.items():
            if plan.is_routed and plan.params:
                check_module(name, self._model.get_submodule(name))
        check_experts(config, self._model, plans, ())

    def _recomputed(self) -> list[str]:
        """Return the modules that recompute."""
        names = [name for name, _ in self._model.named_modules()]
        return find(Recompute(modules=self.blocks), names)

    def _of_stages(
        self, one: Technique, ranks: int, local: int, again: Sequence[str]
    ) -> tuple[int, float]:
        found = stages_of(
            self._model,
            self._sample,
            local,
            microbatches=one.microbatches,
            count=one.pp,
            recomputed=again,
        )
        batch = sum(x.nbytes for x in leaf_tensors(resized(self._sample, local)))
        nbytes = [
            stage_bytes(
                one,
                stage,
                position,
                states=self._states,
                batch=batch,
                world=ranks,
                is_host=self._is_host,
            )
            for position, stage in enumerate(found)
        ]
        sent = [
            _twice(ranks) * stage.params + one.microbatches * (stage.sent + stage.received)
            for stage in found
        ]
        return max(nbytes), max(sent)

    def config(self, one: Technique) -> dict[str, Any]:
        """Return the configuration of a technique, whose pass has run."""
        offload = {"offload": True} if OPTIMIZER in one.on_host else {}
        others = {
            "optimizer": {"zero": one.zero, **offload} if one.zero else None,
            "recompute": {"modules": self.blocks} if one.recompute else None,
            "accumulate": one.accumulate if one.accumulate > 1 else None,
            "copies": one.copies if one.copies > 1 else None,
            "place": dict.fromkeys(self.tables, "cpu") if PLACE in one.on_host else None,
            "offload": {"activations": self.blocks} if ACTIVATIONS in one.on_host else None,
        }
        chosen = {key: value for key, value in others.items() if value is not None}
        return self._on_axes(one) | chosen

    def _on_axes(self, one: Technique) -> dict[str, Any]:
        """Return the mesh of a technique, and what divides the model over it."""
        config: dict[str, Any] = {"mesh": {"dp": -1}}
        if one.whole:
            config = {**self._wholes[one].config, "mesh": {"dp": -1, **dict(one.axes)}}
        if one.ep > 1:
            config = {"mesh": {"dp": -1, "ep": one.ep}, "plan": expert_rules(list(self.experts))}
        if one.cp > 1:
            rule = {"match": "*", "style": "context", "kind": one.kind or self._kinds[one.cp]}
            config = {"mesh": {"dp": -1, "cp": one.cp}, "plan": [rule]}
        if one.is_combined:
            config["mesh"]["tp"] = one.tp
            # Of the rules for one module the first counts: that of experts.
            config["plan"].insert(len(config["plan"]) if one.ep > 1 else 0, "auto_tp")
        elif one.tp > 1:
            config = {"mesh": {"dp": -1, "tp": one.tp}, "plan": "auto_tp"}
        if one.pp > 1:
            stages = {"stages": "auto", "microbatches": one.microbatches}
            config = {"mesh": {"pp": one.pp, "dp": -1}, "pipeline": stages}
        return config


def _pass(one: Technique) -> Technique:
    """Return the technique whose pass is that of `one`: without what happens around it."""
    # Operators are divided apart from experts, whatever the number of ranks that share these.
    ep = min(one.ep, 2) if one.is_combined else 1
    kinds = tuple(kind for kind in one.on_host if kind != OPTIMIZER)
    return msgspec.structs.replace(one, zero=0, ep=ep, on_host=kinds)


def _twice(ranks: int) -> float:
    """Return the share of a tensor that a rank sends in an all-reduce."""
    return 2 * (ranks - 1) / ranks


def axis_of(one: Technique) -> str:
    """Return what a technique has beside `dp`: axes and sizes, and what is on the host."""
    if one.whole:
        return one.on_axes
    sizes = {"ep": one.ep, "cp": one.cp, "tp": one.tp, "pp": one.pp, "copies": one.copies}
    parts = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " + ".join([*parts, *one.on_host])


def kind_of(one: Technique) -> str:
    """Return what a technique has beside `dp`, without sizes."""
    if one.whole or one.on_host:
        return one.whole or axis_of(one)
    return " + ".join(part.partition(" ")[0] for part in axis_of(one).split(" + "))


def _sizes(
    model: nn.Module, states: int, ranks: int, parts: Mapping[str, float] = MappingProxyType({})
) -> ModelBytes:
    """Return what the parameters of a rank take.

    Args:
        model: The model.
        states: Tensors of the optimizer beside each parameter.
        ranks: Of data parallel.
        parts: Parameter -> the share of it that a rank has, if that is not all.
    """
    share = {param: parts.get(name, 1.0) for name, param in model.named_parameters()}
    trained = [param for param in model.parameters() if param.requires_grad]

    def nbytes(params: Iterable[nn.Parameter]) -> float:
        return sum(param.nbytes * share[param] for param in params)

    inside = [
        nbytes(model.get_submodule(name).parameters())
        for name in units(ParallelConfig(optimizer=Optimizer(zero=1)), model, ())
    ]
    params = nbytes(trained)
    others = nbytes(param for param in model.parameters() if not param.requires_grad)
    padding = sum(
        share[param] * param.nbytes * (math.ceil(len(param) / ranks) / len(param) - 1 / ranks)
        for param in trained
        if param.numel()
        if param.dim()
    )
    return ModelBytes(
        params=math.ceil(params),
        fixed=math.ceil(others) + sum(buffer.nbytes for buffer in model.buffers()),
        state=math.ceil(states * params),
        largest=math.ceil(max((nbytes([param]) for param in trained), default=0)),
        unit=math.ceil(max(inside, default=0)),
        root=max(0, math.ceil(params - sum(inside))),
        padding=max(0, math.ceil(padding)),
    )


def _blocks(model: nn.Module) -> list[str]:
    """Return patterns of the blocks of a model: members of its outermost lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
        is_inside = any(f"{name}.".startswith(pattern[:-1]) for pattern in found)
        if name and is_list and not is_inside and any(True for _ in module.parameters()):
            found.append(f"{name}.*")
    return found
