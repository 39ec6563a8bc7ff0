"""The script of this process, as workers import it before they load a function of it."""

from __future__ import annotations

import sys
from pathlib import Path

from msrun.worker.call_files import CallSetup

_PYTHON = (".py", ".pyc", ".pyw", "")


def find_main(function: str) -> CallSetup:
    """Return what a worker does before it loads a function of this process.

    Args:
        function: Its name, for messages.
    """
    main = sys.modules.get("__main__")
    # Notebooks and interactive sessions have no file; some give the name of theirs, as .ipynb.
    file = str(getattr(main, "__file__", None) or "")
    is_script = file and Path(file).suffix in _PYTHON and Path(file).is_file()
    module = str(getattr(getattr(main, "__spec__", None), "name", "")) if is_script else ""
    return CallSetup(
        name=function,
        sys_path=[str(entry) for entry in sys.path],
        argv=list(map(str, getattr(sys, "argv", []))),
        main_path=str(Path(file).absolute()) if is_script else "",
        main_module="" if module == "__main__" else module,
    )
