"""`msrun advise`: what each technique costs and saves for a model, and the first that fits."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import answer, say_notes
from msrun.cli.render.section import TextSection, show
from msrun.errors import UsageError
from msrun.units import parse_size, quoted

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = (
    "Say what each parallel technique costs and saves for the model that FILE:FUNCTION builds, and "
    "recommend the first that fits the memory of a rank.  FUNCTION takes no arguments and returns "
    "the model and its inputs: a tuple, or a mapping by name; tensors get no memory."
)
_GIB, _MIB = 2**30, 2**20
_OPTIMIZERS = ("adam", "momentum", "sgd")
_WORLD_MAX = 1 << 20


def advise(args: Sequence[str], system: System) -> int:
    """Advise on the model that `args` name."""
    given = read_words("msrun advise", SUMMARY, _params(), args)
    found = _advice(given)
    text = _yaml(found.config)
    if given["output"] and found.chosen:
        try:
            Path(given["output"]).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"-o {given['output']} cannot be written: {error.strerror}") from None
    if given["json"]:
        import msgspec

        answer(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(_sections(found, given, text), is_terminal=system.is_terminal())
    if not found.chosen:
        least = min(row.nbytes for row in found.rows)
        raise UsageError(
            f"--memory {_size(found.memory)}: no technique that advise knows fits; the "
            f"smallest takes {_size(least)}",
            hint="take more ranks or a smaller --batch; msrun search also finds meshes of several "
            "axes",
        )
    say_notes([*found.notes, "the estimate leaves out what the device and fragmentation take"])
    return 0


def _params() -> tuple[click.Parameter, ...]:
    return (
        click.Argument(["target"], metavar="FILE:FUNCTION"),
        click.Option(["--world"], required=True, metavar="N", help="Number of ranks."),
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
            ["--batch"],
            metavar="N",
            help="Samples in a step.  [default: those of the inputs on each rank]",
        ),
        click.Option(
            ["--optimizer"],
            default="adam",
            show_default=True,
            metavar="NAME",
            help="adam, momentum or sgd: two, one or no tensors beside each parameter.",
        ),
        click.Option(["-o", "--output"], metavar="FILE", help="File for the configuration."),
        click.Option(["--json"], is_flag=True, help="Print the advice as JSON."),
    )


def _advice(given: dict[str, Any]) -> Any:
    from msrun.parallel.search.cost.topology import find_topology

    if given["optimizer"] not in _OPTIMIZERS:
        raise UsageError(
            f"--optimizer {given['optimizer']} is not known (choose {', '.join(_OPTIMIZERS)})"
        )
    topology = find_topology(given["topology"])
    memory = float(parse_size(given["memory"])) if given["memory"] else topology.memory
    # By name, since nothing outside `msrun.parallel` may need torch.
    module = importlib.import_module("msrun.parallel.advise.advise")
    request = module.AdviceRequest(
        target=given["target"],
        world=_number("--world", given["world"]),
        memory=int(memory),
        batch=given["batch"] and _number("--batch", given["batch"]),
        optimizer=given["optimizer"],
        topology=topology,
    )
    return module.advise(request)


def _number(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _WORLD_MAX:
        raise UsageError(f"{option} {quoted(text)} is no number from 1 to {_WORLD_MAX}")
    return int(text)


def _yaml(config: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump({"parallel": config}, sort_keys=False, default_flow_style=None))


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.3g} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.3g} MiB"


def _sections(found: Any, given: dict[str, Any], text: str) -> list[TextSection]:
    facts = (
        ("model", given["target"]),
        ("parameters", f"{found.params:,}"),
        ("ranks", given["world"]),
        ("memory", f"{_size(found.memory)} a rank"),
        ("local batch", f"{found.local} samples"),
        ("recommended", found.chosen or "nothing fits"),
    )
    rows = tuple(
        (
            row.name,
            _size(row.nbytes),
            "yes" if row.fits else f"no, {_size(row.nbytes - found.memory)} too many",
            _size(row.sent),
            row.cost,
        )
        for row in found.rows
    )
    columns = ("technique", "memory", "fits", "sent a step", "costs")
    sections = [
        TextSection(heading="advice", rows=facts),
        TextSection(heading="techniques, the cheapest first", columns=columns, rows=rows),
    ]
    if found.refused:
        reasons = tuple(found.refused.items())
        sections.append(TextSection(heading="not for this model", rows=reasons))
    if found.chosen:
        lines = tuple((line,) for line in text.rstrip().splitlines())
        sections.append(TextSection(heading="configuration", rows=lines))
    return sections
