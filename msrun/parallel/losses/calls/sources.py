"""Which numbers of a script follow from what it reads of samples, by its source.

A script reads a number at a place that is known, as torch is asked for it: a size of samples, or
an `item()` of a part of the batch.  Python computes with it before torch sees it again, at a place
that is known too.  Between the two are `expressions` of the source, arguments of functions that
run, and values that functions return: who called them, and where, the frames of Python say.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from msrun.parallel.foreach.frames import variables_of
from msrun.parallel.losses.calls.expressions import (
    SIZE,
    Expressions,
    Function,
    Names,
    Place,
    Reads,
    bound,
    operands,
    parameters,
    place_of,
)
from msrun.parallel.losses.calls.marks import Mixture

__all__ = ["SIZE", "Sources", "script"]

_TORCH, _OWN = (
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3])
)
# Python in front of functions of torch; other files of torch compute for themselves.
_WRAPPERS = frozenset(f"{_TORCH}{name}" for name in ("_tensor.py", "overrides.py"))
# They call a function of the script with the arguments that they get.
_CALLING = frozenset(f"{_TORCH}{name}" for name in ("nn/modules/module.py", "utils/_contextlib.py"))
_INNER = frozenset(["<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"])
_MOST_CALLS = 8  # that an argument is followed through

# Of values that functions give to others.
_FOLLOWED = (int, float, list, tuple, dict)


class _Node(NamedTuple):
    """An operator or a call of a source file.

    Args:
        node: Of the syntax tree.
        scopes: Functions and classes that it is in, the innermost first, and the file.
    """

    node: ast.AST
    scopes: tuple[ast.AST, ...]


Tree = dict[Place, _Node]
_Site = tuple[str, Place]  # a place in a file


def script() -> tuple[FrameType, Place] | None:
    """Return the frame that called a function of torch, and its place there; None inside torch."""
    frame = inspect.currentframe()
    while frame and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return None
    place = _place_in(frame)
    return None if place is None else (frame, place)


@functools.cache
def _is_passed(filename: str) -> bool:
    return filename.startswith(_OWN) or filename in _WRAPPERS


def _place_in(frame: FrameType) -> Place | None:
    return _places(frame.f_code)[frame.f_lasti // 2]


@functools.lru_cache(maxsize=256)
def _places(code: CodeType) -> Sequence[Place | None]:
    """Return the place of each instruction, as nodes of a syntax tree have it."""
    found = []
    for first, last, begin, end in code.co_positions():
        is_known = first is not None and last is not None and begin is not None and end is not None
        found.append((first, last, begin, end) if is_known else None)
    return found  # type: ignore[return-value]


class Sources:
    """What a script reads, and what follows from it."""

    def __init__(self) -> None:
        self._reads: dict[str, Reads] = {}
        # Where functions were called, and where these read something, or called one that did.
        self._calls: dict[_Site, set[_Site]] = {}
        self._trees: dict[str, Tree] = {}
        self._files: dict[str, Expressions] = {}
        # By scope, and by site of a call, until something else is read.
        self._known: dict[int, Names] = {}
        self._returned: dict[_Site, Names] = {}

    @property
    def has_reads(self) -> bool:
        """Whether anything was read."""
        return any(self._reads.values())

    def note(self, number: tuple[int, int] | Mixture) -> None:
        """Note that the script reads a number.

        Args:
            number: Of sizes, where that of samples is, from the beginning and from the end; of
                other numbers the mixture that it is.
        """
        if found := script():
            frame, place = found
            reads = self._reads.setdefault(frame.f_code.co_filename, {})
            if place not in reads:
                reads[place] = number
                self._forget()
            self._note_calls(frame, place)

    def note_tensor(self, frame: FrameType, place: Place) -> None:
        """Note that the script computes a tensor at a place of `frame`."""
        reads = self._reads.setdefault(frame.f_code.co_filename, {})
        if reads.get(place, 0) is not None:
            reads[place] = None
            self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._returned.clear()

    def _note_calls(self, frame: FrameType, place: Place) -> None:
        """Note who called the function that reads something at a place of `frame`, and so on."""
        inner = frame.f_code.co_filename, place
        for _ in range(_MOST_CALLS):
            caller = _caller(_function(frame))
            if caller is None:
                return
            frame, place = caller
            outer = frame.f_code.co_filename, place
            known = self._calls.setdefault(outer, set())
            if inner not in known:
                known.add(inner)
                self._forget()
            inner = outer

    def followed(self, frame: FrameType, place: Place) -> Mixture | None:
        """Return what a number follows from that an operator or call at a place gets, if any."""
        found = self._at(frame.f_code.co_filename, place)
        if found is None:
            return None
        given = (self._parts(x, frame, found.scopes, _MOST_CALLS) for x in operands(found.node))
        return next((parts[""] for parts in given if "" in parts), None)

    def _at(self, filename: str, place: Place) -> _Node | None:
        if filename not in self._trees:
            self._trees[filename] = _tree(filename)
        return self._trees[filename].get(place)

    def _expressions(self, filename: str) -> Expressions:
        def returned(place: Place) -> Names:
            return self._returned_at((filename, place))

        if filename not in self._files:
            reads = self._reads.setdefault(filename, {})
            self._files[filename] = Expressions(reads, returned)
        return self._files[filename]

    def _parts(
        self, given: ast.AST, frame: FrameType, scopes: Sequence[ast.AST], calls: int
    ) -> Names:
        """Return which numbers an expression has.

        Args:
            given: The expression.
            frame: In which it is computed.
            scopes: Where it is in the source.
            calls: Through how many more calls to follow arguments.
        """
        file = self._expressions(frame.f_code.co_filename)
        names = self._visible(file, scopes)
        if found := file.parts(given, names):
            return found
        function = next((scope for scope in scopes if isinstance(scope, Function)), None)
        if function is None or not calls:
            return {}
        frame = _function(frame)
        values = variables_of(frame)
        # Only arguments that lead to the expression are looked for in the caller.
        for name in (x for x in parameters(function) if type(values.get(x)) in _FOLLOWED):
            tried = bound(name, {"": SIZE, "[*]": SIZE})
            if file.parts(given, file.names(function, names | tried)):
                own = bound(name, self._argument(name, function, frame, calls - 1))
                if found := file.parts(given, file.names(function, names | own)):
                    return found
        return {}

    def _visible(self, file: Expressions, scopes: Sequence[ast.AST]) -> Names:
        """Return names that follow from numbers at a place in `scopes`."""
        place = id(scopes[0])  # which the trees keep alive
        if place not in self._known:
            self._known[place] = {}  # of a function that calls itself
            self._known[place] = file.visible(scopes)
        return self._known[place]

    def _argument(self, name: str, function: Function, frame: FrameType, calls: int) -> Names:
        """Return which numbers an argument of a function that runs has."""
        for _ in range(_MOST_CALLS):
            caller = _caller(frame)
            found = self._at(caller[0].f_code.co_filename, caller[1]) if caller else None
            if caller is None or found is None or not isinstance(found.node, ast.Call):
                return {}
            if given := _given(found.node, function, name):
                return self._parts(given, caller[0], found.scopes, calls)
            if not _hands_on_all(found.node):
                return {}
            frame = caller[0]
        return {}

    def _returned_at(self, site: _Site) -> Names:
        """Return which numbers are in what functions returned that were called at a site."""
        if site in self._returned or site not in self._calls:
            return self._returned.get(site, {})
        self._returned[site] = {}  # of a function that calls itself
        found: Names = {}
        for filename, place in self._calls[site]:
            node = self._at(filename, place)
            scopes = node.scopes if node else ()
            function = next((scope for scope in scopes if isinstance(scope, Function)), None)
            if function is not None:
                file = self._expressions(filename)
                own = scopes[scopes.index(function) :]
                found |= file.returns(function, self._visible(file, own))
        self._returned[site] = found
        return found


def _function(frame: FrameType) -> FrameType:
    """Return the frame of the function in which a frame, that may be of a comprehension, runs."""
    while frame.f_code.co_name in _INNER and frame.f_back:
        frame = frame.f_back
    return frame


def _caller(frame: FrameType) -> tuple[FrameType, Place] | None:
    """Return the frame of the script that called that of a function, and where; None without."""
    caller = frame.f_back
    while caller and caller.f_code.co_filename in _CALLING:
        caller = caller.f_back
    if caller is None or _is_library(caller.f_code.co_filename):
        return None
    place = _place_in(caller)
    return None if place is None else (caller, place)


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith((_OWN, _TORCH))


@functools.lru_cache(maxsize=4)  # a tree takes megabytes, and watches of a few steps parse it
def _tree(filename: str) -> Tree:
    """Return nodes of a source file by their place; none of a file that is not Python's."""
    try:
        root = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: Tree = {}
    waiting: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(root, (root,))]
    while waiting:
        node, scopes = waiting.pop()
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call | ast.Attribute):
            found[place_of(node)] = _Node(node, scopes)
        inner = (node, *scopes) if isinstance(node, Function | ast.ClassDef) else scopes
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def _given(call: ast.Call, function: Function, name: str) -> ast.AST | None:
    """Return what a call of a function gives for one of its arguments, if that can be told."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = parameters(function)
    own = names[:1] if names[:1] in (["self"], ["cls"]) else []
    is_bound = bool(own) and ast.unparse(call.args[0] if call.args else call) != own[0]
    at = names.index(name) - is_bound
    given = call.args[: at + 1]
    if len(given) <= at or any(isinstance(each, ast.Starred) for each in given):
        return None
    return given[at]


def _hands_on_all(call: ast.Call) -> bool:
    """Return whether a call gives all arguments that its function got, as wrappers do."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Starred)
