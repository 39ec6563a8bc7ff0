"""Run a program as `__main__`, so that it cannot tell it was not started by `python`.

`run` covers what the interpreter does between its own start and the last `atexit`
function; the interpreter's tear-down is replaced by `leave`, which keeps what a
program can see of it and skips the rest: walking all of torch's objects would copy
every page that forked workers share, and C++ destructors that run after peers have
gone abort a job that was already done.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from msrun.supervise.process import flush_c_streams

ERROR = 1
Record = Callable[[BaseException], None]


def run(kind: str, argv: list[str], record: Record) -> NoReturn:
    """Run the program `argv` as `__main__` and end this process as `python` would.

    Args:
        kind: `script` or `module`.
        argv: Path of the script or dotted name of the module, and its arguments.
        record: Called with an exception that nothing caught, before it is shown.
    """
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, *(["-m"] if kind == "module" else []), *argv]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        if kind == "module":
            _run_module(argv[0])
        elif Path(argv[0]).is_file() and not _is_archive(argv[0]):
            _run_script(argv[0], main)
        else:
            sys.path.insert(0, argv[0])
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python DIR` calls
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except KeyboardInterrupt as stop:
        _show(stop)
        _finish()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - the last one before the interpreter's end
        record(error)
        _show(error)
        code = ERROR
    leave(code)


def _is_archive(path: str) -> bool:
    return any(path.endswith(suffix) for suffix in (".zip", ".pyz", ".egg"))


def _run_module(name: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    sys.argv[0] = "-m"
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls


def _run_script(path: str, main: types.ModuleType) -> None:
    file = str(Path.cwd() / path)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(os.path.realpath(file)).parent))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main.__dict__.update(
        __builtins__=builtins, __file__=file, __cached__=None, __loader__=loader, __annotations__={}
    )
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - this is what running a script is


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return ERROR


def _show(error: BaseException) -> None:
    """Print the traceback that `python` would print: without the frames of this file."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _finish() -> None:
    """Wait for threads and run the exit functions, as the interpreter does first."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
    atexit._run_exitfuncs()  # noqa: SLF001 - has no public name


def leave(code: int) -> NoReturn:
    """End this process with `code`, after everything a program may rely on at its end."""
    try:
        _finish()
        if threading.active_count() == 1:
            # A daemon thread may still use the globals.
            _drop_globals()
        _flush_open_files()
    finally:
        os._exit(code)


def _drop_globals() -> None:
    """Let go of the program's globals, so that their finalizers run."""
    namespace = sys.modules["__main__"].__dict__
    for name in list(namespace):
        if name != "__builtins__":
            namespace[name] = None
    gc.collect()


def _flush_open_files() -> None:
    """Write out what unclosed files have buffered, which their destructors would do."""
    for candidate in gc.get_objects():
        # Not isinstance, which asks an object for its `__class__`: some answer with a warning.
        if issubclass(type(candidate), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            try:
                candidate.flush()
            except (OSError, ValueError):
                continue
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    flush_c_streams()
