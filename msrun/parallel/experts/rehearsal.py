"""Runs a forward twice, as if it ran once: a rehearsal without its experts, then the real one.

What the rehearsal leaves behind is undone: random numbers, buffers and attributes of the module.
Modules inside that have parameters or buffers are called once, in the rehearsal: the real run gets
what they have returned, so their hooks, counters and dropouts are those of one run, and nothing
large is computed twice.  The rehearsal works on copies of arguments and of what modules return, so
that it may write into them.

It ends where the forward calls such a module with what experts have returned, which a rehearsal
does not have: the real run calls that module.  It ends also at a module that was called after all
experts with what does not depend on them, such as a shared expert: the caller runs it while rows
travel.  So it does with one that is called before the experts, if nothing looks at what it returns
until they are called: in the rehearsal it returns a tensor that is computed then, or before that if
something does look at it (`later`).  Which modules these are a trial has shown, once, without
gradients (`Depending`).  What a rehearsal does follows from that and from its arguments alone, so
that a recomputation repeats it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from msrun.errors import ModelError
from msrun.parallel import torch_compat
from msrun.parallel.exchange.generators import set_torch_states, torch_states
from msrun.parallel.experts.later import later, postponed, settle
from msrun.parallel.local import is_unit, local_part
from msrun.parallel.losses.batch import map_leaves, tensors_in
from msrun.parallel.torch_compat import write_count

# What calls of a module have returned, and the random states after each; none of one that draws no
# numbers, and was computed later than it was called.
_Returned = list[tuple[Any, list[Tensor]]]

# Of a module, which the runtime changes as it gathers parameters.
_KEPT = ("_parameters", "_modules")


class Learned:
    """What a trial of a module with experts has shown, for rehearsals.

    Attributes:
        is_known: Whether there was one, in which an expert was called.
        after: Modules that get what experts have returned.
        beside: Modules that are called after all experts, with what does not depend on them.
        before: Module -> how often it is called before the first expert.
        waiting: Modules that are called before it, and can compute while rows travel.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.after: set[nn.Module] = set()
        self.beside: set[nn.Module] = set()
        self.before: Counter[nn.Module] = Counter()
        self.waiting: set[nn.Module] = set()


class Depending:
    """Follows which tensors depend on some others, by the memory that they are in.

    Attributes:
        looked_at: Modules whose result, told by `watch`, something has looked at.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # so that no other tensor gets the same memory
        self._watched: dict[int, tuple[nn.Module, Tensor]] = {}
        self.looked_at: set[nn.Module] = set()

    def add(self, tensor: Tensor) -> None:
        """Follow `tensor`."""
        if tensor.numel():
            self._kept[memory_of(tensor)] = tensor

    def has(self, value: Any) -> bool:
        """Return whether some tensor in `value` depends on a followed one."""
        return any(x.numel() and memory_of(x) in self._kept for x in tensors_in(value))

    def watch(self, part: nn.Module, result: Tensor) -> None:
        """Note from now on whether something looks at `result` of `part`."""
        self._watched[memory_of(result)] = part, result

    def active(self) -> AbstractContextManager[object]:
        """Follow operators inside."""
        return torch_compat.dispatching(self._follow)

    def _follow(self, func: Any, _: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        output = func(*args, **kwargs)
        for tensor in tensors_in((args, kwargs)) if self._watched else ():
            if tensor.numel() and (found := self._watched.get(memory_of(tensor))):
                self.looked_at.add(found[0])
        if self._kept and self.has((args, kwargs)):
            for tensor in tensors_in(output):
                self.add(tensor)
        return output


def memory_of(tensor: Tensor) -> int:
    """Return where the values of `tensor` are on this rank; its views are there too."""
    return local_part(tensor).untyped_storage().data_ptr()


class _Waiting(NamedTuple):
    """What a module got and returned in a trial, before the first expert was called."""

    given: Tensor
    result: Tensor
    written: tuple[int, int]

    def is_unwritten(self) -> bool:
        """Return whether nothing has written either in place since."""
        return (write_count(self.given), write_count(self.result)) == self.written


class _Postponed(NamedTuple):
    """What a module returns later, and what runs it beside the experts."""

    result: Tensor
    run: Callable[[], Tensor]


def _is_one(values: Sequence[Any]) -> bool:
    """Return whether there is one value, a plain tensor with elements."""
    return len(values) == 1 and type(values[0]) is Tensor and values[0].numel() > 0


def _may_wait(part: nn.Module) -> bool:
    """Return whether other ranks do not notice when `part` computes.

    Its buffers might be read meanwhile, and a rank whose forward looks at its result earlier than
    the trial's gathers its parameters at another time than the other ranks.
    """
    has_buffers = any(True for _ in part.buffers())
    return not has_buffers and not any(map(is_unit, part.modules()))


class _RehearsalEnd(BaseException):
    """Ends a rehearsal."""


class Rehearsal:
    """One call of a module's forward, rehearsed.

    Args:
        name: Of the module, for messages.
        module: The module.
        apart: Modules inside that the caller answers for.
        learned: Of a trial.
        device: Of this rank.
        depending: Makes it a trial, which follows what experts return.

    Attributes:
        depending: As given; None in a rehearsal.
    """

    def __init__(  # noqa: PLR0917 - each is of another kind
        self,
        name: str,
        module: nn.Module,
        apart: Collection[nn.Module],
        learned: Learned,
        device: torch.device,
        depending: Depending | None = None,
    ) -> None:
        self._name, self._module, self._learned = name, module, learned
        self._parts = list(called_parts(module, apart))
        self._returned: dict[nn.Module, _Returned] = defaultdict(list)
        self._device = device
        self._late: list[nn.Module] = []
        self._calls: Counter[nn.Module] = Counter()
        self._before: Counter[nn.Module] = Counter()
        self._experts_called = 0
        self._beside: list[Callable[[], object]] = []
        self._postponed: dict[nn.Module, _Postponed] = {}
        self._can_wait: dict[nn.Module, _Waiting] = {}  # of a trial
        self.depending = depending

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Rehearse inside: modules run and what they return is kept; all else is undone after."""
        before = torch_states(self._device)
        calls = {part: partial(self._run, part, torch_compat.call_of(part)) for part in self._parts}
        with contextlib.ExitStack() as stack:
            stack.enter_context(_restored(self._module))
            for part in self._parts if self.depending else ():
                for module in part.modules():
                    stack.enter_context(_restored(module))
            stack.enter_context(torch_compat.calls_replaced(calls))
            stack.enter_context(contextlib.suppress(_RehearsalEnd))
            if self.depending:
                stack.enter_context(self.depending.active())
            yield
        set_torch_states(before, self._device)

    def note_expert(self) -> None:
        """Note that an expert was called."""
        if not self._experts_called:
            self._before = self._calls.copy()
        self._experts_called += 1
        self._late.clear()
        for part in self.depending.looked_at if self.depending else ():
            self._can_wait.pop(part, None)

    def shown(self) -> Tensor:
        """Return what a trial has shown: whether it had experts, and numbers of each module."""
        after = [part in self._learned.after for part in self._parts]
        beside = [self._experts_called > 0 and part in self._late for part in self._parts]
        before = [self._before[part] for part in self._parts]
        # The largest number of all ranks says whether one of them objects.
        waits = {part for part, found in self._can_wait.items() if found.is_unwritten()}
        waits = {part for part in waits if self._calls[part] == self._before[part] == 1}
        # What is looked at behind one expert may be so between two.
        waits = waits if self._experts_called > 1 else set()
        objects = [self._experts_called > 0 and part not in waits for part in self._parts]
        numbers = [self._experts_called > 0, *after, *beside, *before, *objects]
        return torch.tensor(numbers, dtype=torch.int32)

    def learn(self, shown: Sequence[int]) -> None:
        """Keep what the trials of all ranks have shown, so that all end rehearsals alike."""
        is_known, *numbers = shown
        size = len(self._parts)
        after = {p for p, is_one in zip(self._parts, numbers[:size], strict=True) if is_one}
        pairs = zip(self._parts, numbers[size : 2 * size], strict=True)
        self._learned.after = after
        self._learned.beside = {p for p, is_one in pairs if is_one and p not in after}
        before = numbers[2 * size : 3 * size]
        self._learned.before = Counter(dict(zip(self._parts, before, strict=True)))
        # A look at what is computed later ends a rehearsal before it comes to modules beside.
        if is_known and not self._learned.beside:
            objects = zip(self._parts, numbers[3 * size :], strict=True)
            self._learned.waiting = {p for p, is_one in objects if not is_one and _may_wait(p)}
        self._learned.is_known = bool(is_known)

    def run_beside(self) -> None:
        """Run what computes while rows travel: modules that do not depend on the experts."""
        for run in (*(each.run for each in self._postponed.values()), *self._beside):
            run()

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Run inside with what modules returned in the rehearsal."""
        calls = {
            part: partial(self._again, part, torch_compat.call_of(part)) for part in self._parts
        }
        with torch_compat.calls_replaced(calls):
            yield
        if any(self._returned.values()):
            raise self.differs()

    def differs(self) -> ModelError:
        """Return the error of a forward that does something else when it runs again."""
        return ModelError(
            f"{self._name}: its forward ran twice, since its experts are a list of which ranks "
            "have parts, and called its modules otherwise the second time",
            hint="a forward around a list of experts may depend on its arguments, on its modules "
            "and on random numbers of torch alone",
        )

    def _run(self, part: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.depending is not None and self.depending.has((args, kwargs)):
            self._learned.after.add(part)
            raise _RehearsalEnd
        if part in self._postponed:
            settle(self._postponed[part].result)  # its calls return in their order
        is_ended = self._is_behind_experts(part)
        if is_ended and part in self._learned.after:
            raise _RehearsalEnd
        if is_ended and part in self._learned.beside:
            self._beside.append(partial(self._call, part, call, args, kwargs))
            raise _RehearsalEnd
        if part in self._learned.waiting and not (is_ended or kwargs) and _is_one(args):
            return self._postpone(part, call, args[0])
        run = partial(self._call, part, call, args, kwargs)
        output = self._tried(part, args, kwargs, run) if self.depending else copied(run())
        self._late.append(part)
        return output

    def _tried(
        self, part: nn.Module, args: Sequence[Any], kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Return what `run`, a call of `part`, does in a trial, and note whether it could wait."""
        states = torch_states(self._device)
        output = copied(run())
        is_drawn = not all(map(torch.equal, states, torch_states(self._device)))
        is_simple = part.training and not kwargs and _is_one(args) and _is_one([output])
        if self.depending and is_simple and not (is_drawn or self._experts_called):
            written = write_count(args[0]), write_count(output)
            self._can_wait[part] = _Waiting(args[0], output, written)
            self.depending.watch(part, output)
        return output

    def _postpone(self, part: nn.Module, call: Callable[..., Any], given: Tensor) -> Tensor:
        """Return what `part` makes of `given` as a tensor that is computed later.

        What looks at it behind the experts ends the rehearsal, so that it computes while rows
        travel.
        """
        run = postponed(call, given)

        def keep() -> Tensor:
            del self._postponed[part]
            states = torch_states(self._device)
            output: Tensor = run()
            if not all(map(torch.equal, states, torch_states(self._device))):
                raise ModelError(
                    f"a {type(part).__name__} beside the experts of {self._name} draws random "
                    "numbers, and drew none in the first call",
                    hint="call it after the experts",
                )
            self._returned[part].append((output, []))
            return output

        def compute() -> Tensor:
            if self._experts_called:
                raise _RehearsalEnd
            return keep().clone()

        found = later(compute, given)
        self._postponed[part] = _Postponed(found, keep)
        return found

    def _is_behind_experts(self, part: nn.Module) -> bool:
        """Count a call of `part`; return whether the forward calls experts before it.

        Where no token of this rank has an expert, it calls none, and other ranks do: a gather of
        the parameters of `part` has to come after the exchange here, too.
        """
        self._calls[part] += 1
        if self.depending is not None:
            return False
        learned = self._learned
        is_late = learned.is_known and self._calls[part] > learned.before[part]
        return self._experts_called > 0 or is_late

    def _call(
        self, part: nn.Module, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        output = call(*args, **kwargs)
        self._returned[part].append((output, torch_states(self._device)))
        return output

    def _again(self, part: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._returned[part]:
            output, random = self._returned[part].pop(0)
            if random:
                set_torch_states(random, self._device)
            return output
        return call(*args, **kwargs)


def copied(args: Any) -> Any:
    """Return arguments for a rehearsal."""
    return map_leaves(torch.clone, args)


def called_parts(module: nn.Module, apart: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the outermost modules inside that can be called and keep something."""
    for child in module.children():
        if child in apart or not any(True for _ in (*child.parameters(), *child.buffers())):
            continue
        if type(child).forward is nn.Module.forward:
            yield from called_parts(child, apart)
        else:
            yield child


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo after it what changes attributes and buffers of `module` itself inside."""
    attributes = vars(module)
    before = dict(attributes)
    inner = {
        key: value.copy()
        for key, value in before.items()
        if type(value) in (dict, list, set) and key not in _KEPT
    }
    buffers = [
        (buffer, buffer.detach().clone(), write_count(buffer))
        for buffer in module.buffers(recurse=False)
    ]
    yield
    attributes.clear()
    attributes.update(before)
    for key, value in inner.items():
        _refill(before[key], value)
    for buffer, values, number in buffers:
        if write_count(buffer) != number:
            with torch.no_grad():
                buffer.copy_(values)


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)
