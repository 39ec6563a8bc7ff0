"""Write a rank table of this server as MindSpore's hccl_tools.py does, with its options.

    python scripts/hccl_tools.py --device_num "[0,8)" --server_ip 10.155.111.140

The file `hccl_<ranks>p_<devices>_<server ip>.json` is written into the working directory.
Unlike the original, device ids may have several digits, spaces do not matter, any range
may cross device 4, and an empty one is refused.  `msrun ranktable build` does more.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, too

from msrun.errors import UsageError
from msrun.rank_table.file import write_table
from msrun.supervise.hccn import ask_hccn_tool, read_device_ips
from ranktable import Inventory, InventoryDevice, RankTableError, build_table

_RANGE = re.compile(r"\s*\[\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)\s*")
_LIST = re.compile(r"\s*[0-9]{1,4}\s*(,\s*[0-9]{1,4}\s*)*")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table and return the exit code."""
    parser = argparse.ArgumentParser(description="Write the rank table of this server.")
    parser.add_argument(
        "--device_num", "--device-num", default="[0,8)", help="Range of devices, such as [0,4)."
    )
    parser.add_argument(
        "--visible_devices",
        "--visible-devices",
        default="",
        help="Physical number of each device in turn, such as 4,5,6,7.",
    )
    parser.add_argument(
        "--server_ip", "--server-ip", default="", help="Address of this server, else looked up."
    )
    given = parser.parse_args(argv)
    try:
        print(_write(given.device_num, given.visible_devices, given.server_ip))
    except UsageError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


def _write(device_num: str, visible_devices: str, server_ip: str) -> Path:
    """Write the table and return its file."""
    numbers = _chosen(device_num, visible_devices)
    address = server_ip or _own_address()
    found = read_device_ips(Path("/"), numbers, ask_hccn_tool)
    if missing := [number for number in numbers if number not in found]:
        message = f"neither hccn_tool nor /etc/hccn.conf has an address of device {missing[0]}"
        raise UsageError(message, hint="msrun ranktable build writes a table without addresses")
    devices = tuple(InventoryDevice(device_id=n, device_ip=found[n]) for n in numbers)
    server = Inventory(server_id=address, host_nic_ip="reserve", devices=devices)
    try:
        table = build_table([server])
    except RankTableError as error:
        raise UsageError(str(error.problems[0])) from None
    name = f"hccl_{len(numbers)}p_{''.join(map(str, numbers))}_{address}.json"
    path = Path.cwd() / name
    write_table(table, str(path))
    return path


def _chosen(device_num: str, visible_devices: str) -> list[int]:
    """Return the physical numbers of the devices of a range."""
    match = _RANGE.fullmatch(device_num)
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(f"--device_num {device_num!r} is no range such as [0,8)")
    logical = range(int(match[1]), int(match[2]))
    if not visible_devices.strip():
        return list(logical)
    if not _LIST.fullmatch(visible_devices):
        raise UsageError(f"--visible_devices {visible_devices!r} is no list such as 4,5,6,7")
    physical = [int(number) for number in visible_devices.split(",")]
    if logical[-1] >= len(physical):
        message = f"--visible_devices has {len(physical)} devices, and --device_num {device_num}"
        raise UsageError(f"{message} needs {logical[-1] + 1}")
    return [physical[number] for number in logical]


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        message = f"the name resolver does not know {socket.gethostname()}: {error.strerror}"
        raise UsageError(message, hint="give --server_ip") from None


if __name__ == "__main__":
    sys.exit(main())
