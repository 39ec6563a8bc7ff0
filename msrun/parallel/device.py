"""Kinds of devices and the process-group backend of each: a new accelerator is one entry."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from msrun.environ import RankIdentity
from msrun.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of device.

    Args:
        backend: Process-group backend of its tensors.
        plugin: Package that adds the kind to torch; empty when torch has it built in.
    """

    backend: str
    plugin: str = ""


# In the order of preference when the machine has several.
KINDS: dict[str, Kind] = {
    "cuda": Kind(backend="nccl"),
    "npu": Kind(backend="hccl", plugin="torch_npu"),
    "xpu": Kind(backend="xccl"),
    "cpu": Kind(backend="gloo"),
}


def pick_device(wanted: str | torch.device | None, identity: RankIdentity) -> torch.device:
    """Return this rank's own device and make it the current one.

    Without a wish: the accelerator of this rank's number on its node when there is one for
    each rank of the node, else the CPU.

    Raises:
        UsageError: The device is not there.
    """
    if wanted is None:
        return _make_current(_own_accelerator(identity) or torch.device("cpu"))
    try:
        device = torch.device(wanted)
    except RuntimeError:
        msg = f"device {str(wanted)!r} is not known (choose {', '.join(KINDS)}, or such as cuda:0)"
        raise UsageError(msg) from None
    count = device_count(device.type)
    if device.type not in KINDS or count == 0:
        present = [name for name in KINDS if device_count(name)]
        raise UsageError(f"device {wanted}: this node has none (choose {', '.join(present)})")
    if device.type == "cpu":
        return torch.device("cpu")
    has_index = ":" in str(device)
    device = torch.device(device.type, device.index if has_index else identity.local_rank)
    if device.index >= count:
        raise UsageError(f"device {device} is beyond the {count} of this node")
    return _make_current(device)


def device_count(kind: str) -> int:
    """Return how many devices of `kind` this process sees; 1 for the CPU."""
    if kind == "cpu":
        return 1
    plugin = KINDS[kind].plugin if kind in KINDS else ""
    if plugin and importlib.util.find_spec(plugin):
        importlib.import_module(plugin)
    module: Any = getattr(torch, kind, None)
    return int(module.device_count()) if module and module.is_available() else 0


def backend_for(device: torch.device) -> str:
    """Return the backend of `device`, with gloo beside it for tensors on the host."""
    own = KINDS[device.type].backend
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def _own_accelerator(identity: RankIdentity) -> torch.device | None:
    for kind in KINDS:
        if kind != "cpu" and device_count(kind) >= identity.local_world_size:
            return torch.device(kind, identity.local_rank)
    return None


def _make_current(device: torch.device) -> torch.device:
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    return device
