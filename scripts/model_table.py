"""Train real models in every configuration beside one process, and write docs/models.md.

Usage: python scripts/model_table.py [run] [--only MODEL[:COLUMN]]... [--again] [--limit SECONDS]
       python scripts/model_table.py page [--check]

`run` trains each cell in ranks of its own, and keeps what it came to in scripts/model_table.json,
cell by cell: it may be stopped and started again, and several may run side by side.  A cell that is
there is not run again without `--again`.  `page` writes the table from that file.

Every cell trains three steps of AdamW in float64, so that a difference is no rounding, and compares
the losses, all weights and all buffers.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.util
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from model_page import render_page  # type: ignore[import-not-found]  # beside this file
from model_zoo import ZOO, ZooModel  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch exports it

import msrun
from msrun.errors import UsageError

ROOT = Path(__file__).parents[1]
CELLS = ROOT / "scripts" / "model_table.json"
PAGE = ROOT / "docs" / "models.md"
STEPS = 3
LIMIT = 120.0
_LOSS_GAP, _WEIGHT_GAP = 1e-8, 1e-6
# Of a loss that the model itself computes in float32.
_ROUNDED_LOSS_GAP = 1e-6
_SENTENCE = 500

_STAGES = {"stages": "auto", "microbatches": 2}


class Trained(NamedTuple):
    """Losses, weights and buffers by all their names, and what else there is to say."""

    losses: list[float]
    tensors: dict[str, Tensor]
    note: str = ""


# Trains one cell on a rank.
Work = Callable[[ZooModel, dict[str, Any]], Trained]
# Column -> ranks, and the configuration for a model.
Make = Callable[[ZooModel, nn.Module], dict[str, Any] | None]
COLUMNS: dict[str, tuple[int, Make]] = {
    "dp": (2, lambda *_: {}),
    "zero 1": (2, lambda *_: {"optimizer": {"zero": 1}}),
    "zero 2": (2, lambda *_: {"optimizer": {"zero": 2}}),
    "zero 3": (2, lambda *_: {"optimizer": {"zero": 3}}),
    "tp": (2, lambda entry, _: _tensor_parallel(entry)),
    "pp": (
        2,
        lambda *_: {"mesh": {"pp": 2}, "pipeline": _STAGES},
    ),
    "recompute": (2, lambda entry, model: _recompute(entry, model)),  # noqa: PLW0108 - see below
    "accumulate": (2, lambda *_: {"accumulate": 2}),
    "auto": (2, lambda *_: {"mode": "auto", "mesh": "auto"}),
    "dp x tp, zero 1": (
        4,
        lambda entry, _: (
            _tensor_parallel(entry, dp=2, optimizer={"zero": 1}) if entry.is_combined else None
        ),
    ),
    "dp x pp": (
        4,
        lambda entry, _: (
            {"mesh": {"pp": 2, "dp": 2}, "pipeline": _STAGES} if entry.is_combined else None
        ),
    ),
}


def _tensor_parallel(entry: ZooModel, dp: int = 1, **more: Any) -> dict[str, Any] | None:
    if not entry.plan:
        return None
    return {"mesh": {"dp": dp, "tp": 2}, "plan": entry.plan, **more}


def _recompute(entry: ZooModel, model: nn.Module) -> dict[str, Any]:
    lists = [name for name in entry.blocks if isinstance(_submodule(model, name), nn.Module)]
    names = []
    for name in lists:
        part = model.get_submodule(name)
        is_list = isinstance(part, nn.ModuleList | nn.Sequential)
        names += [f"{name}.{i}" for i, _ in enumerate(part.children())] if is_list else [name]
    return {"recompute": {"modules": names}}


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


# One cell, in its ranks.


def batches(entry: ZooModel) -> list[tuple[Any, Tensor | None]]:
    """Return inputs and target of the global batches that every number of ranks trains on."""
    torch.manual_seed(7)
    return [(entry.inputs(), entry.target and entry.target()) for _ in range(STEPS)]


def _share(inputs: Any, share: int, count: int) -> Any:
    """Return the samples of one of `count` ranks."""
    if isinstance(inputs, dict):
        return {name: _share(value, share, count) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_share(value, share, count) for value in inputs)
    return None if inputs is None else inputs.chunk(count)[share]


def _by_position(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Return a batch by name in the order of the forward: mode auto takes no names."""
    names = list(inspect.signature(model.forward).parameters)
    if not set(inputs) <= set(names):  # of adapters, which pass all on
        below: Any = model
        names = list(inspect.signature(below.get_base_model().forward).parameters)
    last = max(names.index(name) for name in inputs)
    return tuple(inputs.get(name) for name in names[: last + 1])


def build(entry: ZooModel) -> nn.Module:
    """Return the model with the weights that it has everywhere."""
    torch.manual_seed(3)
    model: nn.Module = entry.make().double().train()
    return model


def train_alone(entry: ZooModel) -> Trained:
    """Train in one process by plain torch."""
    model = build(entry)
    optimizer = entry.optimizer(model.parameters())
    losses = []
    for inputs, target in batches(entry):
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        loss = output.loss if entry.loss is None else entry.loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {name: tensor.detach().clone() for name, tensor in _all_names(model)})


def _all_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by all their names: a stage may have a shared one under a later name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


class Training(NamedTuple):
    """What a rank trains.

    Args:
        model: The model that `rt.shard` has returned.
        optimizer: That of its parameters.
        batches: This rank's part of each global batch, behind these two the arguments of `rt.step`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Any, ...]]


def prepare(rt: msrun.Runtime, entry: ZooModel, model: nn.Module) -> Training:
    """Return what this rank trains, of a model from `build`."""
    given = batches(entry)
    is_auto = rt.config.mode == "auto"
    if is_auto and isinstance(given[0][0], dict):
        given = [(_by_position(model, inputs), target) for inputs, target in given]
    sample: Any = given[0][0] if is_auto or rt.config.pipeline else None
    if sample is not None and rt.config.mesh != "auto":  # of one rank; else of all
        sample = _share(sample, 0, rt.layout.axes.get("dp", 1))
    model = rt.shard(model, sample)
    optimizer = rt.optimizer(entry.optimizer(model.parameters()))
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    parts = []
    for inputs, target in given:
        part = _share(inputs, share, count)
        batch = part if isinstance(part, tuple) else (part,)
        if entry.loss is not None:
            batch = (entry.loss, *batch, _share(target, share, count))
        parts.append(batch)
    return Training(model, optimizer, parts)


def train(
    entry: ZooModel,
    config: dict[str, Any],
    change: Callable[[msrun.Runtime, Training], None] | None = None,
) -> Trained:
    """Train under `config` on this rank; return losses, and on rank 0 whole tensors."""
    from msrun.parallel.verify.gather import to_first_rank

    model = build(entry)
    rt = msrun.init(config)
    training = prepare(rt, entry, model)
    if change:
        change(rt, training)
    losses = [
        rt.step(training.model, training.optimizer, *batch).item() for batch in training.batches
    ]
    tensors = list(_all_names(training.model))
    whole: dict[str, Tensor] = {}
    to_first_rank(rt.context, [(name, t.detach()) for name, t in tensors], whole.__setitem__)
    return Trained(losses, whole)


def _is_rounded(losses: Iterable[float]) -> bool:
    """Return whether losses are numbers of float32, as transformers computes its own."""
    return all(struct.unpack("f", struct.pack("f", loss))[0] == loss for loss in losses)


def compare(found: Trained, expected: Trained) -> str:
    """Return `equal`, or what is wrong."""
    pairs = zip(found.losses, expected.losses, strict=True)
    gap = max(abs(a - b) / max(abs(b), 1.0) for a, b in pairs)
    if not gap <= (_ROUNDED_LOSS_GAP if _is_rounded(expected.losses) else _LOSS_GAP):
        return f"wrong: loss off by {gap:.1e}"
    for name, tensor in found.tensors.items():
        other = expected.tensors.get(name)
        if other is None:
            return f"wrong: one process has no {name}"
        if other.shape != tensor.shape:
            return f"wrong: {name} has shape {tuple(tensor.shape)}"
        own, other = tensor.double(), other.double()
        away = (
            float(torch.where(own == other, 0.0, (own - other).abs()).max()) if own.numel() else 0
        )
        if not away <= _WEIGHT_GAP:
            return f"wrong: {name} off by {away:.1e}"
    # A stage may have a shared weight under another of its names.
    there = expected.tensors
    values = [there[name] for name in found.tensors if name in there]
    missing = [
        name
        for name, tensor in there.items()
        if name not in found.tensors and not any(torch.equal(tensor, value) for value in values)
    ]
    return f"wrong: {missing[0]} is missing" if missing else "equal"


def _rank(
    work: Work,
    cell: tuple[ZooModel, dict[str, Any]],
    place: tuple[int, int],
    folder: str,
    pipe: Any,
) -> None:
    rank, world_size = place
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a device
        os.dup2(nowhere.fileno(), 1)
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
        )
        dist.barrier()
        found = work(*cell)
        expected = Trained(*torch.load(f"{folder}/expected.pt"))
        answer = compare(found, expected) if rank == 0 else "equal"
        if not torch.isfinite(torch.tensor(found.losses)).all():
            answer = "wrong: the loss is no number"
        answer += found.note
    except UsageError as error:
        answer = f"refused: {error.message}" + (f"; hint: {error.hint}" if error.hint else "")
    except BaseException as error:  # noqa: BLE001 - it is the answer
        place_of = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().partition("\n")[0]
        where = f"{Path(place_of.filename).name}:{place_of.lineno}"
        answer = f"traceback: {type(error).__name__}: {text} ({where})"
    pipe.send(" ".join(answer.split())[:_SENTENCE])
    pipe.recv()  # until all have answered: a peer may still talk to this one


def run_cell(
    entry: ZooModel, column: str, limit: float, work: Work = train, alone: Trained | None = None
) -> str:
    """Return what one cell comes to, whose ranks do `work`; `alone` is what `train_alone` gave."""
    world_size, make = COLUMNS[column]
    config = make(entry, build(entry))
    if config is None:
        return "-"
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(tuple(alone or train_alone(entry)), f"{folder}/expected.pt")
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank, args=(work, (entry, config), (rank, world_size), folder, there)
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            answers = _collect(pipes, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return _worst(answers)


def _collect(pipes: list[Any], limit: float) -> list[str]:
    """Return the answers of all ranks; after a failure the others get little more time."""
    answers: dict[int, str] = {}
    deadline = time.monotonic() + limit
    while len(answers) < len(pipes) and time.monotonic() < deadline:
        waiting: list[Any] = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        left = max(0.0, deadline - time.monotonic())
        for pipe in multiprocessing.connection.wait(waiting, left):
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipes[rank].recv()
            except EOFError:
                answers[rank] = "traceback: the process died"
            if not answers[rank].startswith("equal"):
                deadline = min(deadline, time.monotonic() + 5)
    return [answers.get(rank, "hung") for rank in range(len(pipes))]


def _worst(answers: list[str]) -> str:
    """Return the answer of the cell; a rank whose peer failed may hang, which is no answer."""
    for kind in ("traceback", "wrong", "refused", "hung"):
        found = [answer for answer in answers if answer.startswith(kind)]
        if kind == "refused" and found:
            return found[0] if len(found) == len(answers) else f"{found[0]} (on some ranks)"
        if found:
            return found[0]
    return next((answer for answer in answers if answer != "equal"), "equal")  # with its note


# The file of cells.


@contextmanager
def _locked(file: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Yield the cells, and write them afterwards; other processes wait meanwhile."""
    lock = Path(tempfile.gettempdir(), "msrun-model-table.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cells = read_cells(file)
        yield cells
        text = json.dumps(cells, indent=1, ensure_ascii=False) + "\n"
        part = file.with_suffix(f".{os.getpid()}.part")  # others read without the lock
        part.write_text(text, encoding="utf-8")
        part.replace(file)


def read_cells(file: Path = CELLS) -> dict[str, dict[str, str]]:
    """Return model -> column -> what it came to."""
    cells: dict[str, dict[str, str]] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    )
    return cells


def wanted(only: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield model and column of the cells that `--only` names; all without it."""
    asked = [text.partition(":") for text in only]
    for model in ZOO:
        for column in COLUMNS:
            if not asked or any(
                name in ("", model) and at in ("", column) for name, _, at in asked
            ):
                yield model, column


def run(only: Iterable[str], limit: float, *, is_again: bool, file: Path = CELLS) -> int:
    """Run the cells; return 1 if one of them is wrong or ended with a traceback."""
    bad = 0
    for model, column in wanted(only):
        entry = ZOO[model]
        if entry.needs and importlib.util.find_spec(entry.needs) is None:
            print(f"{model}: {entry.needs} is not installed")
            continue
        if not is_again and column in read_cells(file).get(model, {}):
            continue
        start = time.monotonic()
        answer = run_cell(entry, column, limit)
        bad += answer.startswith(("wrong", "traceback", "hung"))
        print(f"{model}, {column}: {answer}  ({time.monotonic() - start:.0f} s)", flush=True)
        with _locked(file) as cells:
            cells.setdefault(model, {})[column] = answer
    return int(bad > 0)


# The page.


def page(cells: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page with `cells`."""
    text: str = render_page(list(ZOO), list(COLUMNS), cells)
    return text


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=["run", "page"], default="run")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL[:COLUMN]")
    parser.add_argument("--again", action="store_true", help="run cells that are there, too")
    parser.add_argument("--cells", type=Path, default=CELLS, help="file of the cells")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one cell")
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    given = parser.parse_args()
    if given.what == "run":
        torch.set_num_threads(1)  # threads do not survive a fork
        return run(given.only, given.limit, is_again=given.again, file=given.cells)
    text = page(read_cells(given.cells))
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
