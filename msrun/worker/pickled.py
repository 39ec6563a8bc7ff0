"""Functions with their arguments, and values, as bytes: the only file that pickles.

A function of a module, and of the `__main__` of a script, travels by its name, as with
multiprocessing's spawn.  A lambda, a closure, and what a notebook defines have no name that another
process could import; cloudpickle, where it is installed, sends them by value.  The bytes stay in
files that one user writes and reads on one machine: decision 0032.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msrun.errors import UsageError

_MAIN = "__main__"
# multiprocessing's name for the script of a parent, under which workers import it.
MAIN_ALIAS = "__mp_main__"
# A worker may start a job of its own.
_MAINS = (_MAIN, MAIN_ALIAS)
_PROTOCOL = pickle.HIGHEST_PROTOCOL


class FunctionCall(NamedTuple):
    """A function and what it is called with."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


class PickledCall(NamedTuple):
    """A call as bytes.

    Args:
        data: The bytes.
        needs_main: Whether they name something in the caller's `__main__`.
    """

    data: bytes
    needs_main: bool


def name_of(function: Callable[..., object]) -> str:
    """Return what messages call `function`."""
    name = getattr(function, "__name__", "") or type(function).__name__
    return str(name)


def dump_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    main_file: str,
) -> PickledCall:
    """Return a call as bytes.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its arguments by name.
        main_file: Script of this process, which workers can import; empty in a notebook.

    Raises:
        UsageError: The function, or an argument, cannot be sent to another process.
    """
    call = FunctionCall(function, tuple(args), dict(kwargs))
    name = name_of(function)
    problem: Exception | None = None
    try:
        data = pickle.dumps(tuple(call), _PROTOCOL)
        needs_main = any(name.encode() in data for name in _MAINS)
        if not needs_main or (main_file and _is_of(function, main_file)):
            return PickledCall(data, needs_main)
    except Exception as error:  # noqa: BLE001 - an argument's own code may raise anything
        problem = error
    by_value = _by_value()
    if by_value is None:
        raise _not_importable(name, problem)
    try:
        return PickledCall(by_value.dumps(tuple(call), _PROTOCOL), needs_main=False)
    except Exception as error:
        raise UsageError(
            f"{name} or its arguments cannot be sent to workers: {_first_line(error)}",
            hint="open files, connections and locks are made inside the function",
        ) from error


def load_call(data: bytes) -> FunctionCall:
    """Return the call that `dump_call` made bytes of; imports what it names."""
    return FunctionCall(*pickle.loads(data))  # noqa: S301 - of this user's own process


def dump_value(value: object) -> bytes:
    """Return a value as bytes.

    Raises:
        Exception: It cannot be pickled.
    """
    try:
        data = pickle.dumps(value, _PROTOCOL)
    except Exception:
        by_value = _by_value()
        if by_value is None:
            raise
        return bytes(by_value.dumps(value, _PROTOCOL))
    return data


def load_value(data: bytes) -> Any:
    """Return the value that a worker made bytes of.

    Raises:
        Exception: It names something that this process does not have.
    """
    # A worker has the script under this name.
    sys.modules.setdefault(MAIN_ALIAS, sys.modules[_MAIN])
    return pickle.loads(data)  # noqa: S301 - of this user's own process


def _is_of(function: Callable[..., object], main_file: str) -> bool:
    """Tell whether a function of `__main__` stands in its file, and was not typed later."""
    code = getattr(function, "__code__", None)
    is_main = getattr(function, "__module__", "") in _MAINS
    return code is None or not is_main or code.co_filename == main_file


def _by_value() -> Any | None:
    """Return cloudpickle, if it is installed."""
    if importlib.util.find_spec("cloudpickle") is None:
        return None
    return importlib.import_module("cloudpickle")


def _not_importable(name: str, problem: Exception | None) -> UsageError:
    """Return why a call cannot be sent by the names of what it consists of."""
    why = _first_line(problem) if problem else f"{name} is defined in this session alone"
    return UsageError(
        f"{name} or its arguments cannot be imported by workers: {why}",
        hint="pip install cloudpickle sends it by value; or move it to a module",
    )


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
