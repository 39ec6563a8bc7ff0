"""The model that a function makes, without memory, and samples of any size for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from msrun.errors import UsageError
from msrun.parallel.auto.tracing.structure import leaf_tensors, mapped
from msrun.units import quoted

# Batches of two sizes show what grows with them.
SIZES = (2, 6)


def make(target: str) -> tuple[nn.Module, list[Any]]:
    """Return the model and the sample that the function called `target` makes, without memory.

    Raises:
        UsageError: There is no such function, it fails, or returns something else.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise UsageError(f"{quoted(target)} names no function (choose such as model.py:make)")
    function = getattr(_module(where), name, None)
    if not callable(function):
        raise UsageError(f"{where} has no function {name}")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}") from error
    match made:
        case (nn.Module() as model, sample):
            pass
        case _:
            raise UsageError(f"{target} must return a model and a sample of its inputs")
    inputs = list(sample) if isinstance(sample, tuple | list) else [sample]
    if not batch_of(inputs):
        raise UsageError(f"{target}: the sample has no tensor with a batch")
    return model.to("meta"), mapped(inputs, _on_meta)


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"{where} is no file")
    # As a script would find its neighbours.
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    try:
        return _execute(path) if path.suffix == ".py" else importlib.import_module(where)
    except Exception as error:
        raise UsageError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error


def _execute(path: Path) -> ModuleType:
    """Return the file's module, under a name that no other module has."""
    name = f"msrun_search_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch_of(sample: Sequence[Any]) -> int:
    """Return the samples of inputs: the first dim of the first tensor; 0 without one."""
    return next((len(x) for x in leaf_tensors(list(sample)) if x.dim()), 0)


def resized(sample: Sequence[Any], batch: int) -> list[Any]:
    """Return inputs like `sample`, of `batch` samples; other sizes stay."""
    given = batch_of(sample)

    def resize(leaf: Any) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == given
        return leaf.new_empty((batch, *leaf.shape[1:])) if is_cut else leaf

    return [mapped(item, resize) for item in sample]
