"""Hooks that every module of a process calls, where a model is not called module by module."""

from __future__ import annotations

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT


def check_global_hooks(key: str) -> None:
    """Refuse hooks that every module calls, under a key whose model calls some of them otherwise.

    Raises:
        ModelError: There are some.
    """
    if torch_compat.has_global_hooks():
        raise ModelError(
            f"{ROOT}.{key}: a hook of torch.nn.modules.module, such as of "
            "register_module_forward_hook, would not run as in one process, since the model is not "
            "called as a whole",
            hint="remove it before rt.shard and rt.step, or put hooks on single modules",
        )
