"""The process group of each mesh axis by name, for collectives that a script calls by hand.

`collectives` takes axis names without a runtime object.  The runtime sets the lookup when it is
made and clears it when it closes; this module imports no torch, so either side may import it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    GroupOf = Callable[[str], dist.ProcessGroup]

_group_of: GroupOf | None = None


def use_axes(group_of: GroupOf | None) -> None:
    """Have `axis_group` look names up with `group_of`; None removes the lookup."""
    global _group_of  # noqa: PLW0603 - the process has one runtime, and this is its mesh
    _group_of = group_of


def axis_group(axis: str) -> dist.ProcessGroup | None:
    """Return the process group of `axis`; None if this process has no runtime."""
    return None if _group_of is None else _group_of(axis)
