"""Runs a program as `__main__`, exactly as `python` would have started it.

A forked worker has no interpreter start of its own, so this module does what the interpreter does
between its start and the last `atexit` function: a fresh `__main__`, `sys.argv`, `sys.path[0]`, the
exit code of `SystemExit`, the traceback without our frames, death by SIGINT after Ctrl-C.  Programs
notice each of these: multiprocessing and pickle look up classes in `__main__`, tools read
`sys.orig_argv`, shells look at the exit status.

The interpreter's tear-down is replaced by `leave`, which keeps the parts that a program can see
(its threads are joined, `atexit` functions run, files are flushed, its globals are finalized) and
skips the rest, for two reasons: a walk over all of torch's objects would copy every page that
forked workers share, and C++ destructors that run after peers have gone abort a job that was
already done.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from msrun.supervise.process import flush_c_streams

ERROR = 1
_CANNOT_OPEN = 2
_LONG_MAX = (1 << 63) - 1
# Name of `__main__` in children that multiprocessing spawned, by which they pickle its classes.
_MP_ALIAS = "__mp_main__"
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
    _replace_main()
    interrupted = False
    try:
        if kind == "module":
            _run_module(argv[0])
        else:
            _run_path(argv[0])
        code = 0
    except SystemExit as stop:
        code = _exit_code(stop)
    except KeyboardInterrupt as stop:
        code = _show(stop)
        interrupted = True
    except BaseException as error:  # noqa: BLE001 - the last one before the interpreter's end
        record(error)
        code = _show(error)
    leave(code, signal.SIGINT if interrupted else None)


def _replace_main() -> None:
    """Begin a new `__main__`, also under the alias that multiprocessing gave the old one."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if _MP_ALIAS in sys.modules:
        sys.modules[_MP_ALIAS] = main


def _run_module(name: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    sys.argv[0] = "-m"
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls


def _run_path(path: str) -> None:
    # Not `Path`, which would tidy up what a program sees of its own path.
    file = path if path.startswith("/") else f"{Path.cwd()}/{path}"
    if pkgutil.get_importer(file) is not None:
        sys.path.insert(0, file)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python DIR` calls
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(os.path.realpath(file)).parent))
    code, loader = load_script(file)
    main = sys.modules["__main__"].__dict__
    main.update(__loader__=loader, __annotations__={}, __builtins__=builtins)
    main.update(__file__=file, __cached__=None)
    exec(code, main)  # noqa: S102 - this is what running a script is


def load_script(file: str) -> tuple[Any, object]:
    """Return the code of a script and its loader."""
    if file.endswith(".pyc"):
        sourceless = importlib.machinery.SourcelessFileLoader("__main__", file)
        return sourceless.get_code("__main__"), sourceless
    try:
        with io.open_code(file) as source:
            text = source.read()
    except OSError as error:
        problem = f"can't open file {file!r}: [Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: {problem}", file=sys.stderr)  # noqa: T201 - as the interpreter does
        raise SystemExit(_CANNOT_OPEN) from None
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return compile(text, file, "exec", dont_inherit=True), loader


def _exit_code(stop: SystemExit) -> int:
    code: object = stop.code
    if code is None:
        return 0
    if isinstance(code, int):
        return (code if -_LONG_MAX <= code <= _LONG_MAX else -1) & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return ERROR


def _show(error: BaseException) -> int:
    """Print the traceback that `python` would print; return the code to exit with."""
    error = _without_our_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as failure:  # noqa: BLE001 - a hook is the user's code
        failure = _without_our_frames(failure)
        failure.__context__ = None
        _print_error("Error in sys.excepthook:", failure)
        _print_error("\nOriginal exception was:", error)
    return ERROR


def _without_our_frames(error: BaseException) -> BaseException:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return error.with_traceback(frames)


def _print_error(title: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):
        print(title, file=sys.stderr)  # noqa: T201 - as the interpreter does
        traceback.print_exception(error)


def leave(code: int, signum: int | None = None) -> NoReturn:
    """End this process after everything a program may rely on at its end.

    Args:
        code: Exit code.
        signum: Signal to die by instead, which is how `python` ends after Ctrl-C.
    """
    try:
        _attempt(threading._shutdown)  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
        _attempt(atexit._run_exitfuncs)  # noqa: SLF001 - has no public name
        # Flushed before and after: a finalizer may write to a file, and one in a reference cycle
        # may run after the file object was closed without a flush.
        _attempt(_flush_open_files)
        _attempt(_drop_globals)
        _attempt(_flush_open_files)
        if signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
    finally:
        os._exit(code)


def _attempt(step: Callable[[], None]) -> None:
    """Take one step of the end; a signal handler that raises must not skip the others."""
    try:
        step()
    except BaseException as error:  # noqa: BLE001 - the exit code is decided already
        _print_error(f"Exception ignored in: {step!r}", _without_our_frames(error))


class _Canary:
    """Stays alive as long as the namespace that holds it."""


def _drop_globals() -> None:
    """Release the program's globals, so that their finalizers run.

    They are released together, as at the interpreter's end: a finalizer still finds the other
    globals.  Only a namespace that something else refers to is emptied by force.
    """
    if threading.active_count() > 1:
        # A daemon thread may still use the globals.
        return
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    canary = _release_main()
    gc.collect()
    if survivor := canary():
        for namespace in gc.get_referrers(survivor):
            if isinstance(namespace, dict):
                _empty(namespace)
        gc.collect()


def _release_main() -> weakref.ref[_Canary]:
    canary = _Canary()
    sys.modules.pop(_MP_ALIAS, None)
    sys.modules.pop("__main__").__dict__[_Canary.__name__] = canary
    return weakref.ref(canary)


def _empty(namespace: dict[str, Any]) -> None:
    for name in sorted(namespace, key=lambda name: not name.startswith("_")):
        if name != "__builtins__":
            namespace[name] = None


def _flush_open_files() -> None:
    """Write out the buffers of unclosed files, which their destructors would do."""
    for candidate in gc.get_objects():
        # Not isinstance, which asks an object for its `__class__`: some answer with a warning.
        if issubclass(type(candidate), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            with contextlib.suppress(Exception):
                candidate.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a program may have put anything there
            stream.flush()
    flush_c_streams()
