"""Imports, for the parent of forked ranks, what would be imported in each of them later."""

from __future__ import annotations

import torch

import msrun.parallel.collectives
import msrun.parallel.shard
import msrun.parallel.step  # noqa: F401 - to be there

# The first optimizer of a process imports torch's compiler: 1.2 CPU-s, a third more than torch.
torch.optim.SGD([torch.zeros(())])
