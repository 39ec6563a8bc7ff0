"""Which tensors of files belong to which names of a model.

The names of a model are those before `rt.shard`, and a file has the same ones, except that

- a file of a base model lacks the prefix that a model with a head puts before its names, or a file
  of a model with a head has it;
- transformers has renamed modules since a file was written, or packs several tensors of files, such
  as the experts of a layer, in one: its own tables say how;
- a model of peft has other names for the layers that have adapters, and the files of adapters leave
  out the adapter's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msrun.errors import CheckpointError
from msrun.parallel.weights.files import Piece, WeightFiles
from msrun.parallel.weights.origin import Library, Origin

_ADAPTED = "base_model.model."
_PARALLEL = "module."
_SHOWN_MAX = 3


class Matched(NamedTuple):
    """The result of `match`.

    Args:
        pieces: First name of a tensor of the model -> what it is made of.
        others: First name -> further tensors of the files that are the same one in the model.
        missing: Names of the model that the files lack, each tensor once.
        unexpected: Names of the files that the model lacks.
    """

    pieces: dict[str, list[Piece]]
    others: dict[str, list[Piece]]
    missing: list[str]
    unexpected: list[str]


def match(origin: Origin, files: WeightFiles) -> Matched:
    """Return which tensors of `files` belong to which names of a model.

    Raises:
        CheckpointError: transformers makes some of them in a way that is not known here.
    """
    library = origin.library
    plain = plain_names(origin)
    renamed = _renamed(library, files, plain)
    found: dict[str, list[Piece]] = {}
    unexpected = []
    for name, pieces in renamed.items():
        if name in plain:
            for own in plain[name]:
                found[own] = pieces
        elif not _matches(library.unexpected, name):
            unexpected += [piece.name for piece in pieces]
    matched = Matched({}, {}, [], unexpected)
    for first, group in origin.groups.items():
        there = list(dict.fromkeys(name for name in group if name in found))
        if there:
            matched.pieces[first] = found[there[0]]
            others = [found[name] for name in there[1:] if found[name] != found[there[0]]]
            if others:
                matched.others[first] = [piece for pieces in others for piece in pieces]
        elif not is_adapters(library, first) and not _matches(library.missing, first):
            matched.missing.append(first)
    return matched


def plain_names(origin: Origin) -> dict[str, list[str]]:
    """Return the names of a model as its files have them -> its own names."""
    found: dict[str, list[str]] = {}
    for name in origin.first:
        plain = _without_adapters(origin.library, name)
        found.setdefault(plain, []).append(name)
    return found


def is_adapters(library: Library, name: str) -> bool:
    """Return whether a tensor belongs to an adapter of peft, not to the base model."""
    plain = _without_adapters(library, name)
    return any(f".{adapter}." in f"{plain}." for adapter in library.adapters)


def shown(names: Sequence[str]) -> str:
    """Return a few of `names` for a message."""
    more = len(names) - _SHOWN_MAX
    return ", ".join(names[:_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def _without_adapters(library: Library, name: str) -> str:
    if not library.adapters:
        return name
    name = name.removeprefix(_ADAPTED).replace(".base_layer.", ".")
    name = name.replace(".original_module.", ".")
    for adapter in library.adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    return name


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _renamed(
    library: Library, files: WeightFiles, plain: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """Return names as the model has them -> the tensors of the files that they are made of."""
    if library.transforms:
        return _by_transformers(library, files, plain)
    found = {}
    are_wrapped = all(name.startswith(_PARALLEL) for name in files.names)
    for name in files.names:
        own = name.removeprefix(_PARALLEL) if are_wrapped and name not in plain else name
        found[with_prefix(library.prefix, own, plain)] = [Piece(name=name)]
    return found


def with_prefix(prefix: str, name: str, plain: Mapping[str, object]) -> str:
    """Return `name` with or without the name of the base model, as the model has it."""
    if not prefix or name in plain:
        return name
    for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if other in plain:
            return other
    return name


def _by_transformers(
    library: Library, files: WeightFiles, plain: Mapping[str, object]
) -> dict[str, list[Piece]]:
    """Do what the loader of transformers does, without reading a tensor."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    renamings = [one for one in library.transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in library.transforms if isinstance(one, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    meta = dict.fromkeys(plain, True)
    found: dict[str, list[Piece]] = {}
    packed: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    for name in sorted(files.names, key=dot_natural_key):
        own, pattern = name, None
        if name not in plain:
            own, pattern = rename_source_key(
                name, renamings, converters, library.prefix or None, meta
            )
        if pattern is None:
            found[own] = [Piece(name=name)]
        else:
            _, parts = packed.setdefault(own, (of_pattern[pattern], {}))
            parts.setdefault(pattern, []).append(name)
    for own, (converter, parts) in packed.items():
        found[own] = _packed(files, own, converter, parts)
    return found


def _packed(
    files: WeightFiles, own: str, converter: Any, parts: Mapping[str, Sequence[str]]
) -> list[Piece]:
    """Return the tensors of the files that make `own`, and where they are in it.

    Raises:
        CheckpointError: It is not a stack of tensors, or tensors one after the other.
    """
    kinds = [type(one).__name__ for one in converter.operations]
    dims = [getattr(one, "dim", 0) for one in converter.operations]
    is_stack = kinds[:1] == ["MergeModulelist"] and dims[0] == 0
    joins = kinds[1:] if is_stack else kinds
    if joins not in ([], ["Concatenate"]) or len(converter.target_patterns) > 1:
        example = next(iter(parts.values()))[0]
        raise CheckpointError(
            f"{files.path}: transformers makes {own} of {example} by {' and '.join(kinds)}, which "
            "is not done here",
            hint="in one process: from_pretrained(DIR).save_pretrained(NEW_DIR, "
            "save_original_format=False) writes the tensors as the model has them",
        )
    along = dims[-1] if joins else 0
    pieces, start = [], 0
    for pattern in converter.source_patterns:
        length = 0
        for index, name in enumerate(parts.get(pattern, ())):
            shape = files.shape(name)
            if is_stack:
                shape = [1, *shape]
            at = [0] * len(shape)
            if joins:
                at[along] = start
                length = shape[along]
            if is_stack:
                at[0] += index
            pieces.append(Piece(name=name, at=at, shape=shape))
        start += length
    return pieces


def match_adapter(origin: Origin, files: WeightFiles) -> Matched:
    """Return which tensors of a directory of adapters belong to which names of a model of peft.

    Raises:
        CheckpointError: The model has no adapter, or several.
    """
    adapters = origin.library.adapters
    if len(adapters) != 1:
        has = f"has the adapters {', '.join(adapters)}" if adapters else "has no adapter"
        raise CheckpointError(f"{files.path} holds one adapter of peft, and {origin.kind} {has}")
    [adapter] = adapters
    own: dict[str, str] = {}
    for name in origin.first:
        saved = name.replace(f".modules_to_save.{adapter}.", ".")
        if saved != name:
            own[saved] = name
        elif is_adapters(origin.library, name):
            own[f"{name}.".replace(f".{adapter}.", ".", 1).removesuffix(".")] = name
    matched = Matched({}, {}, [], [])
    for name in files.names:
        place = own.pop(name, None)
        if place is None:
            matched.unexpected.append(name)
        else:
            matched.pieces[origin.first[place]] = [Piece(name=name)]
    matched.missing.extend(own.values())
    return matched
