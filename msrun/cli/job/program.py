"""The program of every worker: the first word that is not an option, and all words after it.

A peer's way of writing it (`python -u train.py`, `pytest tests`) becomes script or
module; what does not exist is refused before anything is started.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msrun.cli.options import catalog as options
from msrun.cli.options.foreign import COMMANDS, LAUNCHERS
from msrun.cli.options.job_file import JobFile
from msrun.cli.options.settings import Level, Settings, Source
from msrun.cli.verb_table import VERBS
from msrun.errors import UsageError
from msrun.job import ProgramKind, WorkerProgram
from msrun.units import quoted

_PYTHONS = ("python", "python3")
_WITH_VALUE = "XW"
_PYTHON_EXEC = "PYTHON_EXEC"
_ELF = b"\x7fELF"
_SHELL = re.compile(rb"#![^\n]*\b((?:ba|da|z|k)?sh)\b[^\n]*\n(?!['\"])")
_START = 256
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9_.-]+")
# With what follows it, the name of a job in Kubernetes has to have room for that of its pods.
_ID_STEM_MAX = 29


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenProgram:
    """The program and where it was named."""

    program: WorkerProgram
    source: Source


def find_program(words: tuple[str, ...], file: JobFile, settings: Settings) -> ChosenProgram:
    """Return the program that the command line, else the job file, names.

    Raises:
        UsageError: None is named, or it is not there.
    """
    program, source = _named(words, file, settings)
    match program.kind:
        case ProgramKind.SCRIPT:
            _check_script(program.target)
        case ProgramKind.MODULE:
            _check_module(program.target)
        case ProgramKind.COMMAND:
            _check_command(program.target)
    return ChosenProgram(program=program, source=source)


def with_interpreter(chosen: ChosenProgram, environment: Mapping[str, str]) -> ChosenProgram:
    """Return the program as run by PYTHON_EXEC, torchrun's variable for another interpreter.

    Raises:
        UsageError: There is no such command.
    """
    program, python = chosen.program, environment.get(_PYTHON_EXEC, "")
    if not python or program.kind is ProgramKind.COMMAND or python == sys.executable:
        return chosen
    try:
        _check_command(python)
    except UsageError as error:
        raise UsageError(f"environment {_PYTHON_EXEC}: {error.message}", hint=error.hint) from None
    module = ("-m",) if program.kind is ProgramKind.MODULE else ()
    words = ("-u", *program.interpreter_options, *module, program.target, *program.args)
    command = WorkerProgram(kind=ProgramKind.COMMAND, target=python, args=words)
    return ChosenProgram(program=command, source=chosen.source)


def job_id_stem(program: WorkerProgram) -> str:
    """Return the beginning of a default job id: the program's short name."""
    name = program.target.rpartition(".")[2] if program.kind is ProgramKind.MODULE else ""
    stem = _NOT_IN_ID.sub("-", name or Path(program.target).stem)[:_ID_STEM_MAX]
    return stem.strip("_.-") or "job"


def _named(
    words: tuple[str, ...], file: JobFile, settings: Settings
) -> tuple[WorkerProgram, Source]:
    kind = _kind(settings)
    if words:
        source = Source(level=Level.FLAG, place="SCRIPT")
        if kind is ProgramKind.SCRIPT and not settings.value(options.RUN_PATH):
            return _from_words(words), source
        return WorkerProgram(kind=kind, target=words[0], args=words[1:]), source
    if file.script and file.module:
        raise UsageError(f"{file.options.path}: script and module are both given (choose one)")
    source = Source(level=Level.FILE, place=file.options.path, key="script")
    if file.module:
        kind = ProgramKind.MODULE
    target = file.module or file.script
    if target is None:
        raise UsageError("no SCRIPT is given", hint="msrun --help lists options and verbs")
    return WorkerProgram(kind=kind, target=target, args=file.args or ()), source


def _kind(settings: Settings) -> ProgramKind:
    module, command = settings.get(options.MODULE), settings.get(options.NO_PYTHON)
    is_module, is_command = bool(module and module.value), bool(command and command.value)
    if settings.value(options.RUN_PATH):
        is_command = False
        if is_module:
            raise UsageError("--run-path contradicts --module: a path is no module name")
    if is_module and is_command:
        raise UsageError("--no-python contradicts --module: a module is Python")
    if is_module:
        return ProgramKind.MODULE
    return ProgramKind.COMMAND if is_command else ProgramKind.SCRIPT


def _from_words(words: tuple[str, ...]) -> WorkerProgram:
    """Return the program that a Python command line or a script with arguments means."""
    first, rest = words[0], words[1:]
    if first == "pytest":
        return WorkerProgram(kind=ProgramKind.MODULE, target="pytest", args=rest)
    if first in _PYTHONS:
        return _from_python(rest)
    return WorkerProgram(kind=ProgramKind.SCRIPT, target=first, args=rest)


def _from_python(words: tuple[str, ...]) -> WorkerProgram:
    """Return what `python WORDS` would run; `-u` is dropped, as workers never buffer."""
    interpreter: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word.startswith("--"):
            interpreter.append(word)
            if word == "--check-hash-based-pycs" and rest:
                interpreter.append(rest.pop(0))
            continue
        kept, action, value = _short_options(word)
        if kept:
            interpreter.append("-" + kept)
        if action and not value:
            value = rest.pop(0) if rest else ""
        if action in ("m", "c"):
            return _module_or_code(action, value, tuple(rest), tuple(interpreter))
        if action:
            interpreter += [f"-{action}", value]
    if not rest or rest[0] == "-" or {"-h", "-V", "-?", "--help", "--version"} & {*interpreter}:
        raise UsageError(f"{quoted(shlex.join(['python', *words]))} names no script")
    return WorkerProgram(
        kind=ProgramKind.SCRIPT,
        target=rest[0],
        args=tuple(rest[1:]),
        interpreter_options=tuple(interpreter),
    )


def _short_options(word: str) -> tuple[str, str, str]:
    """Split `-BuXdev` into the plain letters without `u`, the one that takes a value, its value."""
    kept = ""
    for i, letter in enumerate(word[1:], start=1):
        if letter in "mc" + _WITH_VALUE:
            return kept, letter, word[i + 1 :]
        kept += letter.replace("u", "")
    return kept, "", ""


def _module_or_code(
    action: str, value: str, args: tuple[str, ...], interpreter: tuple[str, ...]
) -> WorkerProgram:
    if not value:
        raise UsageError(f"'python -{action}' names no {'module' if action == 'm' else 'code'}")
    if action == "m":
        return WorkerProgram(
            kind=ProgramKind.MODULE, target=value, args=args, interpreter_options=interpreter
        )
    return WorkerProgram(
        kind=ProgramKind.COMMAND,
        target=sys.executable,
        args=("-u", *interpreter, "-c", value, *args),
    )


def _check_script(target: str) -> None:
    path = Path(target)
    mode = _mode(path, "script")
    if mode is None or not target:
        raise UsageError(f"script {quoted(target)} does not exist", hint=_hint(target))
    if stat.S_ISDIR(mode):
        path /= "__main__.py"
        if _mode(path, "script") is None:
            raise UsageError(f"script {quoted(target)} is a directory without __main__.py")
    elif not stat.S_ISREG(mode):
        raise UsageError(f"script {quoted(target)} is no regular file")
    try:
        with path.open("rb") as file:
            start = file.read(_START)
    except OSError as error:
        raise UsageError(f"script {quoted(target)} cannot be read: {error.strerror}") from None
    if not target.endswith(".py") and (shell := _shell_of(start)):
        raise UsageError(
            f"script {quoted(target)} is one of {shell}, and no Python",
            hint=f"start it with --no-python {target if '/' in target else f'./{target}'}",
        )
    if target.endswith(".ipynb"):
        raise UsageError(
            f"script {quoted(target)} is a notebook, and no Python",
            hint="in the notebook, msrun.launch(train, workers=4) runs a function of it",
        )
    if start.startswith(_ELF):
        raise UsageError(
            f"script {quoted(target)} is a compiled program", hint="start it with --no-python"
        )


def _shell_of(start: bytes) -> str:
    """Return the shell that a script's first line names; empty where there is none.

    A script of Python may be one of the shell too: its second line is then a text to Python.
    """
    match = _SHELL.match(start)
    return match[1].decode() if match else ""


def _mode(path: Path, noun: str) -> int | None:
    """Return the mode bits of the file at `path`, None when there is no file."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"{noun} {quoted(str(path))} cannot be reached: {error.strerror}"
        ) from None


def _hint(target: str) -> str | None:
    """Return a guess at the intended program where the script does not exist."""
    if target and Path(f"{target}.py").is_file():
        return f"did you mean {target}.py?"
    is_name = re.fullmatch(r"\w[\w.-]*", target) and not target.endswith(".py")
    if is_name and (meant := _other_word(target)):
        return meant
    return None if Path(target).is_absolute() else f"looked in {Path.cwd()}"


def _other_word(name: str) -> str:
    """Return what `name` is instead of a script; empty if it is nothing."""
    if name in COMMANDS:
        return f"did you mean {COMMANDS[name]}?"
    if verbs := difflib.get_close_matches(name, VERBS, n=1, cutoff=0.7):
        return f"did you mean msrun {verbs[0]}?"
    if name in LAUNCHERS:
        return f"msrun takes the place of {name}: leave that word out"
    if shutil.which(name):
        return f"{name} is a command; start it with --no-python"
    if _is_found(name.partition(".")[0]):
        return f"{name} is a module; start it with -m"
    return ""


def _check_module(target: str) -> None:
    top, _, below = target.partition(".")
    if not all(part for part in target.split(".")) or "/" in target:
        dotted = target.removesuffix(".py").replace("/", ".")
        raise UsageError(
            f"module {quoted(target)} is no dotted name such as package.module",
            hint=f"write -m {dotted}, or leave -m out" if Path(target).is_file() else None,
        )
    if not _is_found(top):
        raise UsageError(f"module {quoted(target)} does not exist", hint=f"looked in {Path.cwd()}")
    if below == "py" and Path(target).is_file():
        raise UsageError(
            f"module {quoted(target)} is a file", hint=f"write -m {top}, or leave -m out"
        )


def _is_found(top: str) -> bool:
    """Tell whether a worker could import `top`; imports nothing."""
    if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())]):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:
        return True  # Imported already and without a spec, as `__main__` is.


def _check_command(target: str) -> None:
    if shutil.which(target):
        return
    if "/" not in target:
        raise UsageError(
            f"command {quoted(target)} is not on PATH",
            hint=f"write ./{target}" if Path(target).is_file() else None,
        )
    mode = _mode(Path(target), "command")
    what = "does not exist"
    if mode is not None:
        what = "is a directory" if stat.S_ISDIR(mode) else "may not be executed by this user"
    raise UsageError(f"command {quoted(target)} {what}")
