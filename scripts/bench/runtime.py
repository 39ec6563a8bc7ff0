"""Compare training under one configuration with the same model hand-written on plain torch.

    python scripts/bench/runtime.py    # every configuration at 1, 2 and 4 ranks, `hybrid` at 8
    python scripts/bench/runtime.py --ranks 2 --only tp
    python scripts/bench/runtime.py --width 768        # as wide as GPT-2
    python scripts/bench/runtime.py --check            # exit 1 and name the missed bars
    python scripts/bench/runtime.py --markdown         # and the table of docs/parallel.md

Both models live in the same ranks and take turns, a few steps each, so that whatever else the
machine does meets both.  Beside the time stands the CPU time of all ranks, which others disturb
less.  The hand-written ones use `DistributedDataParallel`, `fully_shard`, `parallelize_module`
and `torch.distributed.pipelining`; `cp` all-to-alls around attention, as in DeepSpeed Ulysses,
beside `DistributedDataParallel`, under which `compile` has each layer compiled; `hybrid`, pp x dp x
tp, the last two, and one all-reduce of all gradients over dp, as `DistributedDataParallel` takes no
divided parameters.  `ep` is the
mixture of `examples/train_moe.py`, whose hand-written form sorts tokens by expert, exchanges them
by `all_to_all_single`, and has `DistributedDataParallel` ignore the experts.  `images` is a
network of convolutions over images of which each rank has some rows; its hand-written form sends
the rows at the border to its neighbours by `batch_isend_irecv`.  Its tokens are pixels.  `grid` has
the layers on a grid of 2 x 2 ranks (style `2d`), and `rows` a table with uneven rows of each rank;
their hand-written forms are in `hand_written.py`.  `compile-zero3`, `compile-pp`, `compile-tp` and
`compile-recompute` have compiled layers beside the other technique, by hand in torchtitan's order:
recomputation, then the compiler, then `fully_shard`, stages or `parallelize_module`.  `bf16` is
autocast over forward and loss.
"""

# tidy: long file, it runs by path and alone, so every hand-written model stands here

from __future__ import annotations

import argparse
import compileall
import functools
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import msrun
import msrun.parallel.preload
import msrun.parallel.runtime  # as msrun's own parent of all ranks has both
from scripts.bench.hand_written import (
    Clicks,
    divide_on_grid,
    grid_shape,
    on_own_samples,
    share_out_rows,
)

ROOT = Path(__file__).resolve().parents[2]
LOCAL_BATCH = 8
# Where arithmetic counts, but what the host does for each layer still shows.
WIDTH = 256
STEPS_A_TURN = 3
# More ranks than cores make single turns differ by a third, and where the memory of a process lies
# makes all turns of one job differ by a twentieth from those of the next.
TURNS = 7
JOBS = 5
RATIO_MIN = 0.98
INIT_MS_MAX = 20.0
# Of four ranks on two cores some wait for a core as long as all of it takes.
INIT_JOBS = 9

Step = Callable[[Tensor, Tensor], Any]
Turns = dict[str, list[float]]
LAYER_PLAN = [
    *({"match": f"layers.*.{name}", "style": "colwise"} for name in ("query", "key", "value")),
    {"match": "layers.*.project", "style": "rowwise"},
    {"match": "layers.*.up", "style": "colwise"},
    {"match": "layers.*.down", "style": "rowwise"},
]
COMPILED = {"compile": {"modules": ["layers.*"]}}
CONFIGS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": -1}},
    "zero3": {"mesh": {"dp": -1}, "optimizer": {"zero": 3}},
    "tp": {"mesh": {"tp": -1}, "plan": LAYER_PLAN},
    "copies": {"mesh": {"tp": -1}, "plan": LAYER_PLAN, "copies": 2},
    "cp": {"mesh": {"cp": -1}, "plan": [{"match": "*", "style": "context"}]},
    "compile": {"mesh": {"dp": -1}, **COMPILED},
    "compile-zero3": {"mesh": {"dp": -1}, "optimizer": {"zero": 3}, **COMPILED},
    "compile-recompute": {
        "mesh": {"dp": -1},
        "recompute": {"modules": ["layers.*"]},
        **COMPILED,
    },
    "compile-tp": {"mesh": {"tp": -1}, "plan": LAYER_PLAN, **COMPILED},
    "compile-pp": {"mesh": {"pp": -1}, **COMPILED},  # and such a pipeline
    "bf16": {"mesh": {"dp": -1}, "precision": "bf16"},
    "pp": {"mesh": {"pp": -1}},  # and a pipeline, whose stages depend on the ranks
    "ep": {
        "mesh": {"ep": -1},
        "plan": [{"match": "*.experts", "style": "experts", "axis": "ep"}],
    },
    "images": {
        "mesh": {"h": -1},
        "data": {"image": ["dp", None, "h", None], "label": ["dp", "h", None]},
    },
    "grid": {},  # its axes depend on the ranks, and so do the rows
    "rows": {"mesh": {"tp": -1}},
    "hybrid": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "plan": LAYER_PLAN},  # and such a pipeline
}
GRID_PLAN = [
    *(
        {"match": f"layers.*.{name}", "style": "2d", "axes": ["x", "y"]}
        for name in ("query", "key", "value", "up", "norm[12]")
    ),
    *(
        {"match": f"layers.*.{name}", "style": "2d", "axes": ["y", "x"]}
        for name in ("project", "down")
    ),
    {"match": "norm", "style": "2d", "axes": ["x", "y"]},
]
STAGED = ("pp", "compile-pp", "hybrid")
AVERAGED = ("dp", "compile", "compile-recompute", "bf16", "cp", "ep", "images")
HYBRID_RANKS = 8  # whatever --ranks says of the others
MICROBATCHES = 4


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", choices=CONFIGS, nargs="+", default=list(CONFIGS))
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="of a job, %(default)s unless said"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help="of a row, %(default)s unless said")
    parser.add_argument(
        "--width", type=int, default=WIDTH, help="of models, %(default)s unless said"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    compileall.compile_dir(ROOT / "msrun", quiet=1)  # as an installation has it
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs, torch {torch.__version__}")
    missed: list[str] = []
    table: dict[str, dict[int, str]] = {}
    import_ms = _import_ms()
    print(f"runtime and first configuration where no parent has them: {import_ms:.1f} ms")
    rows = [(ranks, name) for ranks in options.ranks for name in options.only if name != "hybrid"]
    if "hybrid" in options.only:
        rows.append((HYBRID_RANKS, "hybrid"))
    for ranks in options.ranks:
        added = import_ms + _init_ms(ranks)
        print(f"msrun.init at {ranks} ranks: {added:.1f} ms with these", flush=True)
        if added > INIT_MS_MAX:
            missed.append(f"msrun.init adds {added:.1f} ms at {ranks} ranks")
    for ranks, name in rows:
        speeds, cpu = run(ranks, name, options.turns, options.width, options.jobs)
        ratio, cpu_ratio = _ratio(speeds), 1 / _ratio(cpu)
        added = _added_ms(cpu, ranks)
        ours, plain = map(statistics.median, speeds.values())
        print(
            f"{name:6} {ranks} ranks  msrun {ours:8,.0f} tokens/s  plain torch {plain:8,.0f}  "
            f"ratio {ratio:.3f}, by CPU {cpu_ratio:.3f}, {added:+.1f} ms a step and rank",
            flush=True,
        )
        table.setdefault(name, {})[ranks] = f"{ours:,.0f}, {ratio:.2f} ({cpu_ratio:.2f})"
        if ratio < RATIO_MIN:
            missed.append(f"{name} at {ranks} ranks: {ratio:.3f} of plain torch")
    if options.markdown:
        print(_markdown(table))
    if options.check:
        for text in missed:
            print(f"missed: {text}", file=sys.stderr)
    return 1 if options.check and missed else 0


def _markdown(table: dict[str, dict[int, str]]) -> str:
    """Return the rows of each configuration by ranks."""
    counts = sorted({ranks for cells in table.values() for ranks in cells})
    head = " | ".join(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in counts)
    rows = (
        f"| {name} | {' | '.join(cells.get(ranks, '-') for ranks in counts)} |"
        for name, cells in table.items()
    )
    return "\n".join([f"| configuration | {head} |", "|---" * (len(counts) + 1) + "|", *rows])


def _ratio(turns: Turns) -> float:
    """Return the median of ours over plain, turn by turn."""
    return statistics.median(a / b for a, b in zip(turns["ours"], turns["plain"], strict=True))


def _import_ms() -> float:
    """Return what a fresh interpreter that has torch takes before `init`, at its best.

    It imports the runtime and reads a first configuration.
    """
    code = (
        "import time, torch, torch.distributed, msrun; t = time.perf_counter(); "
        "import msrun.parallel.runtime; from msrun.parallel.config_file import parse_config; "
        "parse_config({}); print(1000 * (time.perf_counter() - t))"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.check_output(command, cwd=ROOT, text=True) for _ in range(3)]
    return min(map(float, runs))


def run(
    ranks: int, name: str, turns: int = TURNS, width: int = WIDTH, jobs: int = 1
) -> tuple[Turns, Turns]:
    """Return of each turn of all jobs tokens a second and CPU seconds."""
    work = functools.partial(_train, name, turns, width)
    found = [_forked(ranks, work) for _ in range(jobs)]
    speeds, cpu = (
        {who: [value for turns in kind for value in turns[who]] for who in ("ours", "plain")}
        for kind in zip(*found, strict=True)
    )
    return speeds, cpu


def _added_ms(cpu: Turns, ranks: int) -> float:
    """Return the median of the CPU time that ours adds to a step of a rank."""
    seconds = statistics.median(a - b for a, b in zip(cpu["ours"], cpu["plain"], strict=True))
    return 1000 * seconds / STEPS_A_TURN / ranks


def _init_ms(ranks: int) -> float:
    """Return what `msrun.init` adds where there is a process group, the median of some jobs."""
    work = functools.partial(_time_init, CONFIGS["dp"])
    return statistics.median(float(_forked(ranks, work)) for _ in range(INIT_JOBS))


def _forked(ranks: int, work: Callable[[int, int], Any]) -> Any:
    """Return what `work(rank, ranks)` returns on the first of that many ranks in one group."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, ranks, work, f"{folder}/store", answers))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"one of {ranks} ranks ended with {process.exitcode}")
    return answers.get()


def _rank(rank: int, ranks: int, work: Callable[[int, int], Any], path: str, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]  # in torch's documentation
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    dist.barrier()
    found = work(rank, ranks)
    if rank == 0:
        answers.put(found)
    dist.barrier()


def _time_init(config: dict[str, Any], rank: int, ranks: int) -> float:
    del rank, ranks
    start = time.perf_counter()
    msrun.init(config)
    return 1000 * (time.perf_counter() - start)


def _train(name: str, turns: int, width: int, rank: int, ranks: int) -> tuple[Turns, Turns]:
    del rank
    runtime = msrun.init(_config(name, ranks))
    lm: Any = _load_example("train_moe" if name == "ep" else "train_lm", width)
    Clicks.WIDTH = width // 4
    lm = {"images": _Pictures, "rows": Clicks}.get(name, lm)
    steps = {"ours": _ours(runtime, lm), "plain": _plain(name, lm)}
    copies = runtime.layout.size("dp")
    generator = torch.Generator().manual_seed(runtime.coordinate.get("dp", 0))
    batch = torch.randint(0, 104, (LOCAL_BATCH, lm.LENGTH + 1), generator=generator)
    inputs, target = batch[:, :-1], batch[:, 1:]
    if name == "images":
        inputs, target = _Pictures.batch(generator)
    if name == "rows":
        inputs, target = Clicks.batch(generator, ranks)
    speeds: Turns = {"ours": [], "plain": []}
    cpu: Turns = {"ours": [], "plain": []}
    for turn in range(turns + 1):
        for who in ("ours", "plain") if turn % 2 else ("plain", "ours"):
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS_A_TURN):
                steps[who](inputs, target)
            cpu_seconds = time.process_time() - start_cpu
            dist.barrier()
            seconds = time.perf_counter() - start
            if turn:  # the first one warms up
                tokens = STEPS_A_TURN * LOCAL_BATCH * lm.LENGTH * copies
                speeds[who].append(tokens / seconds)
                cpu[who].append(cpu_seconds)
    for found in cpu.values():
        total = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(total)
        found[:] = total.tolist()
    return speeds, cpu


def _config(name: str, ranks: int) -> dict[str, Any]:
    config = CONFIGS[name]
    if name == "grid":
        return {"mesh": dict(zip("xy", grid_shape(ranks), strict=True)), "plan": GRID_PLAN}
    if name == "rows":
        return config | {"plan": [{"match": "table", "rows": Clicks.rows(ranks), "axis": "tp"}]}
    if name not in STAGED:
        return config
    count = config["mesh"]["pp"] if name == "hybrid" else ranks
    layers = {f"layers.{index}": index * count // 4 for index in range(4)}
    stages = {"embed": 0, **layers, "norm": count - 1, "head": count - 1}
    return config | {"pipeline": {"stages": stages, "microbatches": MICROBATCHES}}


def _load_example(name: str, width: int) -> ModuleType:
    """Return the example with a model of that width."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"examples/{name}.py is not there")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the compiler looks for it
    spec.loader.exec_module(module)
    module.WIDTH = width
    return module  # type: ignore[no-any-return]


def _ours(runtime: Any, lm: Any) -> Step:
    torch.manual_seed(0)
    model = runtime.shard(_model(lm))
    optimizer = runtime.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return functools.partial(runtime.step, model, optimizer, _loss_of(lm))


class _Pictures:
    """The part of an example for images: a network with a class for each pixel."""

    SIZE = 96
    LENGTH = SIZE * SIZE
    WIDTH = 32
    CLASSES = 8

    @classmethod
    def GPT(cls, _: int) -> nn.Module:  # noqa: N802 - as in the example
        """Return the network."""
        layers: list[nn.Module] = []
        for before in (3, cls.WIDTH, cls.WIDTH):
            layers += [nn.Conv2d(before, cls.WIDTH, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(cls.WIDTH, cls.CLASSES, 3, padding=1))

    @classmethod
    def batch(cls, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images and classes of their pixels."""
        size = (LOCAL_BATCH, cls.SIZE, cls.SIZE)
        images = torch.randn(LOCAL_BATCH, 3, *size[1:], generator=generator)
        return images, torch.randint(0, cls.CLASSES, size, generator=generator)

    @staticmethod
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over pixels."""
        return nn.functional.cross_entropy(output, target)


def _divide_rows(model: nn.Module) -> None:
    """Have convolutions get the rows around theirs from the neighbours."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.padding = (0, 1)
            module.register_forward_pre_hook(lambda _, inputs: (_Halo.apply(*inputs),))  # type: ignore[no-untyped-call]


class _Halo(torch.autograd.Function):
    """A row above and one below, of the ranks before and after this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        above, below = _swapped(x[:, :, :1], x[:, :, -1:])
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        first, last = _swapped(gradient[:, :, :1], gradient[:, :, -1:])
        own = gradient[:, :, 1:-1].clone()
        own[:, :, :1] += first
        own[:, :, -1:] += last
        return own


def _swapped(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Send a row to each neighbour; return theirs, or zeros at the border."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = torch.zeros_like(first), torch.zeros_like(last)
    work = []
    for peer, sent, got in ((rank - 1, first, found[0]), (rank + 1, last, found[1])):
        if 0 <= peer < ranks:
            work.append(dist.P2POp(dist.isend, sent.contiguous(), peer))
            work.append(dist.P2POp(dist.irecv, got, peer))
    for pending in dist.batch_isend_irecv(work) if work else ():
        pending.wait()
    return found


def _on_rows(step: Step, inputs: Tensor, target: Tensor) -> Any:
    """Run a step on the rows of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return step(inputs.chunk(ranks, 2)[rank].contiguous(), target.chunk(ranks, 1)[rank])


def _model(lm: Any) -> nn.Module:
    model: nn.Module = lm.GPT(104) if hasattr(lm, "GPT") else _Logits(lm.Language(104))
    return model


class _Logits(nn.Module):
    """Returns the logits of a mixture of experts alone: its other output is for their balance."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, codes: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        logits: Tensor = self.model(codes)[0]
        return logits


def _loss_of(lm: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def entropy(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    found: Callable[[Tensor, Tensor], Tensor] = getattr(lm, "loss_of", entropy)
    return found


def _plain(name: str, lm: Any) -> Step:
    """Return the step of the same model as its users write it without us."""
    torch.manual_seed(0)
    model = _model(lm)
    if name.startswith("compile"):
        _compile_layers(model, is_recomputed=name == "compile-recompute")
    if name in STAGED:
        axes = CONFIGS[name]["mesh"] if name == "hybrid" else {"pp": dist.get_world_size()}
        return _Pipeline(
            model, lm, init_device_mesh("cpu", (*axes.values(),), mesh_dim_names=(*axes,))
        )
    changes: dict[str, Callable[[Any, Any], None]] = {
        "cp": _divide_tokens,
        "ep": _share_out_experts,
        "images": lambda model, _: _divide_rows(model),
        "grid": divide_on_grid,
    }
    if name in changes:
        changes[name](model, lm)
    if name in AVERAGED:
        model = DistributedDataParallel(model)
    elif name == "rows":
        model = share_out_rows(model, lm)
    elif name.endswith("zero3"):
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    elif name != "grid":
        _divide_layers(model, init_device_mesh("cpu", (dist.get_world_size(),)), lm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "copies":
        return functools.partial(_copied_step, model, optimizer, _loss_of(lm))
    step = functools.partial(_plain_step, model, optimizer, _loss_of(lm), is_narrow=name == "bf16")
    cuts = {"cp": _on_part, "images": _on_rows, "rows": on_own_samples}
    return functools.partial(cuts[name], step) if name in cuts else step


def _compile_layers(model: Any, *, is_recomputed: bool) -> None:
    for index, layer in enumerate(model.layers):
        if is_recomputed:
            layer = model.layers[index] = checkpoint_wrapper(layer)  # noqa: PLW2901
        layer.compile(fullgraph=True)  # otherwise what is not followed would run uncompiled


def _share_out_experts(model: Any, lm: Any) -> None:
    for module in list(model.modules()):
        if isinstance(module, lm.Mixture):
            module.experts = _Experts(module.experts)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    # What users of it call.
    kind: Any = DistributedDataParallel
    kind._set_params_and_buffers_to_ignore_for_model(model, own)  # noqa: SLF001


def _copied_step(model: Any, optimizer: Any, loss_of: Any, inputs: Tensor, target: Tensor) -> float:
    """Train on two halves of a batch, layer by layer in turns."""
    optimizer.zero_grad()
    parts = [model.embed(half) + model.position for half in inputs.chunk(2)]
    for layer in model.layers:
        parts = [layer(part) for part in parts]
    found = [model.head(model.norm(part)) for part in parts]
    loss = sum(loss_of(*pair) for pair in zip(found, target.chunk(2), strict=True)) / 2
    loss.backward()
    optimizer.step()
    return float(loss.item())


def _divide_layers(model: Any, mesh: DeviceMesh, lm: Any) -> None:
    plan: dict[str, Any] = {}
    for index in range(len(model.layers)):
        for part in ("query", "key", "value", "up"):
            plan[f"layers.{index}.{part}"] = ColwiseParallel()
        for part in ("project", "down"):
            plan[f"layers.{index}.{part}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        layer.attend = functools.partial(_attend, lm, layer)


def _divide_tokens(model: Any, lm: Any) -> None:
    """Have layers attend with all tokens of some heads, and the model begin at its own place."""
    size = lm.LENGTH // dist.get_world_size()
    first = dist.get_rank() * size

    def forward(x: Tensor) -> Tensor:
        x = model.embed(x) + model.position[..., first : first + size, :]
        for layer in model.layers:
            x = layer(x)
        found: Tensor = model.head(model.norm(x))
        return found

    model.forward = forward
    for layer in model.layers:
        layer.attend = functools.partial(_attend_by_heads, lm, layer)


def _attend_by_heads(lm: Any, block: Any, x: Tensor) -> Tensor:
    """Attend with all tokens of the heads of this rank, as in DeepSpeed Ulysses."""
    ranks, samples = dist.get_world_size(), len(x)
    parts = torch.stack([part(x) for part in (block.query, block.key, block.value)])
    parts = parts.unflatten(-1, (ranks, lm.HEADS // ranks, -1))  # 3, samples, tokens, ranks, ...
    query, key, value = _exchanged(parts.permute(3, 0, 1, 4, 2, 5)).permute(1, 2, 3, 0, 4, 5)
    found = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), is_causal=True
    )
    heads = _exchanged(found.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    projected: Tensor = block.project(heads.permute(1, 3, 0, 2, 4).reshape(samples, x.shape[1], -1))
    return projected


def _exchanged(parts: Tensor) -> Tensor:
    """Send each row to the rank of its number."""
    found: Tensor = _Exchange.apply(parts)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        del ctx
        parts = parts.contiguous()
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Exchange.forward(ctx, gradient)


def _on_part(step: Step, inputs: Tensor, target: Tensor) -> Any:
    """Run a step on the tokens of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return step(*(x.chunk(ranks, 1)[rank].contiguous() for x in (inputs, target)))


class _Stage(nn.Module):
    """Some layers of the model, and what stands before the first and behind the last."""

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(model.layers)
        self.layers = model.layers[count * rank // ranks : count * (rank + 1) // ranks]
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        if self.is_first:
            self.position = model.position
        if self.is_last:
            self.norm, self.head = model.norm, model.head
        if self.is_first or self.is_last:
            self.embed = model.embed

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage gets, or the logits."""
        if self.is_first:
            x = self.embed(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.is_last else x


class _Pipeline:
    """One step of a hand-divided model, whose embedding the first and the last stage share.

    Where the mesh has axes dp and tp, layers are divided over tp and gradients averaged over dp.
    """

    def __init__(self, model: nn.Module, lm: Any, mesh: DeviceMesh) -> None:
        line = mesh.get_group("pp")
        stages, stage = line.size(), line.rank()
        self._module = _Stage(model, stage, stages)
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            _divide_layers(self._module, mesh["tp"], lm)
        self._copies = mesh.get_group("dp") if "dp" in names else None
        self._line, self._last = line, dist.get_global_rank(line, stages - 1)
        self._ends = self._ends_of(mesh.mesh.movedim(names.index("pp"), 0).reshape(stages, -1))
        device = torch.device("cpu")
        self._schedule = Schedule1F1B(
            PipelineStage(self._module, stage, stages, device, group=line), MICROBATCHES, lm.loss_of
        )
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-3)

    @staticmethod
    def _ends_of(lines: Tensor) -> dist.ProcessGroup | None:
        """Return the group of first and last stage of this rank, if it is one of several."""
        found = None
        for ranks in lines[[0, -1]].t().tolist():
            group = dist.new_group(sorted(set(ranks)))
            found = group if dist.get_rank() in ranks else found
        return found if len(lines) > 1 else None

    def __call__(self, inputs: Tensor, target: Tensor) -> float:
        self._optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (inputs,) if self._module.is_first else ()
        wanted: dict[str, Any] = {}
        if self._module.is_last:
            wanted = {"target": target, "losses": losses}
        self._schedule.step(*given, **wanted)
        if self._ends:
            dist.all_reduce(self._module.embed.weight.grad, group=self._ends)
        self._average()
        self._optimizer.step()
        average = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(average, self._last, group=self._line)
        if self._copies:
            dist.all_reduce(average, group=self._copies)
            average /= self._copies.size()
        return float(average.item())

    def _average(self) -> None:
        """Average all gradients over dp at once."""
        if self._copies is None:
            return
        found = [param.grad for param in self._module.parameters() if param.grad is not None]
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in found]
        flat = torch.cat([part.flatten() for part in parts]).div_(self._copies.size())
        dist.all_reduce(flat, group=self._copies)
        for part, average in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(average.view_as(part))


def _attend(lm: Any, block: Any, x: Tensor) -> Tensor:
    """Attend with the heads of this rank, as a hand-divided model is written."""
    heads = (*x.shape[:2], -1, lm.WIDTH // lm.HEADS)
    query, key, value = (
        part(x).view(heads).transpose(1, 2) for part in (block.query, block.key, block.value)
    )
    found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    projected: Tensor = block.project(found.transpose(1, 2).flatten(2))
    return projected


class _Experts(nn.Module):
    """This rank's experts, and the exchange of tokens, as they are written by hand."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.up = nn.Parameter(whole.up.detach().chunk(self.ranks)[self.rank].clone())
        self.down = nn.Parameter(whole.down.detach().chunk(self.ranks)[self.rank].clone())
        for param in self.parameters():
            param.register_hook(lambda gradient: gradient / self.ranks)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the chosen experts, of all ranks."""
        own, exchange = len(self.up), cast("Any", all_to_all_single_autograd)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=own * self.ranks)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sizes = torch.stack([counts.view(self.ranks, own), arriving.view(self.ranks, own)])
        sent, received = sizes.sum(2).tolist()
        rows = exchange(x[order // index.size(1)], received, sent, dist.group.WORLD).wait()
        of = torch.arange(own).repeat(self.ranks).repeat_interleave(arriving)
        by = of.argsort(stable=True)
        parts = rows[by].split(sizes[1].sum(0).tolist())
        found = [
            nn.functional.linear(nn.functional.gelu(nn.functional.linear(part, up)), down)
            for part, up, down in zip(parts, self.up, self.down, strict=True)
        ]
        back = torch.cat(found)[by.argsort()]
        back = exchange(back, sent, received, dist.group.WORLD).wait()
        back = back * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // index.size(1), back)


def _plain_step(
    model: nn.Module,
    optimizer: Any,
    loss_of: Any,
    inputs: Tensor,
    target: Tensor,
    *,
    is_narrow: bool = False,
) -> float:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
        loss = loss_of(model(inputs), target)
    loss.backward()
    optimizer.step()
    average = loss.detach()
    dist.all_reduce(average)
    return float(average.item()) / dist.get_world_size()


if __name__ == "__main__":
    sys.exit(main())
