"""torchrun's place on PATH, for tools that call that command: `python -m msrun.cli.torchrun_shim`.

`msrun install-shim` writes commands that come here.  `torchrun` is `msrun run` with torchrun's own
number of workers.  `accelerate` runs the accelerate of this interpreter, which calls torchrun as a
function in its own process: what it would have started becomes an `msrun` in its place.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from msrun.cli.main import main
from msrun.cli.output import say_error
from msrun.cli.system import RealSystem
from msrun.errors import ExitCode, UsageError

# Of torchrun, where msrun starts one for each device.
_DEFAULTS = {"PET_NPROC_PER_NODE": "1"}
_SELF = "msrun.cli.torchrun_shim"
_PROGRAM = ("training_script", "training_script_args")


class TorchRun(Protocol):
    """The module `torch.distributed.run`."""

    run: Callable[[argparse.Namespace], None]

    def get_args_parser(self) -> argparse.ArgumentParser:
        """Return the parser of torchrun's options."""


class _TorchrunSystem(RealSystem):
    """The machine, with what torchrun does where its user says nothing."""

    def environment(self) -> Mapping[str, str]:
        return {**_DEFAULTS, **super().environment()}


def shim(name: str, words: Sequence[str]) -> int:
    """Be the command `name`, torchrun, accelerate or accelerate-launch; return its exit code."""
    if name == "torchrun":
        return main(["run", *words], system=_TorchrunSystem())
    if not importlib.util.find_spec("accelerate"):
        say_error(
            UsageError(
                f"{name} is a shim of msrun, and {sys.executable} has no accelerate",
                hint="install it there, or remove the shim with `msrun install-shim --remove`",
            )
        )
        return ExitCode.USAGE
    _accelerate(name, list(words))
    return 0


def _accelerate(name: str, words: list[str]) -> None:
    """Be a command of accelerate, whose own failures look as they do without us."""
    torchrun: TorchRun = importlib.import_module("torch.distributed.run")
    replace_run(torchrun, _become)
    if name == "accelerate" and words[:1] == ["launch"]:
        # As it stands alone: other verbs of accelerate import what this one does not need.
        name, words = "accelerate-launch", words[1:]
    sys.argv = [name, *words]
    module = "launch" if name == "accelerate-launch" else "accelerate_cli"
    importlib.import_module(f"accelerate.commands.{module}").main()


def replace_run(torchrun: TorchRun, become: Callable[[list[str]], None]) -> None:
    """Have the function `run` of torchrun call `become` with the words of its command line."""
    parser = torchrun.get_args_parser()
    torchrun.run = lambda given: become(words_of(parser, given))


def words_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[str]:
    """Return the words that `parser` would read as `given`."""
    words = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of its options
        value = getattr(given, action.dest, action.default)
        is_given = value is not None and str(value) != str(action.default)
        if action.dest in (*_PROGRAM, "help") or not is_given:
            continue
        # Switches take `=true` too.
        text = str(value).lower() if isinstance(value, bool) else str(value)
        flag = next(spelling for spelling in action.option_strings if spelling.startswith("--"))
        words.append(f"{flag}={text}")
    return [*words, given.training_script, *given.training_script_args]


def _become(words: list[str]) -> NoReturn:
    sys.stderr.write(f"msrun: in torchrun's place: msrun {shlex.join(words)}\n")
    sys.stderr.flush()
    own = [sys.executable, "-P", "-m", _SELF, "torchrun", *words]
    os.execv(sys.executable, own)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    sys.exit(shim(sys.argv[1], sys.argv[2:]))
