"""The parameters of a model that live on servers, and those that cannot."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from msrun import environ
from msrun.errors import ConfigError
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.deferred.log import slot_of
from msrun.parallel.layout import plan_axes
from msrun.parallel.match import matching
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.servers.first_rows import meta_tables
from msrun.parallel.servers.parameters.marks import names_on_servers
from msrun.parallel.settings.servers import ServerParameters

KEY = f"{ROOT}.servers"


def find(
    config: ParallelConfig, layout: MeshLayout, model: nn.Module, planned: Collection[str]
) -> set[str]:
    """Return the names of the parameters of `model` that live on servers.

    Args:
        config: The configuration.
        layout: The mesh.
        model: The model, before the first change.
        planned: Modules that the operator plan divides.

    Raises:
        ConfigError: They cannot.
    """
    if config.servers is None:
        return set()
    _check_number(config.servers)
    known = {DATA_AXIS, *plan_axes(layout)}
    axes = [axis for axis, size in layout.axes.items() if size > 1 and axis != DATA_AXIS]
    if unknown := [axis for axis in axes if axis not in known]:
        text = (
            f"{KEY}: works with {DATA_AXIS} and the axes of a plan, and the mesh has {unknown[0]}"
        )
        raise ConfigError(text)
    if axes and config.servers.staleness:
        text = f"{KEY}.sync: with a staleness ranks of {axes[0]} would have other weights each"
        raise ConfigError(text, hint="choose sync: true")
    named = dict(model.named_parameters())
    found = names_on_servers(config, model)
    twice = found & matching(config.reduce.exclude, list(named), "reduce.exclude")
    for name in sorted(twice):
        raise ConfigError(f"{KEY}: {name} is also in {ROOT}.reduce.exclude")
    for name in sorted(found):
        if name.rpartition(".")[0] in planned:
            raise ConfigError(f"{KEY}: {name} is also in {ROOT}.plan")
        if not named[name].requires_grad:
            text = f"{KEY}: {name} is frozen, and servers hold what is trained"
            raise ConfigError(text, hint="keep it out of the patterns")
        if slot_of(named[name]):
            raise ConfigError(
                f"{KEY}: {name} has no values yet, as rt.init_on_meta left it",
                hint='build tables for servers outside of it, on torch.device("meta") if need be',
            )
        if not named[name].is_floating_point():
            raise ConfigError(
                f"{KEY}: {name} is {named[name].dtype}, and servers take real numbers"
            )
    meta_tables.find(config, model, found)
    return found


def _check_number(servers: ServerParameters) -> None:
    """Refuse a job without servers, or with too few of them.

    Raises:
        ConfigError: It is such a job.
    """
    count = environ.servers_place(environ.current()).count
    if not count:
        text = f"{KEY}: this job has no servers"
        raise ConfigError(text, hint="start it with msrun --server-num N")
    if servers.replicas and count == 1:
        text = f"{KEY}.replicas: 1 needs another server, and this job has one"
        raise ConfigError(text, hint="start it with msrun --server-num 2")
