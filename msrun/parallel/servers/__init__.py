"""Rows and optimizers of parameter servers with torch: what the machines' payloads are made of.

`rows.py` is a server's side, `routing.py` a worker's, `recipe.py` the optimizer between them.  The
protocol is in `msrun/cluster/servers`; no process runs it yet (decision 0045).
"""

from msrun.parallel.servers import recipe, routing, rows

__all__ = ["recipe", "routing", "rows"]
