"""Imports, for the parent of forked ranks, what torch would import in each of them later."""

from __future__ import annotations

import torch

# The first optimizer of a process imports torch's compiler: 1.2 CPU-s, a third more than torch.
torch.optim.SGD([torch.zeros(())])
