"""Ends a job whose ranks wait for each other in different calls, with a sentence on each.

The problem.  A model whose ranks share parameters or activations must be called by all of them.
A script that evaluates on rank 0 alone, or stops early there, leaves ranks in collectives that
others never enter, or that meet another one.  Gloo waits for half an hour, and then blames a
connection.

The idea.  A step or call costs an addition or two, which note where the script is.  A thread wakes
once a second and looks at the stack of the script's thread, if that waits (`script_thread.py`).  If
it has waited in one collective for a while, the rank writes its place to the store of the process
group and adds one to a counter there.  Once the counter has reached the number of ranks, nobody is
left who could end the wait.
Then ranks read all places, and if these differ, each prints the sentence and ends.

- A rank that computes, reads data or writes a file is not counted, so slow ranks make nobody end.
- A rank that has left the job is counted for good.
- Ranks in equal places are left alone: what they send may be large and the network slow.
- Without a long wait nothing is sent, but before some evaluations: those that follow the first
  steps, and every thousandth.  Ranks meet in the store there, since a rank that is alone in an
  evaluation would otherwise end a peer whose collective has another size, before anybody looks.

A collective may also raise, as when a peer has ended.  The rank then asks for the places of the
others, waits a moment for them, and names the cause beside torch's error.

The thread cannot raise in a script that waits in torch's C++ code, so it ends the process as an
uncaught exception would, which is what the watchdog of NCCL does too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from msrun.cluster.liveness import stacks
from msrun.errors import RanksDisagreeError
from msrun.parallel.config import DATA_AXIS, ParallelConfig
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.call_hook import CallHook, trains
from msrun.parallel.rank_context import RankContext
from msrun.parallel.watchdog.places import HINT, ScriptPlace, disagreement
from msrun.parallel.watchdog.script_thread import ScriptThread
from msrun.worker.bootstrap import record_error

if TYPE_CHECKING:
    from msrun.parallel.data_parallel.collective_order import CollectiveOrder

_LOOK_SECONDS = 1.0
# A rank that is at one place in so many looks one after the other waits; frozen ranks do not look.
_LOOKS = 10
# So often in a row all ranks must have been found to wait.
_FULL_LOOKS = 3
# Ranks that wait ask the store so many times a second, all of them together.
_QUESTIONS = 1000
_ANSWER_SECONDS = 3.0
_PAUSE_SECONDS = 0.0005
# Changes from training to evaluation before which ranks meet.
_FIRST_TURNS = frozenset([*range(1, 11), 30, 100, 300])
_EVERY = 1000
_ANSWER_LOOK_SECONDS = 0.1
_EXIT_CODE = 1  # as Python's after an uncaught exception
_FRAMES = 12
_WAITING, _ASKED, _PLACE = "waiting", "asked", "place"
# Ranks make their runtimes in one order, so they agree on it.
_numbers = itertools.count()


class Scope(msgspec.Struct, frozen=True):
    """Ranks that must call a model together.

    Args:
        number: Of these ranks, another one for others.
        size: How many they are.
    """

    number: int
    size: int


def scope_of(config: ParallelConfig, context: RankContext, model: nn.Module) -> Scope:
    """Return the ranks that must call `model` together."""
    configured = context.configured
    gathers = config.optimizer.zero > 0 and any(map(is_sharded, model.parameters()))
    if gathers or configured.layout.ep:
        return Scope(0, context.world_size)
    copies = configured.layout.size(DATA_AXIS)
    return Scope(configured.coordinate.get(DATA_AXIS, 0), context.world_size // copies)


class Watchdog:
    """Where this rank's script is, and a thread that looks whether it waits for good."""

    def __init__(self) -> None:
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._store = _store(f"msrun_watchdog_{next(_numbers)}")
        self._kind, self._model = "between", ""
        self._steps = self._trainings = self._evaluations = 0
        self._scope = Scope(-1, 1)
        self._has_evaluated, self._turns = False, 0
        self._is_meeting, self._found = False, list[RanksDisagreeError]()
        self._order: CollectiveOrder | None = None
        self._script = ScriptThread(_LOOK_SECONDS)
        self._lock = threading.Lock()
        self._is_told = False
        self._place: tuple[int, ...] | None = None
        self._looks = self._full = 0
        self._closed = threading.Event()
        own = weakref.ref(self)
        self._thread = threading.Thread(target=_run, args=(own, self._closed), daemon=True)
        self._thread.name = "msrun-watchdog"
        if self._store is not None:
            self._thread.start()
            self._unhook = _explain_uncaught(own)

    def watch(self, model: nn.Module, scope: Scope, order: CollectiveOrder | None) -> None:
        """Note calls of `model`, too.

        Args:
            model: Of `rt.shard`.
            scope: Of its ranks.
            order: Of what they gather; None if they do not.
        """
        self._scope = max(self._scope, scope, key=lambda each: each.size)
        if order:
            self._order = order
            order.watch_gather = self._begin_gather
        begin, end = CallHook(self._begin_call), CallHook(self._end_call)
        # Before others: some of them gather parameters.
        nn.Module.register_forward_pre_hook(model, begin, prepend=True)
        nn.Module.register_forward_hook(model, end)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Note a step; raise what ranks did otherwise, where a collective of it raised.

        Raises:
            RanksDisagreeError: Ranks were not all in this step.
        """
        self._steps += 1
        self._kind, self._has_evaluated = "step", False
        try:
            yield
        except RuntimeError as error:
            if cause := self.explain(error):
                raise cause from None
            raise
        finally:
            self._kind = "between"

    def _begin_call(self, model: nn.Module, *_: object) -> None:
        if self._kind == "step":
            return
        self._model = type(model).__name__.removeprefix("FSDP")  # which is torch's
        if trains(model):
            self._kind, self._has_evaluated = "training", False
            self._trainings += 1
            return
        self._begin_evaluation()

    def _begin_gather(self, unit: str) -> None:
        """Note the call of a part of a model, which gathers `unit`, where it is no training."""
        if self._kind == "between" and not torch.is_grad_enabled():
            self._model = unit
            self._begin_evaluation()
            self._kind = "between"

    def _begin_evaluation(self) -> None:
        self._kind = "evaluation"
        self._evaluations += 1
        if not self._has_evaluated:
            self._has_evaluated = True
            self._turns += 1
            if self._turns in _FIRST_TURNS or self._turns % _EVERY == 0:
                self._meet()

    def _end_call(self, *_: object) -> None:
        if self._kind == "evaluation":
            self._kind = "between"

    def _meet(self) -> None:
        """Return when all ranks of the scope are in this evaluation.

        One that is alone in it would meet another collective of theirs, and gloo ends a process
        that gets more bytes than it waits for.

        Raises:
            RanksDisagreeError: They are elsewhere.
        """
        if self._store is None or self._scope.size == 1 or self._closed.is_set():
            return
        key, pause = f"evaluation {self._scope.number} {self._evaluations}", _PAUSE_SECONDS
        self._store.add(key, 1)
        self._is_meeting = True
        try:
            while self._store.add(key, 0) < self._scope.size:
                if self._found:
                    raise self._found.pop()
                self._closed.wait(pause)
                pause = min(2 * pause, _ANSWER_LOOK_SECONDS)
        finally:
            self._is_meeting = False

    def explain(self, error: BaseException) -> RanksDisagreeError | None:
        """Return what ranks did otherwise if `error` is of a collective; else None."""
        if self._store is None or self._closed.is_set() or not _is_of_peers(error):
            return None
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            self._tell(self._store, self._here())
            self._store.set(_ASKED, "")
            for _ in range(int(_ANSWER_SECONDS / _ANSWER_LOOK_SECONDS)):
                if self._store.add(_WAITING, 0) >= self._ranks:
                    return self._cause(self._store)
                self._closed.wait(_ANSWER_LOOK_SECONDS)
        return None

    def close(self) -> None:
        """Tell the others that this rank has left."""
        if self._store is not None and not self._closed.is_set():
            self._closed.set()
            self._unhook()
            self._kind = "ended"
            with contextlib.suppress(RuntimeError):
                self._tell(self._store, self._here())
            if threading.current_thread() is not self._thread:
                self._thread.join(_LOOK_SECONDS)

    def look(self) -> None:
        """Look at the script, and end the process if all ranks wait for good; once a second."""
        frame = self._script.waiting()
        waits_in = _waits_in(frame)
        calls = (self._steps, self._trainings, self._evaluations)
        place = (id(frame), frame.f_lasti, *calls) if frame and waits_in else None
        if self._is_meeting:
            waits_in, place = "", (0, 0, *calls)
        self._looks = self._looks + 1 if place and place == self._place else 0
        self._place = place
        if not self._looks:
            self._withdraw()
            return
        store = self._own_store
        is_due = self._looks % max(1, self._ranks // _QUESTIONS) == 0
        if self._looks >= _LOOKS or (is_due and store.check([_ASKED])):
            self._tell(store, self._here(waits_in))
            if is_due:
                self._full = self._full + 1 if store.add(_WAITING, 0) >= self._ranks else 0
        if self._full == _FULL_LOOKS and (cause := self._cause(store)):
            if self._is_meeting:  # in Python, where it can raise
                self._found.append(cause)
            else:
                _end(cause.with_traceback(_traceback(frame)))

    @property
    def _own_store(self) -> Any:
        """The store, over a connection of this thread's own: the script may wait for an answer."""
        if not hasattr(self, "_clone"):
            self._clone = self._store.clone()
        return self._clone

    def _here(self, waits_in: str = "") -> ScriptPlace:
        unit = self._order.gathering if self._order else ""
        return ScriptPlace(
            kind=self._kind,  # type: ignore[arg-type]  # one of the kinds
            steps=self._steps,
            trainings=self._trainings,
            evaluations=self._evaluations,
            scope=self._scope.number,
            model=self._model,
            waits_in=f"{waits_in} of {unit}" if waits_in and unit else waits_in,
        )

    def _tell(self, store: Any, place: ScriptPlace) -> None:
        with self._lock:
            if self._is_told and place.kind != "ended":
                return
            store.set(f"{_PLACE}{self._rank}", msgspec.json.encode(place).decode())
            if not self._is_told:
                self._is_told = True
                store.add(_WAITING, 1)

    def _withdraw(self) -> None:
        with self._lock:
            if self._is_told and not self._closed.is_set():
                self._is_told, self._full = False, 0
                self._own_store.add(_WAITING, -1)

    def _cause(self, store: Any) -> RanksDisagreeError | None:
        found = store.multi_get([f"{_PLACE}{rank}" for rank in range(self._ranks)])
        sentence = disagreement([msgspec.json.decode(text, type=ScriptPlace) for text in found])
        return RanksDisagreeError(sentence, hint=HINT) if sentence else None


def _run(watchdog: weakref.ref[Watchdog], closed: threading.Event) -> None:
    while not closed.wait(_LOOK_SECONDS):
        found = watchdog()
        if found is None:
            return
        try:
            found.look()
        except RuntimeError:  # the store has ended, and with it the job
            return
        del found


def _store(prefix: str) -> Any:
    """Return the store of the process group, below `prefix`; None if torch does not show it."""
    get: Callable[[], Any] | None = getattr(dist.group.WORLD, "get_group_store", None)
    store = get() if get and dist.get_world_size() > 1 else None
    if store is None or not hasattr(store, "clone"):
        return None
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # in torch's documentation


def _waits_in(frame: FrameType | None) -> str:
    """Return the function of a collective in which a thread waits for other ranks, or ""."""
    frames: list[stacks.Frame] = []
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        frames.append(stacks.Frame(code.co_filename, 0, code.co_name))
        frame = frame.f_back
    waiting = [each.function for each in frames if stacks.waits([each])]
    return waiting[0] if stacks.waits(frames) else ""


def _is_of_peers(error: BaseException) -> bool:
    """Return whether `error` is of a collective that did not end as it should."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _traceback(frame: FrameType | None) -> TracebackType | None:
    """Return the stack from the script's first call to `frame`, as if that had raised."""
    found = None
    while frame is not None:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return found


def _end(error: RanksDisagreeError) -> None:
    """End this process as `error` would, if nothing caught it."""
    record_error(error)
    sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the script
            stream.flush()
    os._exit(_EXIT_CODE)


def _explain_uncaught(watchdog: weakref.ref[Watchdog]) -> Callable[[], None]:
    """Have an uncaught error of a collective show what ranks did otherwise; return what undoes it.

    A hook that came later stays, and this one with it.
    """
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = watchdog()
        if cause := found.explain(error) if found else None:
            record_error(cause, is_closer=True)
            before(type(cause), cause, trace)
        else:
            before(kind, error, trace)

    def undo() -> None:
        if sys.excepthook is show:
            sys.excepthook = before

    sys.excepthook = show
    return undo
