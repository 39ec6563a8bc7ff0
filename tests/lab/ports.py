"""Ports that are told to programs before they listen there.

The kernel gives a port that was given back to the next who asks for any, and tests beside this
one ask all the time.  So these are none of the kernel's own, and no other process of the tests
takes them: where msrun itself can take any port and say which, tests let it do that.
"""

from __future__ import annotations

import itertools
import os
import socket

# Above those of well-known services, below those that the kernel gives to whoever asks for any
# and those that msrun derives from a job's name.
_FIRST = 10_000
# Processes that pytest starts together have neighbouring pids.
_OWNERS, _EACH = 100, 100
_own = itertools.cycle(range(_EACH))


def free_port() -> int:
    """Return a port on which nobody listens, and for which nobody else asks soon."""
    first = _FIRST + os.getpid() % _OWNERS * _EACH
    for number in itertools.islice(_own, _EACH):
        try:
            with socket.create_server(("", first + number)):
                return first + number
        except OSError:  # somebody listens there
            continue
    raise RuntimeError(f"all ports from {first} to {first + _EACH - 1} are in use")
