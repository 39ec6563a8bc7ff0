"""A report of a pipeline: stages, idle time, memory of activations."""

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
    saved_bytes: Sequence[int] | None = None,
) -> str:
    """Return what each stage has, how long it waits and how much it saves for backward.

    Args:
        plan: The model in chunks.
        sizes: Bytes of the parameters of each stage.
        microbatches: Parts of a batch.
        orders: Actions of each stage in one step.
        saved_bytes: Bytes that each chunk saves of a micro-batch for backward; None if unknown.
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
            + (
                f", up to {_size(peak_live(order, saved_bytes))} of activations"
                if saved_bytes
                else ""
            )
        )
    return "\n".join(lines)


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:  # noqa: PLR2004 - binary units
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
