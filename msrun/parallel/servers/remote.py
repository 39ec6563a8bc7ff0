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
import itertools
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
from msrun.errors import CheckpointError, ConfigError, ModelError, UsageError
from msrun.parallel.config import DATA_AXIS, ParallelConfig
from msrun.parallel.rank_context import RankContext
from msrun.parallel.servers.caching.cached_tables import CachedTables
from msrun.parallel.servers.client import PulledRows, ServersClient
from msrun.parallel.servers.contents import cut_state, joined
from msrun.parallel.servers.first_rows.meta_tables import without_memory
from msrun.parallel.servers.first_rows.sources import TableSource
from msrun.parallel.servers.first_rows.stored import completed
from msrun.parallel.servers.gradients.remote_gradients import RemoteGradients, Terms
from msrun.parallel.servers.lookups import RowsOf, look_up, look_up_bags
from msrun.parallel.servers.parameters.chosen import KEY
from msrun.parallel.servers.parameters.marks import names_on_servers
from msrun.parallel.servers.parameters.remote_parameter import RemoteParameter, remote_parameters
from msrun.parallel.servers.recipe import options_of, recipe_of, try_recipe
from msrun.parallel.servers.routing import places_by_server
from msrun.parallel.servers.wire import SessionPlan, session_name
from msrun.transport.data_sockets import FRAME_BYTES_MAX

# What to ask for of whole parameters: see `server_session`.
WHOLE = "whole"
STATE = "state"
LENT = "lent"
# Counts the sessions of this process, of whatever model.
_sessions = itertools.count(1)
# Bytes a second that a slow network moves: what takes longer is not asked for again.
_SLOW = 200e6


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
        self._all = remote_parameters(model, names_on_servers(config, model))
        self._by_parameter = {each.parameter: each for each in self._all}
        self._cached = self._caches()
        self._gradients = RemoteGradients(self._all, self._terms(), self._servers)
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._client: ServersClient | None = None
        self._is_whole = True
        # Tables that this rank has not, while it has all others -> what servers make them of.
        self._absent: dict[str, TableSource | None]
        self._absent = {each.name: each.source for each in self._all if each.source}
        self._is_closed = False
        if context.world_size > 1:
            for each in self._here():
                dist.broadcast(each.parameter.data, src=0)
        for module in model.modules():
            remote = self._by_parameter.get(getattr(module, "weight", None))  # type: ignore[arg-type]
            if remote is not None and remote.is_table:
                replaced = look_up_bags if isinstance(module, nn.EmbeddingBag) else look_up
                module.forward = partial(replaced, (self, remote, weakref.ref(module)))
        self._gradients.watch(model)
        model.register_state_dict_post_hook(partial(self._complete))
        model.register_load_state_dict_pre_hook(partial(self._refuse_load))
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def _here(self) -> list[RemoteParameter]:
        """Return the parameters whose values a rank has."""
        return [each for each in self._all if each.name not in self._absent]

    def _terms(self) -> Terms:
        """Return how gradients are added.  Ranks of a plan's axes have the same, and one counts."""
        context, is_sync = self._context, not self._settings.staleness
        # In async training each gradient is a step of its own.
        is_mean = self._config.reduce.op == "mean" and is_sync
        others = {a: n for a, n in context.coordinate.items() if a != DATA_AXIS}
        return Terms(
            scale=1 / context.layout.size(DATA_AXIS) if is_mean else 1.0,
            is_pushed=not any(others.values()),
            is_alone=context.world_size == 1,
            is_sync=is_sync,
        )

    def complete_gradients(self) -> None:
        """Give every parameter a gradient, after the backward passes of a step."""
        self._gradients.complete()

    @property
    def parameters(self) -> Collection[Parameter]:
        """Those that live on servers."""
        return self._by_parameter.keys()

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
        name = session_name(self._generation, next(_sessions), os.urandom(8).hex())
        settings = self._settings
        total = sum(each.parameter.nbytes for each in self._all)
        plan = SessionPlan(
            session=self._context.broadcast(name.encode()).decode(),
            tables=[each.table for each in self._all],
            recipe=recipe_of(optimizer, self._names),
            rules=Rules(
                staleness=settings.staleness,
                every=settings.snapshot.every,
                retry=1.0 + total / _SLOW,
                replicas=settings.replicas,
            ),
            workers=ranks,
            directory=settings.snapshot.dir or "",
            suppliers={each.name: index % ranks for index, each in enumerate(self._here())},
            sources={
                each.name: completed(source, optimizer.state.get(each.parameter, {}))
                for each in self._all
                if (source := self._absent.get(each.name))
            },
        )
        values = {
            each.name: (each.parameter.detach().cpu(), optimizer.state.get(each.parameter, {}))
            for each in self._here()
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
        self._is_whole, self._absent = False, {}

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

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Push the gradients; return other arguments of the step where it has a closure."""
        if self._is_closed or not self._is_mine(optimizer):
            return None
        own, closure = args[:1], kwargs.get("closure", (*args[1:], None)[0])
        if closure is None:
            self._push(optimizer)
            return None
        with torch.enable_grad():
            loss = closure()  # servers need its gradients before the step
        self._push(optimizer)
        return own, {"closure": lambda: loss}

    def _push(self, optimizer: torch.optim.Optimizer) -> None:
        options: dict[str, Any] = {}
        for group in optimizer.param_groups:
            held = [self._by_parameter.get(parameter) for parameter in group["params"]]
            of_group = options_of(group) if any(held) else None
            options |= {each.name: of_group for each in held if each}
        if missing := self._names.values() - options.keys():
            text = f"no group of {type(optimizer).__name__} holds {min(missing)} any more"
            raise ModelError(f"{KEY}: {text}", hint="freeze nothing that servers have")
        push, gradients = self._gradients.take(options)
        self._servers().push(push)
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
        self._gradients.put()

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

    def has(self, remote: RemoteParameter) -> bool:
        """Return whether the rank has the whole of a table now.

        Raises:
            ModelError: Nobody has it.
        """
        if self._is_whole and remote.name in self._absent:
            self._check_made()
        return self._is_whole

    def _check_made(self) -> None:
        if self._is_whole and self._absent and self._optimizer is None:
            raise ModelError(
                f"{KEY}: {min(self._absent)} has no values on the device meta",
                hint="rt.optimizer has servers make it",
            )

    # Whole parameters.

    @contextlib.contextmanager
    def whole(self, *, is_replaced: bool, is_streamed: bool = False) -> Iterator[None]:
        """Have all parameters and their optimizer state on this rank inside the block.

        Args:
            is_replaced: Whether servers get what is there at its end; then all ranks together.
            is_streamed: Whether tables that no rank has stay away: see `streamed`.
        """
        self._check_made()
        if self._is_whole:
            yield
            return
        self._take_all(is_streamed=is_streamed)
        try:
            yield
        except BaseException:
            self._release()
            raise
        # Where a checkpoint had none of those that stayed away, it had another model.
        if is_replaced and all(self._absent.values()):
            self._begin()
        else:
            self._release()

    def _take_all(self, *, is_streamed: bool) -> None:
        optimizer = self._own_optimizer()
        away = [each for each in self._all if each.source and is_streamed]
        self._absent = {each.name: None for each in away}
        for each in away:
            optimizer.state[each.parameter] = self._forms(each)
        pulled = self._servers().pull({each.name: STATE for each in self._here()})
        for each in self._here():
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

    def _forms(self, each: RemoteParameter) -> dict[str, Any]:
        """Return the optimizer's state of a table, with tensors without memory for that of rows."""
        first = {"ids": torch.tensor([0]), "state": ""}
        [(of_rows, of_all)] = self._servers().pull({each.name: first}).rows(each.name).values()
        forms: dict[str, Any] = {
            key: without_memory(each.shape, rows.dtype, each.device)
            for key, rows in of_rows.items()
        }
        return {**forms, **of_all}

    # Tables that no rank has, in checkpoints.

    @property
    def streamed(self) -> list[RemoteParameter]:
        """Tables that stay on servers inside of `whole` where it is streamed."""
        return [each for each in self._all if each.name in self._absent]

    def fetch(self, each: RemoteParameter, key: str, begin: int, end: int) -> Tensor:
        """Return rows of a table, or with a key the optimizer's state of them."""
        ids = torch.arange(begin, end)
        ask: Any = {"ids": ids, "state": key} if key else ids
        return _placed(ids, self._servers().pull({each.name: ask}), each)

    def refuse_rows_alone(self, each: RemoteParameter) -> None:
        """Refuse to load a table without the optimizer's state of it, where servers have some.

        Raises:
            CheckpointError: They have.
        """
        if self._own_optimizer().state.get(each.parameter):
            raise CheckpointError(
                f"{each.name} is loaded without its optimizer's state, and no rank has memory to "
                "keep that",
                hint="give rt.load the optimizer, too",
            )

    def make_of(self, each: RemoteParameter, source: TableSource) -> None:
        """Have servers make a table of this, at the end of `whole`."""
        self._absent[each.name] = source

    def _complete(
        self, model: nn.Module, found: dict[str, Any], prefix: str, _: Mapping[str, Any]
    ) -> None:
        """Put whole tables into a state dict."""
        self._check_made()
        if self._is_whole:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            each = self._by_parameter.get(parameter)
            if each is not None and each.is_table and prefix + name in found:
                pulled = self._servers().pull({each.name: WHOLE})
                found[prefix + name] = joined(pulled.slices(each.name), each.table.slices)

    def _refuse_load(self, *_: object) -> None:
        self._check_made()
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

    def __reduce_ex__(self, _: object) -> Any:
        """Refuse a copy: it would have no rows of its own, and change those that are trained."""
        raise ModelError(
            f"{KEY}: a model whose parameters are on servers cannot be copied or pickled",
            hint="rt.state_dict(model) has all weights, for a copy of the unsharded model",
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
    first = next(iter(parts.values()))
    if len(parts) == 1:
        return first.clone()
    rows = torch.empty((len(ids), *remote.shape[1:]), dtype=first.dtype)
    for server, places in places_by_server(ids, pulled.owners[remote.name]).items():
        if server in parts:
            rows[places] = parts[server]
    return rows
