"""The console script: find the verb, run it, turn every failure into one sentence."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import click

from msrun.cli.output import say, say_error
from msrun.cli.system import RealSystem, System
from msrun.cli.verb_table import ELSEWHERE, VERBS
from msrun.errors import ExitCode, MsrunError, signal_exit_code

VerbFunction = Callable[[Sequence[str], System], int]


def console() -> NoReturn:
    """Be the process `msrun`, which ends with the exit code."""
    code: int | None = None

    def leave() -> None:
        # Taking torch and a traced model apart takes a quarter of a second, for nothing.
        if code is not None and "torch" in sys.modules:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except OSError:
                return  # Python reports it
            os._exit(code)

    # Registered first, it is called last: behind what torch and the model's file registered.
    atexit.register(leave)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `__main__` leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    sys.exit(code)


def main(argv: Sequence[str] | None = None, *, system: System | None = None) -> int:
    """Do what the command line says and return the exit code.

    Args:
        argv: Words after `msrun`; None takes this process's.
        system: Answers what the verb asks about the machine; None asks the machine itself.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in VERBS else "run"
    return guarded(partial(_call, name), words, system or RealSystem())


def _call(name: str, words: Sequence[str], system: System) -> int:
    if name in ELSEWHERE:
        from msrun.cli.verbs.elsewhere import find_verb  # Few verbs are about a job elsewhere.

        if remote := find_verb(name, words):
            return remote(words, system)
    module, _, function = VERBS[name].place.partition(":")
    verb: VerbFunction = getattr(importlib.import_module(module), function)
    return verb(words, system)


def guarded(verb: VerbFunction, words: Sequence[str], system: System) -> int:
    """Return the exit code of `verb`, after one sentence on any failure."""
    try:
        return verb(words, system)
    except MsrunError as error:
        say_error(error)
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except KeyboardInterrupt:
        return signal_exit_code(signal.SIGINT)
    except BrokenPipeError:
        # The reader of `msrun plan | head` has enough; nor may the interpreter complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return signal_exit_code(signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001 - the last line of defence, and it hides nothing
        say(_bug_report(error))
        return ExitCode.INTERNAL


def _bug_report(error: Exception) -> str:
    """Return one sentence on our own mistake; the traceback goes to a file."""
    import tempfile  # Neither is needed on a good day, and both take their time to load.
    import traceback

    summary = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    story = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="msrun-bug-", suffix=".txt", delete=False, errors="backslashreplace"
        ) as file:
            file.write(story)
    except OSError:
        return f"{story}error: this is a bug in msrun: {summary}"
    return f"error: this is a bug in msrun: {summary}\n  hint: {file.name} has the traceback"
