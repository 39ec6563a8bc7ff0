"""Scripts that use the standard library alone: the forkserver imports no torch for them.

The import takes a second of such a job's time.  Reading the script decides.  Where that is wrong,
each rank imports torch by itself, as under `python`: it costs time, and changes nothing else.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from msrun.supervise.orders import Configure, Ready

_SOURCE_BYTES_MAX = 1 << 20
_OURS = "msrun"
# All of our package that imports no torch and a script may call.
_LIGHT = "beat"
# By these a script may import anything.
_OPEN_MODULES = {"importlib", "pickle", "runpy"}
_OPEN_FUNCTIONS = {"__import__", "compile", "eval", "exec"}


def ready_without_torch(configure: Configure) -> Ready | None:
    """Return that ranks may be forked as it is, None if they may want what is preloaded."""
    is_wanted = configure.preload_of_user or any(
        module.partition(".")[0] != "torch" for module in configure.preload
    )
    if configure.kind != "script" or not configure.fork or is_wanted:
        return None
    try:
        with Path(configure.cwd, configure.argv[0]).open("rb") as file:
            source = file.read(_SOURCE_BYTES_MAX + 1)
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # running it will say so
    if len(source) > _SOURCE_BYTES_MAX or not all(map(_is_plain, ast.walk(tree))):
        return None
    return Ready(fork=True, seconds=0.0) if _uses_little_of_ours(tree) else None


def _is_plain(node: ast.AST) -> bool:
    """Whether this part of a program imports nothing, or of the standard library or msrun."""
    match node:
        case ast.Name(id=name):
            return name not in _OPEN_FUNCTIONS
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            modules = [module]
        case ast.ImportFrom():
            return False
        case _:
            return True
    tops = {module.partition(".")[0] for module in modules}
    return not tops & _OPEN_MODULES and tops <= sys.stdlib_module_names | {_OURS}


def _uses_little_of_ours(tree: ast.AST) -> bool:
    return all(name == _LIGHT for name in _used_of_ours(tree))


def _used_of_ours(tree: ast.AST) -> Iterator[str]:
    """Yield what a program uses of msrun, empty names where that is not known."""
    nodes = list(ast.walk(tree))
    called = {
        id(node.value): node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ("" for it in names if it.name.startswith(_OURS) and it.name != _OURS)
                yield from ("" for it in names if it.name == _OURS and it.asname)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(_OURS):
                yield from (it.name if module == _OURS else "" for it in names)
            case ast.Name(id=name) if name == _OURS:
                yield called.get(id(node), "")
