"""Addresses of the network ports that Ascend devices have of their own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from msrun.supervise.devices import read_text

# `address_0=192.1.27.6`; other keys have the masks and gateways.
_LINE = re.compile(r"address_([0-9]{1,3})=([0-9A-Fa-f.:]{2,45})")
_SECONDS = 10.0


def read_device_ips(
    root: Path, numbers: Iterable[int], ask: Callable[[int], str]
) -> dict[int, str]:
    """Return physical number -> address of those `numbers` that have one.

    Args:
        root: Where /etc/hccn.conf is.
        numbers: Physical numbers of the devices.
        ask: Returns the output of hccn_tool about a device, "" without any; asked about what
            the file does not have.
    """
    lines = map(str.strip, read_text(root / "etc/hccn.conf").splitlines())
    known = {int(match[1]): match[2] for match in filter(None, map(_LINE.fullmatch, lines))}
    addresses = {number: known.get(number) or _address(ask(number)) for number in numbers}
    return {number: address for number, address in addresses.items() if address}


def ask_hccn_tool(number: int) -> str:
    """Return the output of hccn_tool about the address of a device, "" without the tool."""
    command = ["hccn_tool", "-i", str(number), "-ip", "-g"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def _address(printed: str) -> str:
    """Return the address in `ipaddr:192.1.27.6` and a line on the mask."""
    first = printed.partition("\n")[0].partition(":")[2].strip()
    return first if re.fullmatch(r"[0-9A-Fa-f.:]{2,45}", first) else ""
