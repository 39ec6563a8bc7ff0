"""Compare how msrun and torchrun start, hold and end a job, side by side in one run.

    python scripts/bench/start.py                       # 5 pairs at 2, 8 and 16 workers
    python scripts/bench/start.py --pairs 1 --workers 2
    python scripts/bench/start.py --check               # exit 1 and name the missed bars

The launchers take turns, so that whatever else the machine does meets both.  Needs
Linux and an environment with torch; uses the loopback interface and temporary folders
only, and leaves no process behind.
"""

from __future__ import annotations

import argparse
import compileall
import datetime as dt
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import figures, processes, runs
from scripts.bench.figures import SMALL_JOB, Launcher, Machine, Sample

LOAD_LIMIT = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement that both launchers go through."""

    name: str
    workers: int
    measure: Callable[[Launcher], runs.Figures]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = _parse_options()
    processes.become_subreaper()
    # Who ends this early, as `timeout` does, gets the machine back as it was.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    # As an installation has it, and torchrun's has: a checkout may have no bytecode yet.
    for package in ("launchers", "msrun", "ranktable"):
        compileall.compile_dir(runs.ROOT / package, quiet=1)
    load_before = os.getloadavg()[0]
    if load_before > LOAD_LIMIT:
        _say(f"warning: load average is {load_before:.2f}, figures will be worse than they are")
    samples, failures = _measure(options.workers, options.pairs)
    machine = _describe_machine(load_before)
    rows = figures.summarise(samples)
    shortfalls = figures.missed(rows)
    if options.json != "-":
        render = figures.render_markdown if options.markdown else figures.render_text
        print(render(rows, machine))
    if options.json:
        text = json.dumps(figures.to_json(rows, machine, failures, shortfalls), indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    for failure in failures:
        _say(f"failed run: {failure}")
    if not options.check:
        return 0
    for shortfall in shortfalls:
        _say(f"missed: {shortfall}")
    return 1 if shortfalls or any(text.startswith("msrun") for text in failures) else 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=_positive, default=5, metavar="N", help="runs of each")
    parser.add_argument("--workers", type=_numbers, default=(2, 8, 16), metavar="N,N,...")
    parser.add_argument("--json", metavar="FILE", help="all samples; - for stdout instead of text")
    parser.add_argument("--markdown", action="store_true", help="the table as README.md has it")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))


def _plan(workers: tuple[int, ...]) -> list[Step]:
    """Return what each launcher does in one pair, in this order."""
    steps = [Step("help", 0, runs.measure_help)]
    for number in workers:
        steps.append(Step("start", number, partial(runs.measure_start, workers=number)))
        early = partial(runs.measure_early_variables, workers=number)
        steps.append(Step("variables", number, early))
        steps.append(Step("idle", number, partial(runs.measure_idle, workers=number)))
    restart = partial(runs.measure_restart, workers=SMALL_JOB)
    return [*steps, Step("restart", SMALL_JOB, restart)]


def _measure(workers: tuple[int, ...], pairs: int) -> tuple[list[Sample], list[str]]:
    """Run everything in turns; return the samples and what went wrong."""
    samples: list[Sample] = []
    failures: list[str] = []
    for pair, step in itertools.product(range(pairs), _plan(workers)):
        order = list(Launcher) if pair % 2 == 0 else list(reversed(Launcher))
        for launcher in order:
            found: runs.Figures = {}
            try:
                found = step.measure(launcher)
            except runs.RunFailed as problem:
                failures.append(str(problem))
            samples += [
                Sample(launcher=launcher, figure=figure, workers=step.workers, value=value)
                for figure, value in found.items()
            ]
            shown = ", ".join(f"{figure.key} {figure.render(found[figure])}" for figure in found)
            what = f"{step.name} {step.workers or ''}"
            _say(f"pair {pair + 1}/{pairs}  {launcher.value:8}  {what:10}  {shown or 'FAILED'}")
    return samples, failures


def _describe_machine(load_before: float) -> Machine:
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return Machine(
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cores=len(os.sched_getaffinity(0)),
        cpu=" and ".join(sorted(models)) or platform.machine(),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        load_before=load_before,
        load_after=os.getloadavg()[0],
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
