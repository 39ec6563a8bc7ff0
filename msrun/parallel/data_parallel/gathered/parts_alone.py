"""Parts of a model that a script calls alone in evaluation, under ZeRO.

`fully_shard` gathers the parameters of a unit before the unit's forward.  What calls a part of the
unit instead, as `generate` calls the encoder of T5, would compute with shards.  Without gradients
such a part gathers what it needs and releases it; all ranks call it alike, as they do the model.
With gradients nothing would reduce them, and the use of a shard is an error.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from msrun.parallel import torch_compat


class PartAlone:
    """Gathers the parameters of a unit around the forward of one of its parts.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: FSDPModule) -> None:
        self._unit = weakref.ref(unit)
        self._has_gathered = False

    def before(self, *_: object) -> None:
        """Gather them, if the unit has not and no gradient is asked for."""
        unit = self._unit()
        if torch.is_grad_enabled() or unit is None or torch_compat.is_gathered(unit):
            return
        unit.unshard()
        self._has_gathered = True

    def after(self, *_: object) -> None:
        """Release what was gathered for this part."""
        unit = self._unit()
        if self._has_gathered and unit is not None:
            self._has_gathered = False
            unit.reshard()


def gather_for_parts(model: nn.Module) -> None:
    """Have the parts of each unit of `model` gather their parameters when they are called alone."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for part in torch_compat.parts_with_parameters(unit):
                alone = PartAlone(unit)
                part.register_forward_pre_hook(alone.before, prepend=True)
                part.register_forward_hook(alone.after, always_call=True)
