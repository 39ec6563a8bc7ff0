"""Imports in the forkserver what a server would import by itself when it gets its first rows.

One that was killed goes on with copies in tenths of a second; torch's compiler, which the first
optimizer of a process imports, takes seconds.
"""

from __future__ import annotations

import torch

import msrun.parallel.servers.process  # noqa: F401 - imported for the forked servers

torch.optim.SGD([torch.zeros(())])
