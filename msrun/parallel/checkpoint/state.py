"""Collects the state of models and optimizers by the names of the unmodified model.

Tensors are named `model.NAME` and `optim.NAME.KEY` in every layout.  The settings of an optimizer
are stored for each of its parameters, so that an optimizer with other groups, or of one pipeline
stage, finds its own.  Nothing here takes a step to learn which state an optimizer has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from msrun.errors import CheckpointError
from msrun.parallel.checkpoint.packed import TensorChunks
from msrun.parallel.config import DATA_AXIS
from msrun.parallel.local import is_sharded
from msrun.parallel.uneven_rows.rows import RowRange, rows_of, tensors_of_rows

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | None

MODEL = "model."
OPTIMIZER = "optim."

# Attribute of a pipeline stage: name of the whole model -> first name of the same tensor.
WHOLE_NAMES = "_msrun_whole_names"

# Names that wrappers of torch insert into the names of a model.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# Settings that change how an optimizer computes and not its result: the script's own stay.
_OWN_SETTINGS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
# Key of `Module.get_extra_state` in a state dict.
_EXTRA_STATE = "_extra_state"


class State(msgspec.Struct, kw_only=True):
    """State of one rank.

    Args:
        tensors: Name -> tensor, plain or sharded.
        aliases: Further name of a tensor -> its name.
        values: Name -> state that is not a tensor.
        common: Names of tensors, such as buffers, of which every rank keeps a copy that may
            differ.  Any rank's would do, but all must come from one, so that they fit each other:
            the lowest.
        rows: Name of a tensor -> which rows of a table it has, where ranks have runs of any length.
        chunks: Name of a tensor without memory -> the parts of it that this rank can fetch.
    """

    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = {}
    common: set[str] = set()
    rows: dict[str, RowRange] = {}
    chunks: dict[str, TensorChunks] = {}


class TensorNames:
    """Names of all tensors and extra state in the models of this rank.

    Args:
        excluded: Patterns of parameters that are not reduced, so each data-parallel rank has its
            own.
        data_rank: This rank's index on the axis `dp`.
        models: One model, or the pipeline stages of this rank; or a mapping of several.

    Attributes:
        tensors: Name -> tensor.
        aliases: Further name of a tensor -> its name.
        extra: Name -> module with state of its own, of `get_extra_state`.
        order: Names of tensors, further ones included, in the order of the models.

    Raises:
        CheckpointError: Two models have a name in common.
    """

    def __init__(self, excluded: Sequence[str], data_rank: int, models: Models) -> None:
        self._excluded = excluded
        self._index = data_rank
        self.tensors: dict[str, Tensor] = {}
        self.extra: dict[str, nn.Module] = {}
        self.aliases: dict[str, str] = {}
        self.order: list[str] = []
        self._of: dict[int, str] = {}
        for prefix, model in each_model(models):
            self._add(prefix, model)

    def _add(self, prefix: str, model: nn.Module) -> None:
        # `state_dict` of a module of `fully_shard` also frees gathered parameters, so that their
        # shards are in place.
        for raw, value in model.state_dict(keep_vars=True).items():
            name = prefix + self._stored(clean(raw), value)
            if name in self.tensors or name in self.extra or name in self.aliases:
                hint = 'give the models names of their own: {"model": model, "average": average}'
                raise CheckpointError(f"two of the models have {name}", hint=hint)
            owner, _, last = raw.rpartition(".")
            if last == _EXTRA_STATE:
                self.extra[name] = model.get_submodule(owner)
                continue
            self.order.append(name)
            if id(value) in self._of:
                self.aliases[name] = self._of[id(value)]
            else:
                self._of[id(value)] = name
                self.tensors[name] = value
        self._add_names_of_others(prefix, getattr(model, WHOLE_NAMES, {}))

    def _add_names_of_others(self, prefix: str, first_of: Mapping[str, str]) -> None:
        """Add the names that the whole model has of tensors here, though this stage has not."""
        groups: dict[str, list[str]] = {}
        for name, first in first_of.items():
            groups.setdefault(first, []).append(prefix + name)
        for group in groups.values():
            here = next((name for name in group if name in self.tensors), None)
            if here is not None:
                others = (name for name in group if name not in self.tensors)
                self.aliases |= dict.fromkeys(others, here) | {
                    name: self.aliases[name] for name in group if name in self.aliases
                }

    def _stored(self, name: str, value: object) -> str:
        """Return the name in a checkpoint, with the rank if each data-parallel rank has its own."""
        is_own = isinstance(value, Parameter) and any(
            fnmatchcase(name, pattern) for pattern in self._excluded
        )
        return f"{name}@{DATA_AXIS}{self._index}" if is_own and self._index else name

    def of(self, param: Parameter, optimizer: Optimizer) -> str:
        """Return the name of a parameter that `optimizer` holds.

        Raises:
            CheckpointError: No model has this parameter.
        """
        name = self._of.get(id(param))
        if name is None:
            raise CheckpointError(
                f"{type(optimizer).__name__} holds a parameter of shape {list(param.shape)} that "
                "is in no model"
            )
        return name


def each_model(models: Models) -> list[tuple[str, nn.Module]]:
    """Return each model with the prefix of its tensors' names."""
    if isinstance(models, nn.Module):
        models = [models]
    named = (
        [(f"{name}.", model) for name, model in models.items()]
        if isinstance(models, Mapping)
        else [("", model) for model in models]
    )
    return [
        (prefix, model.module if isinstance(model, DistributedDataParallel) else model)
        for prefix, model in named
    ]


def each_optimizer(optimizer: Optimizers) -> list[Optimizer]:
    """Return one optimizer, several or None as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def clean(name: str) -> str:
    """Return `name` as it is in the unmodified model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def collect(names: TensorNames, optimizers: Iterable[Optimizer]) -> State:
    """Return the state of the models and `optimizers` on this rank.

    Raises:
        CheckpointError: Some state is neither a tensor nor a plain value.
    """
    state = State()
    for name, tensor in names.tensors.items():
        state.tensors[MODEL + name] = tensor
        if rows := rows_of(tensor):
            state.rows[MODEL + name] = rows
        if not is_sharded(tensor) and not isinstance(tensor, Parameter):
            state.common.add(MODEL + name)
    for name, module in names.extra.items():
        extra = module.get_extra_state()
        if isinstance(extra, Tensor):
            state.tensors[MODEL + name] = extra
            state.common.add(MODEL + name)
        else:
            state.values[MODEL + name] = plain(extra, name)
    state.aliases = {MODEL + alias: MODEL + name for alias, name in names.aliases.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = _settings(group, type(optimizer).__name__)
            for param in group["params"]:
                name = names.of(param, optimizer)
                state.values[OPTIMIZER + name] = settings
                _collect_param(state, name, optimizer.state.get(param, {}), type(optimizer))
                if rows := rows_of(param):
                    of_rows = tensors_of_rows(param, optimizer.state.get(param, {}))
                    state.rows |= {f"{OPTIMIZER}{name}.{key}": rows for key in of_rows}
    return state


def _collect_param(state: State, name: str, kept: dict[str, Any], kind: type) -> None:
    scalars = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            state.tensors[f"{OPTIMIZER}{name}.{key}"] = value
        else:
            scalars[key] = plain(value, f"{key}, which {kind.__name__} keeps of {name}")
    if scalars:
        state.values[f"{OPTIMIZER}{name}."] = scalars


def _settings(group: dict[str, Any], kind: str) -> dict[str, Any]:
    return {
        key: plain(value, f"{key}, a setting of {kind}")
        for key, value in group.items()
        if key not in _OWN_SETTINGS
    }


def plain(value: Any, where: str) -> Any:
    """Return `value` as JSON values; tuples become lists, and one-element tensors numbers.

    Raises:
        CheckpointError: JSON has no such value; the message names it by `where`.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case dict():
            for key in value:
                if not isinstance(key, str):
                    raise CheckpointError(f"{where}: key {key!r} is no text, and JSON has no other")
            return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
        case _ if hasattr(value, "item") and getattr(value, "size", None) is not None:
            return plain(_number(value, where), where)
        case _:
            raise CheckpointError(
                f"{where} is a {type(value).__name__}; a checkpoint holds tensors of models and "
                "optimizers, and JSON values"
            )


def _number(value: Any, where: str) -> Any:
    try:
        return value.item()
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(f"{where} is a {type(value).__name__} of several elements") from None
