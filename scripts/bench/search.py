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
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from msrun.parallel.auto.batches import Batches
from msrun.parallel.auto.build import build
from msrun.parallel.auto.eliminate import solve
from msrun.parallel.auto.layouts import Job, explore
from msrun.parallel.auto.problem import Problem, Setting
from msrun.parallel.auto.program import Program
from msrun.parallel.auto.repeat import find_blocks, shortened
from msrun.parallel.auto.search import search
from msrun.parallel.auto.topology import PRESETS
from msrun.parallel.auto.trace import trace
from scripts.bench import highs

GIB = 2**30
# Seconds after which a search for a mesh is left.
_PATIENCE = 60.0
Row = tuple[str, float, float | None, str]


class Attention(nn.Module):
    """Attention with as many heads of keys and values as `kv_heads`, and positions by rotation."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.v = nn.Linear(width, kv_heads * self.size, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, turn: Any = None) -> Any:
        """Return what each position draws from those before it."""
        batch, length, width = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        is_grouped = self.heads != self.kv_heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return self.o(y.transpose(1, 2).reshape(batch, length, width))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class GPTBlock(nn.Module):
    """A block of GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, heads, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the next block's input."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT with its loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList([GPTBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, target.flatten())


class LlamaBlock(nn.Module):
    """A block of LLaMA."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up, self.down = (
            nn.Linear(width, hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: torch.Tensor, turn: Any) -> Any:
        """Return the next block's input."""
        x = x + self.attention(self.norm1(x), turn)
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """LLaMA with its loss; the shape of 8B by default."""

    def __init__(self, layers: int, width: int = 4096, length: int = 4096) -> None:
        super().__init__()
        heads, words, hidden = width // 128, width * 32 - 2816, int(3.5 * width)
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            [LlamaBlock(width, heads, max(1, heads // 4), hidden) for _ in range(layers)]
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("angles", torch.zeros(length, 128))
        self.angles: torch.Tensor

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x, turn = self.tokens(tokens), (self.angles.cos(), self.angles.sin())
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, target.flatten())


def traced(make: Callable[[], nn.Module], batch: int, length: int) -> Program:
    """Return the program of a model for a batch of token sequences."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        sample = [torch.zeros(batch, length, dtype=torch.long) for _ in range(2)]
    return trace(model, sample).program


def gpt3(batch: int, layers: int = 96) -> Program:
    """Return GPT-3 175B."""
    return traced(lambda: GPT(layers, 12288, 96, 2048, 50304), batch, 2048)


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


def meshes() -> Iterator[Row]:
    """Yield the times for meshes that are found."""
    small, large = gpt3(2), gpt3(6)
    blocks = find_blocks(small)
    if blocks is None:
        raise RuntimeError("GPT-3 has blocks")
    short, two = shortened(small, blocks)
    other, _ = shortened(large, blocks)
    for world in (1024, 4096):
        job = Job(
            programs=Batches(short, other, (2, 6)),
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
            "greedy, operator by operator": problem.seconds(greedy(problem)),
            "data parallel": preferred(problem, lambda axes: ["b"] * axes),
            "data and tensor parallel": preferred(problem, lambda axes: ["b"] * (axes - 1) + ["t"]),
        }
        for other, seconds in others.items():
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
_ROWS = ("attention.o", "down")


def preferred(problem: Problem, wanted: Callable[[int], list[str]]) -> float:
    """Return the least cost when the matrix products are divided as a textbook has it."""
    allowed = {}
    for at, node in enumerate(problem.nodes):
        if node.kind != "op" or not node.name.startswith(("linear", "scaled")):
            continue
        names = [choice.name for choice in node.rule.choices]
        number = int(node.name.partition("_")[2] or 0) if "linear" in node.name else -1
        column = "b1" if number < 0 else ("k" if number % 6 in (3, 5) else "n")
        row = []
        for word in wanted(node.rows.shape[1]):
            options = [n for n in names if n in _SAMPLES] if word == "b" else [column]
            row.append(names.index(options[0]) if options and options[0] in names else 0)
        keeps = np.flatnonzero((node.rows == np.array(row)).all(axis=1))
        if len(keeps):
            allowed[at] = keeps
    return solve(problem.restricted(allowed))[0]


def peak() -> Iterator[Row]:
    """Yield the memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield "memory of the process, GiB, torch included", used / GIB, 1.0, ""


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "fixed": fixed,
    "llama": llama,
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
