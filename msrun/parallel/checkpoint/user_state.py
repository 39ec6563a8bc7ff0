"""State that a script adds to a checkpoint: its loader, schedulers, and plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.schema import Manifest
from msrun.parallel.checkpoint.state import plain

Extra = Mapping[str, object] | None


@runtime_checkable
class Stateful(Protocol):
    """A loader, a scheduler, or any other object that can save and restore its state."""

    def state_dict(self) -> Any:
        """Return plain JSON values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore the state that `state_dict` returned."""


def plain_extra(name: str, value: Any) -> Any:
    """Return `value` of `extra` as plain JSON values.

    Raises:
        CheckpointError: It has values that JSON cannot hold.
    """
    if isinstance(value, Stateful):
        value = value.state_dict()
    return plain(value, f"extra[{name!r}]")


def check_extra(manifest: Manifest, loader: Stateful | None, extra: Extra) -> None:
    """Refuse a checkpoint that lacks state of `loader` or `extra`.

    Raises:
        CheckpointError: The checkpoint lacks some of that state.
    """
    if loader is not None and manifest.loader is None:
        raise CheckpointError("the checkpoint has no state of a loader")
    for name, value in (extra or {}).items():
        if isinstance(value, Stateful) and name not in manifest.extra:
            raise CheckpointError(f"the checkpoint has no extra {name!r}")


def restore_extra(value: Stateful, state: Any) -> None:
    """Restore an object of `extra`.

    Earlier releases appended groups of sharded parameters to those of an optimizer.  A scheduler
    that was saved then has values for these groups too, which are dropped.
    """
    optimizer = getattr(value, "optimizer", None)
    if isinstance(optimizer, Optimizer) and isinstance(state, dict):
        groups, saved = len(optimizer.param_groups), len(state.get("base_lrs", ()))
        if saved > groups:
            state = {
                key: item[:groups] if isinstance(item, list) and len(item) == saved else item
                for key, item in state.items()
            }
    value.load_state_dict(state)
