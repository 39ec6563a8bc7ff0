"""Draw models with quirks, train them in a drawn configuration, and compare with one process.

Usage: python scripts/fuzz_models.py [--seed N] [--draws N | --minutes M] [--keep FILE]
       python scripts/fuzz_models.py --case "CONFIGURATION: QUIRK, QUIRK, ..." [--case ...]

Each seed is one draw.  It comes to `equal`, `refused` (one sentence, on all ranks), `warned` (what
data-parallel ranks alone may do is other than one process, and a sentence says so), `wrong`,
`traceback` or `hung`; the last three fail, and the draw is made smaller: quirk by quirk is left out
while it still fails so.  What is left is printed as a case, which `--case` runs again, whatever
later versions of this file draw.  tests/torch/models/fuzz_cases.txt has those that once failed;
`--keep` adds new ones to a file of that form.  With `--minutes` the first seed is a fresh one, if
none is given, and printed.
"""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import argparse
import importlib
import random
import secrets
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz_forms import BLOCKS, FORMS
from fuzz_loops import LIBRARY_LOOPS, LOOPS
from fuzz_quirks import SAMPLES
from fuzz_ranks import FuzzRanks
from fuzz_scripts import AFTER, BEFORE, LOSSES, PENALTIES
from fuzz_training import (
    Case,
    Learned,
    alone,
    sharded,
)

import msrun
import msrun.parallel.preload
from msrun.errors import UsageError

_GAP = 1e-7
# Where a parameter has fewer digits.
_WIDE_GAP = 1e-5
_BLOCKS_MAX = 3

_PLAN = [{"match": "*.up", "style": "colwise"}, {"match": "*.down", "style": "rowwise"}]
_HEAD = [{"match": "head", "style": "colwise"}]
_PIPELINE = {"stages": "auto", "microbatches": 2}
_RECOMPUTE = {"recompute": {"modules": ["blocks.0", "blocks.1"]}}
# name -> ranks, configuration.
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, accumulate": (1, {"accumulate": 2}),
    "dp": (2, {}),
    "dp 4": (4, {}),
    "dp, module buckets": (2, {"reduce": {"fuse": "module"}}),
    "dp, accumulate": (2, {"accumulate": 2}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 1 of 4": (4, {"optimizer": {"zero": 1}, "accumulate": 2}),
    "zero 2, threshold": (2, {"optimizer": {"zero": 2, "threshold": 300}}),
    "zero 2, accumulate": (2, {"optimizer": {"zero": 2}, "accumulate": 2}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "zero 3 of 4": (4, {"optimizer": {"zero": 3}}),
    "recompute": (2, {"recompute": {"modules": ["blocks.0"]}}),
    "zero 3, recompute": (2, {"optimizer": {"zero": 3}} | _RECOMPUTE),
    "tp": (2, {"mesh": {"tp": 2}, "plan": _PLAN}),
    "tp by name": (2, {"mesh": {"tp": 2}, "plan": "auto_tp"}),
    "tp, recompute": (2, {"mesh": {"tp": 2}, "plan": _PLAN} | _RECOMPUTE),
    "tp, accumulate": (2, {"mesh": {"tp": 2}, "plan": _PLAN, "accumulate": 2}),
    "tp of all": (2, {"mesh": {"tp": 2}, "plan": [*_PLAN, *_HEAD]}),
    "tp, dp": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": _PLAN}),
    "tp of all, dp": (4, {"mesh": {"dp": 2, "tp": 2}, "plan": [*_PLAN, *_HEAD]}),
    "tp, zero 1": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": _PLAN, "optimizer": {"zero": 1}},
    ),
    "tp, zero 3": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": _PLAN, "optimizer": {"zero": 3}},
    ),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": _PIPELINE}),
    "pp gpipe": (2, {"mesh": {"pp": 2}, "pipeline": _PIPELINE | {"schedule": "gpipe"}}),
    "pp interleaved": (
        2,
        {"mesh": {"pp": 2}, "pipeline": _PIPELINE | {"schedule": "interleaved"}},
    ),
    "pp, recompute": (2, {"mesh": {"pp": 2}, "pipeline": _PIPELINE} | _RECOMPUTE),
    "pp, one part": (2, {"mesh": {"pp": 2}, "pipeline": _PIPELINE | {"microbatches": 1}}),
    "pp, dp": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": _PIPELINE}),
    "pp, zero 1": (
        4,
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": _PIPELINE, "optimizer": {"zero": 1}},
    ),
    "pp, tp": (4, {"mesh": {"pp": 2, "tp": 2}, "pipeline": _PIPELINE, "plan": _PLAN}),
    "auto": (2, {"mode": "auto", "mesh": "auto"}),
    "auto dp": (2, {"mode": "auto", "mesh": {"dp": 2}}),
    "auto tp": (2, {"mode": "auto", "mesh": {"tp": 2}}),
    "auto dp, tp": (4, {"mode": "auto", "mesh": {"dp": 2, "tp": 2}}),
    "auto pp": (2, {"mode": "auto", "mesh": {"pp": 2}, "pipeline": _PIPELINE}),
}
# Blocks that draw numbers: parts of a batch and stages have their own, as with another seed.
_DRAWING = ("python number", "drawn number")
# Blocks that draw numbers for each sample: each rank has its own.
_DRAWING_SAMPLES = ("noise", "stochastic depth")
_SUMS = ("sum", "scaled sum", "column sums", "mean and sum")
_GRADIENT_HOOKS = ("gradient hook", "hook after accumulation", "hook after accumulation later")


def read_case(text: str) -> Case:
    """Return the case that `str` of it gave."""
    names = [name for name in CONFIGS if text.startswith(f"{name}: ")]
    config = max(names, key=len)
    return Case(config, tuple(text.removeprefix(f"{config}: ").split(", ")))


def draw(seed: int, *, of_libraries: bool = False) -> Case:
    """Return the case of a seed, with a way to train of other libraries on demand."""
    numbers = random.Random(seed)  # noqa: S311 - no secret
    config = numbers.choice(list(CONFIGS))
    quirks = numbers.choices(list(BLOCKS), k=numbers.randint(1, _BLOCKS_MAX))
    for table, most in ((BEFORE, 2), (AFTER, 1)):
        if numbers.random() < 0.3:  # noqa: PLR2004 - most cases have few quirks
            quirks += numbers.sample(list(table), numbers.randint(1, most))
    quirks.append(numbers.choice(list(LOSSES)) if numbers.random() < 0.6 else "mean")  # noqa: PLR2004
    for table in (LOOPS, FORMS):
        first = next(iter(table))
        quirks.append(numbers.choice(list(table)) if numbers.random() < 0.5 else first)  # noqa: PLR2004
    if of_libraries:
        quirks.append(numbers.choice(list(LIBRARY_LOOPS)))
        quirks = [quirk for quirk in quirks if quirk not in LOOPS]
    if numbers.random() < 0.1:  # noqa: PLR2004
        quirks.append(numbers.choice(list(PENALTIES)))
    return Case(config, tuple(quirks))


# One case, in its ranks.


def _config(case: Case) -> dict[str, Any]:
    """Return the configuration; dropout takes the masks of one process."""
    _, config = CONFIGS[case.config]
    exact = {"dropout": "exact"} if case.has("dropout") and "mode" not in config else {}
    if "recompute" in config:
        modules = config["recompute"]["modules"][: len(case.blocks)]
        config = config | {"recompute": {"modules": modules}}
    return config | exact


def _data_ranks(config: Mapping[str, Any]) -> int:
    """Return how many ranks have samples of their own; ranks without a mesh all have."""
    mesh = config.get("mesh", {"dp": dist.get_world_size()})
    return 1 if mesh == "auto" else int(mesh.get("dp", 1))


def _no_case(case: Case) -> str:
    """Return why a case has no one answer; empty if it has."""
    is_split = "accumulate" in CONFIGS[case.config][1] or "mode" in CONFIGS[case.config][1]
    if case.has("dropout") and (is_split or case.loop.parts > 1):
        return "these have masks of their own, as with another seed"
    if case.loop.is_plain and "auto" in case.config:
        return "a plain loop of a plan has the mean of the losses of ranks"
    if case.loop.parts > 1 and (problem := _no_case_of_parts(case)):
        return problem
    return _no_case_of_layout(case)


def _no_case_of_layout(case: Case) -> str:
    """Return why a case has no one answer in its configuration; empty if it has."""
    config = CONFIGS[case.config][1]
    is_halved = case.loop.forwards > 1 and case.has(*_SUMS)
    if is_halved and SAMPLES // _data_ranks(config) == case.loop.forwards:
        return "a part of a sum is a mean where a rank has as many samples"
    is_later = any(quirk.endswith("later") for quirk in case.quirks)
    if is_later and case.has("second names") and "pipeline" in config:
        return "a stage may have a parameter by its second name alone"
    is_penalized = any(quirk.startswith("gradient penalty") for quirk in case.quirks)
    if case.loop.adds_group and is_penalized and "pipeline" in config:
        return "a stage has only what the optimizer gets later, and torch makes none of nothing"
    return ""


def _no_case_of_parts(case: Case) -> str:
    """Return why a case with a loop of parts has no one answer; empty if it has."""
    if case.loop.is_plain and case.has("gathered contrast", *_SUMS):
        return "one process has its own parts, too"
    if any("batch norm" in quirk for quirk in case.quirks):
        return "a loop of parts has the statistics of each"
    written = ("momentum copy", "buffer counter", "buffer average", "spectral norm")
    if case.has(*written, "norms with hooks", "attribute counter"):
        return "a loop of parts changes what forward writes in each"
    is_alone = _data_ranks(CONFIGS[case.config][1]) == 1
    if is_alone and case.has(*_GRADIENT_HOOKS):
        return "one data-parallel rank is as plain torch, which runs a hook in each backward pass"
    is_mean = case.has("mean") and not any(q.startswith("gradient penalty") for q in case.quirks)
    if is_alone and case.loop.is_plain and not is_mean:
        return "one data-parallel rank is as plain torch, which has the loss of each part"
    return ""


def attempt(case: Case) -> str:
    """Return what this rank says of a case; called in each rank of a process group."""
    if problem := _no_case(case):
        return f"invalid: {problem}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            expected = alone(case)
        except Exception as error:  # noqa: BLE001 - then the draw itself makes no sense
            return f"invalid: {type(error).__name__}: {error}"
        if not expected.is_finite:
            return "invalid: one process diverges"
        try:
            return _judge(case, sharded(case, _config(case)), expected, caught)
        except UsageError as error:
            return f"refused: {error.message}"
        except BaseException as error:  # noqa: BLE001 - it is the answer
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().partition("\n")[0]
            where = f"{Path(last.filename).name}:{last.lineno}"
            return f"traceback: {type(error).__name__}: {text} ({where})"
        finally:
            msrun.init().close()


def _judge(
    case: Case, found: Learned, expected: Learned, caught: list[warnings.WarningMessage]
) -> str:
    """Return what a case that was trained comes to, with what was warned of."""
    config = CONFIGS[case.config][1]
    has_parts = case.loop.parts > 1 or {"accumulate", "pipeline", "mode"} & set(config)
    of_samples = case.has(*_DRAWING_SAMPLES) and (has_parts or _data_ranks(config) > 1)
    if of_samples or (case.has(*_DRAWING) and has_parts):
        return "ran: numbers are drawn by each part"
    answer = _compare(case, found, expected) if dist.get_rank() == 0 else "equal"
    return f"warned: {answer}" if answer.startswith("wrong") and _is_said(caught) else answer


def _compare(case: Case, found: Learned, expected: Learned) -> str:
    allowed = _WIDE_GAP if case.has("mixed types") else _GAP
    pairs = [("loss", torch.tensor(found.losses), torch.tensor(expected.losses))]
    pairs += [
        ("logits", own, whole[: len(own)])
        for own, whole in zip(found.logits, expected.logits, strict=True)
    ]
    pairs += [
        (name, tensor, expected.tensors[name])
        for name, tensor in found.tensors.items()
        if name in expected.tensors
    ]
    for name, own, other in pairs:
        size = float(other.abs().max().clamp(min=1)) if own.numel() else 1.0
        gap = float((own - other).abs().max()) / size if own.numel() else 0.0
        if not gap <= allowed:
            return f"wrong: {name} off by {gap:.1e}"
    # A stage may have a shared weight under another of its names.
    values = [expected.tensors[name] for name in found.tensors if name in expected.tensors]
    missing = [
        name
        for name, tensor in expected.tensors.items()
        if name not in found.tensors and not any(torch.equal(tensor, value) for value in values)
    ]
    return f"wrong: {missing[0]} is missing" if missing else "equal"


def _is_said(caught: list[warnings.WarningMessage]) -> bool:
    """Return whether msrun said that a part of the batch may not have the loss of the whole."""
    said = [str(item.message) for item in caught]
    return any(
        text.startswith("msrun: the loss") or "another number for the whole batch" in text
        for text in said
    )


# What all ranks say, and the command.


def worst(answers: list[str]) -> str:
    """Return the answer of all ranks together.

    Ranks that wait for one that refused are no hang: its end is that of the job.
    """
    refused = [answer for answer in answers if answer.startswith("refused")]
    if refused:
        answers = [answer for answer in answers if answer != "hung"]
    for kind in ("traceback", "wrong", "hung", "invalid"):
        found = [answer for answer in answers if answer.startswith(kind)]
        if found:
            return found[0]
    if refused and len(refused) < len(answers):
        return f"traceback: on some ranks alone: {refused[0]}"
    warned = [answer for answer in answers if answer.startswith("warned")]
    return [*refused, *warned, "equal"][0]


def make_ranks() -> FuzzRanks:
    """Return ranks that wait for cases."""
    return FuzzRanks(attempt, worst)


def ask(ranks: FuzzRanks, case: Case) -> str:
    """Return what a case comes to."""
    size, _ = CONFIGS[case.config]
    answer: str = ranks.ask(case, size)
    return answer


def has_failed(answer: str) -> bool:
    """Return whether a case was neither right nor refused."""
    return answer.startswith(("wrong", "traceback", "hung"))


def smaller(ranks: FuzzRanks, case: Case, answer: str) -> tuple[Case, str]:
    """Return a case with fewer quirks that fails in the same way."""
    kind = answer.partition(":")[0]
    index = 0
    while index < len(case.quirks):
        fewer = Case(case.config, case.quirks[:index] + case.quirks[index + 1 :])
        again = ask(ranks, fewer)
        if again.partition(":")[0] == kind:
            case, answer = fewer, again
        else:
            index += 1
    return case, answer


def drawn(given: argparse.Namespace) -> Iterator[tuple[int | None, Case]]:
    """Yield the cases that the command line asks for, with their seeds, while there is time."""
    yield from ((None, read_case(text)) for text in given.case or [])
    if given.case:
        return
    first, draws = given.seed, given.draws
    if first is None:
        first = secrets.randbelow(2**32) if given.minutes else 0
    if given.minutes and draws is None:
        draws = sys.maxsize
    print(f"seeds from {first} on", flush=True)
    began = time.monotonic()
    for seed in range(first, first + (draws or 1)):
        if given.minutes and time.monotonic() - began >= 60 * given.minutes:
            return
        yield seed, draw(seed, of_libraries=given.libraries)


def run(ranks: FuzzRanks, given: argparse.Namespace) -> Counter[str]:
    """Run what the command line asks for; return how many cases came to what."""
    kinds: Counter[str] = Counter()
    for seed, case in drawn(given):
        if not case.config.startswith(given.only):
            kinds["left out"] += 1
            continue
        answer = ask(ranks, case)
        kinds[answer.partition(":")[0]] += 1
        if has_failed(answer):
            print(f"seed {seed}: {case}\n  {answer}", flush=True)
            least, said = smaller(ranks, case, answer)
            print(f"  smallest: {least}\n  {said}", flush=True)
            if given.keep:
                with given.keep.open("a", encoding="utf-8") as file:
                    file.write(f"# seed {seed}: {said}\n{least}\n")
        elif given.case or (given.draws in (None, 1) and not given.minutes):
            print(f"seed {seed}: {case}\n  {answer}", flush=True)
    return kinds


def main() -> int:
    """Do what the command line says; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="first seed; 0, or a fresh one with --minutes")
    parser.add_argument("--draws", type=int, help="1, or as many as there is time for")
    parser.add_argument("--minutes", type=float, default=0.0, help="at most for so long")
    parser.add_argument("--case", action="append", help="a case as it was printed; several may be")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add cases that fail to it")
    parser.add_argument("--only", default="", help="configurations that begin so")
    parser.add_argument(
        "--libraries", action="store_true", help="loops of accelerate, diffusers, transformers"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    if given.libraries:
        importlib.import_module(
            "zoo_entry"
        )  # libraries import torchvision, also that of another torch
    ranks = make_ranks()
    try:
        kinds = run(ranks, given)
    finally:
        ranks.close()
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return int(any(map(has_failed, kinds)))


if __name__ == "__main__":
    sys.exit(main())
