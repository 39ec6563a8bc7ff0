"""Mixtures whose experts are a list, in a form that runs without values: for searches and advice.

The problem.  The forward around a list of experts picks the rows of each expert by their values, in
a loop of its own kind.  A trace has no values, and neither has the pass of one rank that counts
memory, so both end there.

The idea.  `outlined` copies a model without values and runs the copy once.  A forward that fails
and has a list of experts is *rehearsed*: it runs on random rows with random weights, with something
in place of its experts that notes what each call gets.  From then on the copy computes an outline
of the forward: its modules on as many rows as in the rehearsal, each expert on an equal share of
the rows that went to all of them, and the sum of the results.  An outline costs what the forward
costs, and its parameters have the gradients that they have there.  Its values mean nothing.

What it does not know: rows that depend on what the router has learnt, and functions of the forward
outside of its modules, such as a softmax, of which it has those of a usual router.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.experts.listed import list_of_experts
from msrun.parallel.experts.rehearsal import Depending, called_parts
from msrun.parallel.losses.batch import map_leaves, tensors_in

# Of the first dim of what a mixture gets: more rows show nothing further.
_SAMPLES = 64
_SCALE = 0.02
_MATRIX = 2


class _Shape(NamedTuple):
    """A tensor in a rehearsal."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The product of all dims but the last."""
        return math.prod(self.sizes[:-1])


class _ModuleCall(NamedTuple):
    """A call of a module of the mixture, other than its experts."""

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Rehearsed(NamedTuple):
    """What a rehearsal has shown.

    Args:
        tokens: What the mixture got.
        arguments: Of the first call of an expert.
        rows: That went to all experts.
        before: Calls of other modules that do not depend on experts, in order.
        after: Calls of those that do.
        output: What the mixture returned.
    """

    tokens: _Shape
    arguments: tuple[Any, dict[str, Any]]
    rows: int
    before: list[_ModuleCall]
    after: list[_ModuleCall]
    output: Any


class OutlinedForward:
    """The forward of a mixture in a copy without values.

    Args:
        name: Of the list of experts.
        mixture: The module whose forward calls them.
        members: The experts.

    Attributes:
        name: As given.
        experts: Their number.
        rehearsed: What a rehearsal has shown; None before it, and of no mixture.
    """

    def __init__(self, name: str, mixture: nn.Module, members: Sequence[nn.Module]) -> None:
        self.name, self.experts = name, len(members)
        self._mixture, self._members = mixture, list(members)
        self._given = mixture.forward
        self._is_tried = False
        self.rehearsed: Rehearsed | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; an outline of it, if it cannot run without values."""
        if self.rehearsed is not None:
            return _Outline(self.rehearsed, self._mixture, self._members).run(args, kwargs)
        if self._is_tried:
            return self._given(*args, **kwargs)
        self._is_tried = True
        try:
            return self._given(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any kernel may miss values
            try:
                self.rehearsed = copy.deepcopy(self).rehearse(args, kwargs)
            except Exception:  # noqa: BLE001 - what fails on random values says less
                raise error from None
        return self(*args, **kwargs)

    def rehearse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rehearsed:
        """Give the mixture values, and return what a call shows."""
        return _Rehearsing(self._given, self._mixture, self._members).rehearse(args, kwargs)


def outlined(model: nn.Module, sample: Sequence[Any]) -> nn.Module | None:
    """Return a copy of `model` without values that runs without them; None if it has no such list.

    Args:
        model: With values or without; it stays as it is.
        sample: Inputs by position, or one mapping of inputs by name.
    """
    net = without_values(model)
    if not _outline(net):
        return None
    inputs = map_leaves(_on_meta, list(sample))
    named: Mapping[str, Any] = {}
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        inputs, named = [], inputs[0]
    try:
        with torch.device("meta"), torch.no_grad():
            net(*inputs, **named)
    except Exception:  # noqa: BLE001 - a trace of the model says why it does not run
        return None
    return net if listed_experts(net) else None


def listed_experts(model: nn.Module) -> dict[str, int]:
    """Return the lists of experts that `model` has outlines of, with their numbers."""
    forwards = (module.forward for module in model.modules())
    return {
        forward.name: forward.experts
        for forward in forwards
        if isinstance(forward, OutlinedForward) and forward.rehearsed is not None
    }


def without_values(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the device `meta`."""
    held = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        held += [item for item in vars(module).values() if isinstance(item, Tensor)]
    return copy.deepcopy(model, {id(tensor): _on_meta(tensor) for tensor in held})


def _on_meta(tensor: Any) -> Any:
    """Return a tensor on the device `meta` in place of one; a parameter stays one."""
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _outline(net: nn.Module) -> bool:
    """Have every module that may be a mixture try whether it is one; return whether any may."""
    names = [
        name
        for name, module in net.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.ModuleDict)
    ]
    found: list[str] = []
    for name in sorted(names, key=lambda name: -name.count(".")):
        # Blocks with lists in them are no experts.
        if any(inner.startswith(f"{name}.") for inner in found):
            continue
        try:
            listed = list_of_experts(net, name)
        except ModelError:
            continue
        if len(listed.members) > 1 and not isinstance(listed.mixture.forward, OutlinedForward):
            members = list(listed.members.values())
            listed.mixture.forward = OutlinedForward(name, listed.mixture, members)
            found.append(name)
    return bool(found)


class _NoMixtureError(Exception):
    """The module is no mixture whose experts get rows of their own."""


class _Rehearsing:
    """Runs the forward of a mixture on random values.

    Args:
        forward: Of a copy of the mixture.
        mixture: That copy.
        members: Its experts, which stay without values.
    """

    def __init__(
        self, forward: Callable[..., Any], mixture: nn.Module, members: Sequence[nn.Module]
    ) -> None:
        self._forward, self._mixture, self._members = forward, mixture, members
        self._depending = Depending()
        self._arguments: list[Any] = []
        self._rows: list[int] = []
        self._before: list[_ModuleCall] = []
        self._after: list[_ModuleCall] = []

    def rehearse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rehearsed:
        """Return what a call shows, of whose tensors shapes alone are used.

        Raises:
            _NoMixtureError: The module is none.
        """
        leading = {len(x) for x in tensors_in((args, kwargs)) if x.dim()}
        cut = min(_SAMPLES, *leading) if len(leading) == 1 else None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.default_generator.manual_seed(0)  # and not those of devices
            experts = {part for member in self._members for part in member.modules()}
            for module in self._mixture.modules():
                if module not in experts:
                    _fill(module)
            given = map_leaves(lambda x: _drawn(x, cut), (tuple(args), dict(kwargs)))
            parts = called_parts(self._mixture, self._members)
            names = {module: name for name, module in self._mixture.named_modules()}
            calls = {x: partial(self._note, names[x], torch_compat.call_of(x)) for x in parts}
            calls |= {x: partial(self._note_expert, x.forward) for x in self._members}
            with torch_compat.calls_replaced(calls), self._depending.active():
                output = self._forward(*given[0], **given[1])
        rows = [x for x in tensors_in(given) if x.is_floating_point() and x.dim() >= _MATRIX]
        if not rows or not self._rows:
            raise _NoMixtureError
        tokens = _shape(rows[0])
        if sum(self._rows) >= len(self._members) * tokens.rows:
            raise _NoMixtureError
        return Rehearsed(
            tokens=tokens,
            arguments=self._arguments[0],
            rows=sum(self._rows),
            before=self._before,
            after=self._after,
            output=map_leaves(_shape, output),
        )

    def _note(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        noted = _ModuleCall(name, map_leaves(_shape, args), map_leaves(_shape, kwargs))
        is_after = self._depending.has((args, kwargs))
        (self._after if is_after else self._before).append(noted)
        return call(*args, **kwargs)

    def _note_expert(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depending.has((args, kwargs)):
            raise _NoMixtureError  # blocks, of which each continues from the one before
        first = next(iter(tensors_in((args, kwargs))))
        self._rows.append(_shape(first).rows)
        self._arguments.append((map_leaves(_shape, args), map_leaves(_shape, kwargs)))
        with torch.device("meta"):
            output = forward(*map_leaves(_on_meta, args), **map_leaves(_on_meta, kwargs))
        found = _drawn(output, None)
        self._depending.add(found)
        return found


class _Outline:
    """One call of a mixture, as it was rehearsed, on other rows.

    Args:
        rehearsed: What a rehearsal has shown.
        mixture: The mixture.
        members: Its experts.
    """

    def __init__(
        self, rehearsed: Rehearsed, mixture: nn.Module, members: Sequence[nn.Module]
    ) -> None:
        self._rehearsed, self._mixture, self._members = rehearsed, mixture, members

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return something like what the forward returns."""
        tensors = tensors_in((tuple(args), dict(kwargs)))
        x = next(x for x in tensors if x.is_floating_point() and x.dim() >= _MATRIX)
        self._tokens = x.shape
        rows = x.reshape(-1, x.shape[-1])
        given = [self._called(call, rows) for call in self._rehearsed.before]
        weights = self._weights(rows, given)
        found = self._added(self._mixed(rows, weights), given)
        found = self._added(found, [self._called(call, found) for call in self._rehearsed.after])

        def returned(shape: _Shape) -> Tensor:
            # Most forwards end with what they got, added to the results.
            y = self._made(shape, found)
            return x + y if y.shape == x.shape and y.is_floating_point() else y

        return map_leaves(returned, self._rehearsed.output, _Shape)

    def _called(self, call: _ModuleCall, rows: Tensor) -> Tensor:
        """Return the first tensor that a module returns."""
        module = self._mixture.get_submodule(call.module)
        made = partial(self._made, rows=rows)
        output = module(
            *map_leaves(made, call.args, _Shape), **map_leaves(made, call.kwargs, _Shape)
        )
        return tensors_in(output)[0]

    def _weights(self, rows: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Return a weight of each row, which depends on the router and on own parameters."""
        scores = [x for x in given if x.is_floating_point() and _is_score(x, rows)]
        weights = rows[:, :1]
        if scores:
            weights = scores[0].reshape(len(rows), -1).softmax(-1)[:, :1].to(rows.dtype)
        for param in self._mixture.parameters(recurse=False):
            weights = weights + param.mean().to(rows.dtype)
        return weights

    def _mixed(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what experts make of equal shares of the rows."""
        count = len(rows) * self._rehearsed.rows // self._rehearsed.tokens.rows
        share = max(1, count // len(self._members))
        results, places = [], []
        for number, expert in enumerate(self._members):
            place = (torch.arange(share, device=rows.device) + number * share) % len(rows)
            own = rows[place]

            def made(shape: _Shape, own: Tensor = own) -> Tensor:
                return _like((*own.shape[:1], *shape.sizes[-1:]), shape.dtype, own)

            args, kwargs = self._rehearsed.arguments
            y = expert(*map_leaves(made, args, _Shape), **map_leaves(made, kwargs, _Shape))
            results.append(y * weights[place].to(y.dtype))
            places.append(place)
        y = torch.cat(results).to(rows.dtype)
        if y.shape[-1] != rows.shape[-1]:
            return rows + y.mean()
        return torch.zeros_like(rows).index_add(0, torch.cat(places), y)

    def _added(self, found: Tensor, given: Sequence[Tensor]) -> Tensor:
        """Return the rows with those that other modules returned."""
        for x in given:
            if x.is_floating_point():
                is_alike = x.numel() == found.numel() and x.shape[-1] == found.shape[-1]
                found = found + (x.reshape(found.shape) if is_alike else x.mean()).to(found.dtype)
        return found

    def _made(self, shape: _Shape, rows: Tensor) -> Tensor:
        """Return a tensor that is to these rows as `shape` was to those of the rehearsal."""
        tokens, sizes = self._rehearsed.tokens, shape.sizes
        if sizes == tokens.sizes:
            sizes = tuple(self._tokens)
        elif sizes and sizes[0] == tokens.rows:
            sizes = (len(rows), *sizes[1:])
        elif sizes and sizes[0] == tokens.sizes[0]:
            sizes = (self._tokens[0], *sizes[1:])
        return _like(sizes, shape.dtype, rows)


def _is_score(x: Tensor, rows: Tensor) -> bool:
    """Return whether `x` has numbers for each row, and is none itself."""
    return x.dim() > 1 and math.prod(x.shape[:-1]) == len(rows) and x.shape[-1] != rows.shape[-1]


def _like(sizes: Sequence[int], dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Return a tensor of these sizes that depends on `rows`, if it can."""
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype, device=rows.device)
    if math.prod(sizes) == rows.numel() and sizes[-1] == rows.shape[-1]:
        return rows.reshape(sizes).to(dtype)
    return rows.mean().to(dtype).expand(sizes)


def _shape(tensor: Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.dtype)


def _fill(module: nn.Module) -> None:
    """Give the parameters of a module random values; buffers and other tensors are 0."""
    for name, param in list(module.named_parameters(recurse=False)):
        values = torch.randn(param.shape).mul_(_SCALE).to(param.dtype)
        setattr(module, name, nn.Parameter(values, requires_grad=False))
    own = {name: x for name, x in vars(module).items() if isinstance(x, Tensor)}
    for name, tensor in [*module.named_buffers(recurse=False), *own.items()]:
        setattr(module, name, torch.zeros(tensor.shape, dtype=tensor.dtype))


def _drawn(tensor: Tensor, cut: int | None) -> Tensor:
    """Return random values in the shape of `tensor`, of which the first dim may be cut."""
    sizes = list(tensor.shape)
    if cut is not None and sizes:
        sizes[0] = cut
    if not tensor.dtype.is_floating_point:
        return torch.zeros(sizes, dtype=tensor.dtype)
    return torch.randn(sizes).to(tensor.dtype)
