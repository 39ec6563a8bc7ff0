"""A pipeline in words, for a person who is about to wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from msrun.parallel.pipeline.plan import PipelineCut
from msrun.parallel.pipeline.timeline import Action, bubble, peak_live

_FORMULAS = {
    "gpipe": "(S - 1) / (M + S - 1)",
    "1f1b": "(S - 1) / (M + S - 1)",
    "interleaved": "(S - 1) / (V M + S - 1)",
    "looped_bfs": "(S - 1) / (V M + S - 1)",
}


def describe(
    plan: PipelineCut,
    sizes: Sequence[int],
    microbatches: int,
    orders: Sequence[Sequence[Action]],
    kept: Sequence[int] | None = None,
) -> str:
    """Return what each stage holds, how long it waits and how much it keeps.

    Args:
        plan: The model in chunks.
        sizes: Bytes of the parameters of each stage.
        microbatches: Parts of a batch.
        orders: What each stage does in one step.
        kept: Bytes that each chunk keeps of a micro-batch until its backward; None if unknown.
    """
    chunks = plan.chunks
    formula = _FORMULAS.get(chunks.schedule)
    lines = [
        f"pipeline {chunks.schedule}: S = {chunks.stages} stages"
        + (f" of V = {chunks.segments} segments" if chunks.segments > 1 else "")
        + f", M = {microbatches} micro-batches, ranks wait {bubble(orders):.0%} of the time"
        + (f" = {formula}" if formula else "")
        + (f"; cut by {plan.measure}" if plan.measure else "")
    ]
    for stage, order in enumerate(orders):
        lines.append(
            f"  stage {stage}: {plan.shown(stage)}; {_size(sizes[stage])} of parameters; "
            f"at most {peak_live(order)} micro-batch(es) live"
            + (f", up to {_size(peak_live(order, kept))} of activations" if kept else "")
        )
    return "\n".join(lines)


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:  # noqa: PLR2004 - binary units
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
