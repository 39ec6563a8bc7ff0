"""Kinds of devices and the process-group backend of each; a new one is an entry of `KINDS`."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import msgspec
import torch

from msrun.environ import RankIdentity
from msrun.errors import UsageError


class DeviceType(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device.

    Args:
        backend: Process-group backend for its tensors.
        plugin: Package that adds the kind to torch; empty if torch has it built in.
    """

    backend: str
    plugin: str = ""


# In order of preference if a node has several kinds.
KINDS: dict[str, DeviceType] = {
    "cuda": DeviceType(backend="nccl"),
    "npu": DeviceType(backend="hccl", plugin="torch_npu"),
    "xpu": DeviceType(backend="xccl"),
    "cpu": DeviceType(backend="gloo"),
}
# Starters whose ranks all see every device of the node.  Other starters may show each rank only its
# own device, as index 0.
_SAME_VIEW = ("msrun", "torchrun")


def pick_device(wanted: str | torch.device | None, identity: RankIdentity) -> torch.device:
    """Return this rank's device and make it the current one.

    Args:
        wanted: Device or kind of device.  None takes the accelerator with this rank's number on
            its node if every rank of the node has one, or the only one that its starter shows it;
            otherwise the CPU.
        identity: Identity of this rank.

    Raises:
        UsageError: The node has no such device.
    """
    if wanted is None:
        return _make_current(_own_accelerator(identity) or torch.device("cpu"))
    device = _known(wanted)
    count = device_count(device.type)
    if count == 0:
        present = [name for name in KINDS if device_count(name)]
        raise UsageError(f"device {wanted}: this node has none (choose {', '.join(present)})")
    if device.type == "cpu":
        return torch.device("cpu")
    has_index = ":" in str(device)
    device = device if has_index else torch.device(device.type, _own_index(count, identity))
    if device.index >= count:
        raise UsageError(f"device {device} is beyond the {count} of this node")
    return _make_current(device)


def device_count(kind: str) -> int:
    """Return how many devices of `kind`, one of `KINDS`, this process sees; 1 for the CPU."""
    if kind == "cpu":
        return 1
    # The import of a plugin fails on a node without its driver: then it has no such device.
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        _load_plugin(kind)
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if module and module.is_available() else 0


def backend_for(device: torch.device) -> str:
    """Return the backend for `device`, and gloo for tensors on the host."""
    own = KINDS[device.type].backend
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def _known(wanted: str | torch.device) -> torch.device:
    """Return `wanted` as a device of one of the `KINDS`."""
    kind = str(wanted).partition(":")[0]
    try:
        if kind in KINDS:
            _load_plugin(kind)
            return torch.device(wanted)
    except ImportError as error:
        raise UsageError(f"device {wanted} cannot be used: {error}") from None
    except RuntimeError:
        pass
    raise UsageError(
        f"device {str(wanted)!r} is not known (choose {', '.join(KINDS)}, or such as cuda:0)"
    )


def _load_plugin(kind: str) -> None:
    plugin = KINDS[kind].plugin
    if plugin:
        importlib.import_module(plugin)


def _own_accelerator(identity: RankIdentity) -> torch.device | None:
    for kind in KINDS:
        count = 0 if kind == "cpu" else device_count(kind)
        if count >= identity.local_world_size or (count and _is_shown_one(count, identity)):
            return torch.device(kind, _own_index(count, identity))
        if count and identity.local_rank == 0:
            warnings.warn(
                f"{identity.local_world_size} ranks of this node share {count} {kind} device(s), "
                "so they run on the CPU",
                stacklevel=2,
            )
    return None


def _own_index(count: int, identity: RankIdentity) -> int:
    """Return this rank's number among the `count` devices that it sees."""
    if _is_shown_one(count, identity):
        return 0
    if identity.device is not None and identity.device < count:
        return identity.device
    return identity.local_rank


def _is_shown_one(count: int, identity: RankIdentity) -> bool:
    return count == 1 and identity.source not in _SAME_VIEW


def _make_current(device: torch.device) -> torch.device:
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    return device
