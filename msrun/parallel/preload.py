"""Imports in the forkserver what every forked rank would otherwise import by itself.

`runtime` imports `shard` and `step` only inside functions, and scripts import `collectives`.
`config.preloads` names this module and those that a configuration needs beside it.
"""

from __future__ import annotations

import torch

import msrun.parallel.collectives
import msrun.parallel.data_parallel.other_wrappers
import msrun.parallel.losses.equal_batches
import msrun.parallel.shard
import msrun.parallel.step
import msrun.worker.by_hand  # noqa: F401 - imported for the forked ranks
from msrun.parallel.config_file import parse_config

# The first optimizer of a process imports torch's compiler: 1.2 CPU-s, a third more than torch.
torch.optim.SGD([torch.zeros(())])

# The first configuration of a process has the types of all its keys read: 5 CPU-ms of each rank.
parse_config({})
