"""`--parallel`: the configuration of the workers, checked against the size of their job.

It is a YAML file, or the mapping itself as JSON, which is how a job file hands it on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msrun.cli.options import parsers
from msrun.cli.options.settings import Given
from msrun.errors import UsageError
from msrun.units import quoted

if TYPE_CHECKING:
    from msrun.parallel.config import ParallelConfig
    from msrun.parallel.layout import MeshLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the workers of one job divide their work.

    Args:
        config: As it was given.
        layout: The mesh over all of them, None while their number is unknown.
    """

    config: ParallelConfig
    layout: MeshLayout | None

    def render(self) -> str:
        """Return the configuration as a worker reads it."""
        from msrun.parallel.config_file import render_config

        return render_config(self.config)


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
        # A message on the file itself begins with its path, one on what it says with a key.
        about_file = error.message.removeprefix(path)
        colon = ": " if about_file == error.message else ""
        raise UsageError(f"{quoted(value)}{colon}{about_file}", hint=error.hint) from None


def is_inline(value: str) -> bool:
    """Tell whether `value` is the configuration itself."""
    return value.lstrip().startswith("{")


def _json_object(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UsageError(f"{quoted(value)} is no JSON object") from None


def fit_parallel(given: Given[ParallelConfig] | None, world_size: int | None) -> Parallel | None:
    """Return what `given` makes of `world_size` workers; None when nothing is given.

    Without a number it stays to be seen whether it fits them.

    Raises:
        UsageError: It does not fit them.
    """
    if given is None:
        return None
    if world_size is None or given.value.mesh == "auto":
        return Parallel(config=given.value, layout=None)
    from msrun.parallel.layout import resolve

    try:
        layout = resolve(given.value, world_size)
    except UsageError as error:
        raise UsageError(f"{given.cite()}: {error.message}", hint=error.hint) from None
    return Parallel(config=given.value, layout=layout)
