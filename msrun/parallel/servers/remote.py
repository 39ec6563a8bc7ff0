"""A rank's side of parameter servers: parameters of a model that live elsewhere.

Two kinds.  A *table* is looked up only, by `nn.Embedding` and `nn.EmbeddingBag`: the rank has the
rows of its batch alone, pulled as the forward pass asks for them.  Its gradient on the rank is a
sparse one, so that everything between backward pass and optimizer (scaling, counting of losses)
works on it as on any other.  Every other parameter is a *copy*, renewed after each step.

`rt.shard` finds them, `rt.optimizer` gives them to the servers.  From then on the optimizer's step
pushes their gradients and finds none.  Outside of `whole` the weight of a table holds no number:
it is one NaN in its whole shape, without memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from msrun import environ
from msrun.cluster.servers.events import Rules
from msrun.cluster.servers.ownership import Table
from msrun.errors import ConfigError, ModelError, UsageError
from msrun.parallel.config import DATA_AXIS, ROOT, ParallelConfig
from msrun.parallel.layout import MeshLayout
from msrun.parallel.match import matching
from msrun.parallel.rank_context import RankContext
from msrun.parallel.servers.caching.cached_tables import CachedTables
from msrun.parallel.servers.client import PulledRows, ServersClient
from msrun.parallel.servers.contents import cut_state, joined, slices_for
from msrun.parallel.servers.lookups import RowsOf, look_up, look_up_bags
from msrun.parallel.servers.outgoing import OutgoingPush, outgoing
from msrun.parallel.servers.recipe import options_of, recipe_of, try_recipe
from msrun.parallel.servers.routing import places_by_server
from msrun.parallel.servers.rows import RowGradients
from msrun.parallel.servers.wire import SessionPlan
from msrun.transport.data_sockets import FRAME_BYTES_MAX

KEY = f"{ROOT}.servers"
# What to ask for of whole parameters: see `process`.
WHOLE = "whole"
STATE = "state"
LENT = "lent"
# Bytes a second that a slow network moves: what takes longer is not asked for again.
_SLOW = 200e6


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
    if not environ.servers_place(environ.current()).count:
        text = f"{KEY}: this job has no servers"
        raise ConfigError(text, hint="start it with msrun --server-num N")
    axes = [axis for axis, size in layout.axes.items() if size > 1 and axis != DATA_AXIS]
    if axes:
        text = f"{KEY}: works with the axis {DATA_AXIS} alone, and the mesh has {axes[0]}"
        raise ConfigError(text)
    named = dict(model.named_parameters())
    found = matching(config.servers.params, list(named), "servers.params")
    twice = found & matching(config.reduce.exclude, list(named), "reduce.exclude")
    for name in sorted(twice):
        raise ConfigError(f"{KEY}: {name} is also in {ROOT}.reduce.exclude")
    for name in sorted(found):
        if name.rpartition(".")[0] in planned:
            raise ConfigError(f"{KEY}: {name} is also in {ROOT}.plan")
        if not named[name].requires_grad:
            text = f"{KEY}: {name} is frozen, and servers hold what is trained"
            raise ConfigError(text, hint="keep it out of the patterns")
        if named[name].is_meta:
            raise ConfigError(f"{KEY}: {name} has no values yet, as rt.init_on_meta left it")
        if not named[name].is_floating_point():
            raise ConfigError(
                f"{KEY}: {name} is {named[name].dtype}, and servers take real numbers"
            )
    return found


class RemoteParameter:
    """One parameter that lives on servers.

    Args:
        name: Its first name in the model.
        parameter: It.
        lookups: The modules that look it up, where nothing else uses it; else none.
    """

    def __init__(
        self, name: str, parameter: Parameter, lookups: list[nn.Embedding | nn.EmbeddingBag]
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.is_table = bool(lookups)
        self.is_sparse = bool(lookups) and all(module.sparse for module in lookups)
        self.device, self.dtype, self.shape = parameter.device, parameter.dtype, parameter.shape
        rows = self.shape[0] if parameter.dim() else 1
        self.row_bytes = parameter.nbytes // max(rows, 1)
        if self.row_bytes > FRAME_BYTES_MAX or rows < 1:
            text = f"{KEY}: {name} of shape {tuple(self.shape)} has no row that fits a message"
            raise ConfigError(text, hint=f"a row has at most {FRAME_BYTES_MAX} bytes")
        # A copy travels whole: with few slices it is copied least on the way.
        servers = environ.servers_place(environ.current()).count
        sizes = (rows, self.row_bytes)
        slices = slices_for(*sizes) if self.is_table else slices_for(*sizes, servers)
        self.table = Table(name=name, rows=rows, row_bytes=self.row_bytes, slices=slices)

    def release(self) -> None:
        """Give up the memory of a table."""
        if self.is_table:
            nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
            self.parameter.data = nothing.expand(self.shape)

    def renew(self, slices: Mapping[int, Tensor]) -> None:
        """Have the values of these slices, in the memory that is there."""
        here = self.parameter.data
        rows = here if here.dim() else here.view(1)
        for index, piece in slices.items():
            rows[index :: self.table.slices].copy_(piece)

    def fill(self, whole: Tensor) -> None:
        """Have these values, in the memory that is there."""
        whole = whole.reshape(self.shape)
        if self.is_table:
            self.parameter.data = whole.to(self.device)
        else:
            self.parameter.data.copy_(whole)


def _remote_parameters(model: nn.Module, names: set[str]) -> list[RemoteParameter]:
    users: dict[Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((module, attribute))
    found = []
    for name, parameter in model.named_parameters():
        if name in names:
            owners = users[parameter]
            lookups: list[Any] = [
                module
                for module, attribute in owners
                if type(module) in {nn.Embedding, nn.EmbeddingBag} and attribute == "weight"
            ]
            only = lookups if len(lookups) == len(owners) else []
            found.append(RemoteParameter(name, parameter, only))
            for module in only:
                if module.max_norm is not None or module.scale_grad_by_freq:
                    option = "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
                    text = f"{KEY}: {name} has {option}, which needs the whole table"
                    raise ConfigError(text)
    return found


class RemoteParameters:
    """All parameters of a model that live on servers.

    Args:
        config: The configuration.
        context: This rank.
        model: The model after `rt.shard` has made the rest parallel.
        generation: Of the job.
    """

    def __init__(
        self, config: ParallelConfig, context: RankContext, model: nn.Module, generation: int
    ) -> None:
        if config.servers is None:
            raise TypeError("a model without servers")
        self._config, self._settings = config, config.servers
        self._context = context
        self._generation = generation
        names = matching(self._settings.params, [n for n, _ in model.named_parameters()], KEY)
        self._all = _remote_parameters(model, names)
        self._by_parameter = {each.parameter: each for each in self._all}
        self._cached = self._caches()
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._client: ServersClient | None = None
        self._sessions = 0
        self._is_whole = True
        self._is_closed = False
        if context.world_size > 1:
            for each in self._all:
                dist.broadcast(each.parameter.data, src=0)
        for module in model.modules():
            remote = self._by_parameter.get(getattr(module, "weight", None))  # type: ignore[arg-type]
            if remote is not None and remote.is_table:
                replaced = look_up_bags if isinstance(module, nn.EmbeddingBag) else look_up
                module.forward = partial(replaced, (self, remote, weakref.ref(module)))
        model.register_state_dict_post_hook(partial(self._complete))
        model.register_load_state_dict_pre_hook(partial(self._refuse_load))
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _caches(self) -> CachedTables | None:
        cache, tables = self._settings.cache, [each for each in self._all if each.is_table]
        if cache and not tables:
            raise ConfigError(f"{KEY}.cache: servers have no table that is only looked up")
        return CachedTables(cache.rows, tables) if cache else None

    def announce(self, batch: object, following: object) -> None:
        """Take note of the batch that a loader gives now, and of the one after it."""
        if self._cached:
            self._cached.announce(batch, following)

    # The optimizer.

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameters that `optimizer` holds to the servers; all ranks together.

        Raises:
            UsageError: Servers do not offer it, or it holds some of their parameters only.
        """
        held = {param for group in optimizer.param_groups for param in group["params"]}
        mine = [each for each in self._all if each.parameter in held]
        known = self._optimizer() if self._optimizer else None
        if not mine or known is optimizer:
            return
        if self._optimizer is not None:
            raise UsageError(f"{KEY}: servers have the parameters of an optimizer already")
        if len(mine) < len(self._all):
            missing = next(each.name for each in self._all if each.parameter not in held)
            text = f"{type(optimizer).__name__} holds {mine[0].name} and not {missing}"
            raise ModelError(f"{KEY}: {text}", hint="one optimizer holds all that servers have")
        recipe = recipe_of(optimizer, self._names)
        for each in self._all:
            try_recipe(recipe, each.name, each.dtype, is_sparse=each.is_sparse)
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_state_dict_pre_hook(partial(self._refuse_state))
        self._begin()

    @property
    def _names(self) -> dict[Parameter, str]:
        return {parameter: each.name for parameter, each in self._by_parameter.items()}

    def _own_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer() if self._optimizer else None
        if optimizer is None:
            raise UsageError(f"{KEY}: rt.optimizer(optimizer) gives the parameters to servers")
        return optimizer

    def _servers(self) -> ServersClient:
        if self._client is None:
            env = environ.current()
            place, master = environ.servers_place(env), environ.master(env)
            if self._is_closed:
                raise UsageError(f"{KEY}: this rank has left the servers")
            if master is None:
                raise UsageError(f"{KEY}: MASTER_ADDR and MASTER_PORT name no store of this job")
            shares = self._settings.shared_memory
            self._client = ServersClient(place, master, self._context.rank, shares=shares)
        if self._cached:
            self._cached.settle(self._client)
        return self._client

    def _begin(self) -> None:
        """Begin a session with the values and the state that are here, which all ranks have."""
        optimizer, ranks = self._own_optimizer(), self._context.world_size
        self._sessions += 1
        drawn = self._context.broadcast(os.urandom(8)).hex()
        settings = self._settings
        total = sum(each.parameter.nbytes for each in self._all)
        plan = SessionPlan(
            session=f"{self._generation}-{self._sessions}-{drawn}",
            tables=[each.table for each in self._all],
            recipe=recipe_of(optimizer, self._names),
            rules=Rules(
                staleness=settings.staleness,
                every=settings.snapshot.every,
                retry=1.0 + total / _SLOW,
            ),
            workers=ranks,
            directory=settings.snapshot.dir or "",
            suppliers={each.name: index % ranks for index, each in enumerate(self._all)},
        )
        values = {
            each.name: (each.parameter.detach().cpu(), optimizer.state.get(each.parameter, {}))
            for each in self._all
        }

        def supply(table: str, pieces: list[int]) -> dict[int, list[Any]]:
            weight, state = values[table]
            return {index: cut_state(weight, state, index, len_of[table]) for index in pieces}

        len_of = plan.counts
        client = self._servers()
        client.begin(plan, supply)
        client.pull({})  # all servers have it on disk
        if self._cached:
            self._cached.begin(plan.recipe)
        self._release()

    def _release(self) -> None:
        optimizer = self._own_optimizer()
        for each in self._all:
            each.release()
            optimizer.state.pop(each.parameter, None)
        self._is_whole = False

    # Steps.

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        known = self._optimizer() if self._optimizer else None
        if known is not None:
            return known is optimizer
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if held.isdisjoint(self._by_parameter):
            return False
        raise UsageError(
            f"{type(optimizer).__name__} trains parameters of {KEY}, which servers do not have yet",
            hint="pass it to rt.optimizer before the first step",
        )

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_closed or not self._is_mine(optimizer):
            return
        # In async training each gradient is a step of its own.
        is_mean = self._config.reduce.op == "mean" and self._settings.staleness == 0
        scale = 1 / self._context.layout.size(DATA_AXIS) if is_mean else 1.0
        client = self._servers()
        gradients: dict[str, RowGradients | dict[int, Tensor]] = {}
        options: dict[str, Any] = {}
        for group in optimizer.param_groups:
            of_group: dict[str, Any] | None = None
            for parameter in group["params"]:
                each = self._by_parameter.get(parameter)
                if each is None:
                    continue
                of_group = of_group or options_of(group)
                options[each.name] = of_group
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    gradients[each.name] = outgoing(each, gradient, scale, client.empty)
        client.push(OutgoingPush(dict(gradients), options, client.empty))
        if self._cached:
            self._cached.step(gradients, options)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_closed or not self._is_mine(optimizer):
            return
        copies = [each for each in self._all if not each.is_table]
        if copies:
            pulled = self._servers().pull({each.name: LENT for each in copies})
            for each in copies:
                each.renew(pulled.slices(each.name))

    def rows(self, remote: RemoteParameter, ids: Tensor) -> Tensor:
        """Return rows of a table, for a forward pass: `ids` are distinct and ascending."""
        weight = remote.parameter
        if len(ids) and (ids[0] < 0 or ids[-1] >= remote.table.rows):
            raise IndexError(f"{remote.name}: index out of range in self")
        if len(ids) * remote.row_bytes > FRAME_BYTES_MAX:
            text = f"{KEY}: a batch uses {len(ids)} rows of {remote.name}"
            raise ModelError(text, hint=f"a message has at most {FRAME_BYTES_MAX} bytes")
        if not len(ids):
            rows = torch.zeros((1, *remote.shape[1:]), dtype=remote.dtype)
        elif self._cached:
            rows = self._cached.pull(self._servers(), remote.name, ids)
        else:
            rows = _placed(ids, self._servers().pull({remote.name: ids}), remote)
        found: Tensor = RowsOf.apply(weight, rows.to(remote.device), ids)  # type: ignore[no-untyped-call, unused-ignore]
        return found

    @property
    def is_here(self) -> bool:
        """Whether the rank has the whole parameters now."""
        return self._is_whole

    # Whole parameters.

    @contextlib.contextmanager
    def whole(self, *, is_replaced: bool) -> Iterator[None]:
        """Have all parameters and their optimizer state on this rank inside the block.

        Args:
            is_replaced: Whether servers get what is there at its end; then all ranks together.
        """
        if self._is_whole:
            yield
            return
        self._take_all()
        try:
            yield
        except BaseException:
            self._release()
            raise
        if is_replaced:
            self._begin()
        else:
            self._release()

    def _take_all(self) -> None:
        optimizer = self._own_optimizer()
        pulled = self._servers().pull({each.name: STATE for each in self._all})
        for each in self._all:
            slices = pulled.slices(each.name)
            count = each.table.slices
            rows = {index: piece[0] for index, piece in slices.items()}
            each.fill(joined(rows, count))
            state: dict[str, Any] = {}
            for name, first in slices[0][1].items():
                value = first
                if isinstance(first, Tensor) and first.shape == rows[0].shape:
                    parts = {index: piece[1][name] for index, piece in slices.items()}
                    value = joined(parts, count).reshape(each.shape).to(each.device)
                state[name] = value
            if state:
                optimizer.state[each.parameter] = state
        self._is_whole = True

    def _complete(
        self, model: nn.Module, found: dict[str, Any], prefix: str, _: Mapping[str, Any]
    ) -> None:
        """Put whole tables into a state dict."""
        if self._is_whole:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            each = self._by_parameter.get(parameter)
            if each is not None and each.is_table and prefix + name in found:
                pulled = self._servers().pull({each.name: WHOLE})
                found[prefix + name] = joined(pulled.slices(each.name), each.table.slices)

    def _refuse_load(self, *_: object) -> None:
        if not self._is_whole:
            raise ModelError(
                f"{KEY}: load_state_dict of a model whose parameters are on servers",
                hint="load it before rt.optimizer, or use rt.load",
            )

    def _refuse_state(self, _: torch.optim.Optimizer) -> None:
        if not self._is_whole:
            raise ModelError(
                f"{KEY}: state_dict() of the optimizer would lack what servers have",
                hint="rt.save(model, optimizer, step=N) writes all",
            )

    def close(self) -> None:
        """Leave the servers, unless this process fails."""
        for handle in self._handles:
            handle.remove()
        client, self._client, self._is_closed = self._client, None, True
        if client is None:
            return
        if sys.exc_info()[0] is None and not hasattr(sys, "last_value"):
            client.leave()
        client.close()


def _placed(ids: Tensor, pulled: PulledRows, remote: RemoteParameter) -> Tensor:
    """Return pulled rows in the order of `ids`, in memory of this rank."""
    parts = pulled.rows(remote.name)
    if len(parts) == 1:
        return next(iter(parts.values())).clone()
    rows = torch.empty((len(ids), *remote.shape[1:]), dtype=remote.dtype)
    for server, places in places_by_server(ids, pulled.owners[remote.name]).items():
        if server in parts:
            rows[places] = parts[server]
    return rows
