"""`msrun search`: the best parallel plan for a model on any cluster, without the cluster."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.output import answer, say, say_notes
from msrun.cli.render.section import TextSection, show
from msrun.errors import UsageError
from msrun.units import parse_duration, parse_size, quoted

if TYPE_CHECKING:
    from msrun.cli.system import System
    from msrun.parallel.search.plan.plan import SavedPlan

SUMMARY = (
    "Find the fastest parallel plan of the model that FILE:FUNCTION makes, on a cluster that need "
    "not be there.  FUNCTION takes nothing and returns the model and a tuple of inputs; the model "
    "gets no memory."
)
DIFF_SUMMARY = "Show what differs between two plans that `msrun search -o` wrote."
MODES = {
    "exact": "exact",
    "dynamic_programming": "exact",
    "recursive": "recursive",
    "recursive_programming": "recursive",
}
_GIB = 2**30
_RANKS_MAX = 1 << 20
_BATCH_MAX = 1 << 24


def search(args: Sequence[str], system: System) -> int:
    """Search, or compare two plans, as `args` say."""
    words = list(args)
    if words[:1] == ["diff"]:
        return _diff(words[1:], system)
    given = _parse(_command(), words)
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


def _command() -> click.Command:
    options = [
        click.Option(["--world"], required=True, metavar="N", help="Ranks."),
        click.Option(["--batch"], metavar="N", help="Samples of a step.  [default: the input's]"),
        click.Option(["--memory"], metavar="SIZE", help="Of a rank.  [default: the topology's]"),
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
            help="Mesh, the last axis innermost.  [default: the best one, pipeline included]",
        ),
        click.Option(
            ["--mode"],
            default="exact",
            show_default=True,
            metavar="MODE",
            help="exact, or recursive: two axes at a time.  With --mesh.",
        ),
        click.Option(
            ["--budget"],
            default="30s",
            show_default=True,
            metavar="DURATION",
            help="Of the search.",
        ),
        click.Option(["-o", "--output"], metavar="FILE", help="Writes the plan as JSON."),
        click.Option(["--plot"], metavar="FILE.svg", help="Draws the plan and what it costs."),
        click.Option(["--explain"], metavar="NAME", help="Shows parameters and operators NAME."),
        click.Option(["--json"], is_flag=True, help="Prints the plan as JSON."),
    ]
    return click.Command(
        "search",
        params=[click.Argument(["target"], metavar="FILE:FUNCTION"), *options],
        help=SUMMARY,
        epilog="`msrun search diff A B` compares two plans.",
        context_settings=_SETTINGS,
    )


_SETTINGS: dict[str, Any] = {"help_option_names": ["--help", "-h"], "max_content_width": 100}


def _parse(command: click.Command, words: list[str]) -> dict[str, Any]:
    try:
        return command.make_context(f"msrun {command.name}", words).params
    except click.NoSuchOption as error:
        raise UsageError(f"there is no option {error.option_name}") from None
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        raise UsageError(message[:1].lower() + message[1:]) from None


def _check_files(given: Mapping[str, Any]) -> None:
    """Refuse what could not be written when the search is over."""
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
    """Look for garbage seldom, and not at the end: almost all that is made stays till then."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.freeze()


def _search(given: Mapping[str, Any]) -> SavedPlan:
    from msrun.parallel.search.cost.topology import find_topology
    from msrun.transport.loop import Loop

    mode = MODES.get(given["mode"])
    if mode is None:
        raise UsageError(f"--mode {given['mode']} is none (choose {', '.join(MODES)})")
    mesh = _mesh(given["mesh"])
    if mode != "exact" and not mesh:
        raise UsageError(f"--mode {given['mode']} needs --mesh")
    budget = parse_duration(given["budget"])
    # By name, since nothing outside `msrun.parallel` may need torch.
    module = importlib.import_module("msrun.parallel.auto.offline_search")
    request = module.SearchRequest(
        target=given["target"],
        world=_number("--world", given["world"], _RANKS_MAX),
        batch=given["batch"] and _number("--batch", given["batch"], _BATCH_MAX),
        memory=float(parse_size(given["memory"])) if given["memory"] else None,
        topology=find_topology(given["topology"]),
        mesh=mesh,
        mode=mode,
        budget=budget,
    )
    clock: Callable[[], float] = Loop.now
    found: SavedPlan = module.search_model(request, clock=clock, report=say)
    if found.unknown:
        say_notes([f"no rule for {', '.join(found.unknown)}: computed whole on every rank"])
    return found


def _number(option: str, text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise UsageError(f"{option} {quoted(text)} is no number from 1 to {most}")
    return int(text)


def _mesh(text: str | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, equals, size = part.partition("=")
        if not equals or not name.isidentifier() or name in found:
            raise UsageError(f"--mesh {quoted(text or '')} is no mesh (choose such as dp=4,tp=2)")
        found[name] = _number(f"--mesh {name}", size, _RANKS_MAX)
    return found


# What is shown.


def _sections(plan: SavedPlan) -> list[TextSection]:
    from msrun.parallel.search.plan.plan import families

    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    gap = "not known" if plan.gap is None else f"{plan.gap:.2%} at most"
    facts = [
        ("model", plan.model),
        ("ranks", f"{plan.world} ({plan.topology})"),
        ("mesh", f"pp {plan.stages} x {mesh}" if plan.stages > 1 else mesh),
        ("batch", f"{plan.batch} in {plan.microbatches} micro-batches"),
        ("recompute", "yes" if plan.recompute else "no"),
        ("runs on", plan.runs_on),
        ("step", f"{plan.seconds:.4g} s predicted"),
        ("memory", f"{plan.memory / _GIB:.3g} GiB a rank"),
        ("gap", f"{gap} to the best plan on this mesh"),
    ]
    costs = [
        (name, f"{seconds:.4g} s", f"{seconds / plan.seconds:.1%}")
        for name, seconds in plan.costs.items()
    ]
    sections = [
        TextSection(heading="plan", rows=tuple(facts)),
        TextSection(heading="where the time goes", rows=tuple(costs)),
        TextSection(
            heading="parameters",
            columns=("name", " x ".join(plan.mesh)),
            rows=tuple(families(plan.params)),
        ),
    ]
    if plan.rejected:
        rows = tuple((line,) for line in plan.rejected)
        sections.append(TextSection(heading="rejected", rows=rows))
    return sections


def _explained(plan: SavedPlan, pattern: str) -> list[TextSection]:
    from msrun.parallel.search.plan.plan import explain

    rows = tuple(explain(plan, pattern))
    columns = ("name", "divided", "style", "inputs", "outputs")
    return [
        TextSection(heading=f"{pattern} over {' x '.join(plan.mesh)}", columns=columns, rows=rows)
    ]


def _diff(words: list[str], system: System) -> int:
    from msrun.parallel.search.plan.plan import differences, read_plan

    names = ("one", "other")
    command = click.Command(
        "search diff",
        params=[click.Argument([name], metavar="FILE") for name in names],
        help=DIFF_SUMMARY,
        context_settings=_SETTINGS,
    )
    given = _parse(command, words)
    plans = [read_plan(Path(given[name])) for name in names]
    rows = tuple(differences(*plans))
    if not rows:
        say("the plans are alike")
        return 0
    columns = ("", given["one"], given["other"])
    show(
        [TextSection(heading="differences", columns=columns, rows=rows)],
        is_terminal=system.is_terminal(),
    )
    return 0
