"""Plain values that a recorded forward may have read: a change of one needs a new recording.

Watched are attributes of modules whose forward was recorded and those of their classes, which an
attribute of the module may hide later, attributes of plain objects that they hold (such as the
configuration of a model of transformers), and what the recorded functions may read of globals and
of variables of enclosing functions.  An attribute that a module gets later counts if a recorded
function names it.  A check compares a few hundred values.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import CheckpointFunction

from msrun.parallel import torch_compat

_OTHERS = (Path(torch.__file__).parent, Path(__file__).parents[3])
# Variables of their inner functions are the functions that a decorator got, hundreds in a process.
_DECORATING = (contextlib.__file__, functools.__file__)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_FUNCTIONS = (FunctionType, type)
_ITEMS_MAX = 256
_DEPTH_MAX = 3
_MISSING = object()


class _Watched:
    """One value, and where a copy of the model has it.

    Args:
        get: Returns it as it is now.
        name: How messages name it.
        target: Attributes of the copy; None where the copy has no own value.
        key: The attribute.
    """

    __slots__ = ("get", "key", "name", "target", "value")

    def __init__(
        self, get: Callable[[], Any], name: str, target: dict[str, Any] | None, key: str
    ) -> None:
        self.get = get
        self.name = name
        self.target = target
        self.key = key
        self.value = _snapshot(get())


class _WatchedModule(NamedTuple):
    """One module.

    Args:
        name: Of the module.
        module: The module.
        target: Attributes of its copy.
        keys: Attributes that it had at the last look.
    """

    name: str
    module: weakref.ref[nn.Module]
    target: dict[str, Any]
    keys: set[str]

    def shown(self, key: str) -> str:
        """Return how messages name an attribute."""
        return f"{self.name}.{key}".lstrip(".")


class WatchedValues:
    """The watched values of one model."""

    def __init__(self) -> None:
        self._watched: dict[tuple[int, str], _Watched] = {}
        self._seen: set[CodeType] = set()
        # Names and texts in recorded functions, such as those of attributes.
        self._names: set[str] = set()
        self._modules: list[_WatchedModule] = []

    def watch_module(
        self, name: str, module: nn.Module, copied: nn.Module, copies: Mapping[int, Any]
    ) -> None:
        """Watch the attributes of `module`, whose copy a recording reads.

        Args:
            name: Of the module.
            module: The module; it is not kept alive.
            copied: Its copy.
            copies: Copy of each object, by id.
        """
        watched = _WatchedModule(name, weakref.ref(module), vars(copied), set(vars(module)))
        self._modules.append(watched)
        for key, value in list(vars(module).items()):
            if key == "training" or key not in vars(copied):
                continue
            if _is_plain(value):
                self._watch_attribute(module, watched, key)
            else:
                self._watch_object(watched.shown(key), value, copies, _DEPTH_MAX)
        for key in _of_classes(module).difference(vars(module)):
            self._watch_attribute(module, watched, key)

    def _watch_attribute(self, module: nn.Module, watched: _WatchedModule, key: str) -> None:
        reference = watched.module

        def get() -> Any:
            owner = reference()
            return _MISSING if owner is None else getattr(owner, key, _MISSING)

        value = _Watched(get, watched.shown(key), watched.target, key)
        self._watched[id(module), key] = value

    def _new(self) -> str:
        """Return the name of an attribute that a module got, and a recorded function may read."""
        found = ""
        for watched in self._modules:
            module = watched.module()
            if module is None or len(vars(module)) == len(watched.keys):
                continue
            new = set(vars(module)) - watched.keys
            watched.keys.clear()
            watched.keys.update(vars(module))
            for key in sorted(new & self._names):
                value = vars(module)[key]
                if _is_plain(value) and (id(module), key) not in self._watched:
                    self._watch_attribute(module, watched, key)
                    watched.target[key] = _snapshot(value)
                    found = watched.shown(key)
        return found

    def changed(self) -> str:
        """Return the name of a value that is another than before; empty if there is none.

        The copy of the model gets the new ones.
        """
        found = self._new()
        for watched in self._watched.values():
            value = watched.get()
            if value is not watched.value and not _is_equal(value, watched.value):
                if value is _MISSING:
                    continue
                watched.value = _snapshot(value)
                if watched.target is not None:
                    watched.target[watched.key] = watched.value
                found = watched.name
        return found

    @contextmanager
    def finding(self, refuse: Callable[[str, str], None]) -> Iterator[None]:
        """Watch what the functions that run inside may read of globals and enclosing functions.

        Args:
            refuse: Called with problem and hint where one runs that no recording can repeat.
        """
        before = sys.getprofile()
        nested: set[CodeType] = set()

        def profile(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code in _UNREPEATABLE and not _is_of_others(_caller(frame)):
                refuse(*_UNREPEATABLE[code])
            if event == "call" and code in _UNREPEATABLE_IN_TORCH:
                refuse(*_UNREPEATABLE_IN_TORCH[code])
            if event != "call" or code in self._seen:
                return
            self._seen.add(code)
            if _is_of_others(frame):
                return
            self._names.update(code.co_names)
            self._names.update(text for text in code.co_consts if isinstance(text, str))
            self._watch_globals(code, frame.f_globals)
            if code.co_freevars and code.co_filename not in _DECORATING:
                nested.add(code)

        with _no_collection():
            sys.setprofile(profile)
            try:
                yield
            finally:
                restore_profile(before)
        self._watch_closures(nested)

    def _watch_object(self, name: str, value: Any, copies: Mapping[int, Any], depth: int) -> None:
        fields = getattr(value, "__dict__", None)
        if not isinstance(fields, dict) or isinstance(value, nn.Module | Tensor | ModuleType):
            return
        copied = copies.get(id(value))
        target = None if copied is None or copied is value else vars(copied)
        for key, field in list(fields.items()):
            if _is_plain(field):
                self._add(fields, key, f"{name}.{key}", target)
            elif depth:
                self._watch_object(f"{name}.{key}", field, copies, depth - 1)

    def _watch_globals(self, code: CodeType, names: dict[str, Any]) -> None:
        attributes = set(code.co_names)
        for name in code.co_names:
            value = names.get(name, _MISSING)
            if value is _MISSING:
                continue
            if _is_plain(value) or isinstance(value, Tensor):
                self._add(names, name, name, None)
            elif not _is_library(value):
                fields = getattr(value, "__dict__", {})
                for key in attributes.intersection(fields):
                    if _is_plain(fields[key]):
                        self._add(fields, key, f"{name}.{key}", None)

    def _watch_closures(self, codes: set[CodeType]) -> None:
        functions = gc.get_referrers(*codes) if codes else []
        for function in functions:
            if not isinstance(function, FunctionType):
                continue
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=False
            ):

                def get(cell: Any = cell) -> Any:
                    try:
                        return cell.cell_contents
                    except ValueError:  # it is empty
                        return _MISSING

                if _is_plain(get()):
                    self._watched.setdefault((id(cell), name), _Watched(get, name, None, name))

    def _add(
        self, fields: Mapping[str, Any], key: str, name: str, target: dict[str, Any] | None
    ) -> None:
        get = partial(fields.get, key, _MISSING)
        self._watched.setdefault((id(fields), key), _Watched(get, name, target, key))


_IN_A_MODULE = "do it in a module that has a stage"
# Functions whose effect is no step of a graph.
_UNREPEATABLE: dict[CodeType, tuple[str, str]] = {
    code: (f"forward calls {name}", _IN_A_MODULE)
    for name, function in {
        "torch.autograd.Function.apply": inspect.unwrap(
            vars(torch.autograd.Function)["apply"].__func__
        ),
        "torch.manual_seed": torch.manual_seed,
        "torch.seed": torch.seed,
        "torch.random.fork_rng": torch.random.fork_rng,
        "torch.nn.attention.sdpa_kernel": sdpa_kernel,
    }.items()
    for code in (function.__code__, inspect.unwrap(function).__code__)
    if Path(code.co_filename) != Path(contextlib.__file__)
    and not torch_compat.keeps_off_compiler(code)
}

# The same, where torch calls it for a script.
_UNREPEATABLE_IN_TORCH: dict[CodeType, tuple[str, str]] = {
    CheckpointFunction.forward.__code__: (
        "forward calls torch.utils.checkpoint with use_reentrant=True",
        f"pass use_reentrant=False, or {_IN_A_MODULE}",
    )
}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage collection call functions, of `gc.callbacks` or finalizers, in our midst."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def restore_profile(before: Any) -> None:
    """Set the profile function that `sys.getprofile` returned; that of cProfile is an object."""
    if hasattr(before, "enable"):
        before.enable()
    else:
        sys.setprofile(before)


def _caller(frame: FrameType) -> FrameType | None:
    """Return what called a function, also where that is a context manager which is entered."""
    found = frame.f_back
    while found and _only_calls(found.f_code):
        found = found.f_back
    return found


def _only_calls(code: CodeType) -> bool:
    # `torch_compat` calls functions of autograd for a script, once a plan has been used.
    is_between = code.co_filename in (contextlib.__file__, torch_compat.__file__)
    return is_between or torch_compat.keeps_off_compiler(code)


def _is_of_others(frame: FrameType | None) -> bool:
    """Return whether a function is torch's or ours."""
    path = Path(frame.f_code.co_filename) if frame else Path()
    return any(other in path.parents for other in _OTHERS)


def _is_library(value: Any) -> bool:
    """Return whether `value` is of torch or Python itself."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(type(value).__module__)
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
    name = getattr(module, "__name__", "").partition(".")[0]
    is_stdlib = name in sys.stdlib_module_names and name != "__main__"
    has_fields = hasattr(value, "__dict__") and not isinstance(value, ModuleType | type)
    return name == "torch" or (is_stdlib and not has_fields)


def _of_classes(module: nn.Module) -> set[str]:
    """Return the plain attributes that the classes of a module have for it."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] != "torch"]
    return {
        key
        for kind in kinds
        for key, value in vars(kind).items()
        if not key.startswith("__") and not isinstance(value, _FUNCTIONS) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (*_SCALARS, *_FUNCTIONS)):
        return True
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= _ITEMS_MAX and all(isinstance(item, _SCALARS) for item in value)
    if type(value) is dict:
        return len(value) <= _ITEMS_MAX and all(
            isinstance(item, _SCALARS) for pair in value.items() for item in pair
        )
    return False


def _snapshot(value: Any) -> Any:
    return value.copy() if isinstance(value, list | set | dict) else value


def _is_equal(value: Any, before: Any) -> bool:
    is_comparable = type(value) is type(before) and not isinstance(value, Tensor)
    return is_comparable and bool(value == before)
