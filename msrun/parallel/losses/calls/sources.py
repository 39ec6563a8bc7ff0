"""Which numbers of a script follow from what it reads of samples, by its source.

A script reads a number at a place that is known, as torch is asked for it: a size of samples, or
an `item()` of a part of the batch.  Python computes with it before torch sees it again, at a place
that is known too.  Between the two are names, operators, attributes of `self`, and arguments of the
functions that run: who called them, and with what, the frames of Python say.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from msrun.parallel.foreach.frames import variables_of
from msrun.parallel.losses.calls.marks import Mixture

SIZE = Mixture("the number of samples")
_SIZE_NAMES = frozenset(["len", "size", "numel", "nelement"])
_NUMBER_NAMES = frozenset(["item", "float"])
_FUNCTIONS = frozenset(["float", "int", "max", "min", "abs", "round", "pow"])
_MODULES = frozenset(["math", "np", "numpy", "operator"])
_TORCH, _OWN = (
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3])
)
# Python in front of functions of torch; other files of torch compute for themselves.
_WRAPPERS = frozenset(f"{_TORCH}{name}" for name in ("_tensor.py", "overrides.py"))
# They call a function of the script with the arguments that they get.
_CALLING = frozenset(f"{_TORCH}{name}" for name in ("nn/modules/module.py", "utils/_contextlib.py"))
_INNER = frozenset(["<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"])
_MOST_CALLS = 8  # that an argument is followed through

Place = tuple[int, int, int, int]  # first and last line, and columns
# Of sizes with the dim that has samples, of other numbers with the mixture that these are; None
# for places where tensors are computed.
Reads = dict[Place, int | Mixture | None]
# By name, or by attribute as in "self.count".
Names = dict[str, Mixture]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ASSIGNING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


class _Node(NamedTuple):
    """An operator or a call of a source file.

    Args:
        node: Of the syntax tree.
        scopes: Functions and classes that it is in, the innermost first, and the file.
    """

    node: ast.AST
    scopes: tuple[ast.AST, ...]


Tree = dict[Place, _Node]


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
        # Of source files, as long as somebody looks: a tree takes megabytes.
        self._trees: dict[str, Tree] = {}
        self._known: dict[int, Names] = {}  # by scope, until something else is read

    @property
    def has_reads(self) -> bool:
        """Whether anything was read."""
        return bool(self._reads)

    def note(self, number: int | Mixture) -> None:
        """Note that the script reads a size of this dim, or a number that is this mixture."""
        if found := script():
            frame, place = found
            reads = self._reads.setdefault(frame.f_code.co_filename, {})
            if place not in reads:
                reads[place] = number
                self._known.clear()

    def note_tensor(self, frame: FrameType, place: Place) -> None:
        """Note that the script computes a tensor at a place of `frame`."""
        reads = self._reads.setdefault(frame.f_code.co_filename, {})
        if reads.get(place, 0) is not None:
            reads[place] = None
            self._known.clear()

    def followed(self, frame: FrameType, place: Place) -> Mixture | None:
        """Return what a number follows from that an operator or call at a place gets, if any."""
        found = self._at(frame, place)
        if found is None:
            return None
        given = list(_operands(found.node))
        return self._first(given, frame, found.scopes, _MOST_CALLS)

    def _at(self, frame: FrameType, place: Place) -> _Node | None:
        filename = frame.f_code.co_filename
        if filename not in self._trees:
            self._trees[filename] = _tree(filename)
        return self._trees[filename].get(place)

    def _first(
        self, given: Sequence[ast.AST], frame: FrameType, scopes: Sequence[ast.AST], calls: int
    ) -> Mixture | None:
        """Return what the first of expressions that follows from a number follows from.

        Args:
            given: The expressions.
            frame: In which they are computed.
            scopes: Where they are in the source.
            calls: Through how many more calls to follow arguments.
        """
        reads = self._reads.get(frame.f_code.co_filename, {})
        names = self._visible(scopes, reads)
        found = (_source(each, reads, names) for each in given)
        if mixture := next(filter(None, found), None):
            return mixture
        function = next((scope for scope in scopes if isinstance(scope, _Function)), None)
        if function is None or not calls:
            return None
        while frame.f_code.co_name in _INNER and frame.f_back:
            frame = frame.f_back
        values = variables_of(frame)
        arguments = [x for x in _parameters(function) if type(values.get(x)) in (int, float)]
        # Only arguments that lead to one of the expressions are looked for in the caller.
        for name in arguments:
            own = _names(function, reads, {**names, name: SIZE})
            if any(_source(each, reads, own) for each in given) and (
                mixture := self._argument(name, function, frame, calls - 1)
            ):
                return mixture
        return None

    def _visible(self, scopes: Sequence[ast.AST], reads: Reads) -> Names:
        """Return names that follow from numbers at a place in `scopes`."""
        if not reads:
            return {}
        place = id(scopes[0])  # which the trees keep alive
        if place not in self._known:
            self._known[place] = _visible(scopes, reads)
        return self._known[place]

    def _argument(
        self, name: str, function: _Function, frame: FrameType, calls: int
    ) -> Mixture | None:
        """Return what an argument of a function that runs follows from, if any."""
        for _ in range(_MOST_CALLS):
            caller = frame.f_back
            while caller and caller.f_code.co_filename in _CALLING:
                caller = caller.f_back
            place = _place_in(caller) if caller else None
            if caller is None or place is None or _is_library(caller.f_code.co_filename):
                return None
            found = self._at(caller, place)
            if found is None or not isinstance(found.node, ast.Call):
                return None
            if given := _given(found.node, function, name):
                return self._first([given], caller, found.scopes, calls)
            if not _hands_on_all(found.node):
                return None
            frame = caller
        return None


@functools.cache
def _is_library(filename: str) -> bool:
    return filename.startswith((_OWN, _TORCH))


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
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call):
            found[_place(node)] = _Node(node, scopes)
        inner = (node, *scopes) if isinstance(node, _Function | ast.ClassDef) else scopes
        waiting += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def _place(node: ast.AST) -> Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.AugAssign):
        yield node.value
    elif isinstance(node, ast.Call):
        yield from node.args
        yield from (keyword.value for keyword in node.keywords)


def _given(call: ast.Call, function: _Function, name: str) -> ast.AST | None:
    """Return what a call of a function gives for one of its arguments, if that can be told."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = _parameters(function)
    own = names[:1] if names[:1] in (["self"], ["cls"]) else []
    is_bound = bool(own) and _key(call.args[0] if call.args else None) != own[0]
    at = names.index(name) - is_bound
    given = call.args[: at + 1]
    if len(given) <= at or any(isinstance(each, ast.Starred) for each in given):
        return None
    return given[at]


def _hands_on_all(call: ast.Call) -> bool:
    """Return whether a call gives all arguments that its function got, as wrappers do."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Starred)


def _parameters(function: _Function) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _visible(scopes: Sequence[ast.AST], reads: Reads) -> Names:
    """Return names that follow from numbers, in functions around a place and at their object."""
    found: Names = {}
    for scope in reversed(scopes):
        if isinstance(scope, ast.ClassDef):
            found |= _attributes(scope, reads)
            continue
        if isinstance(scope, _Function):  # its arguments are others
            found = {name: found[name] for name in found if name not in _parameters(scope)}
        found = _names(scope, reads, found)
    return found


def _attributes(owner: ast.ClassDef, reads: Reads) -> Names:
    """Return attributes of `self` that follow from numbers, in any method of a class."""
    methods = [node for node in owner.body if isinstance(node, _Function)]
    found = [_names(method, reads, {}) for method in methods]
    return {key: each[key] for each in found for key in each if "." in key}


def _names(scope: ast.AST, reads: Reads, known: Names) -> Names:
    """Return the names of a function that have a number, or what follows from one.

    Args:
        scope: The function.
        reads: Of its file.
        known: Names that are known already.
    """
    found = dict(known)
    nodes = list(_assignments(scope))
    before = -1
    while len(found) > before:
        before = len(found)
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if node.value is not None:
                    found = _assigned(target, node.value, reads, found) | found
    return found


def _assignments(scope: ast.AST) -> Iterator[Any]:
    """Yield assignments of a function, and not those of functions in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, _ASSIGNING):
            yield node
        if not isinstance(node, _Function | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _key(node: ast.AST | None) -> str:
    """Return the name of a variable, or of an attribute of `self`; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    is_own = isinstance(node, ast.Attribute) and _key(node.value) == "self"
    return f"self.{node.attr}" if is_own else ""  # type: ignore[union-attr]


def _assigned(target: ast.AST, value: ast.AST, reads: Reads, names: Names) -> Names:
    if key := _key(target):
        source = _source(value, reads, names)
        return {key: source} if source else {}
    if not isinstance(target, ast.Tuple | ast.List):
        return {}
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
        found: Names = {}
        for pair in zip(target.elts, value.elts, strict=True):
            found |= _assigned(*pair, reads, names)
        return found
    dim = _dim_of_shape(value, reads)
    key = _key(target.elts[dim]) if dim is not None and dim < len(target.elts) else ""
    return {key: SIZE} if key else {}


def _dim_of_shape(node: ast.AST, reads: Reads) -> int | None:
    """Return where samples are in all sizes of a tensor, from the first dim on."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return _dim_of_shape(node.value, reads) if node.slice.lower is None else None
    is_shape = isinstance(node, ast.Attribute) and node.attr == "shape"
    is_called = isinstance(node, ast.Call) and not node.args and _called(node) == "size"
    dim = reads.get(_place(node)) if is_shape or is_called else None
    return dim if isinstance(dim, int) else None


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _source(node: ast.AST, reads: Reads, names: Names) -> Mixture | None:
    """Return what an expression follows from, if it is a number that follows from one."""
    if key := _key(node):
        return names.get(key)
    if isinstance(node, ast.Subscript):
        dim = _dim_of_shape(node.value, reads)
        is_size = dim is not None and isinstance(node.slice, ast.Constant)
        return SIZE if is_size and node.slice.value == dim else None  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and _called(node) in _SIZE_NAMES:
        # Watches read sizes at places of others.
        return SIZE if isinstance(reads.get(_place(node)), int) else None
    if isinstance(node, ast.Call) and _called(node) in _NUMBER_NAMES:
        number = reads.get(_place(node))
        if isinstance(number, Mixture):
            return number
    if isinstance(node, ast.BinOp) and reads.get(_place(node), 0) is None:
        return None  # a tensor
    return next(filter(None, (_source(child, reads, names) for child in _parts(node))), None)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression of numbers that decide its value."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Tuple | ast.List):
        yield from node.elts
    elif isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and _is_of_numbers(node)):
        yield from _operands(node)


def _is_of_numbers(node: ast.Call) -> bool:
    """Return whether an expression calls a function of Python that returns a number."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in _FUNCTIONS
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _MODULES
