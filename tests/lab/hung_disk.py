"""A file system that answers nothing; run by `python -I -S` as root, with its mount point.

Whoever asks it for a file waits, and after the first signal that would end it in state D: the
kernel wants an answer from this process, or its end.  A line says when somebody has asked.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

INIT = 26
LOOKUP = 1
# Version 7.31 of the protocol, one request at a time, writes of 4 KiB; the rest is zero.
ANSWER = struct.pack("<IIIIHHII32x", 7, 31, 0, 0, 1, 1, 4096, 1)
REQUEST_MAX = 1 << 17


def serve(directory: str) -> None:
    """Mount the file system, and read what it is asked."""
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"hung", directory.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)
    print("mounted", flush=True)
    while request := os.read(device, REQUEST_MAX):
        _, opcode, number = struct.unpack_from("<IIQ", request)
        if opcode == INIT:
            os.write(device, struct.pack("<IiQ", 16 + len(ANSWER), 0, number) + ANSWER)
        if opcode == LOOKUP:
            print("asked", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
