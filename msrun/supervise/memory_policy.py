"""Binds the memory of the calling process to NUMA nodes, as `numactl --membind` does.

The C library has no wrapper for the system call and libnuma is often missing, so the
call is made by number.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

from msrun.topology import render_number_list

SystemCall = Callable[[int, int, bytes, int], int]

_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# 1024 nodes, the most that any kernel is built for.
_MASK_BYTES = 128
_REASONS = {
    errno.EPERM: "a container needs CAP_SYS_NICE for it",
    errno.ENOSYS: "this kernel cannot",
    errno.EINVAL: "no memory there that this process may use",
}


def bind_memory(
    nodes: tuple[int, ...],
    *,
    architecture: str | None = None,
    call: SystemCall | None = None,
) -> str | None:
    """Take all further memory of the calling thread and its children from `nodes`.

    Call it before the process starts threads; memory it has already stays where it is.

    Args:
        nodes: NUMA nodes, at least one.
        architecture: As `uname -m` says; None asks the kernel.
        call: Makes the system call and returns its errno, 0 for success.

    Returns:
        None when done, else why not, as half a sentence.
    """
    number = _SET_MEMPOLICY.get(architecture or os.uname().machine)
    if number is None:
        return f"not known how on {architecture or os.uname().machine}"
    if not nodes or not all(0 <= node < _MASK_BYTES * 8 for node in nodes):
        return f"no such NUMA nodes: {render_number_list(nodes) or 'none'}"
    mask = sum(1 << node for node in set(nodes)).to_bytes(_MASK_BYTES, "little")
    # The kernel reads one bit less than the number that it is given.
    code = (call or _system_call)(number, _MPOL_BIND, mask, _MASK_BYTES * 8 + 1)
    if code == 0:
        return None
    reason = _REASONS.get(code, os.strerror(code))
    return f"the kernel refused NUMA node {render_number_list(nodes)} ({reason})"


def _system_call(number: int, mode: int, mask: bytes, bits: int) -> int:
    try:
        function = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return errno.ENOSYS
    function.restype = ctypes.c_long
    failed = function(
        ctypes.c_long(number), ctypes.c_int(mode), ctypes.c_char_p(mask), ctypes.c_ulong(bits)
    )
    return ctypes.get_errno() if failed else 0
