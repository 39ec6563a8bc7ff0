"""The protocol of parameter servers, without IO: who owns which rows, and what no crash may undo.

Read `server.py` first, then `worker.py`, `coordinator.py` and `messages.py`, then one transcript
in `tests/sim/servers/scenarios`.
"""

from msrun.cluster.servers import coordinator, server, worker

__all__ = ["coordinator", "server", "worker"]
