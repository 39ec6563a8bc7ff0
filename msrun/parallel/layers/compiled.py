"""`compile`: modules whose forward `torch.compile` compiles, each for itself.

Only `forward` is compiled, so that names, hooks and parameters stay.  Around it is what the
compiler could not follow, such as hooks that gather parameters.  A module that also recomputes is
compiled with its recomputation, so that the second run computes what gradients need alone; if the
compiler does not follow that, the compiled forward runs again.  In the first step, which is watched
for what mixes samples, it runs as it was.  With rules of a plan inside, or an input that ranks
share, it is compiled with the guard (`tensor.compiled`).  On parts of sequences it runs apart from
what follows functions of the model (`context.apart`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.layers import recompute
from msrun.parallel.layout import context_rule
from msrun.parallel.local import is_image, is_sharded
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.match import matching
from msrun.parallel.notation.mesh_layout import MeshLayout
from msrun.parallel.settings.steps import Compile
from msrun.parallel.tensor.plan import ModulePlan

if TYPE_CHECKING:
    from msrun.parallel.tensor.compiled.forward import FollowedForward
    from msrun.parallel.tensor.guard import Guard

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def find(
    config: ParallelConfig, layout: MeshLayout, model: nn.Module, plans: Mapping[str, ModulePlan]
) -> list[str]:
    """Return the outermost modules to compile.

    Args:
        config: The configuration.
        layout: The mesh.
        model: The model.
        plans: Of modules with a rule of `plan`.

    Raises:
        ModelError: A pattern matches no module, or one that the compiler could not follow.
    """
    if not config.compile:
        return []
    others = (n for name, n in layout.axes.items() if name not in (DATA_AXIS, PIPELINE_AXIS))
    is_divided = math.prod(others) > 1
    routed = [name for name, plan in plans.items() if plan.is_routed] if layout.ep > 1 else []
    names = _outermost(config.compile, model)
    has_parts = bool(layout.images) or context_rule(config) is not None
    divided = plans if is_divided else {name: plans[name] for name in routed}
    _check_rules(names, divided, has_parts=has_parts)
    _check_experts(names, routed)
    _check_recomputed(config, model, names)
    if layout.size(DATA_AXIS) > 1 and config.batch_norm == "sync":
        _check_norms(names, dict(model.named_modules()))
    return names


def _outermost(settings: Compile, model: nn.Module) -> list[str]:
    modules = dict(model.named_modules())
    chosen = sorted(matching(settings.modules, list(modules), "compile.modules"))
    outermost = [
        name
        for name in chosen
        if not any(name != other and _is_inside(name, other) for other in chosen)
    ]
    for name in outermost:
        if not name:
            raise ModelError(
                f"{ROOT}.compile.modules: matches the whole model, around which a step has hooks",
                hint="name its parts, such as 'layers.*'",
            )
        if type(modules[name]).forward is nn.Module.forward:
            kind = type(modules[name]).__name__
            raise ModelError(
                f"{ROOT}.compile.modules: {name} is a {kind}, which has no forward",
                hint="name its members",
            )
    return outermost


def _check_rules(names: Sequence[str], plans: Mapping[str, ModulePlan], *, has_parts: bool) -> None:
    """Refuse modules with a rule inside that the compiler does not follow."""
    for name in names:
        for planned, plan in plans.items():
            what = "a rule beside parts of samples" if has_parts else _unfollowed(plan)
            if what and _is_inside(planned, name):
                raise ModelError(
                    f"{ROOT}.compile.modules: {name} contains {planned}, which has {what}, and the "
                    "compiler does not follow that",
                    hint="name modules beside it",
                )


def _unfollowed(plan: ModulePlan) -> str:
    """Return what of a rule the compiler does not follow; empty if nothing."""
    kinds = {
        "experts that ranks share": plan.is_routed,
        "rows of a table": bool(plan.axis),
        "a product on a grid of axes": plan.product is not None,
        "pieces that it computes in turns": plan.copies > 1,
        "plain shards inside": plan.is_local,
        "a weight that it computes": bool(plan.computed),
        "a rule for several inputs or outputs": bool(plan.each_input or plan.each_out),
    }
    return next((what for what, is_so in kinds.items() if is_so), "")


def _check_experts(names: Sequence[str], routed: Sequence[str]) -> None:
    """Refuse experts of a list, which one rank has and calls with other rows in each step."""
    for name in names:
        for other in routed:
            if _is_inside(name, other):
                raise ModelError(
                    f"{ROOT}.compile.modules: {name} is of the experts {other} that ranks share",
                    hint="name modules beside the experts",
                )


def _check_recomputed(config: ParallelConfig, model: nn.Module, names: Sequence[str]) -> None:
    """Refuse recomputation inside of compiled modules, and saved results of their operators."""
    if not config.recompute:
        return
    recomputed = recompute.find(config.recompute, [name for name, _ in model.named_modules()])
    for name in names:
        for other in recomputed:
            if name != other and _is_inside(other, name):
                raise ModelError(
                    f"{ROOT}.compile.modules: {name} contains {other}, which recomputes",
                    hint="compile what recomputes, or parts of it: the compiler does not follow "
                    "recomputation",
                )
            if _is_inside(name, other) and config.recompute.save:
                raise ModelError(
                    f"{ROOT}.compile.modules: {name} recomputes without what recompute.save names, "
                    "which the compiler hides",
                    hint="leave out recompute.save, or compile other modules",
                )


def _check_norms(names: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    """Refuse batch norms, whose statistics ranks exchange, in compiled modules."""
    for name in names:
        for inner, module in modules[name].named_modules():
            if isinstance(module, _BATCH_NORMS):
                raise ModelError(
                    f"{ROOT}.compile.modules: {name}{inner and f'.{inner}'} exchanges its "
                    "statistics with other ranks, which the compiler does not follow",
                    hint="leave it out, or choose batch_norm: local",
                )


class Switch:
    """Whether the modules of one model run compiled."""

    def __init__(self) -> None:
        self.is_off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Run modules as they were, in a whole step: a recomputation repeats its first run."""
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False


class Apart(Protocol):
    """A module of a model on parts of sequences; see `context.apart`."""

    def compiled(self, forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """Return `forward`, compiled."""

    def is_followed(self) -> bool:
        """Return whether functions are looked at now, so that none may be compiled."""

    def refusing(self) -> AbstractContextManager[None]:
        """Return a context for the forward as it was."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context for the compiled forward."""


def apply(
    model: nn.Module,
    names: Sequence[str],
    mode: str,
    switch: Switch,
    *,
    apart: Callable[[str, nn.Module], Apart] | None,
    guard: Guard | None,
) -> dict[str, CompiledForward]:
    """Compile the modules called `names`, in place; return their forwards by name.

    Args:
        model: The model.
        names: Of its modules.
        mode: As of `torch.compile`.
        switch: Whether compiled forwards are used.
        apart: Has a module run apart from what follows functions of the model, if something does.
        guard: Of the operator plan; None without.
    """
    compiler = None
    if guard and names and not apart:
        from msrun.parallel.tensor.compiled.forward import Compiler, FollowedForward

        compiler = Compiler(guard.followed, mode)
    forwards: dict[str, CompiledForward] = {}
    for name in names:
        module = model.get_submodule(name)
        from_rest = apart(name, module) if apart else None
        forward = CompiledForward(name, module.forward, mode, switch, from_rest)
        if compiler:
            forward.followed = FollowedForward(name, module, compiler)
        module.forward = forwards[name] = forward
    return forwards


class CompiledForward:
    """The forward of a module, compiled.

    Args:
        name: Of the module.
        forward: As it was.
        mode: As of `torch.compile`.
        switch: Whether it is used.
        apart: How it runs apart; None if nothing follows functions of the model.

    Attributes:
        followed: Runs it compiled where it gets or has divided tensors; None without a plan.
        is_followed_again: Whether the compiler may try to follow the recomputation too.
    """

    followed: FollowedForward | None = None
    is_followed_again = False

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        mode: str,
        switch: Switch,
        apart: Apart | None,
    ) -> None:
        self.__wrapped__ = forward  # `inspect.signature` follows it
        self._name, self._mode, self._switch, self._apart = name, mode, switch, apart
        self._run = self._compiled()
        self._run_again: Callable[..., Any] | None = None

    def _compiled(self) -> Callable[..., Any]:
        if self._apart:
            return self._apart.compiled(self.__wrapped__, self._mode)
        return torch.compile(self.__wrapped__, mode=self._mode)

    def __getstate__(self) -> dict[str, Any]:
        made = ("_run", "_run_again")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._run, self._run_again = self._compiled(), None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward returns.

        Raises:
            ModelError: It gets images that ranks divide.
        """
        tensors = tensors_in([*args, *kwargs.values()])
        if any(map(is_image, tensors)):
            raise ModelError(
                f"{ROOT}.compile.modules: {self._name} gets images of which ranks have parts, and "
                "the compiler does not follow these",
                hint="name modules behind the last one that has an image",
            )
        # The compiler would break its graph at the first function of a divided tensor.
        is_off = self._switch.is_off or bool(self._apart and self._apart.is_followed())
        is_divided = any(map(is_sharded, tensors))
        if self.followed and not is_off and (is_divided or self.followed.has_rules):
            with torch_compat.compiled_again():
                return self.followed(*args, **kwargs)
        if is_off or is_divided:
            with self._apart.refusing() if self._apart else contextlib.nullcontext():
                return self.__wrapped__(*args, **kwargs)
        # The loss is watched in every step, but not what computes its inputs.
        running = self._apart.running() if self._apart else contextlib.nullcontext()
        with torch_compat.compiled_again(), running:
            return self._run(*args, **kwargs)

    def recomputing(self, otherwise: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward returns, from a graph whose gradient computes it again.

        Args:
            otherwise: Recomputes without the compiler, where it does not follow that.
            args: Of the forward.
            kwargs: Of the forward.
        """
        is_plain = not any(is_image(x) or is_sharded(x) for x in tensors_in((args, kwargs)))
        if not self.is_followed_again or self._switch.is_off or not is_plain:
            return otherwise()
        if self._run_again is None:
            again = recompute.again(self.__wrapped__)
            self._run_again = torch.compile(again, mode=self._mode, fullgraph=True)
        try:
            with torch_compat.compiled_again():
                return self._run_again(*args, **kwargs)
        except Exception as error:
            # Nothing has run yet.  A count of calls is not followed, for one, since the second run
            # would count again.
            if not torch_compat.is_of_compiler(error):
                raise
        self.is_followed_again = False
        return otherwise()


def _is_inside(name: str, other: str) -> bool:
    """Return whether the module `name` is `other` or inside of it."""
    return not other or f"{name}.".startswith(f"{other}.")
