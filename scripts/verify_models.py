"""Run `msrun verify` over the models of `model_zoo` in every configuration of `model_table`.

Usage: python scripts/verify_models.py [--only MODEL[:COLUMN]]... [--limit SECONDS]

The safety net has to hold for the models of others: each cell runs one step under `msrun verify`,
in a job of its own, and prints what that came to.  The exit code is 1 if a cell differs from one
process, or says nothing at all.  A refusal by name and a step that cannot be compared are printed
and counted.  The same file is the script that `msrun verify` starts, once a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from model_table import COLUMNS, build, prepare  # type: ignore[import-not-found]  # beside this file
from model_zoo import ZOO, ZooModel  # type: ignore[import-not-found]  # beside this file

import msrun

LIMIT = 180.0
_MODEL = "MSRUN_VERIFIED_MODEL"
_NOT_EQUAL = 1
_SENTENCE = 200


def step(entry: ZooModel) -> None:
    """Run one step on this rank, which `msrun verify` compares and ends the job after."""
    torch.set_num_threads(1)
    model = build(entry)
    rt = msrun.init()
    training = prepare(rt, entry, model)
    rt.step(training.model, training.optimizer, *training.batches[0])


def verify(name: str, column: str, limit: float) -> tuple[str, str]:
    """Return what a cell came to, in a word and in a sentence."""
    entry = ZOO[name]
    ranks, make = COLUMNS[column]
    try:
        config = make(entry, build(entry))
    except ImportError as error:
        return "missing", str(error)
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
    text = next((line for line in lines if "equals one process" in line), "")
    if done.returncode == 0 and text:
        return "equal", text
    for mark, word in (("is not that of one process", "wrong"), ("nothing was verified", "not")):
        if text := next((line for line in lines if mark in line), ""):
            return word, text
    text = next((line for line in lines if "Error: " in line), "")
    return ("refused" if "msrun.errors." in text else "wrong"), text or "\n".join(lines)


def main() -> int:
    """Verify the cells; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="MODEL[:COLUMN]")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS")
    given = parser.parse_args()
    cells = {f"{name}:{column}" for name in ZOO for column in COLUMNS} | {*ZOO}
    if unknown := [cell for cell in given.only if cell not in cells]:
        parser.error(
            f"--only {unknown[0]}: no such cell (choose MODEL or MODEL:COLUMN, of the models "
            f"{'; '.join(ZOO)} and the columns {'; '.join(COLUMNS)})"
        )
    counts: Counter[str] = Counter()
    for name in ZOO:
        for column in COLUMNS:
            if given.only and not {name, f"{name}:{column}"} & {*given.only}:
                continue
            word, sentence = verify(name, column, given.limit)
            counts[word] += 1
            print(f"{name}:{column}: {word}: {sentence[:_SENTENCE]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return _NOT_EQUAL if counts["wrong"] or not counts else 0


if __name__ == "__main__":
    if own := os.environ.get(_MODEL):
        step(ZOO[own])
    else:
        sys.exit(main())
