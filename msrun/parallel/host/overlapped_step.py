"""An optimizer step on the host that goes on while the next forward pass runs.

The problem.  With `optimizer.offload` parameters and optimizer state are on the host, and the step
takes as long as the memory of the host lets it, while the device waits.

The idea.  `rt.step` takes the gradients and returns.  A thread updates the parameters, module by
module in the order of the model, and whoever first needs a parameter waits for its module alone:
`fully_shard` before it gathers a unit, and everything else by what follows.

Exactness.  Until its update is done, a parameter has a class of its own (`_pending`), on which each
function of torch and each attribute that tells of values first waits.  So an evaluation, a
checkpoint, an average of weights, a look at a gradient or a change by the script sees what one
process would.  The state of the optimizer waits as a whole.  After its first use a parameter is of
its former class again, and costs nothing.

The update itself is torch's: an optimizer of the same class, with the options of the group as of
the step, gets aliases of the parameters, the gradients and the state.  So a learning rate that is
changed later counts for the next step.  This is right for optimizers that treat each parameter by
itself, which the classes in `_KINDS` do; others are refused.

Invariants:

- At most one step is on its way: the next one, and the end of each forward with gradients, waits.
  So gradients are not written while the thread reads them.
- What the thread raises is raised where the script first waits.
- Hooks after the step see the weights after it: with such a hook the step is waited for at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ROOT
from msrun.parallel.data_parallel.mixed_groups import update_alone
from msrun.parallel.local import is_sharded

_KEY = f"{ROOT}.optimizer.offload: overlap"
_KINDS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop")
_MARK = "msrun_update"
# Attributes of a tensor that tell nothing of its values.
_HARMLESS = frozenset(
    [
        *("__class__", "__dict__", "__torch_function__", "_is_param", "__init__", "__new__"),
        *(
            "requires_grad",
            "is_leaf",
            "grad_fn",
            "shape",
            "size",
            "dim",
            "ndim",
            "numel",
            "nelement",
        ),
        *("dtype", "device", "layout", "stride", "element_size", "itemsize", "nbytes", "names"),
        *("data_ptr", "is_floating_point", "is_complex", "is_sparse", "is_meta", "is_cuda"),
        *("is_cpu", "is_contiguous", "is_inference", "is_nested", "is_quantized", "is_mkldnn"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks"),
        *("_post_accumulate_grad_hooks", "output_nr", "_spec", "placements", "device_mesh"),
    ]
)


class OverlappedStep:
    """Steps of optimizers of one model that go on in a thread.

    Args:
        model: The model, after everything else has changed it.
        executor: Runs updates, in the order in which it gets them; None has a thread of its own.
    """

    def __init__(self, model: nn.Module, executor: Executor | None = None) -> None:
        self._model = weakref.ref(model)
        self._executor = executor
        self._updates: list[_Update] = []
        self._states: list[tuple[weakref.ref[Optimizer], _WaitingState]] = []
        torch_compat.before_gathers(model, _wait_for)
        model.register_forward_hook(self._settle_behind)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose parameters are not known to be updated each by itself.

        Raises:
            ModelError: It is of another class.
        """
        kind = type(optimizer)
        is_known = kind.__name__ in _KINDS and kind.__module__.startswith("torch.optim.")
        if not is_known or any(group.get("differentiable") for group in optimizer.param_groups):
            what = "differentiable" if is_known else "not known to"
            raise ModelError(
                f"{_KEY} updates each parameter by itself, in a thread, and {kind.__name__} is "
                f"{what}{'' if is_known else ' do so'} (choose {', '.join(_KINDS)})",
                hint=f"or choose {ROOT}.optimizer.offload: true, whose step is waited for",
            )

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Do what `zero_grad` does, without waiting for a step that still needs the gradients."""
        waiting = [
            param
            for group in optimizer.param_groups
            for param in group["params"]
            if _MARK in vars(param)
        ]
        for param in waiting:
            kind = _become(param, _plain(type(param)))
            param.grad = None
            _become(param, kind)
        if not waiting:
            optimizer.zero_grad()
            return
        known = set(waiting)
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param not in known:
                    param.grad = None

    def start(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Have `optimizer` step, and return before its parameters on the host are updated.

        Args:
            optimizer: Of the model.
            step: Calls `optimizer.step`, with all hooks around it.
        """
        self.settle()
        taken: list[_Group] = []
        before = optimizer.register_step_pre_hook(lambda *_: taken.extend(_taken(optimizer)))
        after = optimizer.register_step_post_hook(lambda *_: self._begin(optimizer, taken))
        is_watched = torch_compat.is_first_of_step_hooks(optimizer, after)
        try:
            step()
        finally:
            for handle in (before, after):
                handle.remove()
            for group in taken:
                group.give_back()
        if is_watched:
            self.settle()

    def _begin(self, optimizer: Optimizer, taken: Sequence[_Group]) -> None:
        """Start the updates of what was taken out of the step of `optimizer`."""
        for group in taken:
            group.give_back()
        model = self._model()
        order = {} if model is None else _order(model)
        pieces = sorted(
            (piece for group in taken for piece in _pieces(optimizer, group, order)),
            key=lambda piece: order.get(id(piece.params[0]), ("", 0))[1],
        )
        if not pieces:
            return
        self._executor = self._executor or ThreadPoolExecutor(1, "msrun step")
        for piece in pieces:
            self._updates.append(_Update(piece.params, self._executor.submit(piece.run)))
        state = _WaitingState(self.settle, optimizer.state)
        self._states.append((weakref.ref(optimizer), state))
        optimizer.state = state  # type: ignore[assignment]

    def settle(self) -> None:
        """Wait until the last step is done."""
        updates, self._updates = self._updates, []
        with contextlib.ExitStack() as every:
            every.callback(self._show_states)
            for update in updates:
                every.callback(update.wait)

    def _show_states(self) -> None:
        for reference, state in self._states:
            optimizer: Any = reference()
            if optimizer is not None and optimizer.state is state:
                optimizer.state = state.plain
        self._states.clear()

    def _settle_behind(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self.settle()


class _Update:
    """The update of some parameters, on its way.

    Args:
        params: The parameters, which wait for it from now on.
        future: Of the update.
    """

    def __init__(self, params: Sequence[Parameter], future: Future[None]) -> None:
        self._params = list(params)
        self._future = future
        self._lock = threading.Lock()
        for param in params:
            vars(param)[_MARK] = self
            _become(param, _pending(type(param)))

    def wait(self) -> None:
        """Wait until it is done; the parameters are as usual then."""
        with self._lock:
            params, self._params = self._params, []
            try:
                if params:
                    self._future.result()
            finally:
                for param in params:
                    _become(param, _plain(type(param)))
                    vars(param).pop(_MARK, None)


def _wait_for(tensors: Iterable[Any]) -> None:
    """Wait for the updates of `tensors` that are on their way."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and (update := vars(tensor).get(_MARK)) is not None:
            update.wait()


@functools.cache
def _pending(kind: type[Tensor]) -> type[Tensor]:
    """Return a class like `kind` whose values are waited for."""

    def read(self: Tensor, name: str) -> Any:
        if name not in _HARMLESS and hasattr(kind, name):
            _wait_for([self])
            return getattr(self, name)
        return kind.__getattribute__(self, name)

    def called(
        cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name in _HARMLESS:
            plain = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
            return plain(cls, func, types, args, kwargs)
        _wait_for(_leaves([*args, *(kwargs or {}).values()]))
        return func(*args, **(kwargs or {}))

    members = {
        "__slots__": (),
        "__getattribute__": read,
        "__torch_function__": classmethod(called),
        "__module__": kind.__module__,
        "plain_class": kind,
    }
    metaclass: Any = type(kind)
    made: type[Tensor] = metaclass(kind.__name__, (kind,), members)
    return made


def _plain(kind: type[Tensor]) -> type[Tensor]:
    """Return the class that parameters of `kind` had before they waited."""
    found: type[Tensor] = getattr(kind, "plain_class", kind)
    return found


def _become(param: Parameter, kind: type[Tensor]) -> type[Tensor]:
    """Make `param` one of `kind`; return of which class it was."""
    was, param.__class__ = type(param), kind  # type: ignore[assignment]
    return was


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        elif isinstance(value, dict):
            yield from _leaves(value.values())
        else:
            yield value


class _WaitingState(MutableMapping[Any, Any]):
    """The state of an optimizer, which is waited for whenever it is looked at.

    Args:
        settle: Waits.
        plain: The state.
    """

    def __init__(self, settle: Callable[[], None], plain: Any) -> None:
        self._settle = settle
        self.plain = plain

    def _known(self) -> Any:
        self._settle()
        return self.plain

    def __getitem__(self, key: Any) -> Any:
        return self._known()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._known()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._known()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())


class _Group:
    """A group of an optimizer in whose step some parameters are left out.

    Args:
        group: The group.
        left: Those of its parameters that are left out, with their gradients.
    """

    def __init__(self, group: dict[str, Any], left: Sequence[tuple[Parameter, Tensor]]) -> None:
        self.group = group
        self.left = left
        self._all: list[Parameter] | None = group["params"]
        out = {id(param) for param, _ in left}
        group["params"] = [param for param in group["params"] if id(param) not in out]

    def give_back(self) -> None:
        """Give the group its parameters back."""
        if self._all is not None:
            self.group["params"], self._all = self._all, None


def _taken(optimizer: Optimizer) -> list[_Group]:
    """Leave parameters on the host that have a gradient out of the groups of `optimizer`."""
    found = []
    for group in optimizer.param_groups:
        left = [
            (param, param.grad)
            for param in group["params"]
            if param.grad is not None and param.device.type == "cpu" and _is_alike(param)
        ]
        if left:
            found.append(_Group(group, left))
    return found


def _is_alike(param: Parameter) -> bool:
    """Return whether the update of `param` needs no other rank."""
    gradient = param.grad
    if type(param) is Parameter:
        return True
    if not (is_sharded(param) and gradient is not None and is_sharded(gradient)):
        return False
    return gradient.placements == param.placements


class _Piece:
    """The update of parameters of one module and one group.

    Args:
        params: The parameters.
        optimizer: Of aliases of them.
    """

    def __init__(self, params: Sequence[Parameter], optimizer: Optimizer) -> None:
        self.params = params
        self._optimizer = optimizer

    def run(self) -> None:
        """Update them."""
        update_alone(self._optimizer)


def _pieces(
    optimizer: Optimizer, taken: _Group, order: dict[int, tuple[str, int]]
) -> Iterator[_Piece]:
    """Yield the updates of the parameters of each module in a group."""
    of_modules: dict[str, list[tuple[Parameter, Tensor]]] = {}
    for param, gradient in taken.left:
        holder = order.get(id(param), ("", 0))[0]
        of_modules.setdefault(holder, []).append((param, gradient))
    options = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in taken.group.items()
        if key not in ("params", "param_names")
    }
    for pairs in of_modules.values():
        aliases: list[Tensor] = []
        state: dict[Tensor, Any] = {}
        for param, gradient in pairs:
            alias = Parameter(param.detach(), requires_grad=param.requires_grad)
            alias.grad = gradient
            aliases.append(alias)
            state[alias] = optimizer.state[param]
        kind: Any = type(optimizer)
        made: Optimizer = kind([{**options, "params": aliases}])
        made.state.update(state)
        yield _Piece([param for param, _ in pairs], made)


def _order(model: nn.Module) -> dict[int, tuple[str, int]]:
    """Return of each parameter the name of its module and its place in the model."""
    return {
        id(param): (name.rpartition(".")[0], place)
        for place, (name, param) in enumerate(model.named_parameters())
    }
