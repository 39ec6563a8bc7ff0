"""Recomputation: modules that keep only their inputs and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from msrun.parallel.config import Recompute
from msrun.parallel.match import matching
from msrun.parallel.sharded_model import Context

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


def find(settings: Recompute, modules: Sequence[str]) -> list[str]:
    """Return the outermost of `modules` that are to be recomputed.

    Raises:
        ModelError: A pattern matches none.
    """
    chosen = sorted(matching(settings.modules, modules, "recompute.modules"))
    return [
        name
        for name in chosen
        if not any(name != other and f"{name}.".startswith(f"{other}.") for other in chosen)
    ]


def apply(model: nn.Module, names: Iterable[str], save: Sequence[str], context: Context) -> None:
    """Have the modules called `names` recompute; names and hooks of the model stay as they are.

    Random numbers are drawn again as they were, so dropout is exact.  Buffers are read as they
    were too, and written by the first run alone.

    Args:
        model: The model.
        names: Modules, none inside another.
        save: As of `config.Recompute.save`.
        context: What the modules have to run in; in the backward pass nobody else enters it.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if save:
        policy = partial(_policy, frozenset(save))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for name in names:
        module = model.get_submodule(name)
        module.forward = partial(_forward, module, module.forward, context, options)


def _forward(
    module: nn.Module,
    forward: Callable[..., Any],
    context: Context,
    options: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    run = partial(_run, _Buffers(module), forward, context)
    return checkpoint(run, *args, **options, **kwargs)


def _run(
    buffers: _Buffers, forward: Callable[..., Any], context: Context, *args: Any, **kwargs: Any
) -> Any:
    with buffers.written_once(), context():
        return forward(*args, **kwargs)


class _Buffers:
    """The buffers of a module, in its first run and those that repeat it.

    A copy of all is kept with the inputs: torch does not count every writing, as that of its
    batch norms, so nobody knows which ones change.  A later run gets other tensors under their
    names: backward passes still need the values of those that stay.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor] | None = None

    @contextmanager
    def written_once(self) -> Iterator[None]:
        """Let the first run write; show a later one what that found, and forget its writing."""
        if self._before is None:
            self._before = _copies(dict(self._module.named_buffers(remove_duplicate=False)))
            yield
        else:
            with self._exchanged(_copies(self._before)):
                yield

    @contextmanager
    def _exchanged(self, others: dict[str, Tensor]) -> Iterator[None]:
        own = {name: self._module.get_buffer(name) for name in others}
        self._set(others)
        try:
            yield
        finally:
            self._set(own)

    def _set(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, buffer)


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy under each name, one for all names of a tensor."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    return {name: copies[id(buffer)] for name, buffer in buffers.items()}


def _policy(
    save: frozenset[str], context: object, operator: Any, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    """Say of one operator whether its result is kept."""
    del context
    is_kept = ("comm" in save and operator.namespace in _COLLECTIVES) or (
        "matmul" in save and operator.namespace == "aten" and _name(operator) in _MATMULS
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    return str(operator.name()).partition("::")[2].partition(".")[0]
