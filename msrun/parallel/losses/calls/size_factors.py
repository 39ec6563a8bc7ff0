"""Factors that follow from the number of samples of a part, as in `x * len(x)`.

`len` returns a plain number, and Python computes with it before torch sees it.  The source tells
where a number comes from: a script reads a size at a place that is known, as torch is asked for it,
and the place where it multiplies by a number is known too.  Between the two are names and operators
in one function.  What is handed to another function or kept at an object is not followed.

Division by a number of samples is the way to a mean: `(x / len(x)).sum()` has the average of parts
for its value of the whole.  Any other factor makes values that are others for the whole batch.
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
from typing import Any

import torch
from torch import Tensor

from msrun.parallel.local import takes_gradients
from msrun.parallel.losses.calls.marks import Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.torch_calls import DIVIDING, MULTIPLYING

_NAME = "the number of samples"
_ADDING = frozenset(["add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "rsub", "pow"])
_FACTORS = DIVIDING | MULTIPLYING | _ADDING | {"__pow__", "__rtruediv__", "div", "mul"}
_SPACED = frozenset(["linspace", "logspace", "arange"])
_SHAPE: Any = Tensor.shape.__get__  # type: ignore[attr-defined]
SIZES = frozenset([_SHAPE, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel])
_SIZE_NAMES = frozenset(["len", "size", "numel", "nelement"])
_FUNCTIONS = frozenset(["float", "int", "max", "min", "abs", "round", "pow"])
_MODULES = frozenset(["math", "np", "numpy", "operator"])
_TORCH, _OWN = (
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[3])
)
# Python in front of functions of torch; other files of torch compute for themselves.
_WRAPPERS = frozenset(f"{_TORCH}{name}" for name in ("_tensor.py", "overrides.py"))
_CLOSE = 1e-9

Place = tuple[int, int, int, int]  # first and last line, and columns
# Of sizes, each with the dim that has samples; None for places where tensors are computed.
Reads = dict[Place, int | None]
# Operators and calls of a source file, each with the function that it is in.
Tree = dict[Place, tuple[ast.AST, ast.AST]]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _script() -> tuple[FrameType, Place] | None:
    """Return the frame that called a function of torch, and its place there; None inside torch."""
    frame = inspect.currentframe()
    while frame and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_TORCH):
        return None
    place = _places(frame.f_code)[frame.f_lasti // 2]
    return None if place is None else (frame, place)


@functools.cache
def _is_passed(filename: str) -> bool:
    return filename.startswith(_OWN) or filename in _WRAPPERS


@functools.lru_cache(maxsize=256)
def _places(code: CodeType) -> Sequence[Place | None]:
    """Return the place of each instruction, as nodes of a syntax tree have it."""
    found = []
    for first, last, begin, end in code.co_positions():
        is_known = first is not None and last is not None and begin is not None and end is not None
        found.append((first, last, begin, end) if is_known else None)
    return found  # type: ignore[return-value]


class SizeFactors:
    """Sizes that a script reads, and where it multiplies by them.

    Args:
        samples: Of the part.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._reads: dict[str, Reads] = {}
        # Of source files, as long as somebody looks: a tree takes megabytes.
        self._trees: dict[str, Tree] = {}

    def note(self, name: str, x: Tensor, dim: int, asked: int | None) -> None:
        """Note that a script reads sizes of a tensor.

        Args:
            name: Of the function.
            x: The tensor.
            dim: Which has samples.
            asked: Of which dim it returned the size; None of all.
        """
        if name == "__len__":
            asked = 0
        if asked is not None and asked % x.dim() != dim:
            return
        if script := _script():
            frame, place = script
            self._reads.setdefault(frame.f_code.co_filename, {}).setdefault(place, dim)

    def may_decide(self, name: str) -> bool:
        """Return whether a function may compute by a size that a script read."""
        return bool(self._reads) and (name in _SPACED or name in _FACTORS)

    def outcome(self, call: TorchCall) -> Outcome:
        """Return what is known of a result that a size decides, and that is no count itself."""
        is_spaced = call.name in _SPACED
        if not self.may_decide(call.name) or (script := _script()) is None:
            return None
        number = next((x for x in call.args if type(x) in (int, float)), None)
        is_number = number is not None and (is_spaced or takes_gradients(call.result))
        follows = is_number and self._follows(*script)
        frame, place = script
        self._reads.setdefault(frame.f_code.co_filename, {})[place] = None
        if number is None or not follows:
            return None
        text = f"{_NAME}{call.line()}"
        if is_spaced:
            return Mixture(text, place="position" if call.name == "arange" else "")
        divisor = number if call.name in DIVIDING else 1 / number if number else 0.0
        count = divisor / self._samples
        is_mean = call.name in DIVIDING | MULTIPLYING and isinstance(call.args[0], Tensor)
        if not is_mean or round(count) < 1 or abs(count - round(count)) > _CLOSE * count:
            return Mixture(text, unless_counted=not call.result.dim())
        mark = next((mark for x in call.args if (mark := call.mark(x))), Mark(None))
        return Mark(mark.dim, mark.statistic or text) if call.result.dim() else None

    def _follows(self, frame: FrameType, place: Place) -> bool:
        """Return whether a number of what runs at a place in the source follows from a size."""
        filename = frame.f_code.co_filename
        reads = self._reads.get(filename)
        if not reads:
            return False
        if filename not in self._trees:
            self._trees[filename] = _tree(filename)
        if place not in self._trees[filename]:
            return False
        node, function = self._trees[filename][place]
        names = _names(function, reads)
        return any(_is_size(operand, reads, names) for operand in _operands(node))


def _tree(filename: str) -> Tree:
    """Return nodes of a source file by their place; none of a file that is not Python's."""
    try:
        root = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: Tree = {}
    waiting: list[tuple[ast.AST, ast.AST]] = [(root, root)]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.Call):
            found[_place(node)] = node, function
        inner = node if isinstance(node, _Function) else function
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


def _names(function: ast.AST, reads: Reads) -> set[str]:
    """Return the names of a function that have a size, or a number that follows from one."""
    found: set[str] = set()
    nodes = [node for node in ast.walk(function) if isinstance(node, _ASSIGNING)]
    before = -1
    while len(found) > before:
        before = len(found)
        for node in nodes:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if node.value is not None:
                    found |= _assigned(target, node.value, reads, found)
    return found


_ASSIGNING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


def _assigned(target: ast.AST, value: ast.AST, reads: Reads, names: set[str]) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id} if _is_size(value, reads, names) else set()
    if not isinstance(target, ast.Tuple | ast.List):
        return set()
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return {name for pair in pairs for name in _assigned(*pair, reads, names)}
    dim = _dim_of_shape(value, reads)
    element = target.elts[dim] if dim is not None and dim < len(target.elts) else None
    return {element.id} if isinstance(element, ast.Name) else set()


def _dim_of_shape(node: ast.AST, reads: Reads) -> int | None:
    """Return where samples are in all sizes of a tensor, from the first dim on."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return _dim_of_shape(node.value, reads) if node.slice.lower is None else None
    is_shape = isinstance(node, ast.Attribute) and node.attr == "shape"
    is_called = isinstance(node, ast.Call) and not node.args and _called(node) == "size"
    return reads.get(_place(node)) if is_shape or is_called else None


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_size(node: ast.AST, reads: Reads, names: set[str]) -> bool:
    """Return whether an expression is a number that follows from a size."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Subscript):
        dim = _dim_of_shape(node.value, reads)
        return dim is not None and isinstance(node.slice, ast.Constant) and node.slice.value == dim
    if isinstance(node, ast.Call) and _called(node) in _SIZE_NAMES:
        return reads.get(_place(node)) is not None  # watches read sizes at places of others
    if isinstance(node, ast.BinOp) and reads.get(_place(node), 0) is None:
        return False  # a tensor
    return any(_is_size(child, reads, names) for child in _parts(node))


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression of numbers that decide its value."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and _is_of_numbers(node)):
        yield from _operands(node)


def _is_of_numbers(node: ast.Call) -> bool:
    """Return whether an expression calls a function of Python that returns a number."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in _FUNCTIONS
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _MODULES
