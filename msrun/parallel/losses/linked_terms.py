"""Terms of a loss, and which tensors were computed from which of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.parallel.losses.calls.unknown import is_unseen
from msrun.parallel.losses.notes import note_of_all_ranks, watch_numbers
from msrun.parallel.losses.own_gradients import note_gathered
from msrun.parallel.losses.terms import Term
from msrun.parallel.torch_compat import write_count

# Attributes of tensors, since a table of tensors would keep them all in memory: the term that a
# tensor is the value of, what it was computed from, and whether it counts 0, 1, 2, ...  The first
# two are numbers of terms, beside that of the watch: tensors may outlive it.
_TERM, SOURCES, RANGE = "msrun_term", "msrun_sources", "msrun_range"
# The number of the watch that saw a tensor computed from parameters alone.
OF_WEIGHTS = "msrun_of_weights"
# The batch among the sources has no number of a term.
ONLY_BATCH = frozenset([-1])
NOTHING: frozenset[int] = frozenset()
_watches = watch_numbers()


class LinkedTerms(TorchFunctionMode):
    """Terms that a watch found, linked with tensors.

    Args:
        takes_all: Whether every tensor is a part of the batch but parameters, and what is computed
            from them alone; else it is what is linked to the batch.
    """

    def __init__(self, *, takes_all: bool) -> None:
        super().__init__()
        self._number = next(_watches)
        self._terms: list[Term] = []
        self._takes_all = takes_all

    def _leave(self, result: Tensor, term: Term, sources: frozenset[int] = NOTHING) -> None:
        """Note that `result` is the value of `term`, which was computed from other `sources`."""
        number = len(self._terms)
        self._terms.append(term)
        setattr(result, _TERM, (self._number, number, write_count(result)))
        setattr(result, SOURCES, (self._number, *sources, number))

    def _link(self, value: Any, sources: frozenset[int]) -> None:
        if sources and isinstance(value, Tensor):
            setattr(value, SOURCES, (self._number, *sources))

    def _keep(self, source: Tensor, result: Tensor) -> None:
        """Let `result` be the value of the same term as `source`."""
        if hasattr(source, RANGE):
            setattr(result, RANGE, True)
        if self._own_term(source) and result.numel() == 1:
            setattr(result, _TERM, (*getattr(source, _TERM)[:2], write_count(result)))

    def take(self, tensor: Tensor) -> None:
        """Let `tensor` be a part of the batch, whatever it was computed from."""
        vars(tensor).pop(_TERM, None)
        self._link(tensor, ONLY_BATCH)

    def _own_term(self, value: Tensor) -> Term | None:
        """Return the term whose value `value` still is."""
        watch, number, written = getattr(value, _TERM, (None, 0, 0))
        is_same = watch == self._number and write_count(value) == written
        return self._terms[number] if is_same else None

    def _is_data(self, sources: frozenset[int]) -> bool:
        """Return whether what has these sources is a part of the batch without any term."""
        return sources <= ONLY_BATCH if self._takes_all else sources == ONLY_BATCH

    def _are_weights(self, values: Iterable[Any]) -> bool:
        """Return whether the tensors among `values` are parameters, or computed from them alone."""
        found = False
        for value in values:
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Tensor):
                    is_seen = getattr(item, OF_WEIGHTS, None) == self._number
                    own = is_seen and not write_count(item)
                    if not (own or isinstance(item, Parameter)):
                        return False
                    found = True
        return found

    def _needs_sources(self) -> bool:
        return bool(self._terms) or not self._takes_all

    def _sources(self, values: Iterable[Any]) -> frozenset[int]:
        """Return what `values`, or tensors in them, were computed from."""
        found = NOTHING
        for value in values:
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, Tensor):
                    noted = getattr(item, SOURCES, None)
                    if noted is None and not self._takes_all and is_unseen(item):
                        noted = (self._number, *ONLY_BATCH)
                    watch, *sources = noted or (None,)
                    found |= frozenset(sources) if watch == self._number else NOTHING
        return found


def whole(value: Tensor) -> Tensor:
    """Return `value`, which is no part of the batch any more but has all of it."""
    forget(value)
    note_gathered(value)
    return value


def forget(value: Tensor) -> None:
    """Let `value` be computed from nothing: ranks have reduced or exchanged it."""
    setattr(value, SOURCES, (None,))
    note_of_all_ranks(value)
