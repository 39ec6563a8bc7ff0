"""Experts over the axis `ep` and sequences over `cp`, for a strategy search: a `ModuleSearch`.

`msrun search` and `mode: auto` compare the best of these techniques with the best plan of single
operators.  Bytes, configurations and refusals are those of `msrun advise` (`estimate`): one rank
runs without values among ranks that are not there, with the runtime's own modules.  That takes most
of a second or more, seconds of a step take none (`search.modules.seconds`): techniques are sorted
by their seconds, and run in that order until one fits, or until they are slower than the plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from msrun.errors import ModelError, UsageError
from msrun.parallel.advise.combined import combined
from msrun.parallel.advise.estimate import STATES, Estimator, axis_of, kind_of
from msrun.parallel.advise.techniques import (
    SHARDED_PARAMETERS,
    Divisible,
    Technique,
    divided,
    techniques,
    traffic,
)
from msrun.parallel.auto.left_out import LONG, MISSING, expert_modules, long_sequences
from msrun.parallel.auto.modules import run_by
from msrun.parallel.auto.offline import search as offline
from msrun.parallel.auto.offline.search import SearchRequest
from msrun.parallel.auto.tracing.structure import mapped
from msrun.parallel.config import DATA_AXIS, TENSOR_AXIS, ParallelConfig
from msrun.parallel.experts.outline import without_values
from msrun.parallel.layout import resolve
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS
from msrun.parallel.search.cost.topology import OrderedTopology
from msrun.parallel.search.graph.program import Program
from msrun.parallel.search.modules.attention import KINDS, AttentionCall, attention_calls
from msrun.parallel.search.modules.job import ModuleAnswer, ModuleJob, SharedModules
from msrun.parallel.search.modules.seconds import (
    Parameters,
    computation,
    of_attention,
    of_parameters,
)
from msrun.parallel.search.plan.plan import SavedPlan
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS

_GIB = 2**30
# Passes of combinations, each of which takes most of a second.
_PASSES_MAX = 16


def search_model(
    request: SearchRequest, *, clock: Callable[[], float], report: Callable[[str], None]
) -> SavedPlan:
    """Return the best plan for a request of `msrun search`, techniques of whole modules included.

    Args:
        request: The model, the cluster and the constraints.
        clock: Returns seconds.
        report: Called with a line of progress at each better plan.

    Raises:
        UsageError: The model cannot be made or traced, or no plan fits.
    """
    is_host = request.topology.name == "cpu"

    def modules(model: nn.Module, sample: Sequence[Any]) -> WholeModules:
        return WholeModules(model, sample, ParallelConfig(), is_host=is_host)

    plan = offline.search_model(request, clock=clock, report=report, modules=modules)
    ranks = list(request.topology.ranks) if isinstance(request.topology, OrderedTopology) else []
    config = plan.config | {"rank_list": ranks} if plan.config and ranks else plan.config
    return msgspec.structs.replace(plan, rank_list=ranks, config=config)


class _Priced(NamedTuple):
    """A technique, and what a step spends its time on."""

    one: Technique
    costs: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.costs.values())

    @property
    def axis(self) -> str:
        return kind_of(self.one)


class WholeModules:
    """Techniques for one model; a `ModuleSearch`.

    Args:
        model: The model, with values or without; it stays as it is.
        sample: Inputs of any batch, as of `simulate.simulate`.
        config: With what the user has decided beside `mode: auto`.
        is_host: Whether ranks train on hosts.
    """

    def __init__(
        self, model: nn.Module, sample: Sequence[Any], config: ParallelConfig, *, is_host: bool
    ) -> None:
        self._given, self._config, self._is_host = model, config, is_host
        self._sample = mapped(list(sample), _on_meta)

    def find(self, job: ModuleJob) -> ModuleAnswer:
        """Return the fastest technique that fits, if it is faster than `job.seconds`."""
        is_named = CONTEXT_AXIS in job.mesh
        tokens = long_sequences(self._sample, 1 if is_named else LONG)
        if not tokens and not expert_modules(self._given):
            lines = [f"{axis}: not for this model, {what}" for axis, what in MISSING.items()]
            return ModuleAnswer(lines=tuple(lines))
        again = self._config.recompute
        estimator = Estimator(
            self._model,
            self._sample,
            batch=job.batch,
            world=job.world,
            states=STATES["adam"],
            is_host=self._is_host,
            blocks=again.modules if again else None,
        )
        return _Comparison(estimator, self._config, tokens, job).answer()

    @cached_property
    def _model(self) -> nn.Module:
        """The model without values, whose copy takes no memory."""
        return without_values(self._given)


class _Comparison:
    """One search; see `WholeModules.find`."""

    def __init__(
        self, estimator: Estimator, config: ParallelConfig, tokens: int, job: ModuleJob
    ) -> None:
        self._estimator, self._config, self._tokens, self._job = estimator, config, tokens, job
        self._programs: dict[int, Program] = {}
        self._computed: dict[tuple[int, bool, float], float] = {}
        # Axis, or axis and size -> why it is not for this model.
        self._refused: dict[str, str] = {}
        # Axis -> what is said of it.
        self._lines: dict[str, str] = {}
        self._least: float | None = None

    def answer(self) -> ModuleAnswer:
        """Return what came of it."""
        best: SharedModules | None = None
        looked: set[str] = set()
        for found in sorted(self._priced(), key=lambda found: found.seconds):
            if best is None and found.seconds < self._job.seconds:
                best = self._tried(found)
            elif found.axis not in looked:
                self._lines[found.axis] = f"{found.one.name}: {found.seconds:.4g} s, slower"
            looked.add(found.axis)
        best = self._combined(best)
        lines = [*self._lines.values(), *self._reasons(), *self._missing()]
        return ModuleAnswer(best=best, least=self._least, lines=tuple(lines))

    def _combined(self, best: SharedModules | None) -> SharedModules | None:
        """Return what divides operators too, if it is faster than `best`.

        Its seconds take a pass each, so those come first that can be fast, until none can.
        """
        bounds = [(self._computation(one) / one.tp, one) for one in self._ours(combined)]
        passes, unseen = 0, 0
        for least, one in sorted(bounds, key=operator.itemgetter(0)):
            limit = self._job.seconds if best is None else best.seconds
            if least >= limit:
                self._lines.setdefault(kind_of(one), f"{one.name}: {least:.4g} s or more, slower")
                continue
            passes += not self._estimator.has_run(one)
            if passes > _PASSES_MAX:
                unseen += 1
                continue
            if self._is_refused(one) or (found := self._price(one)) is None:
                continue
            if found.seconds >= limit:
                self._lines.setdefault(found.axis, f"{one.name}: {found.seconds:.4g} s, slower")
                continue
            best = self._tried(found) or best
        if unseen:
            self._lines[TENSOR_AXIS] = f"{unseen} combinations with {TENSOR_AXIS} not looked at"
        return best

    def _is_refused(self, one: Technique) -> bool:
        """Return whether the technique, or one that is part of it, is not for this model."""
        names = {axis_of(one), kind_of(one)}
        names |= {part for name in names for part in name.split(" + ")}
        return not names.isdisjoint(self._refused)

    def _reasons(self) -> Iterator[str]:
        """Yield why techniques are not for the model; of combinations one of a kind."""
        known = {*self._lines}
        for axis, reason in self._refused.items():
            kind = " + ".join(part.partition(" ")[0] for part in axis.split(" + "))
            if kind == axis or kind not in known or "+" not in kind:
                yield reason
            known.add(kind)

    # What there is.

    def _ours(self, yielded: Callable[[Divisible], Iterator[Technique]]) -> Iterator[Technique]:
        """Yield techniques that are for this mesh, with what the user has decided."""
        decided = self._config.decided
        model = self._estimator.divisible(self._job.topology.per_node)
        for one in yielded(msgspec.structs.replace(model, tokens=self._tokens)):
            is_plain = one.is_plain and self._estimator.is_outline
            if (one.ep * one.cp == 1 and not is_plain) or one.zero or not self._is_on_mesh(one):
                continue
            levels = {0, 1, SHARDED_PARAMETERS} if is_plain and self._job.world > 1 else {0, 1}
            if "optimizer" in decided:
                levels = {self._config.optimizer.zero}
            if "recompute" in decided and one.recompute != bool(self._estimator.blocks):
                continue
            for level in levels:
                leveled = msgspec.structs.replace(one, zero=level)
                for kind in self._kinds(one):
                    yield msgspec.structs.replace(
                        leveled, kind=kind, accumulate=self._config.accumulate
                    )

    def _is_on_mesh(self, one: Technique) -> bool:
        """Return whether the mesh that the user has named, if any, is that of `one`."""
        sizes = {DATA_AXIS: self._job.world // (one.ep * one.cp * one.tp)}
        sizes |= {EXPERT_AXIS: one.ep, CONTEXT_AXIS: one.cp, TENSOR_AXIS: one.tp}
        return all(sizes.get(axis, 1) == size for axis, size in self._job.mesh.items())

    def _kinds(self, one: Technique) -> list[str]:
        """Return how ranks can share attention; one empty word without any to share."""
        calls = self._calls(one)
        if not calls:
            return [""]
        return [kind for kind in KINDS if all(call.can(kind, one.cp) for call in calls)]

    def _calls(self, one: Technique) -> list[AttentionCall]:
        """Return the calls of attention, as if ranks of `tp` shared their heads."""
        if one.cp == 1:
            return []
        return [
            call._replace(heads=call.heads // one.tp, key_heads=max(1, call.key_heads // one.tp))
            for call in attention_calls(self._program(one), one.cp)
        ]

    def _samples(self, one: Technique) -> int:
        return self._job.batch * one.cp * one.tp // self._job.world

    def _program(self, one: Technique) -> Program:
        samples = self._samples(one)
        if samples not in self._programs:
            self._programs[samples] = self._job.program(samples)
        return self._programs[samples]

    # What it takes.

    def _priced(self) -> Iterator[_Priced]:
        """Yield the techniques with the seconds of a step."""
        for one in self._ours(_plain_or_divided):
            # Before the seconds, which take longer on models of many blocks.
            least, limit = self._estimator.least(one), self._job.limit
            if limit is not None and least > limit:
                self._note(one, f"at least {least / _GIB:.3g} GiB, too large", least)
                continue
            if found := self._price(one):
                yield found

    def _price(self, one: Technique) -> _Priced | None:
        """Return a technique with the seconds of a step; None if it is not for the model."""
        try:
            exchanged = self._exchanged(one)
            costs = self._over_tp(one) if one.is_combined else {}
            parts = self._estimator.peaks(one).parts if one.is_combined else {}
        except ModelError as error:
            axis = axis_of(one) if one.is_combined else EXPERT_AXIS
            self._refused[axis] = f"{axis}: {error.message}"
            return None
        ranks, topology = self._job.world // one.tp, self._job.topology
        sizes = self._estimator.sizes(one, parts)
        trained = self._estimator.trained()
        own = Parameters(
            nbytes=sizes.params,
            stored=sizes.stored(ranks) if one.zero else sizes.params,
            count=sum(x.numel() for x in trained) / max(1, sum(x.nbytes for x in trained)),
            sent=traffic(one, sizes, ranks),
            units=self._estimator.units if one.zero else 0,
        )
        update, reduced = of_parameters(own, topology, ranks, one.tp)
        axis = EXPERT_AXIS if one.ep > 1 else CONTEXT_AXIS
        travels = {} if one.is_plain else {f"tokens over {axis}": exchanged}
        costs = {
            "computation": self._computation(one),
            "update of parameters": update,
            f"gradients and parameters over {DATA_AXIS}": reduced,
            **travels,
            **costs,
        }
        return _Priced(one, costs)

    def _over_tp(self, one: Technique) -> dict[str, float]:
        """Return what ranks of `tp` compute and send of a combination.

        Raises:
            ModelError: It is not for the model.
        """
        run, whole = self._estimator.combined(one)
        *_, wire = self._job.topology.wires((self._job.world // one.tp, one.tp))
        parts = whole.computed(self._job.topology) / run.work.computed(self._job.topology)
        return {
            "computation": self._computation(one, parts),
            f"activations over {TENSOR_AXIS}": one.accumulate * run.work.sent(wire),
        }

    def _computation(self, one: Technique, shared: float | None = None) -> float:
        """Return the seconds of operators, which ranks of `cp` share unless told otherwise."""
        samples = self._samples(one)
        key = samples, one.recompute, one.cp if shared is None else shared
        if key not in self._computed:
            self._computed[key] = computation(
                self._program(one),
                self._job.topology,
                samples,
                recompute=one.recompute,
                shared=key[-1],
            )
        return self._computed[key]

    def _exchanged(self, one: Technique) -> float:
        """Return the seconds of tokens on their way.

        Raises:
            ModelError: The model does not run without values.
        """
        if one.is_plain:
            return 0.0
        size = one.ep * one.cp
        sizes = (self._job.world // (size * one.tp), size, one.tp)
        _, wire, _ = self._job.topology.wires(sizes)
        if one.cp > 1 and not one.kind:
            return 0.0
        if one.cp > 1:
            calls = self._calls(one)
            if one.is_combined:  # a recomputation calls them again
                calls = [*self._estimator.combined(one)[0].attention][: len(calls)]
            return of_attention(calls, one.kind, wire)
        return one.accumulate * self._estimator.exchange(one, wire, self._job.topology).seconds

    def _tried(self, found: _Priced) -> SharedModules | None:
        """Return the plan of a technique if it runs and fits, and note what it takes."""
        one, limit = found.one, self._job.limit
        if self._is_refused(one):
            return None
        try:
            nbytes, _ = self._estimator.nbytes(one)
        except ModelError as error:
            self._refused[found.axis] = f"{axis_of(one)}: {error.message}"
            return None
        config = self._written(found)
        try:
            run = run_by(self._config, config)
            self._estimator.check(run, resolve(run, self._job.world))
        except UsageError as error:
            self._refused[axis_of(one)] = f"{axis_of(one)}: {error.message}"
            return None
        if limit is not None and nbytes > limit:
            said = f"{found.seconds:.4g} s, {nbytes / _GIB:.3g} GiB, too large"
            self._note(one, said, nbytes)
            return None
        self._lines[found.axis] = f"{one.name}: {found.seconds:.4g} s, {nbytes / _GIB:.3g} GiB"
        return SharedModules(
            name=one.name,
            mesh=config["mesh"],
            config=config,
            recompute=one.recompute,
            seconds=found.seconds,
            costs=found.costs,
            memory=nbytes,
        )

    def _note(self, one: Technique, said: str, nbytes: float) -> None:
        """Note a technique that does not fit; the report has the last of each axis."""
        self._least = nbytes if self._least is None else min(nbytes, self._least)
        self._lines[kind_of(one)] = f"{one.name}: {said}"

    def _written(self, found: _Priced) -> dict[str, Any]:
        """Return the configuration of a technique, without what the user has decided."""
        config = self._estimator.config(found.one)
        one = found.one
        sizes = {EXPERT_AXIS: one.ep, CONTEXT_AXIS: one.cp, TENSOR_AXIS: one.tp}
        mesh = {DATA_AXIS: self._job.world // math.prod(sizes.values())}
        mesh |= {axis: size for axis, size in sizes.items() if size > 1}
        config["mesh"] = self._job.mesh or mesh
        return {key: item for key, item in config.items() if key not in self._config.decided}

    def _missing(self) -> Iterator[str]:
        """Yield why an axis has no technique."""
        known = {*self._lines, *(axis.partition(" ")[0] for axis in self._refused)}
        batch, world = self._job.batch, self._job.world
        experts = math.gcd(*self._estimator.experts.values())
        counted = {
            EXPERT_AXIS: (experts, f"{experts} experts and {batch} samples"),
            CONTEXT_AXIS: (self._tokens, f"{self._tokens} tokens of {batch} samples"),
        }
        for axis, (number, what) in counted.items():
            if axis in known:
                continue
            if not number:
                yield f"{axis}: not for this model, {MISSING[axis]}"
            elif self._job.mesh and not self._job.mesh.keys() & {EXPERT_AXIS, CONTEXT_AXIS}:
                yield f"{axis}: not looked at, the mesh does not name it"
            else:
                yield f"{axis}: {what} do not divide over {world} ranks"


def _plain_or_divided(model: Divisible) -> Iterator[Technique]:
    """Yield what divides the batch alone, and what divides the model beside it."""
    if model.batch % model.world == 0:
        yield from techniques(1, can_recompute=model.can_recompute, world=model.world)
    yield from divided(model)


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
