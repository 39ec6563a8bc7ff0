"""What names of axes mean in this process: the groups of its runtime's mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    GroupOf = Callable[[str], dist.ProcessGroup]

_group_of: GroupOf | None = None


def use_axes(group_of: GroupOf | None) -> None:
    """Let names of axes mean the groups that `group_of` returns; None forgets them."""
    global _group_of  # noqa: PLW0603 - the process has one runtime, and this is its mesh
    _group_of = group_of


def axis_group(axis: str) -> dist.ProcessGroup | None:
    """Return the group of `axis`; None where there is no runtime."""
    return None if _group_of is None else _group_of(axis)
