"""Draw shapes and grids for each parallel technique, train, and compare with one process.

Usage: python scripts/fuzz_techniques.py [--seed N] [--draws N] [--only KIND]
       python scripts/fuzz_techniques.py --case 'CASE' [--case ...]

A draw is one technique (grids of ranks, copies, parts of sequences, experts, uneven rows, tables
and activations on the host, reduced precision, parts of images), a model that has what it divides,
with widths, heads, row counts and sizes at random, a mesh, and things that it composes with: data
parallelism, ZeRO, accumulation, recomputation, stages, clipping.  It comes to what a draw of
scripts/fuzz_models.py comes to.  A case that fails is printed as JSON, which `--case` runs again.
tests/torch/models/technique_cases.txt has those that once failed.
"""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz_models import has_failed, worst
from fuzz_ranks import FuzzRanks
from fuzz_technique_models import MODELS, Sizes, inputs, loss_fn, targets
from torch import Tensor, nn

import msrun
import msrun.parallel.preload
from msrun.errors import UsageError

Numbers = random.Random
Config = dict[str, Any]
_STEPS = 3
# Seconds of a case, of up to 8 ranks on a machine that may be busy.
_LIMIT = 180.0
_GAP = 1e-8
# Of a loss, in bfloat16 and by float32 parameters.
_WIDE_GAP = 3e-2


@dataclass(frozen=True, slots=True)
class TechniqueCase:
    """One draw.

    Args:
        kind: A key of `KINDS`.
        model: A key of `MODELS`.
        ranks: Of the job.
        sizes: Of the model and its batch.
        config: The configuration.
        train: Options of training: optimizer, `max_norm`.
    """

    kind: str
    model: str
    ranks: int
    sizes: Sizes
    config: Config
    train: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps(asdict(self))


# What is drawn.


def _is(numbers: Numbers, share: float) -> bool:
    """Return whether one of `share` of all draws has something."""
    return numbers.random() < share


def _blocks(numbers: Numbers, *, heads: int, unit: int) -> Sizes:
    """Return sizes of blocks whose heads are `heads`, or there is no attention."""
    has_attention = bool(heads)
    width = unit * max(heads, 1)
    hidden = numbers.choice([2, 3, 4]) * width
    groups = numbers.choice([g for g in range(1, heads + 1) if heads % g == 0]) if heads else 0
    return {
        "width": width,
        "hidden": hidden,
        "heads": heads if has_attention else 0,
        "groups": groups,
        "is_causal": _is(numbers, 0.5),
        "bias": _is(numbers, 0.7),
        "norm": numbers.choice(["layer", "rms"]),
        "blocks": numbers.randint(1, 2),
    }


def _extras(numbers: Numbers, *, zero: tuple[int, ...] = (1, 2, 3), again: str = "") -> Config:
    """Return what a technique may be composed with."""
    found: Config = {}
    if zero and _is(numbers, 0.4):
        found["optimizer"] = {"zero": numbers.choice(zero)}
    if _is(numbers, 0.3):
        found["accumulate"] = 2
    if again and _is(numbers, 0.3):
        found["recompute"] = {"modules": [again]}
    return found


def _grid_rules(axes: dict[str, list[str]], sizes: Sizes) -> list[Config]:
    """Return the rules of blocks: products in turns, norms as the product that follows."""
    style, here, there = axes["style"][0], axes["here"], axes["there"]
    first = ["*.second", "*.up"]
    last = ["*.down"]
    if sizes["heads"]:
        first += ["*.first", "*.q", "*.k", "*.v"]
        last += ["*.o"]
    return [{"match": name, "style": style, "axes": here} for name in first] + [
        {"match": name, "style": style, "axes": there} for name in last
    ]


def _grid(numbers: Numbers) -> TechniqueCase:
    style = numbers.choice(["2d", "2d", "2.5d", "3d"])
    names = {"2d": ["x", "y"], "2.5d": ["d", "x", "y"], "3d": ["x", "y", "z"]}[style]
    ranks = [numbers.choice([1, 2, 2, 3]) if style == "2d" else 2 for _ in names]
    while (style == "2d" and ranks == [3, 3]) or len([r for r in ranks if r > 1]) == 0:
        ranks = [numbers.choice([1, 2, 3]) for _ in names]
    mesh = dict(zip(names, ranks, strict=True))
    has_data = style == "2d" and ranks == [2, 1] and _is(numbers, 0.5)
    parts = 2 if has_data else 1
    here = names
    there = [names[0], *names[:0:-1]] if style == "2.5d" else [names[1], names[0], *names[2:]]
    heads = numbers.choice([0, 0, 2, 4, 6])
    sizes = _blocks(numbers, heads=heads, unit=numbers.choice([4, 6, 12]))
    sizes |= {"samples": parts * 2 * numbers.choice([2, 4, 6]), "tokens": numbers.choice([0, 3, 4])}
    if heads:
        sizes["tokens"] = numbers.choice([3, 4, 6])
    rules = _grid_rules({"style": [style], "here": here, "there": there}, sizes)
    config: Config = {"mesh": ({"dp": 2} if has_data else {}) | mesh, "plan": rules}
    config |= _extras(numbers, zero=(1, 3) if style == "2d" and has_data else (), again="blocks.*")
    total = parts * ranks[0] * ranks[1] * (ranks[2] if len(ranks) > 2 else 1)  # noqa: PLR2004
    return TechniqueCase("grid", "vectors", total, sizes, config, _training(numbers))


def _copies(numbers: Numbers) -> TechniqueCase:
    copies, ways, data = numbers.choice([2, 3]), numbers.choice([2, 2, 3]), numbers.choice([1, 2])
    data = 1 if ways > 2 else data  # noqa: PLR2004
    has_stages = data == 1 and ways == 2 and _is(numbers, 0.3)  # noqa: PLR2004
    heads = numbers.choice([0, ways, 2 * ways])
    sizes = _blocks(numbers, heads=heads, unit=6)
    sizes |= {"tokens": numbers.choice([2, 5]), "groups": heads, "blocks": 2}
    rules = [
        {"match": "*.up", "style": "colwise"},
        {"match": "*.down", "style": "rowwise"},
    ]
    if heads:
        rules += [{"match": f"*.{name}", "style": "colwise"} for name in "qkv"]
        rules += [{"match": "*.o", "style": "rowwise"}]
    config: Config = {"plan": rules, "copies": copies}
    config |= _extras(numbers, zero=(1, 2) if data > 1 else (), again="blocks.*")
    parts = config.get("accumulate", 1)
    if has_stages:
        config.pop("accumulate", None)
        config["pipeline"] = {"stages": "auto", "microbatches": 2}
        parts = 2
    mesh = {"pp": 2} if has_stages else {"dp": data}
    config["mesh"] = mesh | {"tp": ways}
    uneven = numbers.choice([0, 0, 1])
    sizes["samples"] = data * parts * copies * numbers.choice([1, 2]) + uneven * data
    ranks = 2 * ways if has_stages else data * ways
    return TechniqueCase("copies", "vectors", ranks, sizes, config, _training(numbers))


def _context(numbers: Numbers) -> TechniqueCase:
    ways, data = numbers.choice([(2, 1), (2, 2), (3, 1), (4, 1)])
    heads = numbers.choice([1, 2, 3, 4, 6])
    sizes = _blocks(numbers, heads=heads, unit=4)
    tokens = ways * numbers.choice([1, 2, 4, 6])
    sizes |= {"tokens": tokens, "words": numbers.choice([7, 16]), "samples": data * 4}
    rule = {"match": "*", "style": "context", "kind": numbers.choice(["auto", "ring"])}
    if heads % ways == 0 and _is(numbers, 0.3):
        rule["kind"] = "all_to_all"
    config = {"mesh": {"dp": data, "cp": ways}, "plan": [rule]}
    config |= _extras(numbers, again="blocks.*")
    return TechniqueCase("context", "text", data * ways, sizes, config, _training(numbers))


def _experts(numbers: Numbers) -> TechniqueCase:
    ways, data = numbers.choice([(2, 1), (2, 2), (3, 1), (4, 1)])
    each = numbers.choice([1, 2, 3])
    sizes: Sizes = {
        "width": numbers.choice([4, 6, 10]),
        "hidden": numbers.choice([3, 8]),
        "experts": ways * each,
        "blocks": numbers.randint(1, 2),
        "capacity": _is(numbers, 0.3),
        "is_list": _is(numbers, 0.3),
        "is_shared": _is(numbers, 0.5),
        "tokens": numbers.choice([0, 3]),
    }
    sizes["top"] = numbers.randint(1, min(3, sizes["experts"]))
    config: Config = {
        "mesh": {"dp": data, "ep": ways},
        "plan": [{"match": "*.experts", "style": "experts", "axis": "ep"}],
    }
    config |= _extras(numbers)
    sizes["samples"] = data * ways * config.get("accumulate", 1) * numbers.choice([1, 2, 3])
    return TechniqueCase("experts", "mixtures", data * ways, sizes, config, _training(numbers))


def _clicks(numbers: Numbers, groups: int) -> Sizes:
    return {
        "rows": [numbers.choice([1, 2, 5, 9, 30]) for _ in range(groups)],
        "fields": groups * numbers.randint(1, 3),
        "width": numbers.choice([1, 3, 8]),
        "hidden": numbers.choice([4, 7]),
        "is_sparse": False,
    }


def _rows(numbers: Numbers) -> TechniqueCase:
    ways, data = numbers.choice([(2, 1), (2, 2), (3, 1), (4, 1)])
    sizes = _clicks(numbers, ways)
    rule = {"match": "table", "rows": sizes["rows"], "axis": "tp"}
    if _is(numbers, 0.3):
        rule["out"] = ["..."]
    config: Config = {"mesh": {"dp": data, "tp": ways}, "plan": [rule]}
    config |= _extras(numbers, zero=(1, 2, 3) if data > 1 else ())
    uneven = numbers.choice([0, 0, 1])
    sizes["samples"] = data * (ways * numbers.choice([2, 4]) + uneven)
    return TechniqueCase("rows", "clicks", data * ways, sizes, config, _training(numbers))


def _place(numbers: Numbers) -> TechniqueCase:
    data = numbers.choice([1, 2, 4])
    sizes = _clicks(numbers, numbers.randint(1, 3))
    sizes["is_sparse"] = _is(numbers, 0.4)
    sizes["samples"] = data * numbers.choice([2, 4, 6])
    config: Config = {"mesh": {"dp": data}, "place": {"tab*": "cpu"}}
    config |= _extras(numbers, zero=(1, 2, 3) if data > 1 else ())
    train = _training(numbers) | ({"optimizer": "sgd"} if sizes["is_sparse"] else {})
    return TechniqueCase("place", "clicks", data, sizes, config, train)


def _offload(numbers: Numbers) -> TechniqueCase:
    data = numbers.choice([1, 2])
    sizes = _blocks(numbers, heads=numbers.choice([0, 2, 3]), unit=4)
    sizes |= {"tokens": numbers.choice([2, 5]), "samples": data * numbers.choice([2, 4])}
    activations = {"activations": [numbers.choice(["blocks.*", "*.up", "*.attention"])]}
    if not sizes["heads"]:
        activations = {"activations": ["blocks.*"]}
    options = {"threshold": numbers.choice([0, 256]), "prefetch": numbers.randint(1, 2)}
    config: Config = {"mesh": {"dp": data}, "offload": activations | options}
    config |= _extras(numbers, again="blocks.*")
    return TechniqueCase("offload", "vectors", data, sizes, config, _training(numbers))


def _precision(numbers: Numbers) -> TechniqueCase:
    data, ways = numbers.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    heads = numbers.choice([0, 2])
    sizes = _blocks(numbers, heads=heads, unit=8)
    sizes |= {"tokens": 3, "samples": data * 4, "groups": heads}
    config: Config = {"mesh": {"dp": data, "tp": ways}, "precision": "bf16"}
    names = {"up": "colwise", "down": "rowwise"}
    if heads:
        names |= {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    if ways > 1:
        config["plan"] = [{"match": f"*.{name}", "style": style} for name, style in names.items()]
    else:
        del config["mesh"]["tp"]
    config |= _extras(numbers, zero=(1, 2, 3) if data > 1 else (), again="blocks.*")
    return TechniqueCase("precision", "vectors", data * ways, sizes, config, {"optimizer": "sgd"})


def _stage(numbers: Numbers) -> Sizes:
    kernel, dilation = numbers.randint(1, 4), numbers.randint(1, 2)
    mode = numbers.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    padding = numbers.randint(0, (kernel - 1) * dilation // 2 + 1)
    return {
        "kernel": kernel,
        "stride": numbers.choice([1, 1, 2]),
        "dilation": dilation,
        "padding": min(padding, 2) if mode != "zeros" else padding,
        "mode": mode,
        "convolution_groups": numbers.choice([1, 2]),
        "image_norm": numbers.choice(["batch", "group", "instance", "none"]),
        "then": numbers.choice(["max", "average", "wide", "none"]),
    }


def _images(numbers: Numbers) -> TechniqueCase:
    height, across = numbers.choice([(2, 1), (1, 2), (2, 2), (3, 1), (4, 1)])
    data = 2 if height * across == 2 and _is(numbers, 0.4) else 1  # noqa: PLR2004
    sizes: Sizes = {
        "channels": numbers.choice([2, 4]),
        "height": numbers.randint(6, 15),
        "across": numbers.randint(6, 15),
        "stages": [_stage(numbers) for _ in range(numbers.randint(1, 3))],
        "samples": data * 2,
    }
    mesh = ({"dp": data} if data > 1 else {}) | {"h": height, "w": across}
    image = ["dp" if data > 1 else None, None, "h", "w"]
    config: Config = {"mesh": mesh, "data": {"image": image, "label": image[:1]}}
    config |= _extras(numbers)
    has_batch_norm = any(spec["image_norm"] == "batch" for spec in sizes["stages"])
    if has_batch_norm:
        config.pop("accumulate", None)
    ranks, train = height * across * data, _training(numbers)
    beside = numbers.choice(["none", "none", "pp", "tp"])
    if beside == "none":
        return TechniqueCase("images", "images", ranks, sizes, config, train)
    if beside == "pp":
        config.pop("accumulate", None)
        schedule = "gpipe" if has_batch_norm else numbers.choice(["gpipe", "1f1b", "zbv"])
        parts = 1 if has_batch_norm else 2
        config["mesh"] = {"pp": 2} | mesh
        config["pipeline"] = {"stages": "auto", "schedule": schedule, "microbatches": parts}
    else:
        sizes["hidden"] = numbers.choice([4, 6])
        rules: list[Config] = [
            {"match": "up", "style": "colwise"},
            {"match": "down", "style": "rowwise"},
        ]
        if _is(numbers, 0.3):
            rules.append({"match": "first", "params": {"weight": ["tp", None, None, None]}})
        config["mesh"] = mesh | {"tp": 2}
        config["plan"] = rules
    return TechniqueCase("images", "images", 2 * ranks, sizes, config, train)


def _training(numbers: Numbers) -> dict[str, Any]:
    return {
        "optimizer": numbers.choice(["sgd", "adamw"]),
        "max_norm": numbers.choice([None, None, 0.1]),
    }


KINDS: dict[str, Callable[[Numbers], TechniqueCase]] = {
    "grid": _grid,
    "copies": _copies,
    "context": _context,
    "experts": _experts,
    "rows": _rows,
    "place": _place,
    "offload": _offload,
    "precision": _precision,
    "images": _images,
}


def draw(seed: int) -> TechniqueCase:
    """Return the case of a seed; the kinds take turns."""
    kind = list(KINDS)[seed % len(KINDS)]
    return KINDS[kind](Numbers(seed))  # no secret


def read_case(text: str) -> TechniqueCase:
    """Return the case that `str` of it gave."""
    return TechniqueCase(**json.loads(text))


# One case, in its ranks.


def _build(case: TechniqueCase) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = MODELS[case.model](case.sizes)
    return model if case.kind == "precision" else model.double()


def _batches(case: TechniqueCase) -> Iterator[tuple[Tensor, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = [
            (inputs(case.model, case.sizes), targets(case.model, case.sizes)) for _ in range(_STEPS)
        ]
    dtype = torch.float32 if case.kind == "precision" else torch.float64
    return ((x.to(dtype) if x.is_floating_point() else x, y) for x, y in made)


def _optimizer(case: TechniqueCase, model: nn.Module) -> torch.optim.Optimizer:
    if case.train["optimizer"] == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    momentum = 0.0 if case.sizes.get("is_sparse") else 0.9
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


Learned = tuple[list[float], dict[str, Tensor]]


def _alone(case: TechniqueCase) -> Learned:
    model, losses = _build(case), []
    optimizer = _optimizer(case, model)
    is_narrow = case.kind == "precision"
    for x, y in _batches(case):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if is_narrow else nullcontext():
            loss = loss_fn(model(x), y)
        loss.backward()
        if case.train.get("max_norm") and not case.sizes.get("is_sparse"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.train["max_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _sharded(case: TechniqueCase) -> Learned:
    rt = msrun.init(case.config)
    model = _build(case)
    share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    sample: Any = None
    if "pipeline" in case.config:
        sample = (next(_batches(case))[0].tensor_split(count)[share],)
    model = rt.shard(model, sample)
    optimizer, losses = rt.optimizer(_optimizer(case, model)), []
    max_norm = None if case.sizes.get("is_sparse") else case.train.get("max_norm")
    for batch in _batches(case):
        x, y = (value.tensor_split(count)[share] for value in batch)
        losses.append(rt.step(model, optimizer, loss_fn, x, y, max_norm=max_norm).item())
    return losses, rt.state_dict(model)


def attempt(case: TechniqueCase) -> str:
    """Return what this rank says of a case; called in each rank of a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _alone(case)
        except Exception as error:  # noqa: BLE001 - then the draw itself makes no sense
            return f"invalid: {type(error).__name__}: {error}"
        if not all(bool(x.isfinite().all()) for x in expected[1].values()):
            return "invalid: one process diverges"
        try:
            found = _sharded(case)
        except UsageError as error:
            return f"refused: {error.message}"
        except BaseException as error:  # noqa: BLE001 - it is the answer
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error).strip().partition("\n")[0]
            where = f"{Path(last.filename).name}:{last.lineno}"
            return f"traceback: {type(error).__name__}: {text} ({where})"
        finally:
            msrun.init().close()
    return _compare(case, found, expected) if dist.get_rank() == 0 else "equal"


def _compare(case: TechniqueCase, found: Learned, expected: Learned) -> str:
    allowed = _WIDE_GAP if case.kind == "precision" else _GAP
    gap = max(abs(a - b) for a, b in zip(found[0], expected[0], strict=True))
    if not gap <= allowed:
        return f"wrong: loss off by {gap:.1e}"
    for name, other in expected[1].items():
        if name not in found[1]:
            return f"wrong: {name} is missing"
        size = float(other.abs().max().clamp(min=1)) if other.numel() else 1.0
        gap = float((found[1][name] - other).abs().max()) / size if other.numel() else 0.0
        if not gap <= allowed:
            return f"wrong: {name} off by {gap:.1e}"
    return "equal"


def main() -> int:
    """Do what the command line says; return 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--case", action="append", help="a case as it was printed; several may be")
    parser.add_argument("--only", default="", help="kinds that begin so")
    parser.add_argument("--verbose", action="store_true", help="print what each draw comes to")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    ranks = FuzzRanks(attempt, worst)
    counts: Counter[str] = Counter()
    seeds = range(given.seed, given.seed + given.draws)
    cases = [(None, read_case(text)) for text in given.case or []]
    try:
        for seed, case in cases or ((seed, draw(seed)) for seed in seeds):
            if not case.kind.startswith(given.only):
                continue
            answer = ranks.ask(case, case.ranks, _LIMIT)
            counts[answer.partition(":")[0]] += 1
            if has_failed(answer) or given.verbose:
                print(f"seed {seed}: {case.kind}: {answer}", flush=True)
            if has_failed(answer):
                print(f"  {case}", flush=True)
    finally:
        ranks.close()
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return int(any(map(has_failed, counts)))


if __name__ == "__main__":
    sys.exit(main())
