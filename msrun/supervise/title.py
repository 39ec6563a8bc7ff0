"""How this process shows in `ps`, `top` and /proc: name, command line, environment.

A forked process would show those of the process that it was forked from.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

KEEPER = "msrun keeper"
"""Name of the process between a program and the launcher of its job."""

_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF
# Positions in /proc/PID/stat, as proc_pid_stat(5) counts them.
_START_CODE, _END_CODE, _START_STACK = 26, 27, 28
_START_DATA, _END_DATA, _START_BRK = 45, 46, 47

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
# The kernel reads them in place, for as long as this process lives.
_shown: list[ctypes.Array[ctypes.c_char]] = []


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def set_name(name: str) -> None:
    """Set the name that `top` shows; 15 bytes are kept."""
    _libc.prctl(_PR_SET_NAME, ctypes.create_string_buffer(os.fsencode(name)[:15]), 0, 0, 0)


def show_as(argv: Iterable[str], environment: Mapping[str, str]) -> None:
    """Set the command line and the environment that /proc shows.

    A kernel without CONFIG_CHECKPOINT_RESTORE refuses, and nothing changes.
    """
    arguments = _keep(argv)
    variables = _keep(f"{name}={value}" for name, value in environment.items())
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    # The third field, a letter, is the first after the name.
    stat = [0, 0, 0, 0, *map(int, fields[1:])]
    arg_start, env_start = ctypes.addressof(arguments), ctypes.addressof(variables)
    memory = _MemoryMap(
        stat[_START_CODE],
        stat[_END_CODE],
        stat[_START_DATA],
        stat[_END_DATA],
        stat[_START_BRK],
        _libc.sbrk(0),
        stat[_START_STACK],
        arg_start,
        arg_start + len(arguments),
        env_start,
        env_start + len(variables),
        0,
        0,
        _NO_FILE,
    )
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(memory), ctypes.sizeof(memory), 0)


def _keep(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char]:
    """Return memory of this process's own with the NUL-terminated `texts`."""
    data = b"".join(os.fsencode(text) + b"\0" for text in texts)
    buffer = ctypes.create_string_buffer(data, len(data))
    _shown.append(buffer)
    return buffer
