"""Parameters that a script marks for servers, as MindSpore's `set_param_ps` does."""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

from msrun.errors import ConfigError, UsageError
from msrun.parallel.config import ROOT, ParallelConfig
from msrun.parallel.match import matching

_MARK = "is_on_msrun_servers"


def mark(config: ParallelConfig, what: nn.Module | Parameter, *, recurse: bool) -> None:
    """Have parameters live on servers; see `Runtime.set_param_ps`.

    Raises:
        UsageError: The configuration has no servers, or there is no parameter.
    """
    if config.servers is None:
        raise UsageError(
            f"set_param_ps: {ROOT} has no servers", hint="configure it, such as servers: {}"
        )
    params = [what] if isinstance(what, Parameter) else list(what.parameters(recurse=recurse))
    if not params:
        raise UsageError(f"set_param_ps: {type(what).__name__} has no parameters")
    for param in params:
        setattr(param, _MARK, True)


def names_on_servers(config: ParallelConfig, model: nn.Module) -> set[str]:
    """Return the names of the parameters that patterns or marks choose.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is chosen.
    """
    named = dict(model.named_parameters())
    patterns = config.servers.params if config.servers else []
    found = matching(patterns, list(named), "servers.params")
    found |= {name for name, param in named.items() if getattr(param, _MARK, False)}
    if not found:
        raise ConfigError(
            f"{ROOT}.servers.params: names no parameter of {type(model).__name__}",
            hint="write patterns of names, or mark a module with rt.set_param_ps",
        )
    return found
