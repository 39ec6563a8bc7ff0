"""Experts on ranks beside parts of sequences: tokens travel, and nobody looks on the way.

What `style: experts` computes of a token was tried not to depend on others.  Its functions mix the
tokens of many ranks, and its ranges count rows and no tokens.  So it runs outside of `Sequences`,
also where the axis of experts has one rank, which has all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from functools import partial, update_wrapper
from typing import Any

from torch import nn

from msrun.errors import ModelError
from msrun.parallel.context.sequences import Sequences
from msrun.parallel.context.token_calls import Taint, TokenPlace
from msrun.parallel.experts.arguments import Arguments
from msrun.parallel.experts.probe import Probe
from msrun.parallel.experts.routed import bound
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.torch_compat import without_mode


@contextlib.contextmanager
def run_outside(sequences: Sequences, model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Have modules that become experts of several ranks inside run outside of `sequences`.

    Args:
        sequences: Of the model.
        model: The model, or a stage of it.
        names: Of these modules in the whole model.
    """
    own = dict(model.named_modules())
    experts = {name: own[name] for name in names if name in own}
    for module in experts.values():
        sequences.leave_out(module, is_compiled=False)
    yield
    recorded = sequences.in_recordings(names)
    for name, module in recorded:
        _wrap(module, partial(_without_values, name, module))
    for name, module in (*experts.items(), *recorded):
        _wrap(module, partial(_run, sequences, name))


def try_whole(model: nn.Module, names: Collection[str]) -> None:
    """Have experts that each rank has all of tried in their first call, as those of ranks are.

    Args:
        model: The model, or a stage of it.
        names: Of modules with the weights of all their experts, in the whole model.
    """
    own = dict(model.named_modules())
    for name in names:
        if module := own.get(name):
            experts = next(module.parameters()).size(0)
            _wrap(module, partial(_tried, Probe(name, module), experts))


def _tried(
    probe: Probe, experts: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not probe.is_done:
        arguments = Arguments(probe.name, args, kwargs)
        probe.run(partial(arguments.call, forward), *arguments.routed, experts)
    return forward(*args, **kwargs)


def _wrap(module: nn.Module, run: Callable[..., Any]) -> None:
    """Have `run` get the forward of `module`, and what that would get."""
    module.forward = update_wrapper(partial(run, module.forward), module.forward)


def _without_values(
    name: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run experts in a recording; where a route needs values, return the tokens with gradients."""
    try:
        return forward(*args, **kwargs)
    except ModelError:
        raise
    except Exception:  # noqa: BLE001 - whatever torch says of a tensor without values
        tokens = Arguments(name, args, kwargs).routed[0]
        return bound(tokens.clone(), dict(module.named_parameters(recurse=False)))


def _run(
    sequences: Sequences, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    watch = sequences.watch_now()
    place: TokenPlace | None = None
    if watch:
        marks = {watch.mark(tensor) for tensor in tensors_in([args, kwargs])}
        place = next((mark for mark in marks if isinstance(mark, TokenPlace)), None)
        if place is None or len(marks) > 1:
            taint = next((mark.name for mark in marks if isinstance(mark, Taint)), "other rows")
            raise watch.refusal(f"experts ({name}) that get {taint} beside tokens")
    with without_mode(sequences), without_mode(watch) if watch else contextlib.nullcontext():
        output = forward(*args, **kwargs)
    if watch and place:
        watch.leave(output, place)
    return output
