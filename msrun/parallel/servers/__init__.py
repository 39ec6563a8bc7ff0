"""Parameter servers with torch: what the machines of `msrun/cluster/servers` act upon.

A server is `process.py`: rows (`rows.py`), disk (`disk.py`), and in server 0 the coordinator
(`head.py`).  A rank is `remote.py`: parameters of a model that live elsewhere, their lookups
(`lookups.py`) and checkpoints, over a thread of its own (`client.py`).  Between them are the
optimizer as data (`recipe.py`), messages (`wire.py`, `routing.py`, `contents.py`) and the addresses
in the job's store (`addresses.py`).
"""

from msrun.parallel.servers import recipe, routing, rows

__all__ = ["recipe", "routing", "rows"]
