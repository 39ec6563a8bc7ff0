"""Start of every Python process that msrun makes: `python entry.py module:function ARGS`.

Run by path and not by `-m`, because `-m` would put the current directory on
`sys.path` and `-P` would show in the `sys.flags` of forked workers.

The function is called with the remaining arguments.  What it returns is called next,
and so on: a forked child leaves its parent's frames that way, so that a stack dump of
a user's program shows two lines of ours and not our whole history.
"""

import importlib
import sys
from pathlib import Path


def main() -> None:
    """Import what was named with ours first on `sys.path`, then take it off again."""
    if not sys.flags.safe_path:
        del sys.path[0]
    module_name, _, function_name = sys.argv[1].partition(":")
    home = str(Path(__file__).parent.parent)
    sys.path.insert(0, home)
    function = getattr(importlib.import_module(module_name), function_name)
    sys.path.remove(home)
    then = function(sys.argv[2:])
    while then is not None:
        then = then()


if __name__ == "__main__":
    main()
