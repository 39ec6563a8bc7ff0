"""Which expressions of a script have numbers of samples, by the syntax tree of their file.

A value is such a number, or a list, a dict or an object that has some.  `Names` knows variables by
paths: "count", "self.count", "sizes[0]", and "info['n']"; "sizes[*]" is any item of a list.  Of an
expression it knows the paths behind it: "" is the number itself, and "[0]" the first item.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msrun.parallel.losses.calls.marks import Mixture

SIZE = Mixture("the number of samples")
_SIZE_NAMES = frozenset(["len", "size", "numel", "nelement"])
_NUMBER_NAMES = frozenset(["item", "float"])
_FUNCTIONS = frozenset(["float", "int", "max", "min", "abs", "round", "pow", "sum"])
_MODULES = frozenset(["math", "np", "numpy", "operator"])
_COPYING = frozenset(["list", "tuple", "dict"])
_ANY = "[*]"

Place = tuple[int, int, int, int]  # first and last line, and columns
# Of sizes with where among all sizes that of samples is, from the beginning and from the end; of
# other numbers with the mixture that these are; None for places where tensors are computed.
Reads = dict[Place, tuple[int, int] | Mixture | None]
Names = dict[str, Mixture]
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_ASSIGNING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr


def place_of(node: ast.AST) -> Place:
    """Return where an expression is."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def operands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what an operator or a call gets."""
    given: list[ast.AST] = []
    if isinstance(node, ast.BinOp):
        given = [node.left, node.right]
    elif isinstance(node, ast.AugAssign):
        given = [node.value]
    elif isinstance(node, ast.Call):
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
    for each in given:
        yield from each.elts if isinstance(each, ast.Tuple | ast.List) else [each]


def parameters(function: Function) -> list[str]:
    """Return the names of the arguments of a function."""
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def bound(path: str, parts: Names) -> Names:
    """Return what is known of a variable whose value has these parts."""
    return {path + behind: mixture for behind, mixture in parts.items()}


class Expressions:
    """Expressions of a file.

    Args:
        reads: Of the file.
        returned: Returns what the functions returned that a call at a place ran.
    """

    def __init__(self, reads: Reads, returned: Callable[[Place], Names]) -> None:
        self._reads, self._returned = reads, returned
        self._assignments: dict[ast.AST, list[tuple[ast.AST, ast.AST]]] = {}  # by scope

    def visible(self, scopes: Sequence[ast.AST]) -> Names:
        """Return names that have numbers, in functions around a place and at their object."""
        found: Names = {}
        for scope in reversed(scopes):
            if isinstance(scope, ast.ClassDef):
                found |= self._attributes(scope)
                continue
            if isinstance(scope, Function):  # its arguments are others, but for `self`
                own = {*parameters(scope)} - {"self"}
                found = {path: found[path] for path in found if _variable(path) not in own}
            found = self.names(scope, found)
        return found

    def _attributes(self, owner: ast.ClassDef) -> Names:
        """Return attributes of `self` that have numbers, in any method of a class."""
        methods = [node for node in owner.body if isinstance(node, Function)]
        found = [self.names(method, {}) for method in methods]
        return {path: each[path] for each in found for path in each if path.startswith("self.")}

    def names(self, scope: ast.AST, known: Names) -> Names:
        """Return the names of a function that have numbers, beside those that are known."""
        found = dict(known)
        if scope not in self._assignments:
            self._assignments[scope] = list(_assignments(scope))
        before = -1
        while len(found) > before:
            before = len(found)
            for target, value in self._assignments[scope]:
                found = self._assigned(target, self.parts(value, found)) | found
        return found

    def _assigned(self, target: ast.AST, parts: Names) -> Names:
        if not parts:
            return {}
        if path := _path(target):
            return bound(path, parts)
        found: Names = {}
        for index, item in enumerate(getattr(target, "elts", ())):
            if isinstance(item, ast.Starred):
                break
            found |= self._assigned(item, _item(parts, f"[{index}]"))
        return found

    def returns(self, function: Function, names: Names) -> Names:
        """Return what is in values that a function returns."""
        if isinstance(function, ast.Lambda):
            return self.parts(function.body, names)
        found: Names = {}
        for node in _own_nodes(function):
            if isinstance(node, ast.Return) and node.value is not None:
                found |= self.parts(node.value, names)
        return found

    def parts(self, node: ast.AST, names: Names) -> Names:
        """Return which numbers the value of an expression has."""
        found: Names = {}
        match node:
            case ast.Name():
                found = _behind(names, node.id)
            case ast.Attribute():
                found = self._of_attribute(node, names)
            case ast.Subscript():
                found = self._of_item(node, names)
            case ast.Call():
                found = self._of_call(node, names)
            case ast.BinOp() | ast.UnaryOp():
                if self._reads.get(place_of(node), 0) is not None:  # else a tensor
                    children = ast.iter_child_nodes(node)
                    found = _number(self.parts(each, names) for each in children)
            case _:
                found = self._of_several(node, names)
        return found

    def _of_several(self, node: ast.AST, names: Names) -> Names:
        """Return which numbers a value of other expressions has."""
        found: Names = {}
        match node:
            case ast.IfExp() | ast.BoolOp():
                each = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
                for value in each:
                    found |= self.parts(value, names)
            case ast.Tuple() | ast.List():
                for index, value in enumerate(node.elts):
                    found |= bound(f"[{index}]", self.parts(value, names))
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant):
                        found |= bound(f"[{key.value!r}]", self.parts(value, names))
            case ast.ListComp() | ast.GeneratorExp():
                found = bound(_ANY, self.parts(node.elt, names))
            case ast.NamedExpr():
                found = self.parts(node.value, names)
        return found

    def _of_attribute(self, node: ast.Attribute, names: Names) -> Names:
        place = place_of(node)
        if node.attr == "shape" and (sizes := self._sizes(place)):
            return sizes
        return self._returned(place) or _behind(self.parts(node.value, names), f".{node.attr}")

    def _sizes(self, place: Place) -> Names:
        """Return where among all sizes of a tensor, read at a place, that of samples is."""
        dims = self._reads.get(place)
        return {} if dims is None or isinstance(dims, Mixture) else {f"[{x}]": SIZE for x in dims}

    def _of_item(self, node: ast.Subscript, names: Names) -> Names:
        parts = self.parts(node.value, names)
        if not isinstance(node.slice, ast.Slice):
            return _item(parts, _index(node.slice))
        is_from_first = node.slice.lower is None and node.slice.step is None
        return {path: parts[path] for path in parts if is_from_first and path[:2] != "[-"}

    def _of_call(self, node: ast.Call, names: Names) -> Names:
        place, name = place_of(node), _called(node)
        number = self._reads.get(place)
        if name == "size" and not (node.args or node.keywords):
            return self._sizes(place)
        if name in _SIZE_NAMES and isinstance(number, tuple):  # of none but this file
            return {"": SIZE}
        if name in _NUMBER_NAMES and isinstance(number, Mixture):
            return {"": number}
        if found := self._returned(place):
            return found
        given = [self.parts(each, names) for each in operands(node)]
        if _is_of_numbers(node):
            items = [{"": each[path]} for each in given for path in each if path[:1] == "["]
            return _number([*given, *items])
        return given[0] if name in _COPYING and given else {}


def _number(given: Any) -> Names:
    """Return that a number follows from the first of values that is one."""
    found = next((parts[""] for parts in given if "" in parts), None)
    return {} if found is None else {"": found}


def _behind(names: Names, path: str) -> Names:
    """Return what is known behind a path."""
    count = len(path)
    return {
        each[count:]: mixture
        for each, mixture in names.items()
        if each.startswith(path) and each[count : count + 1] in ("", ".", "[")
    }


def _item(parts: Names, index: str) -> Names:
    """Return what is known of an item of a value with these parts."""
    return _behind(parts, _ANY) | _behind(parts, index)


def _index(node: ast.AST) -> str:
    try:
        return f"[{ast.literal_eval(node)!r}]"
    except (ValueError, TypeError):
        return _ANY


def _path(node: ast.AST) -> str:
    """Return the path of a target of assignments; empty for several."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute | ast.Subscript) and (path := _path(node.value)):
        return path + (f".{node.attr}" if isinstance(node, ast.Attribute) else _index(node.slice))
    return ""


def _variable(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes of a function, and not those of functions in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _assignments(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what a function assigns to, and which expression."""
    for node in _own_nodes(scope):
        if isinstance(node, _ASSIGNING) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target, node.value) for target in targets)
        elif isinstance(node, ast.Call) and _called(node) == "append" and len(node.args) == 1:
            owner = getattr(node.func, "value", node)
            yield ast.Subscript(owner, ast.Name("*")), node.args[0]


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_of_numbers(node: ast.Call) -> bool:
    """Return whether an expression calls a function of Python that returns a number."""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id in _FUNCTIONS
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _MODULES
