"""`msrun install-shim`: commands named torchrun and accelerate that run msrun."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msrun.cli.options.words import read_words
from msrun.cli.output import say
from msrun.errors import UsageError
from msrun.units import shown

if TYPE_CHECKING:
    from msrun.cli.system import System

SUMMARY = (
    "Make a directory with a command torchrun that runs msrun, for tools that call torchrun; with "
    "accelerate installed, also a command accelerate whose launch starts workers by msrun.  Put "
    "the directory first on PATH."
)
DEFAULT = "~/.local/share/msrun/shim"
_MARK = "# made by msrun install-shim"
_MODULE = "msrun.cli.torchrun_shim"
_TORCHRUN = ("torchrun",)
_ACCELERATE = ("accelerate", "accelerate-launch")


def install_shim(args: Sequence[str], system: System) -> int:
    """Install the commands, or remove them."""
    del system
    params = (
        click.Argument(["folder"], metavar="[DIR]", required=False, default=DEFAULT),
        click.Option(["--remove"], is_flag=True, help="Remove the commands from DIR instead."),
    )
    epilog = f"DIR is {DEFAULT} by default.  Files that msrun did not make are left alone."
    given = read_words("msrun install-shim", SUMMARY, params, args, epilog=epilog)
    folder = Path(given["folder"]).expanduser().absolute()
    try:
        text = _remove(folder) if given["remove"] else _install(folder)
    except OSError as error:
        at = shown(str(error.filename or folder))
        raise UsageError(f"{at}: {error.strerror}", hint="choose another directory") from None
    say(text)
    return 0


def _install(folder: Path) -> str:
    names = _TORCHRUN + (_ACCELERATE if importlib.util.find_spec("accelerate") else ())
    foreign = [folder / name for name in names if _is_foreign(folder / name)]
    if foreign:
        raise UsageError(
            f"{shown(str(foreign[0]))} is there already, and msrun did not make it",
            hint="choose a directory for the shim alone",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        command = shlex.join([sys.executable, "-P", "-m", _MODULE, name])
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(f'#!/bin/sh\n{_MARK}\nexec {command} "$@"\n')
        temporary.chmod(0o755)
        temporary.replace(folder / name)
    path = shlex.quote(str(folder))
    return f'{", ".join(names)} of {sys.executable} in {folder}\nexport PATH={path}:"$PATH"'


def _remove(folder: Path) -> str:
    found = [folder / name for name in (*_TORCHRUN, *_ACCELERATE)]
    own = [path for path in found if os.path.lexists(path) and not _is_foreign(path)]
    if not own:
        raise UsageError(f"{shown(str(folder))} has no command that msrun install-shim made")
    for path in own:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return f"removed {', '.join(path.name for path in own)} from {folder}"


def _is_foreign(path: Path) -> bool:
    """Tell whether `path` is there and not one of ours."""
    if not os.path.lexists(path):
        return False
    if path.is_symlink() or not path.is_file():
        return True
    with path.open("rb") as file:
        return _MARK.encode() not in file.read(256).splitlines()
