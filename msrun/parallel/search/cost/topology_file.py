"""A topology as users name it: a preset, or a file."""

from __future__ import annotations

from pathlib import Path

from msrun.errors import UsageError
from msrun.parallel.config_file import load_yaml
from msrun.parallel.search.cost.topology import Topology, parse_topology, preset

_ENDINGS = (".yaml", ".yml", ".json")


def find_topology(name: str) -> Topology:
    """Return the preset called `name`, or what the file of that name says.

    Raises:
        UsageError: There is neither, or the file says something else.
    """
    path = Path(name)
    if path.suffix not in _ENDINGS:
        return preset(name)
    try:
        tree = load_yaml(path)
    except UsageError as error:
        raise UsageError(f"topology: {error.message}") from None
    return parse_topology(tree)
