"""Parameters that forward writes, such as those of a copy that follows a trained module.

One process writes them once a step, and micro-batches once each.  A write that a second one does
not change again, such as a limit of weights, passes.  Values are kept of written ones alone.

Those of ZeRO have no values at hand while they are divided.  There a frozen one that is written
twice is one that follows others, and trained ones pass.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from msrun.parallel.local import is_equal, local_part
from msrun.parallel.torch_compat import write_count, writes_to_frozen


class WrittenParameters:
    """The parameters that micro-batches of the first step have written."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._after: dict[str, Tensor] = {}
        self._frozen: dict[str, int] = {}
        self._written: set[str] = set()

    def begin(self, model: nn.Module) -> None:
        """Note how often parameters were written, before a micro-batch."""
        is_gathered = any(isinstance(module, FSDPModule) for module in model.modules())
        self._frozen = writes_to_frozen(model) if is_gathered else {}
        params = () if is_gathered else model.named_parameters()
        self._counts = {name: write_count(local_part(param)) for name, param in params}

    def again(self, model: nn.Module) -> list[str]:
        """Return what this micro-batch changed, and one before it had written."""
        counts = writes_to_frozen(model) if self._frozen else {}
        written = {name for name, count in counts.items() if count != self._frozen.get(name)}
        found = sorted(written & self._written)
        self._written |= written
        for name, param in model.named_parameters():
            if self._counts.get(name) in (None, write_count(local_part(param))):
                continue
            now = local_part(param).detach()
            if name in self._after and not is_equal(self._after[name], now):
                found.append(name)
            self._after[name] = now.clone()
        return found
