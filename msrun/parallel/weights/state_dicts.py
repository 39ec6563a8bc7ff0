"""`state_dict` and `load_state_dict` of a model after `rt.shard`, and of its optimizer.

`model.state_dict()` returns what the rank has, as with torch's `fully_shard`: under `zero` and an
operator plan `DTensor`s of the whole shape, in a pipeline the tensors of this stage.  In memory
that is right: such a dict can be copied, and loaded again.  In a file it would be the parts of one
rank, so it refuses to be pickled, and with it to be written by `torch.save`.

`model.load_state_dict` takes such a dict, or the whole one of an unmodified model, which each rank
passes: of a whole tensor the rank's part is taken, and of names those of its stage.  Missing and
unexpected names are those of the whole model, and torch reports them as it does everywhere.
Loading is not collective, so that a rank which was given another dict, or none, is noticed where
replicas are compared: in the next step.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel.checkpoint.state import clean
from msrun.parallel.local import is_sharded, local_part
from msrun.parallel.uneven_rows.rows import rows_of, whole_shape
from msrun.parallel.weights.origin import Origin

if TYPE_CHECKING:
    from msrun.parallel.data_parallel.replica_digest import ReplicaDigest

_HINT = (
    "on all ranks: rt.save_pretrained(model, DIR), rt.save(model, step=N, path=DIR), or "
    "whole = rt.state_dict(model), which rank 0 can write"
)
_MARK = "msrun"


class PartsMark:
    """Refuses to be pickled; the state dict of a model that this rank has in parts holds one.

    Args:
        kind: Class of the model.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ModelError(
            f"{self._kind}.state_dict() has the parts of this rank alone, and a file of it would "
            "lack those of the others",
            hint=_HINT,
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self


def is_divided(model: nn.Module, *, is_pipeline: bool) -> bool:
    """Return whether a rank has parts of `model` alone."""
    return is_pipeline or any(map(_is_part, (*model.parameters(), *model.buffers())))


def _is_part(tensor: Tensor) -> bool:
    return is_sharded(tensor) or rows_of(tensor) is not None


def prepare_state_dicts(
    model: nn.Module, origin: Origin, replicas: ReplicaDigest | None, *, is_pipeline: bool
) -> None:
    """Have `state_dict` and `load_state_dict` of a divided model do what this module says.

    Args:
        model: A result of `rt.shard`.
        origin: The model as it was before.
        replicas: Compares later whether all ranks were given the same; None on one rank.
        is_pipeline: Whether it is a stage.
    """
    model.register_state_dict_post_hook(_Marking(origin.kind))
    model.register_load_state_dict_pre_hook(_Dividing(origin, replicas, is_pipeline=is_pipeline))
    if hasattr(model, "save_pretrained") or origin.library.config is not None:
        model.save_pretrained = _Refusing(origin.kind)  # type: ignore[assignment]


class _Refusing:
    """Stands for a method that would write the parts of one rank."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(
            f"{self._kind}.save_pretrained would write the parts of this rank alone",
            hint="on all ranks: rt.save_pretrained(model, DIR)",
        )


class _Marking:
    """Marks a state dict, in the metadata that torch keeps with it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(
        self, _: nn.Module, __: Mapping[str, Any], ___: str, metadata: dict[str, Any]
    ) -> None:
        metadata[_MARK] = PartsMark(self._kind)


class _Dividing:
    """Turns the state dict of an unmodified model into that of this rank's model, before a load."""

    def __init__(
        self, origin: Origin, replicas: ReplicaDigest | None, *, is_pipeline: bool
    ) -> None:
        self._origin = origin
        self._replicas = replicas
        self._is_pipeline = is_pipeline

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model is no model of `rt.shard`, whose ranks are compared.
        return vars(self) | {"_replicas": None}

    def __call__(
        self,
        model: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _: Mapping[str, Any],
        __: bool,  # noqa: FBT001 - torch passes it so
        missing: list[str],
        unexpected: list[str],
        ___: list[str],
    ) -> None:
        own = model.state_dict(keep_vars=True)
        if self._is_pipeline:
            self._take_stage(state, prefix, {clean(name) for name in own}, missing, unexpected)
        whole = []
        for name, like in own.items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and not is_sharded(value) and _is_part(like):
                whole.append(value)
                state[prefix + name] = _divided(value, like)
        if whole and self._replicas:
            self._replicas.note_given(whole)

    def _take_stage(
        self,
        state: dict[str, Any],
        prefix: str,
        own: Collection[str],
        missing: list[str],
        unexpected: list[str],
    ) -> None:
        """Leave the entries of this stage in `state`, and note what the whole model lacks."""
        given = {name for name in state if name.startswith(prefix)}
        names = {prefix + name for name in (*self._origin.first, *self._origin.extra)}
        here = {prefix + name for name in own}
        if given <= here:  # the state dict of this stage
            return
        missing.extend(sorted(names - given - here))
        unexpected.extend(sorted(given - names))
        for name in given - here:
            del state[name]


def _divided(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `value`, placed like the sharded tensor `like`."""
    if rows := rows_of(like):
        return rows.cut(value.detach()) if value.shape == whole_shape(like) else value
    if not is_sharded(like) or value.shape != like.shape:
        return value  # torch says so
    from torch.distributed.tensor import DTensor

    from msrun.parallel.deferred.fill import part_of

    part = part_of(value.detach(), like).to(local_part(like).device)
    return DTensor.from_local(
        part.contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def prepare_optimizer(optimizer: torch.optim.Optimizer, *, is_pipeline: bool) -> None:
    """Have `optimizer.load_state_dict` take the state of an optimizer of whole parameters.

    Its own `state_dict` has this rank's parts, and refuses to be pickled.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if _PREPARED in vars(optimizer) or not (is_pipeline or any(map(_is_part, params))):
        return
    setattr(optimizer, _PREPARED, True)
    try:
        optimizer.register_load_state_dict_pre_hook(_divide_state)
    except AttributeError:  # it never called the constructor of its base class
        name = type(optimizer).__name__
        raise ModelError(
            f"{name} has none of the hooks of torch's optimizers, by which sharded parameters and "
            "stages save its state",
            hint=f"give rt.optimizer what {name} wraps, or train without zero, plan and pipeline",
        ) from None
    optimizer.register_state_dict_post_hook(lambda of, state: PartsOfState(state, type(of)))


class PartsOfState(dict[str, Any]):
    """The state dict of an optimizer with this rank's parts.

    Args:
        state: Its entries.
        kind: Class of the optimizer; libraries that copy the dict, as accelerate, leave it out.
    """

    def __init__(self, state: Mapping[str, Any], kind: type = torch.optim.Optimizer) -> None:
        super().__init__(state)
        self._kind = kind

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ModelError(
            f"{self._kind.__name__}.state_dict() has the parts of this rank alone, and a file of "
            "it would lack those of the others",
            hint="on all ranks: rt.save(model, optimizer, step=N, path=DIR); "
            "msrun convert --optimizer DIR FILE.pt makes one file of it",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PartsOfState:
        return PartsOfState(
            {key: copy.deepcopy(each, memo) for key, each in self.items()}, self._kind
        )


def _divide_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer of whole parameters as that of `optimizer`."""
    given = [len(group["params"]) for group in state["param_groups"]]
    held = [len(group["params"]) for group in optimizer.param_groups]
    if given != held:
        raise ModelError(
            f"{type(optimizer).__name__}.load_state_dict got groups of {_shown(given)} parameters, "
            f"and this rank's optimizer has {_shown(held)}",
            hint="in a pipeline each stage has some of the parameters: rt.load(model, optimizer, "
            "path=DIR) loads a checkpoint, which msrun convert --optimizer makes of a .pt file",
        )
    kept = dict(state["state"])
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for key, param in zip(group["params"], own["params"], strict=True):
            if key in kept and _is_part(param):
                kept[key] = {name: _as_state(value, param) for name, value in kept[key].items()}
    return {**state, "state": kept}


def _as_state(value: Any, param: Tensor) -> Any:
    is_whole = isinstance(value, Tensor) and not is_sharded(value) and value.dim() > 0
    return _divided(value, param) if is_whole else value


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


_PREPARED = "_divides_state"
