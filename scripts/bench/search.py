"""Measure the strategy search: its time, its memory, and how far other ways of choosing are off.

    python scripts/bench/search.py            # all figures of docs/auto.md
    python scripts/bench/search.py --only gaps
    python scripts/bench/search.py --check    # exit 1 and name the missed bars

Nothing is trained: models have no memory, and clusters are numbers.  Seconds are those of one
thread on its processor, which other work on the machine lengthens less than those of a clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn

from msrun.parallel.auto.tracing.trace import trace
from msrun.parallel.search.cost.topology import PRESETS
from msrun.parallel.search.graph.program import Program, ProgramByBatch
from msrun.parallel.search.graph.repeat import find_blocks, shortened
from msrun.parallel.search.mesh.job_layout import SearchedJob
from msrun.parallel.search.mesh.mesh_search import explore
from msrun.parallel.search.solve.build import build
from msrun.parallel.search.solve.eliminate import solve
from msrun.parallel.search.solve.modes import search
from msrun.parallel.search.solve.problem import Problem, Setting
from scripts.bench import highs, models
from scripts.bench.models import GPT, Llama

GIB = 2**30
# Seconds after which a search for a mesh is left.
_PATIENCE = 60.0
Row = tuple[str, float, float | None, str]


def traced(make: Callable[[], nn.Module], batch: int, length: int) -> Program:
    """Return the program of a model for a batch of token sequences."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        sample = models.tokens(batch, length)
    return trace(model, sample).program


def gpt3(batch: int, layers: int = 96) -> Program:
    """Return GPT-3 175B."""
    return traced(partial(models.gpt3, layers), batch, models.GPT3_LENGTH)


def _setting(*sizes: int, topology: str = "a100") -> Setting:
    return Setting(sizes=sizes, topology=PRESETS[topology])


def _timed(act: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Return the least of several times."""
    best, found = float("inf"), None
    for _ in range(times):
        start = time.process_time()
        found = act()
        best = min(best, time.process_time() - start)
    return best, found


def fixed() -> Iterator[Row]:
    """Yield the times for meshes that are given."""
    gpt3(2, layers=1)  # the first trace of a process loads half of torch
    seconds, program = _timed(partial(gpt3, 1536), times=1)
    yield "trace of GPT-3 175B, 96 layers", seconds, 5.0, ""
    for sizes, bar in (((512, 8), 0.2), ((64, 8, 8), 1.0)):
        seconds, found = _timed(partial(search, program, _setting(*sizes)))
        name = f"GPT-3 175B on {' x '.join(map(str, sizes))}"
        yield name, seconds, bar, f"step {found.seconds:.4g} s, gap {found.gap:.1e}"
    limit = found.memory * 0.7
    seconds, found = _timed(partial(search, program, _setting(512, 8), limit=limit))
    yield "the same on 512 x 8 with 0.7 of the memory", seconds, None, f"gap {found.gap:.1e}"


def llama() -> Iterator[Row]:
    """Yield the time of a LLaMA 8B shape on 64 devices, from the model to the plan."""
    traced(lambda: Llama(1), 2, 4096)  # as in `fixed`

    def act() -> Any:
        program = traced(lambda: Llama(32), 64, 4096)
        return search(program, _setting(8, 8), limit=72 * GIB)

    seconds, found = _timed(act, times=1)
    note = f"step {found.seconds:.4g} s, {found.memory / GIB:.3g} GiB, gap {found.gap:.1e}"
    yield "LLaMA 8B shape on 8 x 8, model to plan", seconds, 5.0, note


def command() -> Iterator[Row]:
    """Yield the time of the whole command, from the start of its process to its end."""
    for name, target, words in (
        ("GPT-3 175B on 512 x 8", "gpt", ("--world=4096", "--mesh=dp=512,tp=8", "--batch=1536")),
        ("LLaMA 8B shape on 8 x 8", "llama", ("--world=64", "--mesh=dp=8,tp=8", "--batch=64")),
    ):
        model = f"{Path(models.__file__)}:{target}"
        limit = "--memory=72GiB" if target == "llama" else "--memory=1TiB"
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        line = [sys.executable, "-m", "msrun", "search", model, *words, limit, "--json"]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        taken, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield f"`msrun search`, {name}", used, 5.0, f"{taken:.1f} s by the clock"


def meshes() -> Iterator[Row]:
    """Yield the times for meshes that are found."""
    small, large = gpt3(2), gpt3(6)
    blocks = find_blocks(small)
    if blocks is None:
        raise RuntimeError("GPT-3 has blocks")
    short, two = shortened(small, blocks)
    other, _ = shortened(large, blocks)
    for world in (1024, 4096):
        job = SearchedJob(
            programs=ProgramByBatch(short, other, (2, 6)),
            blocks=two,
            count=blocks.count,
            topology=PRESETS["a100"],
            world=world,
            batch=1536,
            limit=72e9,
        )
        start, first, reached, best = time.process_time(), 0.0, 0.0, None
        begun = time.perf_counter()
        for progress in explore(job):
            now = time.process_time() - start
            if progress.best is not best:
                first, best, reached = first or now, progress.best, now
            if now > _PATIENCE:
                break
        if best is None:
            raise RuntimeError("no plan fits")
        layout = best.layout
        note = (
            f"{best.seconds:.4g} s a step: {layout.stages} stages of "
            f"{' x '.join(map(str, layout.sizes))}, {layout.microbatches} micro-batches; found "
            f"after {reached:.1f} s; {progress.seen} of {progress.total} layouts looked at; "
            f"{time.perf_counter() - begun:.0f} s by the clock"
        )
        yield f"GPT-3 175B, mesh found, {world} devices: first plan", first, 5.0, ""
        yield f"GPT-3 175B, mesh found, {world} devices", now, 30.0, note


def exact() -> Iterator[Row]:
    """Yield how far plans are from those of an integer solver."""
    models: dict[str, Program] = {
        "GPT": traced(lambda: GPT(2, 512, 8, 128, 512), 16, 128),
        "LLaMA": traced(lambda: Llama(2, 512, 128), 16, 128),
    }
    for name, program in models.items():
        for sizes in ((8,), (4, 4)):
            problem = build(program, _setting(*sizes))
            ours, (found, _) = _timed(partial(solve, problem))
            theirs, (best, _) = _timed(partial(highs.solve, problem), times=1)
            note = f"{ours:.3f} s, the integer solver {theirs:.1f} s"
            yield f"{name} on {sizes}: relative difference", abs(found / best - 1), 1e-6, note


def gaps() -> Iterator[Row]:
    """Yield how much slower plans of other ways of choosing are, under the same costs."""
    for name, batch, sizes in (
        ("13B", 64, (8, 8)),
        ("13B", 1024, (32, 8)),
        ("175B", 64, (8, 8)),
        ("175B", 64, (8, 8, 8)),
    ):
        width, heads = (5120, 40) if name == "13B" else (12288, 96)
        program = traced(partial(GPT, 2, width, heads, 2048, 50304), batch, 2048)
        problem = build(program, _setting(*sizes))
        best = solve(problem)[0]
        others = {
            "greedy, operator by operator": greedy(problem),
            "data parallel": preferred(problem, "b" * len(sizes)),
            "data and tensor parallel": preferred(problem, "b" * (len(sizes) - 1) + "t"),
        }
        for other, plan in others.items():
            seconds = problem.seconds(plan)
            title = f"{name}, batch {batch}, {' x '.join(map(str, sizes))}: {other}"
            yield f"{title}, slower by", seconds / best - 1, None, ""


def greedy(problem: Problem) -> list[int]:
    """Return a plan of which each node took what is cheapest with those decided before it."""
    chosen: dict[int, int] = {}
    order = sorted(range(len(problem.nodes)), key=lambda at: problem.nodes[at].kind == "param")
    for at in order:
        seconds = problem.nodes[at].seconds.copy()
        for edge in problem.edges:
            if edge.target == at and edge.source in chosen:
                seconds += edge.seconds[chosen[edge.source]]
            elif edge.source == at and edge.target in chosen:
                seconds += edge.seconds[:, chosen[edge.target]]
        chosen[at] = int(seconds.argmin())
    return [chosen[at] for at in range(len(problem.nodes))]


# Which loop of each operator is divided among samples, and among columns, then rows.
_SAMPLES = {"b0", "d0", "b"}


def preferred(problem: Problem, wanted: Sequence[str]) -> list[int]:
    """Return the best plan of those that divide the matrix products as a textbook has it.

    Args:
        problem: Of a model whose blocks have the products of `GPTBlock`.
        wanted: What each axis divides: `b` for samples, `t` for columns, then rows.
    """
    allowed = {}
    for at, node in enumerate(problem.nodes):
        if node.kind != "op" or not node.name.startswith(("linear", "scaled")):
            continue
        names = [choice.name for choice in node.rule.choices]
        number = int(node.name.partition("_")[2] or 0) if "linear" in node.name else -1
        column = "b1" if number < 0 else ("k" if number % 6 in (3, 5) else "n")
        row = []
        for word in wanted:
            options = [n for n in names if n in _SAMPLES] if word == "b" else [column]
            row.append(names.index(options[0]) if options and options[0] in names else 0)
        keeps = np.flatnonzero((node.rows == np.array(row)).all(axis=1))
        if len(keeps):
            allowed[at] = keeps
    chosen = solve(problem.restricted(allowed))[1]
    return [int(allowed[at][one]) if at in allowed else one for at, one in enumerate(chosen)]


def peak() -> Iterator[Row]:
    """Yield the memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield "memory of the process, GiB, torch included", used / GIB, 1.0, ""


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "fixed": fixed,
    "llama": llama,
    "command": command,
    "meshes": meshes,
    "peak": peak,
    "exact": exact,
    "gaps": gaps,
}


def main() -> int:
    """Print the figures; return 1 if one misses its bar and that counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    missed = []
    for part in given.only or PARTS:
        for name, value, bar, note in PARTS[part]():
            limit = "" if bar is None else f"  (at most {bar:g})"
            print(f"{name:68} {value:10.4g}{limit}  {note}", flush=True)
            if bar is not None and value > bar:
                missed.append(name)
    for name in missed if given.check else ():
        print(f"missed: {name}")
    return int(bool(missed) and given.check)


if __name__ == "__main__":
    sys.exit(main())
