"""A loader that draws one batch ahead, so that rows of the next one can be asked for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

_Batch = TypeVar("_Batch")


def one_ahead(
    announce: Callable[[object, object], None], batches: Iterable[_Batch]
) -> Iterator[_Batch]:
    """Yield `batches`, each after the next one is drawn, and `announce` both.

    Where drawing a batch takes random numbers in this process, as a transform without workers does,
    none is drawn ahead: the model, which draws from the same stream, would get others.
    """
    rest = iter(batches)
    before = _random_states()
    for first in rest:
        if _random_states() != before:
            yield first
            break
        batch = first
        for following in rest:
            announce(batch, following)
            yield batch
            batch = following
        yield batch
        return
    yield from rest


def _random_states() -> list[object]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else ()
    states: list[object] = [bytes(torch.get_rng_state().numpy()), random.getstate()]
    return [*states, *(bytes(each) if hasattr(each, "tobytes") else each for each in drawn)]
