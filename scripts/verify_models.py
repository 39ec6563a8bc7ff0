"""Verify the models of `model_zoo` in every configuration of `model_table`.

Usage: python scripts/verify_models.py [--only MODEL[:COLUMN]]... [--limit SECONDS] [--jobs]
       python scripts/verify_models.py --sample DATE --minutes M [--note]
       python scripts/verify_models.py --plant [--only ...]

The safety net has to hold for the models of others.  Each cell trains three steps under
`verify: first_step`, in ranks that are forked from this process, and then two verdicts meet: that
of verification, about loss, gradients and buffers of the first step, and that of the table, about
losses, weights and buffers after three.  They must agree.  The cells begin with one configuration
of each model, and go on with the next of each.  `--jobs` runs them as jobs of `msrun verify` in
processes of their own, as a person does; those end after the first step.

`--sample` takes the cells in an order that its text decides, such as a date, while `--minutes`
last; `--note` writes the cells that are equal, with that text, to verified_cells.json.

`--plant` gives the last rank a wrong gradient of one parameter, by a hook of the script, and says
which parameter verification names.  A rank scales what it has of the parameter by 1.5.

The exit code is 1 if a cell differs from one process, if a planted error is not found or is given
another name, or if a cell says nothing at all.  A refusal by name and a step that cannot be
compared are printed and counted.  The same file is the script that `--jobs` starts, once a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from model_table import (  # type: ignore[import-not-found]  # beside this file
    COLUMNS,
    Trained,
    Training,
    build,
    prepare,
    run_cell,
    train,
    train_alone,
)
from model_zoo import ZOO, ZooModel  # type: ignore[import-not-found]  # beside this file
from torch import nn

import msrun

LIMIT = 180.0
VERIFIED = Path(__file__).with_name("verified_cells.json")
_MODEL = "MSRUN_VERIFIED_MODEL"
_NOT_EQUAL = 1
_SENTENCE = 200
_RIGHT, _DIFFERS, _NOTHING = (
    "equals one process",
    "is not that of one process",
    "nothing was verified",
)
_FACTOR = 1.5


# A cell in forked ranks.


def train_verified(entry: ZooModel, config: dict[str, Any]) -> Trained:
    """Train on this rank and verify the first step.

    Raises:
        ModelError: It differs.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found: Trained = train(entry, {**config, "verify": "first_step"})
    if torch.distributed.get_rank() > 0:
        return found
    texts = [*said.getvalue().splitlines(), *(str(warning.message) for warning in warned)]
    told = (text for mark in (_RIGHT, _NOTHING) for text in texts if mark in text)
    return found._replace(note=f": {next(told, f'{_NOTHING}, without a word')}")


def train_planted(entry: ZooModel, config: dict[str, Any]) -> Trained:
    """Train on this rank, with a wrong gradient on the last one.

    Raises:
        ModelError: Verification finds it, as it must.
    """
    config = {**config, "verify": "first_step"}
    with contextlib.redirect_stdout(io.StringIO()):
        found: Trained = train(entry, config, _plant)
    return found


def _plant(rt: msrun.Runtime, training: Training) -> None:
    """Have the last rank of each stage scale a gradient by a hook on the parameter."""
    axes = {axis: size for axis, size in rt.layout.axes.items() if axis != "pp"}
    is_last = all(rt.coordinate[axis] == size - 1 for axis, size in axes.items())
    wrong = planted(training.model)
    for name, param in training.model.named_parameters():
        if name == wrong:
            param.register_hook(lambda grad: grad * _FACTOR if is_last else grad)


def planted(model: nn.Module) -> str:
    """Return the name of the parameter whose gradient is made wrong: the last matrix."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1][-1]


def verify(entry: ZooModel, column: str, limit: float, alone: Trained) -> tuple[str, str]:
    """Return what a cell came to, in a word and in a sentence."""
    answer = run_cell(entry, column, limit, train_verified, alone)
    return _word(answer), answer


def verify_planted(entry: ZooModel, column: str, limit: float, alone: Trained) -> tuple[str, str]:
    """Return whether the error of a cell is found, in a word and in a sentence."""
    answer = run_cell(entry, column, limit, train_planted, alone)
    if _DIFFERS not in answer:
        return _word(answer).replace("equal", "missed"), answer
    named = answer.partition("gradients that differ: ")[2].partition(";")[0]
    return ("found" if planted(build(entry)) in named else "unnamed"), answer


def _word(answer: str) -> str:
    kind = answer.partition(":")[0]
    if _DIFFERS in answer:
        return "wrong"
    if _NOTHING in answer and kind == "equal":
        return "not"
    return {"equal": "equal", "refused": "refused", "-": "none"}.get(kind, "wrong")


# A cell as a job of its own.


def step(entry: ZooModel) -> None:
    """Run one step on this rank, which `msrun verify` compares and ends the job after."""
    torch.set_num_threads(1)
    model = build(entry)
    rt = msrun.init()
    training = prepare(rt, entry, model)
    rt.step(training.model, training.optimizer, *training.batches[0])


def verify_job(name: str, column: str, limit: float) -> tuple[str, str]:
    """Return what `msrun verify` says of a cell, in a word and in a sentence."""
    entry = ZOO[name]
    ranks, make = COLUMNS[column]
    config = make(entry, build(entry))
    if config is None:
        return "none", "no plan"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "parallel.yaml")
        path.write_text(json.dumps({"parallel": config}))
        command = [sys.executable, "-m", "msrun", "verify", "--worker-num", str(ranks)]
        command += ["--log-dir", f"{folder}/logs", "--parallel", str(path), __file__]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, _MODEL: name},
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "wrong", f"no answer in {limit:g} s"
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    text = next((line for line in lines if _RIGHT in line), "")
    if done.returncode == 0 and text:
        return "equal", text
    for mark, word in ((_DIFFERS, "wrong"), (_NOTHING, "not")):
        if text := next((line for line in lines if mark in line), ""):
            return word, text
    text = next((line for line in lines if "Error: " in line), "")
    return ("refused" if "msrun.errors." in text else "wrong"), text or "\n".join(lines)


# All cells.


def cells(only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the cells that are wanted: one configuration of each model, then the next of each."""
    columns = list(COLUMNS)
    for shift in range(len(columns)):
        for number, name in enumerate(ZOO):
            column = columns[(number + shift) % len(columns)]
            if not only or {name, f"{name}:{column}"} & {*only}:
                yield name, column


def chosen(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the cells that are wanted, in their order, while there is time."""
    found = list(cells(given.only))
    if given.sample:
        random.Random(given.sample).shuffle(found)  # noqa: S311 - no secret
    began = time.monotonic()
    for cell in found:
        if given.minutes and time.monotonic() - began >= 60 * given.minutes:
            return
        yield cell


def note(found: Sequence[tuple[str, str]], day: str) -> None:
    """Write which cells were equal to one process, and when last."""
    noted = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    for name, column in found:
        noted.setdefault(name, {})[column] = day
    VERIFIED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


def verify_all(given: argparse.Namespace) -> Counter[str]:
    """Verify the cells; return how many came to what."""
    counts: Counter[str] = Counter()
    equal: list[tuple[str, str]] = []
    alone: dict[str, Trained] = {}
    for name, column in chosen(given):
        entry = ZOO[name]
        if entry.needs and importlib.util.find_spec(entry.needs) is None:
            word, sentence = "missing", f"{entry.needs} is not installed"
        elif given.jobs:
            word, sentence = verify_job(name, column, given.limit)
        else:
            work = verify_planted if given.plant else verify
            try:
                one = alone[name] = alone.get(name) or train_alone(entry)
                word, sentence = work(entry, column, given.limit, one)
            except ImportError as error:
                word, sentence = "missing", str(error)
        counts[word] += 1
        equal += [(name, column)] if word == "equal" else []
        if word != "none":
            print(f"{name}:{column}: {word}: {' '.join(sentence.split())[:_SENTENCE]}", flush=True)
    if given.note:
        note(equal, given.sample)
    return counts


def main() -> int:
    """Verify the cells; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="MODEL[:COLUMN]")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS")
    parser.add_argument("--jobs", action="store_true", help="as jobs of `msrun verify`")
    parser.add_argument("--sample", default="", metavar="DATE", help="cells in an order by it")
    parser.add_argument("--minutes", type=float, default=0.0, help="at most for so long")
    parser.add_argument("--note", action="store_true", help="write which cells are equal")
    parser.add_argument("--plant", action="store_true", help="with a wrong gradient on one rank")
    given = parser.parse_args()
    if given.jobs and given.plant:
        parser.error("--plant is for forked ranks (leave out --jobs)")
    if given.note and not given.sample:
        parser.error("--note needs --sample DATE")
    known = {f"{name}:{column}" for name in ZOO for column in COLUMNS} | {*ZOO}
    if unknown := [cell for cell in given.only if cell not in known]:
        parser.error(
            f"--only {unknown[0]}: no such cell (choose MODEL or MODEL:COLUMN, of the models "
            f"{'; '.join(ZOO)} and the columns {'; '.join(COLUMNS)})"
        )
    torch.set_num_threads(1)  # threads do not survive a fork
    counts = verify_all(given)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    bad = counts["wrong"] + counts["missed"] + counts["unnamed"]
    return _NOT_EQUAL if bad or not counts else 0


if __name__ == "__main__":
    if own := os.environ.get(_MODEL):
        step(ZOO[own])
    else:
        sys.exit(main())
