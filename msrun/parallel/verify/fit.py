"""Whether rank 0 has memory for a copy of the model, which is decided before one is made."""

from __future__ import annotations

import torch
from torch import nn

from msrun.parallel.rank_context import Rank
from msrun.parallel.settings.steps import Verify
from msrun.parallel.verify.layers import LayerSample, comparison_size, sample
from msrun.parallel.verify.reference import Reference
from msrun.supervise.machine import read_memory_available

_NUMBER = 8


def copy_model(settings: Verify, rank: Rank, model: nn.Module) -> Reference | LayerSample | None:
    """Return what is compared: the whole model, on rank 0 alone, or sampled layers.

    All ranks call it together, before `rt.shard` changes the model.

    Args:
        settings: The configuration.
        rank: This rank.
        model: The model.

    Raises:
        ConfigError: A pattern of layers matches none.
    """
    own = _free(rank.device) // 2 if settings.memory is None else int(settings.memory)
    limit = int.from_bytes(rank.broadcast(own.to_bytes(_NUMBER, "big")), "big")
    size = comparison_size(model)
    if size <= limit and not settings.modules:
        return Reference(model) if rank.rank == 0 else None
    reason = "the configuration names modules"
    if size > limit:
        bound = "half of what is free" if settings.memory is None else "verify.memory"
        reason = (
            f"a copy of the model with gradients takes {_text(size)}, and {bound} is {_text(limit)}"
        )
    return sample(model, settings.modules, limit, reason)


def _free(device: torch.device) -> int:
    """Return the bytes that are free on `device`, and on the host, where the model may be now."""
    on_host = read_memory_available()
    if device.type == "cpu":
        return on_host
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return min(on_host, int(free) + int(unused))


def _text(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**27 else f"{size / 2**20:.3g} MiB"
