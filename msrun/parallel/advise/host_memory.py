"""What of a pass is in the memory of the host, for `simulate`: tables, and saved activations.

The runtime's own modules for this tell tensors of the host from those of the device by where they
are, and tensors without values have one device.  So a pass has stand-ins here: what would be on the
host is no tensor at all, and is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.settings.host import Offload

_TABLES = (nn.Embedding, nn.EmbeddingBag)
# A table with a smaller share of the parameters saves little.
_SHARE_MIN = 1 / 16


def large_tables(model: nn.Module) -> list[str]:
    """Return the tables that are worth a place on the host: large, and of no other module too."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners[id(param)] = owners.get(id(param), 0) + 1
    least = _SHARE_MIN * sum(param.nbytes for param in model.parameters())
    return [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, _TABLES)
        if owners[id(module.weight)] == 1 and module.weight.nbytes >= least
    ]


class OnHost(NamedTuple):
    """What is on the host.

    Args:
        tables: Names of tables.
        activations: Names of modules whose saved tensors wait there.
    """

    tables: Sequence[str] = ()
    activations: Sequence[str] = ()

    def apply(self, net: nn.Module) -> TrafficOfPass:
        """Have `net` compute as with these on the host, in place."""
        traffic = TrafficOfPass()
        for name in self.tables:
            net.get_submodule(name).register_forward_hook(traffic.look_up)
        settings = Offload(activations=["*"])
        calls = _BlockForwards(traffic, int(settings.threshold), settings.prefetch)
        for name in self.activations:
            module = net.get_submodule(name)
            forward = module.forward
            module.forward = update_wrapper(partial(calls.run, module, forward), forward)
        return traffic


class TrafficOfPass:
    """What travels in a pass.

    Attributes:
        nbytes: To the host and back.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def look_up(self, table: nn.Module, inputs: tuple[Any, ...], rows: Tensor) -> Tensor:
        """Return the rows that a table on the host sends, for which it has a gradient there."""
        self.nbytes += rows.nbytes * (1 + rows.requires_grad)
        self.nbytes += sum(tensor.nbytes for tensor in tensors_in([inputs]))
        if not rows.requires_grad:
            return rows
        sent: Tensor = _RowsFromHost.apply(table.weight, rows.detach())  # type: ignore[no-untyped-call]
        return sent


class _RowsFromHost(torch.autograd.Function):
    """Rows whose gradient leaves the device."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        """Return the rows."""
        del ctx, weight
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Return no gradient: that of the table is on the host."""
        del ctx, gradients
        return None, None


class _BlockForwards:
    """Forwards of modules whose activations wait on the host; as of `host.activations`.

    Args:
        traffic: What travels.
        least: Bytes of tensors that go.
        prefetch: Calls whose tensors come back ahead of the backward pass.
    """

    def __init__(self, traffic: TrafficOfPass, least: int, prefetch: int) -> None:
        self._traffic, self._least, self._prefetch = traffic, least, prefetch
        self._calls: list[_BlockForward] = []

    def run(
        self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a forward; what autograd saves in it is gone until the backward pass."""
        known = [*module.parameters(), *module.buffers()]
        known += [tensor for tensor in tensors_in([args, kwargs]) if not tensor.requires_grad]
        call = _BlockForward({id(tensor.untyped_storage()) for tensor in known})
        number = len(self._calls)
        self._calls.append(call)
        with saved_tensors_hooks(partial(self._pack, call), partial(self._unpack, number)):
            return forward(*args, **kwargs)

    def _pack(self, call: _BlockForward, tensor: Tensor) -> _Gone | Tensor:
        storage = tensor.untyped_storage()
        if id(storage) in call.staying or storage.nbytes() < max(self._least, 1):
            return tensor if tensor.grad_fn is None else tensor.detach()
        found, slot = call.sent.get(id(storage), (None, None))
        if slot is None or found is None or found() is not storage:
            slot = _MemoryAway(storage.nbytes())
            call.sent[id(storage)] = weakref.ref(storage), slot
            call.slots.append(slot)
            self._traffic.nbytes += 2 * slot.nbytes
        slot.left += 1
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Gone(slot, tensor.dtype, place)

    def _unpack(self, number: int, saved: _Gone | Tensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for call in self._calls[max(0, number - self._prefetch) : number + 1]:
            for slot in call.slots:
                slot.fetch()
        memory = saved.slot.take().view(saved.dtype)
        return memory.as_strided(*saved.place)


class _BlockForward:
    """One forward of one module.

    Args:
        staying: Identities of storages that do not go away between forward and backward.
    """

    def __init__(self, staying: set[int]) -> None:
        self.staying = staying
        self.sent: dict[int, tuple[weakref.ref[torch.UntypedStorage], _MemoryAway]] = {}
        self.slots: list[_MemoryAway] = []


class _MemoryAway:
    """The memory of one tensor on the host; `left` saved tensors of it did not come back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.left = nbytes, 0
        self._back: Tensor | None = None

    def fetch(self) -> None:
        """Have it on the device, if it is needed there still."""
        if self._back is None and self.left:
            self._back = torch.empty(self.nbytes, dtype=torch.uint8)

    def take(self) -> Tensor:
        """Return it for one of its saved tensors."""
        self.left -= 1
        memory, self._back = self._back, self._back if self.left else None
        return torch.empty(self.nbytes, dtype=torch.uint8) if memory is None else memory


class _Gone(NamedTuple):
    """A saved tensor on the host: its place in the memory there."""

    slot: _MemoryAway
    dtype: torch.dtype
    place: tuple[Any, ...]
