"""Factors that follow from the number of samples of a part, as in `x * len(x)`.

`len` returns a plain number, and Python computes with it before torch sees it.  `sources` tells
where a number comes from.  So it does of a number of `item()` that a script computes with.

The running sum of as many ones as samples has their places, as `torch.arange` has.

Division by their number is the way to a mean: `(x / len(x)).sum()` has the average of parts for its
value of the whole.  Any other factor makes values that are others for the whole batch.
"""

from __future__ import annotations

from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.calls.sources import SIZE, Sources, script
from msrun.parallel.losses.mixing import dims_of
from msrun.parallel.losses.torch_calls import DIVIDING, KEEPING, MULTIPLYING

_ADDING = frozenset(["add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "rsub", "pow"])
FACTORS = DIVIDING | MULTIPLYING | _ADDING | {"__pow__", "__rtruediv__", "div", "mul"}
_SPACED = frozenset(["linspace", "logspace", "arange"])
# They return equal rows, as many as they are told; running sums and products count these.
_MAKING = frozenset(["ones", "full", "new_ones", "new_full"])
_COUNTING = frozenset(["cumsum", "cumprod"])
_MADE = "msrun_made_rows"  # of a tensor: the watch, and which dim has as many rows as samples
_DECIDED = _SPACED | _MAKING
_CLOSE = 1e-9


class SizeFactors:
    """Numbers of samples that a script reads, and where it multiplies by them.

    Args:
        samples: Of the part.

    Attributes:
        divided: Sums over samples that a script divides by their number.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._sources = Sources()
        self.divided: set[str] = set()
        self._has_made = False  # a tensor of equal rows

    def note(self, name: str, x: Tensor, dim: int, asked: int | None) -> None:
        """Note that a script reads sizes of a tensor.

        Args:
            name: Of the function.
            x: The tensor.
            dim: Which has samples.
            asked: Of which dim it returned the size; None of all.
        """
        if name == "__len__":
            asked = 0
        if asked is None or asked % x.dim() == dim:
            self._sources.note((dim, dim - x.dim()))

    def note_number(self, number: Mixture) -> None:
        """Note that a script reads a number that is this mixture of samples."""
        self._sources.note(number)

    def may_decide(self, name: str) -> bool:
        """Return whether a function may compute by a number that a script read."""
        if self._has_made and (name in _COUNTING or name in KEEPING):
            return True
        return self._sources.has_reads and (name in _DECIDED or name in FACTORS)

    def outcome(self, call: TorchCall) -> Outcome:
        """Return what is known of a result that a number decides, and that is no count itself."""
        if call.name in _COUNTING or call.name in KEEPING:
            return self._counted(call) if self._has_made else None
        found = script() if self.may_decide(call.name) else None
        if found is None:
            return None
        number = next((x for x in call.args if type(x) in (int, float)), None)
        is_number = number is not None and takes_gradients(call.result)
        source = self._sources.followed(*found) if is_number or call.name in _DECIDED else None
        self._sources.note_tensor(*found)
        if call.name in _MAKING and source is SIZE:
            self._note_made(call)
        if number is None or source is None or call.name in _MAKING:
            return None
        return self._scaled(call, number, source)

    def _scaled(self, call: TorchCall, number: float, source: Mixture) -> Outcome:
        """Return what is known of a result that is computed by `number`, which has a `source`."""
        is_spaced = call.name in _SPACED
        if source is not SIZE:  # losses of one number are looked at by `watch`
            return source if call.result.dim() and not is_spaced else None
        text = f"{SIZE.name}{call.line()}"
        if is_spaced:
            return Mixture(text, place="position" if call.name == "arange" else "")
        divisor = number if call.name in DIVIDING else 1 / number if number else 0.0
        count = divisor / self._samples
        is_mean = call.name in DIVIDING | MULTIPLYING and isinstance(call.args[0], Tensor)
        if not is_mean or round(count) < 1 or abs(count - round(count)) > _CLOSE * count:
            return Mixture(text, unless_counted=not call.result.dim())
        mark = next((mark for x in call.args if (mark := call.mark(x))), Mark(None))
        self.divided.add(mark.statistic)
        return Mark(mark.dim, mark.statistic or text) if call.result.dim() else None

    def _note_made(self, call: TorchCall) -> None:
        """Note that equal rows were made, as many as samples."""
        shape = call.result.shape
        dim = next((at for at, length in enumerate(shape) if length == self._samples), None)
        if dim is not None:
            setattr(call.result, _MADE, (self, dim))
            self._has_made = True

    def _counted(self, call: TorchCall) -> Outcome:
        """Return that `call` counts rows that were made for samples, if it does."""
        owner, dim = getattr(call.x, _MADE, (None, 0))
        if owner is not self:
            return None
        if call.name in KEEPING:
            if call.result.shape == call.x.shape:
                setattr(call.result, _MADE, (self, dim))
            return None
        dims = dims_of(call.name, call.args, call.kwargs, call.x.dim())
        return Mixture(f"{SIZE.name}{call.line()}", place="position") if dim in dims else None
