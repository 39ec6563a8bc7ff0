"""What `rt.shard` does to a model, in the one order in which the parts fit together.

Equal weights everywhere -> batch norms -> recomputation -> reduction of gradients -> random
streams.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import UsageError
from msrun.parallel import batch_norm, recompute
from msrun.parallel.config import DATA_AXIS, ROOT
from msrun.parallel.match import matching
from msrun.parallel.reducer import GradientReducer, fill_buckets

if TYPE_CHECKING:
    from msrun.parallel.runtime import Runtime

_BROADCAST_BYTES = 25 * 2**20
_GOLDEN = 0x9E3779B97F4A7C15


class ShardedModel:
    """A model after `shard`, with what its steps need.

    Args:
        model: The model.
        originals: Its parameters before; those that were replaced are no longer its own.
        reducer: Sums gradients over data-parallel ranks; None where there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        originals: Sequence[weakref.ref[Parameter]],
        reducer: GradientReducer | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._originals = originals
        self._reducer = reducer

    def parameters(self) -> list[Parameter]:
        """Return this rank's parameters, each once."""
        model = self._model()
        return [] if model is None else list(model.parameters())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients add up on this rank."""
        with contextlib.ExitStack() as stack:
            if self._reducer is not None:
                stack.enter_context(self._reducer.paused())
            yield

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that holds parameters which `shard` replaced."""
        replaced = {id(reference()) for reference in self._originals}
        replaced -= {id(param) for param in self.parameters()}
        for group in optimizer.param_groups:
            if any(id(param) in replaced for param in group["params"]):
                message = f"{type(optimizer).__name__} holds parameters from before rt.shard"
                raise UsageError(message, hint="make the optimizer after rt.shard(model)")


def shard_model(runtime: Runtime, model: nn.Module) -> ShardedModel:
    """Make `model` parallel in place, as `runtime.config` says.

    Raises:
        UsageError: The configuration does not fit the model; then nothing was changed.
    """
    config, layout = runtime.config, runtime.layout
    modules = [name for name, _ in model.named_modules()]
    recomputed = recompute.find(config.recompute, modules) if config.recompute else []
    excluded = matching(
        config.reduce.exclude, [name for name, _ in model.named_parameters()], "reduce.exclude"
    )
    batch_norm.check(config, model)

    model.to(runtime.device)
    originals = [weakref.ref(param) for param in model.parameters()]
    if runtime.world_size > 1:
        _equalize(model, excluded)
    group = runtime.group(DATA_AXIS) if layout.size(DATA_AXIS) > 1 else None
    if group is not None and config.batch_norm == "sync":
        batch_norm.synchronize(model, group)
    if config.recompute:
        recompute.apply(model, recomputed, config.recompute.save)
    reducer = None
    if group is not None:
        reducer = _reducer(runtime, model, group, excluded)
    if runtime.world_size > 1:
        _divide_random_streams(runtime)
    return ShardedModel(model, originals, reducer)


def _reducer(
    runtime: Runtime, model: nn.Module, group: dist.ProcessGroup, excluded: set[str]
) -> GradientReducer:
    settings = runtime.config.reduce
    params = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and name not in excluded
    ]
    if not params:
        raise UsageError(f"{ROOT}.reduce: the model has no parameter to train")
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    scale = 1.0 if settings.op == "sum" else 1.0 / group.size()
    return GradientReducer(fill_buckets(params, settings.fuse, dtype), group, scale=scale)


@torch.no_grad()
def _equalize(model: nn.Module, excluded: set[str]) -> None:
    """Give every rank the parameters and buffers of rank 0, but the `excluded` parameters."""
    tensors = [param for name, param in model.named_parameters() if name not in excluded]
    for run in _runs([*tensors, *model.buffers()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        dist.broadcast(flat, src=0)
        parts = flat.split([tensor.numel() for tensor in run])
        for tensor, part in zip(run, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _runs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in runs of one type that are worth one message."""
    run: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda t: str(t.dtype)):
        if run and (tensor.dtype != run[0].dtype or size + tensor.nbytes > _BROADCAST_BYTES):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.nbytes
    if run:
        yield run


def _divide_random_streams(runtime: Runtime) -> None:
    """Let ranks that see the same samples draw the same numbers, and others other ones.

    Data-parallel rank 0 goes on with the stream of rank 0, as one process would.
    """
    own = [torch.get_rng_state(), torch.tensor([torch.initial_seed()], dtype=torch.uint64)]
    states = own if runtime.device.type == "cpu" else [*own, _device_state(runtime)]
    for state in states:
        there = state.view(torch.uint8).to(runtime.device)
        dist.broadcast(there, src=0)
        state.view(torch.uint8).copy_(there)
    index = runtime.coordinate.get(DATA_AXIS, 0)
    if index:
        torch.manual_seed((int(states[1].item()) + index * _GOLDEN) % 2**63)
    else:
        torch.set_rng_state(states[0])
        if runtime.device.type != "cpu":
            getattr(torch, runtime.device.type).set_rng_state(states[2])


def _device_state(runtime: Runtime) -> Tensor:
    state: Tensor = getattr(torch, runtime.device.type).get_rng_state()
    return state
