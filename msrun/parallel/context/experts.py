"""Experts on ranks beside parts of sequences: tokens travel, and nobody looks on the way.

What `style: experts` computes of a token was tried not to depend on others.  Its functions mix the
tokens of many ranks, and its ranges count rows and no tokens.  So it runs outside of `Sequences`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial, update_wrapper
from typing import Any

from torch import nn

from msrun.parallel.context.sequences import Sequences
from msrun.parallel.context.token_calls import Taint, TokenPlace
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.torch_compat import without_mode


@contextlib.contextmanager
def run_outside(sequences: Sequences, experts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Have modules that become experts of several ranks inside run outside of `sequences`.

    Args:
        sequences: Of the model.
        experts: Modules by name.
    """
    for module in experts.values():
        sequences.leave_out(module, is_compiled=False)
    yield
    for name, module in experts.items():
        module.forward = update_wrapper(
            partial(_run, sequences, name, module.forward), module.forward
        )


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
