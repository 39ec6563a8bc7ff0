"""`--parallel`: the configuration of the workers, from text or a file.

It is a YAML file, or the mapping itself as JSON, which is how a job file hands it on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.cli.options import parsers
from msrun.errors import UsageError
from msrun.units import quoted

if TYPE_CHECKING:
    from msrun.parallel.config import ParallelConfig


def parse_parallel(value: str) -> ParallelConfig:
    """Return the configuration that `value` is or names."""
    from msrun.parallel.config_file import parse_config, read_config  # Help needs none of it.

    if is_inline(parsers.text(value)):
        tree = _json_object(value)
        try:
            return parse_config(tree)
        except UsageError as error:
            raise UsageError(f"{quoted(value)}: {error.message}", hint=error.hint) from None
    path = str(Path(value).absolute())
    try:
        return read_config(path)
    except UsageError as error:
        # A message about the file begins with its path, one about its content with a key.
        about_file = error.message.removeprefix(path)
        colon = ": " if about_file == error.message else ""
        raise UsageError(f"{quoted(value)}{colon}{about_file}", hint=error.hint) from None


def translations(value: str) -> list[tuple[str, str]]:
    """Return MindSpore's words in the configuration that `value` is or names, each with ours."""
    from msrun.parallel.config_file import read_translations

    tree = _json_object(value) if is_inline(value) else None
    return read_translations(tree if isinstance(tree, dict) else str(Path(value).absolute()))


def is_inline(value: str) -> bool:
    """Tell whether `value` is the configuration itself."""
    return value.lstrip().startswith("{")


def _json_object(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UsageError(f"{quoted(value)} is no JSON object") from None
