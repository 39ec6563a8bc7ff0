"""The parameters of a model as of `rt.shard`, which a step compares with those that it finds.

Reducers and gathers are set up for the parameters that exist in `rt.shard`.  A parameter that is
replaced or added later would be trained by each rank alone, and the replicas would drift apart
without an error.  `ParameterSnapshot` detects that before the optimizer uses the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from operator import is_

from torch import nn
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.torch_compat import own_parameters


class ParameterSnapshot:
    """The parameters of a model as of `rt.shard`.

    Args:
        model: The model after `rt.shard` has made it parallel.
        gathered: Names of the parameters that `fully_shard` replaces while they are gathered.
        tied: Names of the parameters that other stages of a pipeline have, too.
    """

    def __init__(
        self, model: nn.Module, gathered: Collection[str], tied: Collection[str] = ()
    ) -> None:
        self._model = weakref.ref(model)
        self._gathered = gathered
        self._original = self._identities(model)
        self._units = self._holders(model)
        self._places = self._walk(model)
        self._tied = {name: model.get_parameter(name).requires_grad for name in tied}

    def check(self) -> None:
        """Refuse a model whose parameters were replaced or added since `rt.shard`.

        Raises:
            ModelError: Each rank would train such a parameter alone.
        """
        model = self._model()
        if model is None:
            return  # it is gone, so no step can train it
        places = self._walk(model)
        if len(places) != len(self._places) or not all(map(is_, places, self._places)):
            self._compare(model)
        for name, is_trained in self._tied.items():
            if model.get_parameter(name).requires_grad != is_trained:
                what = "frozen" if is_trained else "thawed"
                raise ModelError(
                    f"{name} was {what} after rt.shard, and other stages share this weight, which "
                    "do not know of it",
                    hint="freeze or train a weight that stages share from the start",
                )

    def _compare(self, model: nn.Module) -> None:
        current, original = self._identities(model), self._original
        for name in {**original, **current}:
            if name not in current or name not in original or current[name] is not original[name]:
                what = "replaced" if name in original else "added"
                raise ModelError(
                    f"{name} was {what} after rt.shard, so ranks do not train it together",
                    hint="change the model before rt.shard",
                )

    def _holders(self, model: nn.Module) -> dict[int, set[str]]:
        """Return the names of gathered parameters by the identity of the module that holds them."""
        holders: dict[int, set[str]] = {}
        for name in self._gathered:
            holder, _, own = name.rpartition(".")
            holders.setdefault(id(model.get_submodule(holder)), set()).add(own)
        return holders

    def _walk(self, model: nn.Module) -> list[object]:
        """Return what `_identities` compares in an order of its own, without names of modules.

        It takes a tenth of the time, and two walks are part of every step.
        """
        found: list[object] = []
        for module, params in own_parameters(model):
            found += params
            if self._units and (gathered := self._units.get(id(module))):
                found += [None if name in gathered else p for name, p in params.items()]
            else:
                found += params.values()
        return found

    def _identities(self, model: nn.Module) -> dict[str, Parameter | weakref.ref[nn.Module]]:
        """Return parameters by name; for a gathered one a reference to the module that holds it.

        A gathered parameter is another object than its shard, so only its module identifies it.
        One of `fully_shard` knows the whole model and would keep it alive.  A module has one such
        reference.
        """
        identities: dict[str, Parameter | weakref.ref[nn.Module]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            holder, _, _ = name.rpartition(".")
            if name not in self._gathered:
                identities[name] = param
            else:
                identities[name] = weakref.ref(model.get_submodule(holder))
        return identities
