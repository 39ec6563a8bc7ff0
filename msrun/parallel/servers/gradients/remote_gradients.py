"""The gradients of all parameters on servers, on one rank: their norms, and what is pushed.

A hook before autograd accumulates gives it the plain gradient back, and one afterwards wraps it, so
parts of a batch add up as ever.  At the end of each backward pass every parameter has a gradient,
if only one without values: a rank whose samples used no row of a table takes part in its norm.

The first norm that a script asks for measures all parameters at once: their gradients travel to the
servers, which answer with norms of the sums of all ranks.  If nothing but factors has changed by
the optimizer's step, the push says only these.

After the optimizer's step gradients stay where they are, as torch leaves them: `zero_grad` drops
them, or makes zeros of them with which the next step still decays weights and moves momentum.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.servers.client import ServersClient
from msrun.parallel.servers.gradients.server_gradient import GradientPart, ServerGradient
from msrun.parallel.servers.outgoing import Commit, OutgoingPush, Pushed, outgoing
from msrun.parallel.servers.rows import RowGradients, power_of

_Gradients = dict[str, RowGradients | dict[int, Tensor]]


class _Remote(Pushed, Protocol):
    """A parameter on servers; `remote` has them."""

    parameter: Parameter


class Terms(NamedTuple):
    """How the gradients of ranks are added.

    Args:
        scale: By what each rank multiplies its own.
        is_pushed: Whether those of this rank count; others have the same.
        is_alone: Whether no other rank has a part of them.
        is_sync: Whether servers add those of all ranks before a step.
    """

    scale: float
    is_pushed: bool
    is_alone: bool
    is_sync: bool


class _Measured(NamedTuple):
    """Norms that servers know.

    Args:
        order: Of the norms.
        values: Parameter -> the gradient that was measured, without its factor.
        factors: Parameter -> that factor.
        norms: Parameter -> the norm of the sum.
        gradients: As they were sent.
    """

    order: float
    values: dict[str, Tensor | None]
    factors: dict[str, float]
    norms: dict[str, float]
    gradients: _Gradients

    def holds(self, parts: Mapping[str, GradientPart]) -> bool:
        """Return whether these gradients have changed by factors alone."""
        return all(
            part.values is self.values[name] and self.factors[name] for name, part in parts.items()
        )


class RemoteGradients:
    """See the module.

    Args:
        parameters: The parameters on servers.
        terms: How ranks' gradients are added.
        client: Returns the connection to servers.
    """

    def __init__(
        self,
        parameters: Sequence[_Remote],
        terms: Terms,
        client: Callable[[], ServersClient],
    ) -> None:
        self._all = parameters
        self._terms = terms
        self._client = client
        self._measured: _Measured | None = None
        # Parameter -> its gradient, during the optimizer's step.
        self._stepped: dict[str, Tensor | None] = {}
        # Number of the backward pass at whose end parameters get their gradients.
        self._running = -1

    def watch(self, model: nn.Module) -> None:
        """Have gradients of backward passes through `model` be those of servers."""
        own = weakref.ref(self)
        for each in self._all:
            before, after = _hooks(own, each.name)
            each.parameter.register_hook(before(weakref.ref(each.parameter)))
            each.parameter.register_post_accumulate_grad_hook(after)

        def at_output(_module: nn.Module, _inputs: object, output: object) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(at_gradient)

        def at_gradient(_gradient: Tensor) -> None:
            if (gradients := own()) is not None:
                gradients.begin()

        model.register_forward_hook(at_output)

    def begin(self) -> None:
        """Note that a backward pass is running; at its end all parameters have gradients."""
        number = torch_compat.backward_number()
        if number != self._running:  # one that raised does not end
            self._running = number
            torch_compat.after_backward(self.complete)

    def complete(self) -> None:
        """Give every parameter a gradient, also where this rank has no part of it."""
        self._running = -1
        self._measured = None
        for each in self._all:
            gradient = each.parameter.grad
            if isinstance(gradient, ServerGradient):
                gradient.part.norms = self  # it may be of the step before
            elif gradient is None and each.parameter.requires_grad:
                self.wrap(each.name, each.parameter)

    def wrap(self, name: str, parameter: Parameter) -> None:
        """Have the gradient of a parameter be that of servers."""
        part = GradientPart(self, name, parameter.grad)
        parameter.grad = ServerGradient(part, parameter)

    def cleared(self, _part: GradientPart) -> None:
        """Forget norms."""
        self._measured = None

    # Norms.

    def norm(self, part: GradientPart, order: float) -> float:
        """Return the norm of the sum of the parts of all ranks.

        Raises:
            ModelError: Servers add no gradients, or the order is none of theirs.
            RanksDisagreeError: Another rank takes no norm in this step.
        """
        if not order > 0:
            text = f"{ROOT}.servers: norms of order {order:g} are not taken (choose one above 0)"
            raise ModelError(text)
        if self._terms.is_alone:
            return self._norm_here(part, order)
        if not self._terms.is_sync:
            raise ModelError(
                f"{ROOT}.servers: {part.name} has no norm of its gradient with a staleness, since "
                "servers step with each rank's gradient alone",
                hint="choose sync: true to clip by a norm",
            )
        known = self._measured
        parts = self._parts()
        if known is None or known.order != order or not known.holds(parts):
            known = self._measured = self._measure(order, parts)
        if known.values[part.name] is not part.values:
            raise ModelError(
                f"{ROOT}.servers: the gradient of {part.name} was replaced since the backward pass",
                hint="take the norm of .grad of the parameter",
            )
        before = known.factors[part.name] or 1.0
        return known.norms[part.name] * abs(part.factor / before)

    def _norm_here(self, part: GradientPart, order: float) -> float:
        if (values := part.values) is None:
            return 0.0
        values = values.coalesce().values() if values.is_sparse else values
        return _rooted(power_of(values, order), order) * abs(self._terms.scale * part.factor)

    def _parts(self) -> dict[str, GradientPart]:
        return {each.name: _part(each) for each in self._all}

    def _measure(self, order: float, parts: Mapping[str, GradientPart]) -> _Measured:
        client, gradients = self._client(), self._outgoing(parts)
        found = client.measure(OutgoingPush(gradients, {}, client.empty, order=order))
        norms = {
            each.name: _rooted([part[each.name] for part in found if each.name in part], order)
            for each in self._all
        }
        values = {name: part.values for name, part in parts.items()}
        factors = {name: part.factor for name, part in parts.items()}
        return _Measured(order, values, factors, norms, gradients)

    def _outgoing(self, parts: Mapping[str, GradientPart]) -> _Gradients:
        if not self._terms.is_pushed:
            return {}
        scale, empty = self._terms.scale, self._client().empty
        found: _Gradients = {}
        for each in self._all:
            part = parts[each.name]
            if part.values is not None:
                found[each.name] = outgoing(each, part.values, scale * part.factor, empty)
        return found

    # Steps.

    def take(self, options: Mapping[str, Mapping[str, Any]]) -> tuple[OutgoingPush | Commit, Any]:
        """Return what to push, and the gradients of this rank; parameters have none until `put`."""
        parts = self._parts()
        self._stepped = {each.name: each.parameter.grad for each in self._all}
        for each in self._all:
            each.parameter.grad = None
        known, self._measured = self._measured, None
        if known is not None and known.holds(parts):
            factors = {n: part.factor / known.factors[n] for n, part in parts.items()}
            changed = {n: _times(each, factors[n]) for n, each in known.gradients.items()}
            return Commit(options, {n: f for n, f in factors.items() if f != 1.0}), changed
        gradients = self._outgoing(parts)
        return OutgoingPush(gradients, options, self._client().empty), gradients

    def put(self) -> None:
        """Give parameters back the gradients that `take` took, after the optimizer's step."""
        stepped, self._stepped = self._stepped, {}
        spent = _SpentNorms()
        for each in self._all:
            gradient = each.parameter.grad = stepped.get(each.name)
            if isinstance(gradient, ServerGradient) and not self._terms.is_alone:
                gradient.part.norms = spent


class _SpentNorms:
    """Refuses norms after the optimizer's step: the ranks need not take that one together.

    Zeros are those of all ranks.
    """

    def __init__(self) -> None:
        self._zeros: set[str] = set()

    def norm(self, part: GradientPart, _order: float) -> float:
        """Return 0 of a gradient that was made zero.

        Raises:
            ModelError: It was not.
        """
        if part.name in self._zeros:
            return 0.0
        raise ModelError(
            f"{ROOT}.servers: the norm of the gradient of {part.name} is asked for after the "
            "optimizer's step, when servers do not have that gradient any more",
            hint="take norms between the backward pass and the optimizer's step",
        )

    def cleared(self, part: GradientPart) -> None:
        """Note a gradient that is zero from now on."""
        self._zeros.add(part.name)


def _hooks(own: weakref.ref[RemoteGradients], name: str) -> tuple[Any, Any]:
    """Return what autograd calls before and after it accumulates; see `parameter_hooks`."""

    def before(reference: weakref.ref[Parameter]) -> Callable[[Tensor], None]:
        def unwrap(_gradient: Tensor) -> None:
            gradients, parameter = own(), reference()
            if gradients is None or parameter is None:
                return
            gradients.begin()
            if isinstance(parameter.grad, ServerGradient):
                parameter.grad = parameter.grad.part.whole()

        return unwrap

    def after(parameter: Parameter) -> None:
        if (gradients := own()) is not None:
            gradients.wrap(name, parameter)

    return before, after


def _part(each: _Remote) -> GradientPart:
    gradient = each.parameter.grad
    if isinstance(gradient, ServerGradient):
        return gradient.part
    return GradientPart(_NO_NORMS, each.name, gradient)  # as the script has set it


class _NoNorms:
    def norm(self, part: GradientPart, _order: float) -> float:
        raise ModelError(f"{ROOT}.servers: nobody knows the norm of {part.name}")

    def cleared(self, _part: GradientPart) -> None:
        """There is nothing to forget."""


_NO_NORMS = _NoNorms()


def _rooted(powers: float | Sequence[float], order: float) -> float:
    powers = [powers] if isinstance(powers, float) else powers
    if math.isinf(order):
        return max(powers, default=0.0)
    return (
        float(math.fsum(powers) ** (1.0 / order))
        if all(map(math.isfinite, powers))
        else (math.nan if any(map(math.isnan, powers)) else math.inf)
    )


def _times(gradient: RowGradients | dict[int, Tensor], factor: float) -> Any:
    """Return the gradients of rows that a cache steps with; it has none of copies."""
    if factor == 1.0 or isinstance(gradient, dict):
        return gradient
    return RowGradients(
        ids=gradient.ids, values=gradient.values * factor, is_sparse=gradient.is_sparse
    )
