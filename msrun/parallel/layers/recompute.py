"""Recomputation: modules that save only their inputs and run forward again in the backward pass.

The work is done by `torch.utils.checkpoint` in its non-reentrant form.  It saves the inputs and the
state of the random generators, and runs the module again when the backward pass first needs one of
its activations.  This module adds what is missing for unmodified modules in the runtime:

- Names.  Only `forward` of a module is replaced, so names, hooks and parameters stay, unlike with a
  wrapper module.  If a module and one inside it match, only the outer one recomputes.
- Context.  The guard of an operator plan and exact dropout are modes that surround the model's
  forward.  In the backward pass nobody enters them, so the recomputation does (`context`).
- Saved results.  `save` keeps the results of collectives or of matrix products, by a policy over
  operators.  Collectives must be functional ones, which return new tensors: an operator that writes
  into a given tensor would be skipped, and its output would stay unwritten.
- Buffers.  A second run would move running statistics twice, and read other values than the first
  run did.  So buffers are copied before the first run, and each later run works on copies of these
  copies, which are dropped afterwards.  All buffers are copied, since torch does not count every
  write: batch norms write without a new version.  The module's own buffers are not written back and
  forth, since backward passes may need the values that they hold now.
- Plain values.  A module may count its calls in an attribute, or draw numbers of Python or numpy.
  If its first run does, each later run begins with the values and generators of the first one.
- TorchScript optimizes a function after its first calls.  What it then saves for its gradient has
  another order, and torch, which matches what both runs save by order, makes wrong gradients if the
  two runs lie on different sides of that.  So functions of TorchScript run without optimizations.
  One that has the last tensor to be saved is refused: torch ends a second run there by an exception
  that TorchScript does not let through.
- Parameters.  A call with other tensors in their places (`torch.func.functional_call`) is over when
  the second run begins, so that run has the tensors of the first one.
- Inputs that a module writes in place are refused: the second run would begin with what it wrote.
- Caches.  Decoders of transformers fill a cache of keys and values, by default in training too.  A
  second run would fill it again, so recomputed modules get none, as transformers itself has it.
  One that already has keys of the module is an input, as prefixes of peft are, and refused.

Invariant: a run in the backward pass computes the same numbers as the first run and leaves no
trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from msrun.errors import ModelError
from msrun.parallel.config import ROOT, Recompute
from msrun.parallel.layers.plain_state import PlainCall, PlainState
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.match import matching
from msrun.parallel.sharded_model import Context
from msrun.parallel.torch_compat import (
    is_transforming,
    own_parameters,
    shards_of_gathered,
    unoptimized_scripts,
    write_count,
)

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
_SCRIPT_FAILED = "The following operation failed in the TorchScript interpreter"
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")


def find(settings: Recompute, modules: Sequence[str]) -> list[str]:
    """Return the outermost of `modules` that the settings match.

    Raises:
        ModelError: A pattern matches no module.
    """
    chosen = sorted(matching(settings.modules, modules, "recompute.modules"))
    return [
        name
        for name in chosen
        if not any(name != other and f"{name}.".startswith(f"{other}.") for other in chosen)
    ]


class Compiled(Protocol):
    """The compiled forward of a module; see `layers.compiled`."""

    is_followed_again: bool

    def recomputing(self, otherwise: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what the forward returns; `otherwise` recomputes without the compiler."""


def apply(
    model: nn.Module,
    names: Iterable[str],
    save: Sequence[str],
    context: Context,
    compiled: Mapping[str, Compiled],
) -> None:
    """Have the modules called `names` recompute, in place.

    Args:
        model: The model.
        names: Names of modules, none inside another.
        save: As in `config.Recompute.save`.
        context: Context that the modules must run in, also in the backward pass.
        compiled: Compiled forwards that may recompute without `context`, by name.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if save:
        policy = partial(_policy, frozenset(save))
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for name in names:
        module = model.get_submodule(name)
        names = tuple(inspect.signature(module.forward).parameters)
        caches = {key: at for at, key in enumerate(names) if key in _CACHES}
        forward = module.forward
        plain = PlainState(module)
        # The compiler would write buffers a second time.
        if name in compiled and not any(True for _ in module.buffers()):
            compiled[name].is_followed_again = True
        changed = partial(_forward, module, name, forward, (context, options, caches, plain))
        # Where the signature of the forward is looked for.
        module.forward = update_wrapper(changed, forward)


def _forward(
    module: nn.Module,
    name: str,
    forward: Callable[..., Any],
    how: tuple[Context, dict[str, Any], Mapping[str, int], PlainState],
    /,  # names of arguments are the model's
    *args: Any,
    **kwargs: Any,
) -> Any:
    context, options, caches, plain = how
    # Without gradients nothing is saved, so nothing is to be computed again.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if is_transforming():
        raise ModelError(
            f"{ROOT}.recompute: {name or type(module).__name__} runs inside of a transform of "
            "torch.func such as vmap or grad, which cannot run it a second time",
            hint="leave the module out of recompute.modules",
        )
    if caches := _of_keys(caches, args, kwargs):
        _check_empty(module, name, [*args, *kwargs.values()])
        args, kwargs = _without_caches(caches, args, kwargs)
    given = [(tensor, write_count(tensor)) for tensor in tensors_in([args, kwargs])]
    frozen = [(p, key, write_count(p)) for key, p in module.named_parameters() if _is_frozen(p)]

    def by_torch() -> Any:
        named = partial(forward, **kwargs)  # of which torch may have options of the same names
        label = name or type(module).__name__
        state = _Buffers(module), _FirstPlaces(module), plain.of_call()
        return checkpoint(partial(_run, label, state, named, context), *args, **options)

    recomputing = getattr(forward, "recomputing", None)  # of what is compiled
    result = recomputing(by_torch, *args, **kwargs) if recomputing else by_torch()
    if any(write_count(tensor) != count for tensor, count in given):
        raise ModelError(
            f"{ROOT}.recompute: {name or type(module).__name__} writes its input in place, and a "
            "second run would begin with what it wrote",
            hint="write a copy: x = x.clone()",
        )
    for param, key, count in frozen:
        if write_count(param) != count:
            raise ModelError(
                f"{ROOT}.recompute: {name or type(module).__name__} writes its parameter {key} in "
                "forward, and a second run would write it again",
                hint="write it between steps, or leave the module out of recompute.modules",
            )
    return result


def again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with its recomputation, as the compiler follows it."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return recomputed


def _is_frozen(param: Tensor) -> bool:
    return not param.requires_grad and param.is_floating_point()


def _check_empty(module: nn.Module, name: str, values: Sequence[Any]) -> None:
    """Refuse a cache of transformers that has keys and values before `module` runs."""
    layers = {getattr(part, "layer_idx", None) for part in module.modules()} - {None}
    for value in values:
        length = getattr(value, "get_seq_length", None)
        if length is not None and any(map(length, layers)):
            raise ModelError(
                f"{ROOT}.recompute: {name or type(module).__name__} gets a cache that already has "
                "keys and values, such as a prefix, and a second run would add to it again",
                hint="leave the module out of recompute.modules",
            )


def _without_caches(
    caches: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None for `caches`, the names and places of these parameters."""
    places = {at for at in caches.values() if at < len(args)}
    given = tuple(None if at in places else value for at, value in enumerate(args))
    named = {key: None if key in caches else value for key, value in kwargs.items()}
    return given, named | ({"use_cache": False} if kwargs.get("use_cache") else {})


def _of_keys(
    caches: Mapping[str, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, int]:
    """Return the caches that have keys and values; `cache` may be something of the model's."""
    return {
        key: at
        for key, at in caches.items()
        if key != "cache"
        or hasattr(args[at] if at < len(args) else kwargs.get(key), "get_seq_length")
    }


def _run(
    name: str,
    state: tuple[_Buffers, _FirstPlaces, PlainCall],
    forward: Callable[..., Any],
    context: Context,
    *args: Any,
) -> Any:
    buffers, places, plain = state
    with (
        unoptimized_scripts(),
        places.as_first(),
        buffers.written_once(),
        plain.changed_once(),
        context(),
    ):
        try:
            return forward(*args)
        except RuntimeError as error:
            if not (buffers.is_again and _SCRIPT_FAILED in str(error)):
                raise
            raise ModelError(
                f"{ROOT}.recompute: a function of TorchScript is the last of {name} that saves a "
                "tensor, and torch cannot run it again",
                hint="leave the module out of recompute.modules, or the function out of "
                "torch.jit.script",
            ) from error


class _FirstPlaces:
    """The tensors that a module has in the places of its parameters in one forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = [
            (params, name, tensor)
            for _, params in own_parameters(module)
            for name, tensor in params.items()
        ]

    @contextmanager
    def as_first(self) -> Iterator[None]:
        """Have the same tensors there inside."""
        others = [
            (params, name, tensor, params.get(name))
            for params, name, tensor in self._first
            if params.get(name) is not tensor
        ]
        if others:
            # A unit inside may be gathered now, and not yet then.
            pairs = shards_of_gathered(self._module).items()
            gathered = {id(form) for pair in pairs for form in pair}
            others = [place for place in others if id(place[2]) not in gathered]
        for params, name, tensor, _ in others:
            params[name] = tensor
        try:
            yield
        finally:
            for params, name, _, now in others:
                params[name] = now


class _Buffers:
    """The buffers of a module in one forward and its recomputations."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor] | None = None
        self.is_again = False

    @contextmanager
    def written_once(self) -> Iterator[None]:
        """Run on the module's own buffers first; later on copies from before the first run."""
        # `remove_duplicate=False`: a buffer with two names must be exchanged under both.
        if self._before is None:
            self._before = _copies(dict(self._module.named_buffers(remove_duplicate=False)))
            yield
        else:
            self.is_again = True
            # Copies again, since there may be several recomputations, as with a retained graph.
            with self._exchanged(_copies(self._before)):
                yield

    @contextmanager
    def _exchanged(self, others: dict[str, Tensor]) -> Iterator[None]:
        own = {name: self._module.get_buffer(name) for name in others}
        self._set(others)
        # torch stops a recomputation early by an exception, once it has what it needs.
        try:
            yield
        finally:
            self._set(own)

    def _set(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, buffer)


def _copies(buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each buffer by name; names of one tensor share a copy."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    return {name: copies[id(buffer)] for name, buffer in buffers.items()}


def _policy(
    save: frozenset[str], context: object, operator: Any, *_args: object, **_kwargs: object
) -> CheckpointPolicy:
    """Return whether to save or recompute the result of `operator`."""
    del context
    is_kept = ("comm" in save and operator.namespace in _COLLECTIVES) or (
        "matmul" in save and operator.namespace == "aten" and _name(operator) in _MATMULS
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: Any) -> str:
    return str(operator.name()).partition("::")[2].partition(".")[0]
