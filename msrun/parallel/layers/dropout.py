"""`dropout: exact`: data-parallel ranks drop the elements that one process would drop.

The problem.  By default each data-parallel rank has a random stream of its own, so the elements
that N ranks drop differ from those of one process, as they would with another seed.  A comparison
of a parallel run with one process, bit for bit, needs the same masks.

The idea.  All ranks keep one random stream, the one of rank 0 (`RankContext.stream` is 0 on every
rank).  At each dropout a rank draws the mask of the global batch, like one process, and uses the
part of its own samples.  Every rank draws all N parts, so the stream stays equal on all of them.
The price is the time to draw the mask of the global batch, and its memory.

How.  `ExactDropout` is a torch function mode that is active while the model runs forward in
training.  It replaces `functional.dropout`.  A recomputation in the backward pass enters the mode
again by `active`, since modes are not active there.  Dropout of tensors that a plan shards goes to
the guard, which draws its masks with `draw` and cuts them further.

Invariants:

- The mask of a rank are rows [i R, (i + 1) R) of N R rows, for rank i and R rows on it.  So
  the first dim of a tensor must begin with the samples: its size is a multiple of the batch size,
  as when dims are flattened behind the samples.  All ranks must have equally many samples.
- Any other random operator would draw the same numbers for different samples on every rank, which
  is wrong without an error.  So the mode refuses all of them by name, and dropout inside attention
  and recurrent layers.
- Micro-batches over `dp` and pipelines are refused (`layout`): a micro-batch of N ranks holds other
  samples than a micro-batch of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, ROOT
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.rank_context import RankContext

_DRAWING_NAMES = """
    alpha_dropout bernoulli bernoulli_ cauchy_ dropout1d dropout2d dropout3d exponential_
    feature_alpha_dropout geometric_ gumbel_softmax log_normal_ multinomial normal normal_ poisson
    rand rand_like randint randint_like randn randn_like random_ randperm rrelu uniform_
"""
_DRAWING = frozenset(_DRAWING_NAMES.split())
# Recurrent functions drop inside; their dropout is the only positive float among the arguments.
_RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}


class ExactDropout(TorchFunctionMode):
    """A mode in which dropout draws masks of the global batch.

    Args:
        context: Rank whose data-parallel axis shards the batch.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__()
        self._batch = context.batch
        self._index = context.coordinate[DATA_AXIS]
        self._count = context.layout.size(DATA_AXIS)
        self._samples = 0
        self._is_drawing = False

    def apply(self, model: nn.Module) -> None:
        """Have `model` run in this mode in training."""
        forward = model.forward
        # The wrapped one tells which inputs the model takes by name.
        model.forward = update_wrapper(partial(self._forward, model, forward), forward)

    def _forward(
        self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not model.training:
            return forward(*args, **kwargs)
        # A weight other than 1 means that ranks have different numbers of samples, so this rank
        # does not know where its part of the mask begins.
        if self._batch.value != 1.0:
            raise ModelError(
                f"{ROOT}.dropout: exact needs batches of one size on all ranks",
                hint="take rt.loader(..., drop_last=True)",
            )
        # The first tensor with dims has the batch size in its first dim.
        given = tensors_in([args, kwargs])
        self._samples = next((len(x) for x in given if x.dim()), 0)
        with self.active():
            return forward(*args, **kwargs)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Enter this mode, unless it is active already."""
        with contextlib.nullcontext() if torch_compat.is_active(self) else self:
            yield

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, with dropout replaced and other random functions refused."""
        del types
        kwargs = kwargs or {}
        if func is functional.dropout and not is_sharded(args[0]):
            return self._dropout(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if not self._is_drawing and (name in _DRAWING or _drops(name, args, kwargs)):
            raise ModelError(
                f"{ROOT}.dropout: exact knows torch.nn.Dropout alone, and the model calls {name}",
                hint="take dropout: local",
            )
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float, training: Any, inplace: Any) -> Tensor:
        if not training or p == 0.0:
            return x
        keep = self.draw(x, 1 - p).div_(1 - p)
        return x.mul_(keep) if inplace else x * keep

    def draw(self, x: Tensor, share: float) -> Tensor:
        """Return a mask for `x`: each element is 1 with probability `share`, and otherwise 0.

        Raises:
            ModelError: The first dim of `x` does not begin with the samples of the batch.
        """
        rows = len(x) if x.dim() else 0
        if not self._samples or rows % self._samples or not rows:
            raise ModelError(
                f"{ROOT}.dropout: exact: a dropout sees a tensor of shape {tuple(x.shape)}, "
                f"which does not begin with the {self._samples} samples of the batch",
                hint="take dropout: local",
            )
        self._is_drawing = True  # the mode would refuse `bernoulli_`, too
        try:
            mask = torch.empty(
                (self._count * rows, *x.shape[1:]), dtype=x.dtype, device=x.device
            ).bernoulli_(share)
        finally:
            self._is_drawing = False
        return mask[self._index * rows :][:rows]


def _drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the function `name` applies a dropout of its own."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))  # noqa: PLR2004
    return name in _RECURRENT and any(isinstance(value, float) and value > 0 for value in args)
