"""`msrun advise`: what each technique costs and saves for a model, and the first that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from msrun.errors import ModelError, UsageError
from msrun.parallel.advise.estimate import STATES, Estimator, axis_of, kind_of
from msrun.parallel.advise.techniques import (
    ACTIVATIONS,
    GRIDS,
    IMAGES,
    OPTIMIZER,
    PLACE,
    SHARDED_PARAMETERS,
    Technique,
    bubble,
    divided,
    on_host,
    rank,
    techniques,
)
from msrun.parallel.advise.whole_models import whole_models
from msrun.parallel.auto.offline_model import make
from msrun.parallel.auto.outlines import outline_of
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.search.cost.topology import Topology

# Slices of a batch: one computes while the collective of the other is on its way.
_COPIES = 2
_MIB = 2**20


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One technique for a model.

    Args:
        name: Of the technique.
        nbytes: Of a rank.
        sent: Bytes that a rank sends in a step.
        moved: Bytes that travel to the host and back in a step.
        cost: What it costs in time.
        fits: Whether the bytes are there.
        config: Its configuration.
    """

    name: str
    nbytes: int
    sent: int
    moved: int
    cost: str
    fits: bool
    config: dict[str, Any]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and needs.

    Args:
        params: Number of parameters.
        memory: Bytes of a rank.
        local: Samples of a data-parallel rank in a step.
        rows: Each technique that was looked at, the cheapest first.
        refused: Technique -> why it is not for this model.
        chosen: Name of the first that fits; empty if none does.
        config: Its configuration.
        notes: What the script has to do for it.
    """

    params: int
    memory: int
    local: int
    rows: list[Row]
    refused: dict[str, str]
    chosen: str
    config: dict[str, Any]
    notes: list[str]


class AdviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the cluster.

    Args:
        target: `FILE:FUNCTION`, as of `msrun search`.
        world: Ranks.
        memory: Bytes of a rank.
        batch: Samples of a step; None is those of the sample for each rank.
        optimizer: A key of `STATES`.
        topology: What it runs on; `cpu` are hosts.
    """

    target: str
    world: int
    memory: int
    batch: int | None
    optimizer: str
    topology: Topology


def advise(request: AdviceRequest) -> Advice:
    """Return advice for the model that a function makes, which gets no memory.

    Raises:
        UsageError: The model cannot be made or run without values, or the batch does not divide.
    """
    model, sample = make(request.target)
    model = outline_of(model, sample) or model
    given = next(len(x) for x in leaf_tensors(list(sample)) if x.dim())
    total = request.batch or given * request.world
    if total % request.world:
        raise UsageError(f"--batch {total} does not divide over {request.world} ranks")
    return advise_model(model, sample, total // request.world, request)


def advise_model(
    model: nn.Module, sample: Sequence[Any], local: int, request: AdviceRequest
) -> Advice:
    """Return advice for a model on the device `meta`; see `advise`.

    Args:
        model: The model.
        sample: Inputs of any batch.
        local: Samples of a rank in a step.
        request: The cluster.
    """
    return _Advisor(model, sample, local, request).advice()


class _Advisor:
    """Looks at one technique after the other; see `advise_model`."""

    def __init__(
        self, model: nn.Module, sample: Sequence[Any], local: int, request: AdviceRequest
    ) -> None:
        self._model, self._sample, self._local = model, sample, local
        self._request = request
        self._estimator = Estimator(
            model,
            sample,
            batch=local * request.world,
            world=request.world,
            states=STATES[request.optimizer],
            is_host=request.topology.name == "cpu",
        )
        self._rows: list[tuple[Technique, Row]] = []
        self._refused: dict[str, str] = {}

    def advice(self) -> Advice:
        """Return the advice."""
        request = self._request
        plain = techniques(
            self._local if self._estimator.can_cut else 1,
            can_recompute=bool(self._estimator.blocks),
            world=request.world,
        )
        for one in plain:
            self._look(one, is_shown=self._estimator.has_run(one))
        self._look_at_host()
        for one in divided(self._estimator.divisible(request.topology.per_node)):
            self._look(one, is_shown=not self._has(one))
        self._look_at_copies()
        self._look_at_whole_models()
        rows = sorted(self._rows, key=lambda found: rank(found[0]))
        chosen, row = next(((one, row) for one, row in rows if row.fits), (None, None))
        return Advice(
            params=sum(param.numel() for param in self._model.parameters()),
            memory=request.memory,
            local=self._local,
            rows=[row for _, row in rows],
            refused=self._refused,
            chosen="" if row is None else row.name,
            config={} if row is None else row.config,
            notes=[] if chosen is None else _notes(chosen),
        )

    def _look_at_host(self) -> None:
        """Add rows of what may be in the memory of the host."""
        estimator = self._estimator
        if self._request.topology.name == "cpu":
            self._refused["place, offload"] = "ranks on hosts have the memory of the host alone"
            return
        kinds = [OPTIMIZER]
        if estimator.blocks:
            kinds.insert(0, ACTIVATIONS)
        else:
            self._refused[ACTIVATIONS] = "no list of blocks is found, whose activations could go"
        if estimator.tables:
            kinds.insert(0, PLACE)
        else:
            self._refused[PLACE] = (
                "no table that no other module shares has a sixteenth of the parameters"
            )
        found = on_host(
            kinds,
            self._local if estimator.can_cut else 1,
            can_recompute=bool(estimator.blocks),
            world=self._request.world,
        )
        for one in found:
            # Beside each other only where one does not do.
            is_single = len(one.on_host) == 1 and not self._has(one)
            if not self._refused.keys() & {*one.on_host}:
                self._look(one, is_shown=is_single)

    def _look_at_copies(self) -> None:
        """Add a row of copies for the first of the divisions of operators."""
        tensor = [one for one, _ in self._rows if kind_of(one) == "tp"]
        if not tensor:
            return
        one = msgspec.structs.replace(tensor[0], copies=_COPIES)
        local = self._local * one.tp
        problem = "a batch norm needs all samples at once" if not self._estimator.can_cut else ""
        if local % _COPIES:
            problem = f"{local} samples do not divide into {_COPIES} slices"
        if problem:
            self._refused["copies"] = problem
        else:
            self._look(one, is_shown=True)

    def _look_at_whole_models(self) -> None:
        """Add a row for each grid, and for parts of images."""
        request = self._request
        wholes = whole_models(
            self._model,
            self._sample,
            batch=self._local * request.world,
            world=request.world,
            topology=request.topology,
        )
        for one, found in wholes.found:
            self._estimator.know(one, found)
            self._look(one, is_shown=True)
        self._refused |= wholes.refused

    def _has(self, one: Technique) -> bool:
        """Return whether there is a row of the kind of `one` already."""
        return any(kind_of(other) == kind_of(one) for other, _ in self._rows)

    def _look(self, one: Technique, *, is_shown: bool) -> None:
        """Add the row of a technique: until one fits, and of what `is_shown`."""
        cheaper = any(row.fits and rank(other) <= rank(one) for other, row in self._rows)
        if (cheaper and not is_shown) or axis_of(one) in self._refused:
            return
        try:
            nbytes, sent = self._estimator.nbytes(one)
        except ModelError as error:
            if one.is_plain:
                raise
            if one.on_host:
                self._refused |= dict.fromkeys(one.on_host, error.message)
                return
            self._refused[axis_of(one)] = error.message
            return
        moved = round(self._estimator.moved(one)) if one.on_host else 0
        row = Row(
            name=one.name,
            nbytes=nbytes,
            sent=round(sent),
            moved=moved,
            cost=self._cost(one, moved),
            fits=nbytes <= self._request.memory,
            config=self._estimator.config(one),
        )
        self._rows.append((one, row))

    def _cost(self, one: Technique, moved: int) -> str:
        costs = {
            "half as much traffic again": one.zero == SHARDED_PARAMETERS,
            "blocks compute their forward twice": one.recompute,
            f"{one.accumulate} smaller passes a step": one.accumulate > 1,
            f"tokens travel to their experts and back{self._beside(one)}": one.ep > 1,
            "ranks exchange tokens in each attention": one.cp > 1,
            "ranks wait for each other in each block": one.tp > 1,
            "ranks wait for each other in each product": one.whole in GRIDS,
            "ranks exchange rows at their borders": one.whole == IMAGES,
            f"{one.microbatches} smaller passes a step, ranks wait {bubble(one):.0%}": one.pp > 1,
            f"{moved / _MIB:.3g} MiB to the host and back a step": bool(one.on_host),
            "the host updates the parameters": OPTIMIZER in one.on_host,
        }
        found = [text for text, is_so in costs.items() if is_so]
        if one.copies > 1:
            hidden = self._estimator.hidden(one, self._request.topology)
            found.append(
                f"{one.copies} times the collectives, beside which a slice computes: up to "
                f"{hidden:.0%} of the time saved"
            )
        return ", ".join(found) or "none"

    def _beside(self, one: Technique) -> str:
        """Return what computes while tokens travel."""
        is_routed = one.ep > 1 and one.pp == 1
        share = self._estimator.beside(one, self._request.topology) if is_routed else 0.0
        return f", {share:.0%} of the time beside the work on others" if share else ""


def _notes(one: Technique) -> list[str]:
    names = ", ".join(axis for axis, _ in one.axes)
    notes = {
        "train by rt.step, and give the sample to rt.shard, by which stages are cut": one.pp > 1,
        "train by rt.step: ranks of cp get the same batch of whole sequences": one.cp > 1,
        f"train by rt.step: ranks of {names} get the same images, or parts by rt.loader": (
            one.whole == IMAGES
        ),
        f"ranks of {names} get the same batch, as rt.loader gives it": one.whole in GRIDS,
        "ranks of tp get the same batch, as rt.loader gives it": one.tp > 1,
        "train by rt.step: it cuts the batch into copies": one.copies > 1,
        "the estimate is of activations that travel as fast as blocks compute": (
            ACTIVATIONS in one.on_host
        ),
        "give the optimizer foreach=True, which torch does not choose on two devices": (
            PLACE in one.on_host
        ),
        "the estimate is of tokens that spread evenly over experts": one.ep > 1,
    }
    return [text for text, is_so in notes.items() if is_so]
