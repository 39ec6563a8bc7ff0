"""`msrun search`: the fastest parallel plan of a model for any cluster, found without it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say, say_notes
from msrun.cli.render.section import TextSection, show
from msrun.errors import UsageError
from msrun.units import parse_duration, parse_size, quoted

if TYPE_CHECKING:
    from msrun.cli.system import System
    from msrun.parallel.search.plan.plan import SavedPlan

SUMMARY = (
    "Find the fastest parallel plan of the model that FILE:FUNCTION builds, for a cluster that "
    "need not exist.  FUNCTION takes no arguments and returns the model and its inputs: a tuple, "
    "or a mapping by name; tensors get no memory."
)
DIFF_SUMMARY = "Show what differs between two plans that `msrun search -o` wrote."
_EPILOG = "`msrun search diff A B` compares two plans."
_GIB = 2**30
_RANKS_MAX = 1 << 20
_BATCH_MAX = 1 << 24


def search(args: Sequence[str], system: System) -> int:
    """Search, or compare two plans, as `args` say."""
    words = list(args)
    if words[:1] == ["diff"]:
        return _diff(words[1:], system)
    given = read_words("msrun search", SUMMARY, _params(), words, epilog=_EPILOG)
    _check_files(given)
    with _rare_collection():
        plan = _search(given)
    if given["output"]:
        from msrun.parallel.search.plan.plan import write_plan

        write_plan(plan, Path(given["output"]))
    if given["plot"]:
        _draw(plan, Path(given["plot"]))
    if given["json"]:
        import msgspec

        answer(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return 0
    sections = _explained(plan, given["explain"]) if given["explain"] else _sections(plan)
    show(sections, is_terminal=system.is_terminal())
    return 0


def _params() -> tuple[click.Parameter, ...]:
    return (
        click.Argument(["target"], metavar="FILE:FUNCTION"),
        click.Option(["--world"], required=True, metavar="N", help="Number of ranks."),
        click.Option(
            ["--batch"], metavar="N", help="Samples in a step.  [default: those of the inputs]"
        ),
        click.Option(
            ["--memory"], metavar="SIZE", help="Memory of a rank.  [default: the topology's]"
        ),
        click.Option(
            ["--topology"],
            default="a100",
            show_default=True,
            metavar="NAME|FILE",
            help="a100, h100, h200, ascend910, cpu, or a YAML file.",
        ),
        click.Option(
            ["--mesh"],
            metavar="AXIS=N,...",
            help="Mesh, the last axis innermost.  [default: the fastest one, pipelines included]",
        ),
        click.Option(
            ["--rank-list"],
            metavar="RANK,...",
            help="Rank at each position of the mesh.  [default: 0,1,...]",
        ),
        click.Option(
            ["--mode"],
            default="exact",
            show_default=True,
            metavar="MODE",
            help="exact, or with --mesh recursive: two axes at a time, or propagation.",
        ),
        click.Option(
            ["--rules"],
            metavar="FILE",
            help="With --mesh: YAML file with rules as of `plan`, which the plan keeps.",
        ),
        click.Option(
            ["--budget"],
            default="30s",
            show_default=True,
            metavar="DURATION",
            help="Time of the search.",
        ),
        click.Option(["-o", "--output"], metavar="FILE", help="File for the plan as JSON."),
        click.Option(
            ["--plot"], metavar="FILE.svg", help="File for a picture of the plan and its cost."
        ),
        click.Option(
            ["--explain"], metavar="NAME", help="Show only parameters and operators NAME."
        ),
        click.Option(["--json"], is_flag=True, help="Print the plan as JSON."),
    )


def _check_files(given: Mapping[str, Any]) -> None:
    """Refuse files that cannot be written, before the search and not after it."""
    if given["plot"] and Path(given["plot"]).suffix != ".svg":
        other = Path(given["plot"]).with_suffix(".svg")
        raise UsageError(f"--plot {given['plot']}: a picture is SVG (choose such as {other})")
    for option, text in (("-o", given["output"]), ("--plot", given["plot"])):
        if not text:
            continue
        path = Path(text)
        is_there = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise UsageError(f"{option} {text} cannot be written: {error.strerror}") from None
        if not is_there:
            path.unlink()


def _draw(plan: SavedPlan, path: Path) -> None:
    from msrun.cli.render.plan_chart import picture

    try:
        path.write_text(picture(plan), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Collect garbage rarely, and not at the end: almost every object lives until then."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()


def _search(given: Mapping[str, Any]) -> SavedPlan:
    from msrun.parallel.search.cost.topology import find_topology, ordered
    from msrun.parallel.search.solve.modes import MODES
    from msrun.transport.loop import Loop

    mode = MODES.get(given["mode"])
    if mode is None:
        raise UsageError(f"--mode {given['mode']} is not known (choose {', '.join(MODES)})")
    mesh = _mesh(given["mesh"])
    if mode != "exact" and not mesh:
        raise UsageError(f"--mode {given['mode']} needs --mesh")
    if given["rules"] and not mesh:
        raise UsageError("--rules needs --mesh, whose axes the rules name")
    if mode == "propagation" and not given["rules"]:
        raise UsageError(f"--mode {given['mode']} needs --rules, from which layouts spread")
    budget = parse_duration(given["budget"])
    world = _number("--world", given["world"], _RANKS_MAX)
    # By name, since nothing outside `msrun.parallel` may need torch.
    module = importlib.import_module("msrun.parallel.advise.module_search")
    request = module.SearchRequest(
        target=given["target"],
        world=world,
        batch=given["batch"] and _number("--batch", given["batch"], _BATCH_MAX),
        memory=float(parse_size(given["memory"])) if given["memory"] else None,
        topology=ordered(find_topology(given["topology"]), _ranks(given["rank_list"], world)),
        mesh=mesh,
        mode=mode,
        budget=budget,
        rules=given["rules"],
    )
    clock: Callable[[], float] = Loop.now
    plan: SavedPlan = module.search_model(request, clock=clock, report=say)
    if plan.unknown:
        say_notes([f"no rule for {', '.join(plan.unknown)}: computed whole on every rank"])
    return plan


def _number(option: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{option} {quoted(text)} is no number from 1 to {most}")
    return int(text)


def _mesh(text: str | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, equals, size = part.partition("=")
        if not equals or not name.isidentifier() or name in sizes:
            raise UsageError(f"--mesh {quoted(text or '')} is no mesh (choose such as dp=4,tp=2)")
        sizes[name] = _number(f"--mesh {name}", size, _RANKS_MAX)
    return sizes


def _ranks(text: str | None, world: int) -> list[int]:
    ranks = [_rank(part, text or "", world) for part in text.split(",")] if text else []
    if ranks and sorted(ranks) != [*range(world)]:
        raise UsageError(f"--rank-list {text} has not each of the {world} ranks once")
    return ranks


def _rank(part: str, text: str, world: int) -> int:
    if not part.isascii() or not part.isdigit() or int(part) >= world:
        raise UsageError(f"--rank-list {quoted(text)}: {quoted(part)} is no rank below {world}")
    return int(part)


# Output.


def _sections(plan: SavedPlan) -> list[TextSection]:
    from msrun.parallel.search.plan.plan import families

    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    gap = "not known" if plan.gap is None else f"{plan.gap:.2%} at most"
    facts = [
        ("model", plan.model),
        ("ranks", f"{plan.world} ({plan.topology})"),
        ("mesh", f"pp {plan.stages} x {mesh}" if plan.stages > 1 else mesh),
        *([("ranks in order", ",".join(map(str, plan.rank_list)))] if plan.rank_list else []),
        ("batch", f"{plan.batch} in {plan.microbatches} micro-batches"),
        ("recompute", "yes" if plan.recompute else "no"),
        ("runs on", plan.runs_on),
        ("step", f"{plan.seconds:.4g} s predicted"),
        ("memory", f"{plan.memory / _GIB:.3g} GiB a rank"),
        ("gap", f"{gap} to the best plan on this mesh"),
    ]
    if plan.config:
        facts.pop()
    costs = [
        (name, f"{seconds:.4g} s", f"{seconds / plan.seconds:.1%}")
        for name, seconds in plan.costs.items()
    ]
    sections = [
        TextSection(heading="plan", rows=tuple(facts)),
        TextSection(heading="where the time goes", rows=tuple(costs)),
        _configuration(plan)
        if plan.config
        else TextSection(
            heading="parameters",
            columns=("name", " x ".join(plan.mesh)),
            rows=tuple(families(plan.params)),
        ),
    ]
    if plan.rejected:
        rows = tuple((line,) for line in plan.rejected)
        sections.append(TextSection(heading="rejected", rows=rows))
    return sections


def _configuration(plan: SavedPlan) -> TextSection:
    import yaml

    text = yaml.safe_dump({"parallel": plan.config}, sort_keys=False, default_flow_style=None)
    return TextSection(heading="configuration", rows=tuple((line,) for line in text.splitlines()))


def _explained(plan: SavedPlan, pattern: str) -> list[TextSection]:
    from msrun.parallel.search.plan.plan import explain

    if plan.config:
        raise UsageError(
            f"--explain {quoted(pattern)}: {plan.runs_on} divides whole modules, and no operators",
            hint="leave out --explain: the output shows the configuration",
        )
    rows = tuple(explain(plan, pattern))
    columns = ("name", "divided", "style", "inputs", "outputs")
    return [
        TextSection(heading=f"{pattern} over {' x '.join(plan.mesh)}", columns=columns, rows=rows)
    ]


def _diff(words: list[str], system: System) -> int:
    from msrun.parallel.search.plan.plan import differences, read_plan

    names = ("one", "other")
    params = [click.Argument([name], metavar="FILE") for name in names]
    given = read_words("msrun search diff", DIFF_SUMMARY, params, words)
    plans = [read_plan(Path(given[name])) for name in names]
    rows = tuple(differences(*plans))
    if not rows:
        say("the plans are equal")
        return 0
    columns = ("", given["one"], given["other"])
    show(
        [TextSection(heading="differences", columns=columns, rows=rows)],
        is_terminal=system.is_terminal(),
    )
    return 0
