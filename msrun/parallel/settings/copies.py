"""What `copies` cannot be combined with."""

from __future__ import annotations

from typing import Any


def copies_problem(config: Any) -> str | None:
    """Return why copies of `config` would be no use or not right; None if they are.

    Args:
        config: A `ParallelConfig`, which this module does not know.
    """
    mesh = {} if isinstance(config.mesh, str) else config.mesh
    styles = {getattr(rule, "style", None) for rule in config.plan} - {None}
    problems = {
        "mode auto plans the whole batch (choose semi_auto)": config.mode == "auto",
        "mode manual has its collectives in the script (choose semi_auto)": config.mode == "manual",
        "without a plan there are no collectives that others could compute beside": not config.plan,
        "optimizer.zero 3 would release what another copy computes with (choose zero 2)": (
            config.optimizer.zero == 3  # noqa: PLR2004 - the level
        ),
        "compiled modules cannot take turns (leave out compile)": config.compile,
        "servers answer one forward at a time": config.servers,
        "batch_norm local leaves the batch norms to each part (leave out copies)": (
            config.batch_norm == "local"
        ),
        "style context has collectives of its own, which take no turns": "context" in styles,
        "data has ranks exchange parts of images, which takes no turns": bool(config.data),
        "tables with rows of ranks exchange what they looked up, which takes no turns": any(
            getattr(rule, "rows", None) for rule in config.plan
        ),
        "experts over ep have collectives of their own, which take no turns": "ep" in mesh,
        "dropout exact draws the masks of the whole batch (choose local)": config.dropout
        == "exact",
    }
    return next((sentence for sentence, is_so in problems.items() if is_so), None)
