"""`AveragedModel` of a copy from before `rt.shard`, which follows the sharded model.

The copy is whole on every rank.  torch updates it by pairs of parameters, and takes no plain tensor
with a DTensor; so it gets whole ones, which ranks gather together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from msrun.errors import ModelError
from msrun.parallel.local import full_tensor, is_sharded


def follow_models() -> None:
    """Have averages take sharded models from now on; a second call does nothing."""
    update: Any = AveragedModel.update_parameters
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    def update_parameters(average: AveragedModel, model: nn.Module) -> None:
        update(average, _following(average.module, model))

    AveragedModel.update_parameters = update_parameters  # type: ignore[assignment, method-assign]


def _following(copy: nn.Module, model: nn.Module) -> nn.Module:
    """Return what `copy` is updated from: `model`, with whole parameters where the copy's are.

    Raises:
        ModelError: They have other parameters, as a stage of a pipeline has.
    """
    own, others = list(copy.parameters()), list(model.parameters())
    if [param.shape for param in own] != [param.shape for param in others]:
        raise ModelError(
            f"the average has {len(own)} parameters and the model of rt.shard {len(others)} on "
            "this rank, or of other shapes, such as those of a stage of a pipeline",
            hint="make the average of what rt.shard returned, not before",
        )
    pairs = zip(own, others, strict=True)
    if any(is_sharded(other) and not is_sharded(param) for param, other in pairs):
        return _Whole(copy, model)
    return model


class _Whole(nn.Module):
    """A model as an average of a whole copy reads it.

    Args:
        copy: The copy.
        model: The model.
    """

    def __init__(self, copy: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self._pairs = lambda: zip(copy.parameters(), model.parameters(), strict=True)
        self._model = [model]  # no module of this one

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:  # type: ignore[override]  # noqa: FBT001, FBT002 - as torch's
        """Return the parameters of the model, whole where those of the copy are."""
        del recurse
        pairs: Iterator[tuple[Tensor, Tensor]] = self._pairs()  # type: ignore[no-untyped-call]
        for param, other in pairs:
            is_whole = is_sharded(other) and not is_sharded(param)
            yield full_tensor(other.detach()) if is_whole else other

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:  # noqa: FBT001, FBT002 - as torch's
        """Return the buffers of the model."""
        return self._model[0].buffers(recurse)
