"""Tables of a model that are on the device `meta`, and that servers are to make.

On `meta` a table has no memory, and whatever a script does to its values is lost.  torch counts
in-place writes all the same.  So a table that only its own constructor has written gets the rows of
`reset_parameters`, and any other one is refused unless the configuration says what its rows are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import Parameter

from msrun.errors import ConfigError, ModelError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.match import matching
from msrun.parallel.rank_context import RankContext
from msrun.parallel.servers.first_rows.sources import Drawn, TableSource
from msrun.parallel.settings.section import given
from msrun.parallel.settings.servers import TableInit
from msrun.parallel.torch_compat import as_plain_tensors, write_count

KEY = f"{ROOT}.servers"
_SOURCE = "msrun_table_source"
_FORMS = frozenset([torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like])
_SEEDS = 1 << 32  # as many the generator of the CPU tells apart


class TablePlace(Parameter):
    """The parameter of a table that no rank has.

    Some optimizers make their state when they are built, as Adagrad does.  It would take the
    memory that the table does not.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` as on a plain tensor, and have no memory for tensors of its form."""
        del types
        words = dict(kwargs or {})
        if func in _FORMS and isinstance(args[0], cls):
            own = args[0].detach()
            dtype, device = words.get("dtype") or own.dtype, words.get("device") or own.device
            return without_memory(own.shape, dtype, device)
        with as_plain_tensors():
            return func(*args, **words)


def source_of(parameter: Parameter) -> TableSource | None:
    """Return what servers make a table of; None of any other parameter."""
    found: TableSource | None = getattr(parameter, _SOURCE, None)
    return found


def without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor that reads as NaN in its whole shape."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def find(
    config: ParallelConfig, model: nn.Module, remote: Collection[str]
) -> dict[str, TableSource]:
    """Return the tables of `model` on `meta` that live on servers; seeds are still 0.

    Args:
        config: The configuration.
        model: The model, before the first change.
        remote: Names of the parameters that live on servers.

    Raises:
        ConfigError: A pattern of `servers.init` names another parameter, or checkpoints are
            written beside the training.
        ModelError: Nobody knows the values of one.
    """
    named = dict(model.named_parameters())
    init = config.servers.init if config.servers else {}
    for name in sorted(matching(init, list(named), "servers.init")):
        if name not in remote or not named[name].is_meta:
            raise ConfigError(
                f"{KEY}.init: {name} is no table of servers on the device meta, and keeps its "
                "values (name tables that no rank has)"
            )
    for name, tensor in (*named.items(), *model.named_buffers()):
        if tensor.is_meta and name not in remote:
            raise ModelError(
                f"{KEY}: {name} is on the device meta, and is no table of servers",
                hint='put only those there, such as nn.Embedding(..., device="meta"); '
                "rt.init_on_meta is for models without servers",
            )
    found = {}
    for name in sorted(remote):
        if (parameter := named[name]).is_meta:
            rules = [rule for pattern, rule in init.items() if fnmatchcase(name, pattern)]
            found[name] = TableSource(
                shape=list(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                rows=_drawn(name, parameter, model, rules[0] if rules else None),
            )
    if found and config.checkpoint and config.checkpoint.is_async:
        raise ConfigError(
            f"{ROOT}.checkpoint.async: rows of {min(found)} come from servers as they are written, "
            "so no step can go on meanwhile (leave it out)"
        )
    return found


def _drawn(name: str, parameter: Parameter, model: nn.Module, rule: TableInit | None) -> Drawn:
    owners: list[Any] = [
        module
        for module in model.modules()
        if any(own is parameter for own in module.parameters(recurse=False))
    ]
    if not all(type(each) in {nn.Embedding, nn.EmbeddingBag} for each in owners):
        raise ModelError(
            f"{KEY}: {name} is on the device meta, and no table that is looked up only",
            hint="build it where it has values; servers make tables of nn.Embedding and "
            "nn.EmbeddingBag",
        )
    rows = parameter.shape[0]
    paddings = {each.padding_idx for each in owners} - {None}
    padding = sorted(each % rows for each in paddings)
    if rule is not None:
        [kind] = given(rule)
        return Drawn(kind=kind, value=getattr(rule, kind), seed=0, padding=padding)  # type: ignore[arg-type]
    is_own = len(owners) == 1 and "reset_parameters" not in vars(owners[0])
    if not is_own or write_count(parameter) != 1 + len(padding):
        raise ModelError(
            f"{KEY}: {name} is on the device meta, where what was done to its values is lost",
            hint=f"say what its rows are, such as {KEY}.init: {{{name}: {{normal: 0.01}}}}",
        )
    return Drawn(kind="normal", value=1.0, seed=0, padding=padding)


def take(
    config: ParallelConfig, context: RankContext, model: nn.Module, remote: Collection[str]
) -> None:
    """Give tables on `meta` a tensor without memory, and note what servers make of them.

    All ranks call it together.  Parameters stay the same objects.
    """
    found = find(config, model, remote)
    if not found:
        return
    base = int(context.broadcast(str(torch.initial_seed()).encode()))
    named = dict(model.named_parameters())
    for name, source in found.items():
        parameter = named[name]
        nothing = without_memory(parameter.shape, parameter.dtype, context.device)
        kept = dict(vars(parameter))
        torch.utils.swap_tensors(parameter, TablePlace(nothing, parameter.requires_grad))
        vars(parameter).update(kept)
        rows = replace(source.rows, seed=seed_of(name, base))
        setattr(parameter, _SOURCE, replace(source, rows=rows))


def seed_of(name: str, base: int) -> int:
    """Return the seed of the generator of a table.

    Args:
        name: Of its parameter.
        base: `torch.initial_seed()` of rank 0.
    """
    return (base + zlib.crc32(name.encode())) % _SEEDS
