"""Objects of Kubernetes as YAML that every reader of YAML takes for the same values.

Kubernetes reads YAML 1.1 and 1.2 with a parser of its own, to which `3e-4`, `1_000`, `0o7` and
`on` are no texts.  So a text stands bare only where no version reads anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import yaml

_BARE = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.-]*(?:[:=@][A-Za-z0-9/_.-]+)*")
_WORDS = frozenset({"y", "yes", "n", "no", "true", "false", "on", "off", "null"})
_WIDTH = 1 << 20  # never folds a line


class _Dumper(yaml.SafeDumper):
    """Quotes texts, indents lists, and repeats what stands twice."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - yaml's own
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - yaml's own
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and all(
        line == line.rstrip() and line.isprintable() for line in text.split("\n")
    ):
        style: str | None = "|"
    else:
        is_bare = _BARE.fullmatch(text) and text.lower() not in _WORDS
        style = None if is_bare else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def render_yaml(document: Mapping[str, object]) -> str:
    """Return one object as YAML, its keys in their order."""
    return str(
        yaml.dump(
            document,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=False,
            width=_WIDTH,
        )
    )


def join_documents(texts: Iterable[str]) -> str:
    """Return several documents as one stream."""
    return "---\n".join(texts)
