"""The benchmark's figures: names, medians, ratios, bars and how they are shown.  Pure."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


class Launcher(enum.Enum):
    """Who starts the workers."""

    MSRUN = "msrun"
    TORCHRUN = "torchrun"


class Figure(enum.Enum):
    """What is measured: key in JSON, the words for a reader, unit, decimals."""

    WALL = ("wall", "start to exit, one all-reduce", "s", 2)
    WALL_FOLLOWED = ("wall_followed", "the same, a script that sets OMP_NUM_THREADS first", "s", 2)
    WALL_EXEC = ("wall_exec", "the same, a script that sets KMP_BLOCKTIME first", "s", 2)
    CPU = ("cpu", "CPU time of all processes", "s", 2)
    MEMORY = ("memory", "memory of all processes (PSS)", "MiB", 0)
    WORKER_PSS = ("worker_pss", "one idle worker (PSS)", "MiB", 1)
    WORKER_EXTRA = ("worker_extra", "one idle worker above the forkserver", "MiB", 1)
    FORKSERVER_PSS = ("forkserver_pss", "forkserver (PSS)", "MiB", 1)
    AGENT_RSS = ("agent_rss", "launcher process (RSS)", "MiB", 1)
    SCHEDULER_RSS = ("scheduler_rss", "scheduler process (RSS)", "MiB", 1)
    TORCH_MAPPED = ("torch_mapped", "control processes that hold torch", "", 0)
    HELP = ("help", "`--help`", "s", 2)
    RESTART = ("restart", "`kill -9` of a worker to all running again", "s", 2)
    END = ("end", "last line of the last worker to exit", "s", 2)
    STOP = ("stop", "SIGTERM to exit", "s", 2)

    def __init__(self, key: str, words: str, unit: str, decimals: int) -> None:
        self.key = key
        self.words = words
        self.unit = unit
        self.decimals = decimals

    def render(self, value: float | None) -> str:
        """Return `value` with its unit, or a dash when there is none."""
        return "-" if value is None else f"{value:.{self.decimals}f} {self.unit}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured value, in the unit of its figure.

    Args:
        launcher: Who ran.
        figure: What was measured.
        workers: At how many workers; 0 where none were started.
        value: The value.
    """

    launcher: Launcher
    figure: Figure
    workers: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        figure: What was measured.
        workers: At how many workers; 0 where none were started.
        values: Launcher -> its samples, in the order they were taken.
    """

    figure: Figure
    workers: int
    values: dict[Launcher, tuple[float, ...]]

    def median(self, launcher: Launcher) -> float | None:
        """Return the launcher's median, None when it has no sample."""
        values = self.values.get(launcher, ())
        return statistics.median(values) if values else None

    @property
    def ratio(self) -> float | None:
        """How many times torchrun's median is msrun's; None when one is missing or 0."""
        ours, theirs = self.median(Launcher.MSRUN), self.median(Launcher.TORCHRUN)
        return theirs / ours if ours and theirs is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a figure must reach: a ratio at least, or msrun's own median at most."""

    figure: Figure
    workers: int
    ratio_min: float | None = None
    value_max: float | None = None

    def check(self, row: Row | None) -> str | None:
        """Return what is missed, in words; None when the bar is reached."""
        name = f"{self.figure.words}{f' at {self.workers} workers' if self.workers else ''}"
        value = row.median(Launcher.MSRUN) if row else None
        if row is None or value is None:
            return f"{name}: not measured"
        if self.value_max is not None and value > self.value_max:
            render = self.figure.render
            return f"{name}: {render(value)} (limit {render(self.value_max)})"
        if self.ratio_min is None:
            return None
        if row.ratio is None:
            return f"{name}: no ratio, one side was not measured"
        if row.ratio < self.ratio_min:
            return f"{name}: {row.ratio:.1f} times better (must be {self.ratio_min:g})"
        return None


SMALL_JOB = 4
"""Workers of the job whose worker is killed and whose end is timed."""

BARS = (
    Bar(figure=Figure.WALL, workers=2, ratio_min=1.9),
    Bar(figure=Figure.WALL, workers=16, ratio_min=8),
    Bar(figure=Figure.CPU, workers=16, ratio_min=16),
    Bar(figure=Figure.WORKER_EXTRA, workers=16, value_max=10),
    Bar(figure=Figure.AGENT_RSS, workers=16, value_max=35),
    Bar(figure=Figure.SCHEDULER_RSS, workers=16, value_max=35),
    Bar(figure=Figure.TORCH_MAPPED, workers=16, value_max=0),
    Bar(figure=Figure.HELP, workers=0, ratio_min=6),
    Bar(figure=Figure.RESTART, workers=SMALL_JOB, value_max=0.5),
    Bar(figure=Figure.END, workers=SMALL_JOB, value_max=0.3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when it was measured.

    Args:
        date: Day and minute, UTC.
        cores: CPUs this process may use.
        cpu: Model name.
        memory_gib: Installed memory.
        system: Operating system and its release.
        python: Version.
        torch: Version.
        load_before: One-minute load average when the first run started.
        load_after: The same after the last run; our own runs are in it.
    """

    date: str
    cores: int
    cpu: str
    memory_gib: float
    system: str
    python: str
    torch: str
    load_before: float
    load_after: float

    def render(self) -> str:
        """Return one sentence."""
        return (
            f"{self.date}, {self.cores} cores ({self.cpu}), {self.memory_gib:.0f} GiB, "
            f"{self.system}, Python {self.python}, torch {self.torch}; "
            f"load average {self.load_before:.2f} before, {self.load_after:.2f} after"
        )


def summarise(samples: Iterable[Sample]) -> list[Row]:
    """Return one row for each figure and number of workers, in the order of `Figure`."""
    groups: dict[tuple[Figure, int], dict[Launcher, tuple[float, ...]]] = {}
    for sample in samples:
        values = groups.setdefault((sample.figure, sample.workers), {})
        values[sample.launcher] = (*values.get(sample.launcher, ()), sample.value)
    order = list(Figure)
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    return [Row(figure=figure, workers=n, values=groups[figure, n]) for figure, n in keys]


def missed(rows: Iterable[Row], bars: Iterable[Bar] = BARS) -> list[str]:
    """Return one sentence for each bar that is not reached."""
    found = {(row.figure, row.workers): row for row in rows}
    verdicts = (bar.check(found.get((bar.figure, bar.workers))) for bar in bars)
    return [verdict for verdict in verdicts if verdict is not None]


_HEADER = ("", "workers", "msrun", "torchrun", "ratio")


def render_text(rows: Sequence[Row], machine: Machine) -> str:
    """Return an aligned table for a terminal."""
    cells = [_HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in cells
    )
    return "\n".join([*lines, "", f"medians of {_counts(rows)}; {machine.render()}"])


def render_markdown(rows: Sequence[Row], machine: Machine) -> str:
    """Return the table that README.md quotes."""
    cells = [_HEADER, ("---", *["---:"] * 4), *map(_cells, rows)]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([*lines, "", f"Medians of {_counts(rows)}; {machine.render()}."])


def to_json(
    rows: Sequence[Row], machine: Machine, failures: Sequence[str], shortfalls: Sequence[str]
) -> dict[str, object]:
    """Return everything that was measured, for `json.dumps`."""
    return {
        "machine": asdict(machine),
        "rows": [_row_to_json(row) for row in rows],
        "failures": list(failures),
        "missed": list(shortfalls),
    }


def _row_to_json(row: Row) -> dict[str, object]:
    names = {launcher.value: launcher for launcher in Launcher}
    return {
        "figure": row.figure.key,
        "unit": row.figure.unit,
        "workers": row.workers,
        "median": {name: row.median(launcher) for name, launcher in names.items()},
        "samples": {name: row.values.get(launcher, ()) for name, launcher in names.items()},
        "ratio": row.ratio,
    }


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.figure.words,
        str(row.workers or ""),
        row.figure.render(row.median(Launcher.MSRUN)),
        row.figure.render(row.median(Launcher.TORCHRUN)),
        "-" if row.ratio is None else f"{row.ratio:.1f}",
    )


def _counts(rows: Iterable[Row]) -> str:
    """Return how many samples stand behind each median, such as `5 interleaved pairs`."""
    counts = {len(values) for row in rows for values in row.values.values()}
    if not counts:
        return "no samples"
    low, high = min(counts), max(counts)
    return f"{low if low == high else f'{low} to {high}'} interleaved runs each"
