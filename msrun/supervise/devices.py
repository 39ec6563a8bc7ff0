"""Accelerators of this node, counted without torch: a CUDA query would poison every fork.

A device counts if this process may open its file in /dev; /proc and /sys give its place.  The
variables that hide devices are read as the vendors' own runtimes read them, whose
rules for malformed values differ.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from msrun.topology import Device, DeviceKind

_NVIDIA = re.compile(r"nvidia([0-9]+)")
_DAVINCI = re.compile(r"davinci([0-9]+)")


class _ProbedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device: its number before any visibility variable, and facts from its driver."""

    number: int | None = None
    numa_node: int | None = None
    bus: str = ""
    uuid: str = ""


def read_devices(root: Path, visible: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the accelerators that this process may use, in the order of `local_rank`.

    A machine with both families counts the NVIDIA GPUs, unless all are hidden.

    Args:
        root: Where /dev, /proc and /sys are.
        visible: CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES, among others.
    """
    return _read_gpus(root, visible) or _read_npus(root, visible)


def read_text(path: Path | str) -> str:
    """Return the text of a file of the kernel, "" if it cannot be read."""
    try:
        with io.FileIO(os.fspath(path)) as file:
            return file.readall().decode(errors="replace")
    except OSError:
        return ""


def read_names(directory: Path) -> list[str]:
    """Return the names in `directory`, none when it cannot be read."""
    try:
        return os.listdir(directory)  # noqa: PTH208 - /dev and /sys are large, paths are slow
    except OSError:
        return []


def _read_gpus(root: Path, visible: Mapping[str, str]) -> tuple[Device, ...]:
    minors = _usable(root, _NVIDIA)
    about = _nvidia_information(root) if minors else {}
    gpus = [about.get(minor, _ProbedDevice()) for minor in minors]
    if all(gpu.bus for gpu in gpus):
        # CUDA and nvidia-smi number GPUs by bus address, which minors need not follow.
        gpus.sort(key=lambda gpu: (len(gpu.bus), gpu.bus))
    probed = [replace(gpu, number=number) for number, gpu in enumerate(gpus)]
    text = visible.get("CUDA_VISIBLE_DEVICES")
    return _devices(DeviceKind.CUDA, probed if text is None else _cuda_visible(text, probed))


def _nvidia_information(root: Path) -> dict[int, _ProbedDevice]:
    """Return facts from the NVIDIA driver, by the number in the name of the device file."""
    about = {}
    directory = root / "proc/driver/nvidia/gpus"
    for bus in read_names(directory):
        lines = read_text(directory / bus / "information").splitlines()
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        minor = fields.get("Device Minor", "")
        if minor.isdigit():
            node = _numa_node(root / "sys/bus/pci/devices" / bus.lower())
            uuid = fields.get("GPU UUID", "")
            about[int(minor)] = _ProbedDevice(numa_node=node, bus=bus.lower(), uuid=uuid)
    return about


def _read_npus(root: Path, visible: Mapping[str, str]) -> tuple[Device, ...]:
    minors = _usable(root, _DAVINCI)
    nodes = _ascend_numa_nodes(root) if minors else {}
    probed = [_ProbedDevice(number=i, numa_node=nodes.get(minor)) for i, minor in enumerate(minors)]
    text = visible.get("ASCEND_RT_VISIBLE_DEVICES")
    return _devices(DeviceKind.NPU, probed if text is None else _ascend_visible(text, probed))


def _ascend_numa_nodes(root: Path) -> dict[int, int | None]:
    """Return davinci number -> NUMA node; the driver puts the number beside its PCI device."""
    directory = root / "sys/bus/pci/drivers/devdrv_device_driver"
    nodes = {}
    for bus in read_names(directory):
        number = read_text(directory / bus / "dev_id").strip()
        if number.isdigit():
            nodes[int(number)] = _numa_node(directory / bus)
    return nodes


def _usable(root: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers of the device files that this process may open.

    A device cgroup that hides a GPU leaves its file in /dev and forbids the access.
    """
    matches = filter(None, map(pattern.fullmatch, read_names(root / "dev")))
    return sorted(
        int(match[1]) for match in matches if os.access(root / "dev" / match[0], os.R_OK | os.W_OK)
    )


def _numa_node(pci_device: Path) -> int | None:
    text = read_text(pci_device / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1: the firmware does not say


def _devices(kind: DeviceKind, chosen: list[_ProbedDevice]) -> tuple[Device, ...]:
    return tuple(
        Device(
            kind=kind,
            index=index,
            physical=index if one.number is None else one.number,
            numa_node=one.numa_node,
        )
        for index, one in enumerate(chosen)
    )


def _cuda_visible(text: str, probed: list[_ProbedDevice]) -> list[_ProbedDevice]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves.

    An unknown entry ends the list, a repeated entry empties it.  Source: CUDA
    C++ Programming Guide, "CUDA Environment Variables", and `torch.cuda.device_count`.
    """
    entries = [entry.strip() for entry in text.split(",")] if probed else []
    chosen: dict[str | int, _ProbedDevice] = {}
    for entry in entries:
        if entries[0].startswith("MIG-"):
            one = _mig_instance(entry, probed)
        elif entries[0].startswith("GPU-"):
            one = _gpu_of_uuid(entry, probed)
        else:
            one = _at(re.match(r"\+?([0-9]{1,9})", entry), probed)
        if one is None:
            break
        key = entry if one.number is None else one.number
        if key in chosen:
            return []
        chosen[key] = one
    return list(chosen.values())


def _gpu_of_uuid(entry: str, probed: list[_ProbedDevice]) -> _ProbedDevice | None:
    """Return the one GPU with a UUID that starts with `entry`."""
    if not entry.startswith("GPU-"):
        return None
    if not any(one.uuid for one in probed):
        return _ProbedDevice()  # the driver does not tell UUIDs here, so it is taken at its word
    matches = [one for one in probed if one.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _mig_instance(entry: str, probed: list[_ProbedDevice]) -> _ProbedDevice | None:
    """Return a MIG instance, which has no number; only its older name tells its GPU."""
    if not entry.startswith("MIG-"):
        return None
    gpu = entry.removeprefix("MIG-").partition("/")[0]
    nodes = {one.numa_node for one in probed if one.uuid == gpu}
    nodes = nodes or {one.numa_node for one in probed}
    return _ProbedDevice(numa_node=nodes.pop() if len(nodes) == 1 else None)


def _ascend_visible(text: str, probed: list[_ProbedDevice]) -> list[_ProbedDevice]:
    """Return the NPUs that ASCEND_RT_VISIBLE_DEVICES leaves.

    Digits and commas are read up to the first other thing.  Source: CANN,
    "Environment Variables", ASCEND_RT_VISIBLE_DEVICES.
    """
    chosen: list[_ProbedDevice] = []
    for entry in text.split(","):
        one = _at(re.match(r"([0-9]{1,9})", entry), probed)
        if one is None or one in chosen:
            break
        chosen.append(one)
        if not entry.isdigit():
            break
    return chosen


def _at(number: re.Match[str] | None, probed: list[_ProbedDevice]) -> _ProbedDevice | None:
    """Return the device of the number that `number` matched."""
    return probed[int(number[1])] if number and int(number[1]) < len(probed) else None
