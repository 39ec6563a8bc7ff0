"""`msrun advise`: what each technique costs and saves for a model, and the first that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from msrun.errors import UsageError
from msrun.parallel.advise.simulate import Peaks, batch_norms, simulate
from msrun.parallel.advise.techniques import (
    SHARDED_PARAMETERS,
    ModelBytes,
    Technique,
    rank_bytes,
    techniques,
    traffic,
)
from msrun.parallel.auto.offline_search import make, resized
from msrun.parallel.auto.tracing.structure import leaf_tensors
from msrun.parallel.config import Optimizer, ParallelConfig, Recompute
from msrun.parallel.data_parallel.zero import units
from msrun.parallel.layers.recompute import find

# States of the optimizer for each element of a parameter.
STATES = {"adam": 2, "momentum": 1, "sgd": 0}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One technique for a model.

    Args:
        name: Of the technique.
        nbytes: Of a rank.
        sent: Bytes that a rank sends in a step.
        cost: What it costs in time.
        fits: Whether the bytes are there.
    """

    name: str
    nbytes: int
    sent: int
    cost: str
    fits: bool


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and needs.

    Args:
        params: Number of parameters.
        memory: Bytes of a rank.
        local: Samples of a rank in a step.
        rows: Each technique that was looked at, the cheapest first.
        chosen: Name of the first that fits; empty if none does.
        config: Its configuration.
    """

    params: int
    memory: int
    local: int
    rows: list[Row]
    chosen: str
    config: dict[str, Any]


class AdviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the cluster.

    Args:
        target: `FILE:FUNCTION`, as of `msrun search`.
        world: Ranks.
        memory: Bytes of a rank.
        batch: Samples of a step; None is those of the sample for each rank.
        optimizer: A key of `STATES`.
        is_host: Whether ranks train on hosts.
    """

    target: str
    world: int
    memory: int
    batch: int | None
    optimizer: str
    is_host: bool


def advise(request: AdviceRequest) -> Advice:
    """Return advice for the model that a function makes, which gets no memory.

    Raises:
        UsageError: The model cannot be made or run without values, or the batch does not divide.
    """
    model, sample = make(request.target)
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
    blocks = _blocks(model)
    most = 1 if batch_norms(model) else local
    sizes = _sizes(model, STATES[request.optimizer], request.world)
    batch = sum(x.nbytes for x in leaf_tensors(resized(sample, local)))
    known: dict[tuple[bool, int], Peaks] = {}
    rows: list[Row] = []
    chosen = Technique()
    for one in techniques(most, can_recompute=bool(blocks), world=request.world):
        key = (one.recompute, one.accumulate)
        if any(row.fits for row in rows) and key not in known:
            continue
        if key not in known:
            again = find(Recompute(modules=blocks), _names(model)) if one.recompute else []
            known[key] = simulate(model, resized(sample, local // one.accumulate), again)
        nbytes = rank_bytes(
            one, sizes, known[key], batch, world=request.world, is_host=request.is_host
        )
        if nbytes <= request.memory and not any(row.fits for row in rows):
            chosen = one
        rows.append(
            Row(
                name=one.name,
                nbytes=nbytes,
                sent=round(traffic(one, sizes, request.world)),
                cost=_cost(one),
                fits=nbytes <= request.memory,
            )
        )
    is_found = any(row.fits for row in rows)
    return Advice(
        params=sum(param.numel() for param in model.parameters()),
        memory=request.memory,
        local=local,
        rows=rows,
        chosen=chosen.name if is_found else "",
        config=_config(chosen, blocks) if is_found else {},
    )


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def _sizes(model: nn.Module, states: int, world: int) -> ModelBytes:
    trained = [param for param in model.parameters() if param.requires_grad]
    inside = [
        sum(p.nbytes for p in model.get_submodule(name).parameters())
        for name in units(ParallelConfig(optimizer=Optimizer(zero=1)), model, ())
    ]
    params = sum(param.nbytes for param in trained)
    others = [param.nbytes for param in model.parameters() if not param.requires_grad]
    padding = sum(
        param.nbytes // max(1, len(param)) * math.ceil(len(param) / world) - param.nbytes // world
        for param in trained
        if param.dim()
    )
    return ModelBytes(
        params=params,
        fixed=sum(others) + sum(buffer.nbytes for buffer in model.buffers()),
        state=states * params,
        largest=max((param.nbytes for param in trained), default=0),
        unit=max(inside, default=0),
        root=max(0, params - sum(inside)),
        padding=max(0, padding),
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


def _cost(one: Technique) -> str:
    costs = {
        "half as much traffic again": one.zero == SHARDED_PARAMETERS,
        "blocks compute their forward twice": one.recompute,
        f"{one.accumulate} smaller passes a step": one.accumulate > 1,
    }
    return ", ".join(text for text, is_so in costs.items() if is_so) or "none"


def _config(one: Technique, blocks: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"mesh": {"dp": -1}}
    if one.zero:
        config["optimizer"] = {"zero": one.zero}
    if one.recompute:
        config["recompute"] = {"modules": blocks}
    if one.accumulate > 1:
        config["accumulate"] = one.accumulate
    return config
