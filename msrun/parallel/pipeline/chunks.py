"""Which chunk of the model is on which stage, and what each schedule requires.

A *chunk* is a run of the model between two cuts; chunks are numbered in order of execution.  A
stage is the share of one rank along the pipeline axis: one chunk, or one of each *segment*.
Segments follow each other, all from stage 0 on, or in a V: there and back.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrun.errors import ConfigError
from msrun.parallel.config import PIPELINE_AXIS, ROOT, Pipeline, Schedule

STAGES = f"{ROOT}.pipeline.stages"
MICROBATCHES = f"{ROOT}.pipeline.microbatches"

_ONE_SEGMENT = ("gpipe", "1f1b")
_V_SHAPED = ("zbv", "dualpipev")
_BY_ROUNDS = ("interleaved", "interleaved_zb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of one pipeline.

    Args:
        schedule: Decides on which stage each chunk is.
        stages: Ranks along the pipeline axis.
        segments: Chunks of each stage.
    """

    schedule: Schedule
    stages: int
    segments: int = 1

    @property
    def count(self) -> int:
        """Chunks of the whole model."""
        return self.stages * self.segments

    def index(self, stage: int, segment: int) -> int:
        """Return the number of a chunk."""
        if self.schedule in _V_SHAPED and segment % 2:
            stage = self.stages - 1 - stage
        return segment * self.stages + stage

    def stage(self, chunk: int) -> int:
        """Return the stage that holds `chunk`."""
        segment, stage = divmod(chunk, self.stages)
        return self.stages - 1 - stage if self.schedule in _V_SHAPED and segment % 2 else stage

    def segment(self, chunk: int) -> int:
        """Return the segment of `chunk`."""
        return chunk // self.stages

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the chunks of `stage`, in order of execution."""
        return tuple(self.index(stage, segment) for segment in range(self.segments))

    def shown(self, chunk: int) -> str:
        """Return how messages name `chunk`."""
        stage = f"stage {self.stage(chunk)}"
        return stage if self.segments == 1 else f"{stage}, segment {self.segment(chunk)}"


def read_chunks(settings: Pipeline, stages: int) -> tuple[Chunks, dict[str, int]]:
    """Return the chunks that `settings` configures, and the chunk of each pattern.

    Raises:
        ConfigError: A stage is missing, is not there, or does not suit the schedule.
    """
    if isinstance(settings.stages, str):
        segments = 1 if settings.schedule in _ONE_SEGMENT else 2
        chunks = Chunks(schedule=settings.schedule, stages=stages, segments=segments)
        check_microbatches(chunks, settings.microbatches)
        return chunks, {}
    places = {
        pattern: (place, 0) if isinstance(place, int) else place
        for pattern, place in settings.stages.items()
    }
    if not places:
        raise ConfigError(f"{STAGES}: no module has a stage (choose auto, or name them)")
    for pattern, (stage, segment) in places.items():
        _check_place(settings.schedule, stages, pattern, stage, segment)
    segments = 1 + max(segment for _, segment in places.values())
    chunks = Chunks(schedule=settings.schedule, stages=stages, segments=segments)
    _check_segments(chunks)
    named = {pattern: chunks.index(*place) for pattern, place in places.items()}
    for chunk in range(chunks.count):
        if chunk not in named.values():
            raise ConfigError(
                f"{STAGES}: no pattern names {chunks.shown(chunk)} of {stages} stages"
            )
    check_microbatches(chunks, settings.microbatches)
    return chunks, named


def _check_place(schedule: Schedule, stages: int, pattern: str, stage: int, segment: int) -> None:
    if not 0 <= stage < stages:
        raise ConfigError(
            f"{STAGES}: {pattern!r} is in stage {stage}, "
            f"and axis {PIPELINE_AXIS} has {stages} (0 to {stages - 1})"
        )
    if segment < 0:
        raise ConfigError(
            f"{STAGES}: {pattern!r} is in segment {segment}, which must be at least 0"
        )
    if segment and schedule in _ONE_SEGMENT:
        raise ConfigError(
            f"{STAGES}: {pattern!r} is in segment {segment}, and {schedule} has only segment 0"
            " (choose interleaved, looped_bfs, interleaved_zb, zbv or dualpipev)"
        )


def _check_segments(chunks: Chunks) -> None:
    if chunks.schedule in _V_SHAPED and chunks.segments != 2:  # noqa: PLR2004 - there and back
        hint = "write `[stage, segment]`; segment 1 goes back from the last stage to stage 0"
        raise ConfigError(
            f"{STAGES}: {chunks.schedule} needs segments 0 and 1, not {chunks.segments} segment(s)",
            hint=hint,
        )


def check_microbatches(chunks: Chunks, microbatches: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot run.

    Raises:
        ConfigError: There are too few, or they do not divide into rounds.
    """
    least = {"1f1b": chunks.stages, "dualpipev": chunks.count}.get(chunks.schedule, 1)
    if microbatches < least:
        raise ConfigError(
            f"{MICROBATCHES}: {microbatches} is too few, "
            f"{chunks.schedule} with {chunks.stages} stages needs {least}"
        )
    rounds = max(1, microbatches // chunks.stages)
    if chunks.schedule in _BY_ROUNDS and microbatches % rounds:
        raise ConfigError(
            f"{MICROBATCHES}: {microbatches} does not divide into {rounds} rounds, "
            f"as {chunks.schedule} with {chunks.stages} stages does "
            f"(choose {chunks.stages * rounds})"
        )
