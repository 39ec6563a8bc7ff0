"""The program of a worker that calls a function of `msrun.launch`: `-m msrun.worker.call`.

It does what multiprocessing's spawn does: import the caller's script under another name than
`__main__`, so that the part below `if __name__ == "__main__"` does not run, then load the function,
call it, and leave its value for the caller.
"""

from __future__ import annotations

import builtins
import importlib.util
import runpy
import sys
import traceback
import types
from importlib.abc import InspectLoader
from pathlib import Path
from types import TracebackType
from typing import Any

from msrun import environ
from msrun.errors import MsrunError, UsageError
from msrun.worker import main_module, pickled
from msrun.worker.call_files import BYTES_MAX, CallFiles, CallSetup
from msrun.worker.pickled import FunctionCall

# Files whose frames a traceback of the user's function does not show.
_OURS = (__file__, main_module.__file__, pickled.__file__, runpy.__file__, "<frozen runpy>")


def main() -> None:
    """Call the function and leave its value, or the text of its exception."""
    sys.excepthook = _show
    directory = environ.call_directory()
    if not directory:
        raise UsageError(
            "the function of msrun.launch is on the node of its caller alone",
            hint="start other nodes with a script: msrun.Job('train.py', launcher=...)",
        )
    files = CallFiles(Path(directory))
    who = environ.rank_identity(environ.current())
    try:
        value = _load(files)()
    except SystemExit as stop:
        if stop.code in (None, 0):
            _leave(files, who, None)
        raise
    except BaseException as error:
        files.write_traceback(who.generation, who.rank, _text(error))
        raise
    _leave(files, who, value)


def _load(files: CallFiles) -> _Loaded:
    """Return the function, ready to be called."""
    setup = files.read_setup()
    sys.path[:] = setup.sys_path
    sys.argv = list(setup.argv)
    _import_main(setup)
    try:
        call = pickled.load_call(files.read_call())
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{setup.name} cannot be loaded by a worker: {type(error).__name__}: {error}",
            hint="define it in the script or in a module that workers can import",
        ) from error
    environ.end_call()
    return _Loaded(call)


class _Loaded:
    """A function with its arguments."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call

    def __call__(self) -> object:
        return self._call.function(*self._call.args, **self._call.kwargs)


def _import_main(setup: CallSetup) -> None:
    """Import the caller's script, and have it as `__main__`."""
    if not setup.main_path:
        return
    main = types.ModuleType(pickled.MAIN_ALIAS)
    spec = importlib.util.find_spec(setup.main_module) if setup.main_module else None
    code: Any
    loader: object
    if spec and isinstance(spec.loader, InspectLoader):
        code, loader = spec.loader.get_code(setup.main_module), spec.loader
        main.__dict__.update(__spec__=spec, __package__=spec.parent)
    else:
        code, loader = main_module.load_script(setup.main_path)
    main.__dict__.update(__loader__=loader, __builtins__=builtins, __file__=setup.main_path)
    sys.modules["__main__"] = sys.modules[pickled.MAIN_ALIAS] = main
    try:
        exec(code, main.__dict__)  # noqa: S102 - this is what importing a script is
    except SystemExit as stop:
        raise UsageError(
            f"{setup.main_path} called sys.exit({stop.code!r}) while a worker imported it, before "
            f"{setup.name} was called",
            hint='put what only the caller does below if __name__ == "__main__":',
        ) from None


def _leave(files: CallFiles, who: environ.RankIdentity, value: object) -> None:
    """Leave `value` for the caller, or one sentence about why it cannot have it."""
    problem = ""
    data = b""
    try:
        data = pickled.dump_value(value)
    except Exception as error:  # noqa: BLE001 - the value's own code may raise anything
        problem = f"cannot be pickled: {type(error).__name__}: {error}"
    if len(data) > BYTES_MAX:
        problem = f"is larger than {BYTES_MAX >> 30} GiB"
    if not problem:
        files.write_value(who.generation, who.rank, data)
        return
    what = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    sentence = f"the value of rank {who.rank}, a {what}, {problem}"
    files.write_problem(who.generation, who.rank, sentence)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error.with_traceback(_beyond(error.__traceback__))))


def _show(kind: type[BaseException], error: BaseException, frames: TracebackType | None, /) -> None:
    """Print a traceback as Python does, without our frames; of an error of ours, its sentence."""
    last = [frame.filename for frame in traceback.extract_tb(frames)[-1:]]
    if isinstance(error, MsrunError) and last and last[0] in _OURS:
        print(error.render(), file=sys.stderr)  # noqa: T201 - this is where tracebacks go
        return
    traceback.print_exception(kind, error, _beyond(frames))


def _beyond(frames: TracebackType | None) -> TracebackType | None:
    """Return `frames` from the first one on that is not ours; all of them when every one is."""
    first = frames
    while first and first.tb_frame.f_code.co_filename in _OURS:
        first = first.tb_next
    return first or frames


if __name__ == "__main__":
    main()
