"""Custom resources: the structural schema of their definition fills in, prunes and refuses."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator

from kube.failures import ApiError
from kube.resources import Resource

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def admit_custom(operation: str, resource: Resource, obj: dict, old: dict | None) -> None:
    """Apply defaults and drop unknown fields in place; raise for what the schema forbids."""
    properties = resource.schema.get("properties", {})
    for field in properties.keys() - {"apiVersion", "kind", "metadata"}:
        if field in obj:
            obj[field] = filled(properties[field], obj[field])
    for field in obj.keys() - properties.keys() - {"apiVersion", "kind", "metadata"}:
        if not resource.schema.get("x-kubernetes-preserve-unknown-fields"):
            del obj[field]
    problems = []
    for field in properties.keys() - {"apiVersion", "kind", "metadata"}:
        if operation == "STATUS" and field != "status":
            continue
        if field in obj:
            before = (old or {}).get(field)
            found = list(check(properties[field], obj[field], field))
            # Rules are for values that have the right shape.
            problems += found or broken_rules(properties[field], obj[field], field, before)
        elif field in resource.schema.get("required", ()):
            problems.append(f"{field}: Required value")
    rules = {"x-kubernetes-validations": resource.schema.get("x-kubernetes-validations", ())}
    problems = problems or list(broken_rules(rules, obj, "", old))
    if problems:
        name = f'{resource.kind}.{resource.group} "{obj["metadata"]["name"]}"'
        text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise ApiError(422, "Invalid", f"{name} is invalid: {text}")


def filled(schema: dict, value: object) -> object:
    """Return a value with the defaults of its schema and without fields that this lacks."""
    if isinstance(value, dict) and schema.get("type") == "object":
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        result = {}
        for key, inner in value.items():
            if key in known:
                if inner is None and "default" in known[key]:
                    continue
                result[key] = filled(known[key], inner)
            elif others:
                result[key] = filled(others, inner) if isinstance(others, dict) else inner
            elif schema.get("x-kubernetes-preserve-unknown-fields"):
                result[key] = inner
        for key, inner in known.items():
            if key not in result and "default" in inner:
                result[key] = filled(inner, copy.deepcopy(inner["default"]))
        return result
    if isinstance(value, list) and "items" in schema:
        return [filled(schema["items"], item) for item in value]
    return value


def check(  # noqa: C901 - a table of keywords
    schema: dict, value: object, path: str
) -> Iterator[str]:
    """Yield what is wrong with a value, in the server's words."""
    if value is None and schema.get("nullable"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str):
            yield f"{path}: Invalid value: must be an integer or a string"
        return
    kind = _TYPES.get(schema.get("type", ""), object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        said = type(value).__name__
        yield f'{path}: Invalid value: "{said}": must be of type {schema["type"]}'
        return
    if "enum" in schema and value not in schema["enum"]:
        choices = ", ".join(json.dumps(choice) for choice in schema["enum"])
        yield f"{path}: Unsupported value: {json.dumps(value)}: supported values: {choices}"
    yield from _bounds(schema, value, path)
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{path}.{key}: Required value"
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            below = known.get(key) or (others if isinstance(others, dict) else None)
            if below:
                yield from check(below, inner, f"{path}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from check(schema.get("items", {}), item, f"{path}[{i}]")


def _inside(old: object, key: str) -> object:
    return old.get(key) if isinstance(old, dict) else None


def _bounds(schema: dict, value: object, path: str) -> Iterator[str]:
    if "minimum" in schema and value < schema["minimum"]:
        least = schema["minimum"]
        yield f"{path}: Invalid value: {value}: should be greater than or equal to {least}"
    if "maximum" in schema and value > schema["maximum"]:
        yield f"{path}: Invalid value: {value}: should be less than or equal to {schema['maximum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: Invalid value: {json.dumps(value)}: should match '{schema['pattern']}'"
    for word, least in (
        ("minLength", True),
        ("minItems", True),
        ("minProperties", True),
        ("maxLength", False),
        ("maxItems", False),
        ("maxProperties", False),
    ):
        if word in schema and (len(value) < schema[word] if least else len(value) > schema[word]):
            yield f"{path}: Invalid value: {word} is {schema[word]}"


def broken_rules(schema: dict, value: object, path: str, old: object) -> Iterator[str]:
    """Yield the rules that a value breaks, itself or inside."""
    yield from _rules_inside(schema, value, path, old)
    for rule in schema.get("x-kubernetes-validations", ()):
        text = rule["rule"]
        if "oldSelf" in text and old is None:
            continue
        try:
            holds = evaluate(text, value, old)
        except LookupError as error:
            yield f"{path}: Invalid value: rule {text}: {error}"
            continue
        if not holds:
            yield f"{path}: Invalid value: {rule.get('message', f'failed rule: {text}')}"


def _rules_inside(schema: dict, value: object, path: str, old: object) -> Iterator[str]:
    """Yield the rules that what is inside a value breaks."""
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, inner in value.items():
            below = known.get(key, others)
            if isinstance(below, dict):
                yield from broken_rules(below, inner, f"{path}.{key}", _inside(old, key))
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from broken_rules(schema.get("items", {}), item, f"{path}[{i}]", None)


# The part of the Common Expression Language that our definitions use, by way of Python: field
# selection, has(), size(), comparison, arithmetic, &&, ||, !, ?: and the macros all and exists.

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'[^']*'|"[^"]*")|(?P<number>\d+)|(?P<name>[A-Za-z_]\w*)"""
    r"""|(?P<sign>&&|\|\||==|!=|<=|>=|[-!<>+*/%?:.,()\[\]]))"""
)
_BINARY = (
    {"||": lambda a, b: a or b()},
    {"&&": lambda a, b: a and b()},
    {
        "==": lambda a, b: a == b(),
        "!=": lambda a, b: a != b(),
        "<=": lambda a, b: a <= b(),
        ">=": lambda a, b: a >= b(),
        "<": lambda a, b: a < b(),
        ">": lambda a, b: a > b(),
        "in": lambda a, b: a in b(),
    },
    {"+": lambda a, b: a + b(), "-": lambda a, b: a - b()},
    {"*": lambda a, b: a * b(), "/": lambda a, b: a // b(), "%": lambda a, b: a % b()},
)
_MISSING = object()


def evaluate(text: str, value: object, old: object = None) -> object:
    """Return what an expression is for a value; raises `SyntaxError` for what is not CEL here."""
    parser = _Parser(text)
    tree = parser.ternary()
    if parser.peek():
        raise SyntaxError(f"{text}: nothing may follow {parser.peek()}")
    names = {"self": value, "oldSelf": old, "true": True, "false": False, "null": None}
    return tree(names)


class _Parser:
    """Recursive descent to functions of the variables."""

    def __init__(self, text: str) -> None:
        self._words, at = [], 0
        text = text.strip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if not found:
                raise SyntaxError(f"{text}: {text[at:]} is not understood")
            self._words.append(found[found.lastgroup])
            at = found.end()

    def peek(self) -> str:
        return self._words[0] if self._words else ""

    def take(self, *expected: str) -> str:
        word = self.peek()
        if expected and word not in expected:
            raise SyntaxError(f"expected {' or '.join(expected)}, not {word!r}")
        return self._words.pop(0)

    def ternary(self):
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take("?")
        yes = self.ternary()
        self.take(":")
        no = self.ternary()
        return lambda names: yes(names) if condition(names) else no(names)

    def binary(self, level: int):
        if level == len(_BINARY):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _BINARY[level]:
            left = self._joined(_BINARY[level][self.take()], left, self.binary(level + 1))
        return left

    @staticmethod
    def _joined(join, left, right):
        return lambda names: join(left(names), lambda: right(names))

    def unary(self):
        if self.peek() == "!":
            self.take()
            inner = self.unary()
            return lambda names: not inner(names)
        if self.peek() == "-":
            self.take()
            inner = self.unary()
            return lambda names: -inner(names)
        return self.postfix()

    def postfix(self):
        node = self.primary()
        while self.peek() in (".", "["):
            if self.take() == "[":
                node = self._index(node, self.ternary())
                self.take("]")
                continue
            name = self.take()
            node = self._method(node, name) if self.peek() == "(" else self._field(node, name)
        return node

    @staticmethod
    def _index(node, key):
        return lambda names: node(names)[key(names)]

    @staticmethod
    def _field(node, name: str):
        def get(names):
            found = node(names)
            if not isinstance(found, dict) or name not in found:
                if names.get("has()") and found is not _MISSING:
                    return _MISSING
                raise LookupError(f"no such key: {name}")
            return found[name]

        return get

    def _method(self, node, name: str):
        self.take("(")
        if name in ("all", "exists"):
            variable = self.take()
            self.take(",")
            inner = self.ternary()
            self.take(")")
            fold = all if name == "all" else any
            return lambda names: fold(inner({**names, variable: item}) for item in node(names))
        words = [] if self.peek() == ")" else [self.ternary()]
        self.take(")")
        known = {
            "size": len,
            "startsWith": lambda text, start: text.startswith(start),
            "endsWith": lambda text, end: text.endswith(end),
            "contains": lambda text, part: part in text,
            "matches": lambda text, pattern: bool(re.search(pattern, text)),
        }
        return lambda names: known[name](node(names), *(word(names) for word in words))

    def primary(self):  # noqa: PLR0911 - a table of first words
        word = self.take()
        if word == "(":
            inner = self.ternary()
            self.take(")")
            return inner
        if word == "[":
            items = []
            while self.peek() != "]":
                items.append(self.ternary())
                if self.peek() == ",":
                    self.take()
            self.take("]")
            return lambda names: [item(names) for item in items]
        if word in ("has", "size") and self.peek() == "(":
            self.take("(")
            inner = self.ternary()
            self.take(")")
            if word == "size":
                return lambda names: len(inner(names))
            return lambda names: inner({**names, "has()": True}) is not _MISSING
        if word.isdigit():
            return lambda _names: int(word)
        if word[0] in "'\"":
            return lambda _names: word[1:-1]
        return lambda names: names[word]
