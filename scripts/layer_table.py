"""Write the layer table of docs/architecture.md from the contracts that import-linter checks.

Usage: python scripts/layer_table.py [--check]

What a layer holds is the first line of its docstring; which modules are pure or free of torch
is what the contracts in pyproject.toml forbid, so the page cannot promise more than is checked.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers: generated -->\n", "<!-- layers: end -->"
# import-linter's signs between modules of one layer.
APART, TOGETHER = "|", ":"
# A contract that forbids a clock is the one for pure code; of torch alone, the one for torch.
CLOCK, TORCH = "time", "torch"


@dataclass(frozen=True, slots=True)
class Promises:
    """What the contracts forbid: modules without torch, and modules without any side effect."""

    torch_free: frozenset[str]
    pure: frozenset[str]


def read_contracts() -> list[dict[str, Any]]:
    """Return the contracts of pyproject.toml, in order."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


def promises(contracts: Iterable[dict[str, Any]]) -> Promises:
    """Return what all contracts of the type `forbidden` promise together."""
    torch_free: set[str] = set()
    pure: set[str] = set()
    for contract in contracts:
        if contract["type"] == "forbidden":
            forbidden = contract["forbidden_modules"]
            if forbidden == [TORCH]:
                torch_free.update(contract["source_modules"])
            elif CLOCK in forbidden:
                pure.update(contract["source_modules"])
    return Promises(frozenset(torch_free), frozenset(pure))


def layers(contracts: Iterable[dict[str, Any]], container: str) -> list[str]:
    """Return the layers inside `container`, the highest first, as import-linter spells them."""
    for contract in contracts:
        if contract["type"] == "layers" and container in contract.get("containers", ()):
            spelled: list[str] = contract["layers"]
            return spelled
    raise SystemExit(f"layer_table: pyproject.toml has no contract for the layers of {container}")


def modules(layer: str) -> list[str]:
    """Return the modules of one layer, as spelled `a | b` or `a : b`."""
    return [name.strip() for name in layer.replace(TOGETHER, APART).split(APART)]


def first_line(module: str) -> str:
    """Return the first line of a module's or a package's docstring."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = docstring.partition("\n")[0].replace("|", "\\|")
    if not line:
        raise SystemExit(f"layer_table: {file} has no docstring that says what it holds")
    return line


def promised(module: str, names: Iterable[str]) -> str:
    """Return `yes` when all of `module` is among `names`, else the parts of it that are."""
    names = sorted(names)
    if module in names:
        return "yes"
    prefix = f"{module}."
    return ", ".join(f"`{name.removeprefix(prefix)}`" for name in names if name.startswith(prefix))


def table(contracts: list[dict[str, Any]]) -> str:
    """Return a row for each module of each layer, then which rows of one layer stay apart."""
    spelled = layers(contracts, "msrun")
    rows = [("launchers", "launchers")]
    rows += [(name, f"msrun.{name}") for layer in spelled for name in modules(layer)]
    rows += [("ranktable", "ranktable")]
    given = promises(contracts)
    lines = ["| layer | what it holds | without torch | pure |", "|---|---|---|---|"]
    for name, module in rows:
        # Code without side effects imports no torch either: its contract names torch too.
        without_torch = promised(module, given.torch_free | given.pure)
        pure = promised(module, given.pure)
        lines.append(f"| `{name}` | {first_line(module)} | {without_torch} | {pure} |")
    return "\n".join([*lines, "", *_neighbours(spelled)])


def _neighbours(spelled: Iterable[str]) -> Iterator[str]:
    """Yield one line for each layer of several modules."""
    for layer in spelled:
        names = [f"`{name}`" for name in modules(layer)]
        if len(names) > 1:
            together = f"{', '.join(names[:-1])} and {names[-1]} share a layer"
            allowed = "may not" if APART in layer else "may"
            yield f"- {together}: they {allowed} import each other."


def page(text: str) -> str:
    """Return `text` of the page with the table as it should be."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"layer_table: {PAGE} lacks {BEGIN.strip()} or {END}")
    return f"{head}{BEGIN}{table(read_contracts())}\n{END}{tail}"


def main() -> int:
    """Write the page, or with `--check` return 1 when it is not current."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if page(text) == text:
            return 0
        print("docs/architecture.md: run python scripts/layer_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
