"""Draw models with quirks, train them in a drawn configuration, and compare with one process.

Usage: python scripts/fuzz_models.py [--seed N] [--draws N] [--keep FILE]
       python scripts/fuzz_models.py --case "CONFIGURATION: QUIRK, QUIRK, ..."

Each seed is one draw.  It comes to `equal`, `refused` (one sentence, on all ranks), `wrong`,
`traceback` or `hung`; the last three fail, and the draw is made smaller: quirk by quirk is left out
while it still fails so.  What is left is printed as a case, which `--case` runs again, whatever
later versions of this file draw.  tests/torch/models/fuzz_cases.txt has those that once failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz_quirks import (  # type: ignore[import-not-found]  # beside this file
    AFTER,
    BEFORE,
    BLOCKS,
    CLASSES,
    LOSSES,
    SAMPLES,
    WIDTH,
)
from fuzz_ranks import FuzzRanks  # type: ignore[import-not-found]  # beside this file
from torch import Tensor, nn

import msrun
import msrun.parallel.preload
from msrun.errors import UsageError

STEPS = 3
_GAP = 1e-7
_BLOCKS_MAX = 3
# A batch by position, by name, with its loss from the model.
FORMS = ("by position", "by name", "own loss")

_PLAN = [{"match": "*.up", "style": "colwise"}, {"match": "*.down", "style": "rowwise"}]
_PIPELINE = {"stages": "auto", "microbatches": 2}
# name -> ranks, configuration.
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, accumulate": (1, {"accumulate": 2}),
    "dp": (2, {}),
    "dp, module buckets": (2, {"reduce": {"fuse": "module"}}),
    "dp, accumulate": (2, {"accumulate": 2}),
    "zero 1": (2, {"optimizer": {"zero": 1}}),
    "zero 2, threshold": (2, {"optimizer": {"zero": 2, "threshold": 300}}),
    "zero 2, accumulate": (2, {"optimizer": {"zero": 2}, "accumulate": 2}),
    "zero 3": (2, {"optimizer": {"zero": 3}}),
    "recompute": (2, {"recompute": {"modules": ["blocks.0"]}}),
    "zero 3, recompute": (
        2,
        {"optimizer": {"zero": 3}, "recompute": {"modules": ["blocks.0", "blocks.1"]}},
    ),
    "tp": (2, {"mesh": {"tp": 2}, "plan": _PLAN}),
    "tp, zero 1": (
        4,
        {"mesh": {"dp": 2, "tp": 2}, "plan": _PLAN, "optimizer": {"zero": 1}},
    ),
    "pp": (2, {"mesh": {"pp": 2}, "pipeline": _PIPELINE}),
    "pp, dp": (4, {"mesh": {"pp": 2, "dp": 2}, "pipeline": _PIPELINE}),
    "auto": (2, {"mode": "auto", "mesh": "auto"}),
    "auto dp": (2, {"mode": "auto", "mesh": {"dp": 2}}),
    "auto tp": (2, {"mode": "auto", "mesh": {"tp": 2}}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One draw.

    Args:
        config: A key of `CONFIGS`.
        quirks: Keys of the tables of `fuzz_quirks`, and of `FORMS`; blocks in their order.
    """

    config: str
    quirks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.config}: {', '.join(self.quirks)}"


def read_case(text: str) -> Case:
    """Return the case that `str` of it gave."""
    config, _, quirks = text.partition(": ")
    return Case(config, tuple(quirks.split(", ")))


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    numbers = random.Random(seed)  # noqa: S311 - no secret
    config = numbers.choice(list(CONFIGS))
    quirks = numbers.choices(list(BLOCKS), k=numbers.randint(1, _BLOCKS_MAX))
    for table, most in ((BEFORE, 2), (AFTER, 1)):
        if numbers.random() < 0.4:  # noqa: PLR2004 - most cases have few quirks
            quirks += numbers.sample(list(table), numbers.randint(1, most))
    quirks.append(numbers.choice(list(LOSSES)))
    quirks.append(numbers.choices(FORMS, weights=(3, 1, 1))[0])
    return Case(config, tuple(quirks))


# One case, in its ranks.


class Fuzzed(nn.Module):
    """The model of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        names = [quirk for quirk in case.quirks if quirk in BLOCKS] or ["plain"]
        self.blocks = nn.ModuleList([BLOCKS[name]() for name in names])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(x)
        return output


class FuzzedWithLoss(Fuzzed):
    """The same, with its loss."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.loss = _loss(case)

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        """Return loss and logits."""
        output = super().forward(x)
        return {"loss": self.loss(output, labels), "logits": output}


def _loss(case: Case) -> Any:
    return LOSSES[next((q for q in case.quirks if q in LOSSES), "mean")]


def _build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    make = FuzzedWithLoss if "own loss" in case.quirks else Fuzzed
    model = make(case).double()
    for quirk in case.quirks:
        if quirk in BEFORE:
            BEFORE[quirk](model)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose groups follow attributes of parameters."""
    groups: dict[float, list[Any]] = {}
    for param in model.parameters():
        groups.setdefault(getattr(param, "lr_scale", 1.0), []).append(param)
    return torch.optim.SGD(
        [{"params": params, "lr": 0.1 * scale} for scale, params in groups.items()],
        lr=0.1,
        momentum=0.9,
    )


def _batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    found = []
    for _ in range(STEPS):
        y = torch.randint(0, CLASSES, (SAMPLES,))
        y[:3:2] = -100
        found.append((torch.randn(SAMPLES, WIDTH, dtype=torch.float64), y))
    return found


def _between_steps(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "temperature"):
            module.temperature = 1.0 + step  # type: ignore[assignment]


def _alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process by plain torch."""
    model, loss_fn = _build(case), _loss(case)
    for quirk in case.quirks:
        if quirk in AFTER:
            AFTER[quirk](model)
    optimizer = _optimizer(model)
    torch.manual_seed(11)
    losses = []
    for step, (x, y) in enumerate(_batches_kept()):
        _between_steps(model, step)
        optimizer.zero_grad()
        loss = model(x, y)["loss"] if "own loss" in case.quirks else loss_fn(model(x), y)
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().clone() for name, tensor in _all_names(model)}


def _all_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by all their names: a stage may have a shared one under a later name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _batches_kept() -> list[tuple[Tensor, Tensor]]:
    """Return the batches without moving the random numbers of the model."""
    with torch.random.fork_rng():
        return _batches()


def _sharded(case: Case, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train under the configuration on this rank."""
    from msrun.parallel.verify.gather import to_first_rank

    rt = msrun.init(config)
    model, batches, loss_fn = _build(case), _batches_kept(), _loss(case)
    torch.manual_seed(11)
    x, y = batches[0]
    has_own = "own loss" in case.quirks
    share, count = 0, 1
    if config.get("mesh") != "auto":
        share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    needs_sample = "pipeline" in config or config.get("mode") == "auto"
    sample = [value.chunk(count)[share] for value in ((x, y) if has_own else (x,))]
    model = rt.shard(model, sample if needs_sample else None)
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    for quirk in case.quirks:
        if quirk in AFTER:
            AFTER[quirk](model)
    optimizer = rt.optimizer(_optimizer(model))
    losses = []
    for step, batch in enumerate(batches):
        x, y = (value.chunk(count)[share] for value in batch)
        _between_steps(model, step)
        if has_own:
            loss = rt.step(model, optimizer, {"x": x, "labels": y})
        else:
            loss = rt.step(model, optimizer, loss_fn, {"x": x} if _is_named(case) else x, y)
        losses.append(loss.item())
    tensors = list(_all_names(model))
    whole: dict[str, Tensor] = {}
    to_first_rank(rt.context, [(name, t.detach()) for name, t in tensors], whole.__setitem__)
    return losses, whole


def _is_named(case: Case) -> bool:
    return "by name" in case.quirks


def _config(case: Case) -> dict[str, Any]:
    """Return the configuration; dropout takes the masks of one process."""
    _, config = CONFIGS[case.config]
    exact = {"dropout": "exact"} if "dropout" in case.quirks and "mode" not in config else {}
    blocks = sum(quirk in BLOCKS for quirk in case.quirks)
    if "recompute" in config:
        modules = config["recompute"]["modules"][: max(blocks, 1)]
        config = config | {"recompute": {"modules": modules}}
    return config | exact


def attempt(case: Case) -> str:
    """Return what this rank says of a case; called in each rank of a process group."""
    is_split = "accumulate" in case.config or "mode" in CONFIGS[case.config][1]
    if "dropout" in case.quirks and is_split:
        return "invalid: these have masks of their own, as with another seed"
    try:
        expected = _alone(case)
    except Exception as error:  # noqa: BLE001 - then the draw itself makes no sense
        return f"invalid: {type(error).__name__}: {error}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _sharded(case, _config(case))
        return _compare(found, expected) if dist.get_rank() == 0 else "equal"
    except UsageError as error:
        return f"refused: {error.message}"
    except BaseException as error:  # noqa: BLE001 - it is the answer
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().partition("\n")[0]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"traceback: {type(error).__name__}: {text} ({where})"
    finally:
        msrun.init().close()


def _compare(
    found: tuple[list[float], Mapping[str, Tensor]],
    expected: tuple[list[float], Mapping[str, Tensor]],
) -> str:
    gap = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    if not gap <= _GAP:
        return f"wrong: loss off by {gap:.1e}"
    for name, tensor in found[1].items():
        other = expected[1].get(name)
        if other is not None and not float((tensor - other).abs().max()) <= _GAP:
            return f"wrong: {name} off by {float((tensor - other).abs().max()):.1e}"
    # A stage may have a shared weight under another of its names.
    values = [expected[1][name] for name in found[1] if name in expected[1]]
    missing = [
        name
        for name, tensor in expected[1].items()
        if name not in found[1] and not any(torch.equal(tensor, value) for value in values)
    ]
    return f"wrong: {missing[0]} is missing" if missing else "equal"


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
    return refused[0] if refused else "equal"


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


def main() -> int:
    """Do what the command line says; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--case", help="one case as it was printed")
    parser.add_argument("--only", default="", help="configurations that begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    ranks = make_ranks()
    kinds: Counter[str] = Counter()
    seeds = [None] if given.case else range(given.seed, given.seed + given.draws)
    try:
        for seed in seeds:
            case = read_case(given.case) if seed is None else draw(seed)
            if not case.config.startswith(given.only):
                kinds["left out"] += 1
                continue
            answer = ask(ranks, case)
            kinds[answer.partition(":")[0]] += 1
            if has_failed(answer):
                print(f"seed {seed}: {case}\n  {answer}", flush=True)
                case, answer = smaller(ranks, case, answer)
                print(f"  smallest: {case}\n  {answer}", flush=True)
            elif given.case or given.draws == 1:
                print(f"seed {seed}: {case}\n  {answer}", flush=True)
    finally:
        ranks.close()
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return int(any(map(has_failed, kinds)))


if __name__ == "__main__":
    sys.exit(main())
