"""Context parallelism: a model computes on the part of each sequence that its rank has.

The problem.  A long sequence does not fit one rank, and the model is not written for parts of one.
It is right on a part as long as it treats tokens one by one.  Three things do not: attention, what
counts positions from 0, and code that mixes tokens in some other way.

The idea.  The ranks of an axis `cp` get the same batch, and each takes consecutive tokens of it.  A
function mode is active in forward and loss:

- `scaled_dot_product_attention` of tokens becomes that of all ranks (`attention`).
- `torch.arange(n)` for the n tokens of the part, and the first n rows of a table of all positions,
  become those of the part: which calls are meant was seen in the first step.
- In the first step everything else is followed by a `TokenWatch`, which refuses by its name what
  mixes tokens or is not known.  So nothing is cut that must not be.

For everything else the ranks of `cp` are data-parallel ranks: the runtime runs on a mesh in which
`dp` has the ranks of both (`rank_context`), so gradients, ZeRO, losses by sum and count, digests
and checkpoints need to know nothing of tokens.  docs/decisions/0053 has the reasons.

`rt.step` cuts the batch, and the loss function gets parts.  A call of the model by the script gets
whole tensors: it cuts its arguments and gathers its outputs.

A backward pass leaves function modes, and a module that the script recomputes there calls attention
again.  So the modules that the rule matches enter the mode by themselves.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.autocast.casts import as_factor
from msrun.parallel.collectives import all_gather
from msrun.parallel.config import ROOT
from msrun.parallel.context.attention import Attention, attention_arguments, by_heads
from msrun.parallel.context.documents import FINDERS, Documents
from msrun.parallel.context.inside import Inside, has_no_attention
from msrun.parallel.context.masks import SequencePart
from msrun.parallel.context.parts import Cut, cut_batch
from msrun.parallel.context.positions import (
    RangeOfPart,
    RowsOfAll,
    RowsOfPart,
    first_rows,
    range_of,
    with_rows,
)
from msrun.parallel.context.ring import around
from msrun.parallel.context.sites import apart_refusal, shown_site, site_of_call
from msrun.parallel.context.token_calls import TokenPlace
from msrun.parallel.context.token_watch import TokenWatch
from msrun.parallel.context.windows import Windows, window_of
from msrun.parallel.losses.batch import StepBatch, batch_size, map_leaves, tensors_in
from msrun.parallel.rank_context import SequenceRanks
from msrun.parallel.torch_compat import checkpointed, is_active, is_in_backward

_DIMS = 4
# Names of functions that may add positions of all tokens.
ADDING = ("add", "__add__", "__radd__")
_TOKENS = -2


class Sequences(TorchFunctionMode):
    """The tokens of this rank, and what computes on those of all.

    Args:
        key: Path of the rule in the configuration, for messages.
        ranks: Ranks of the axis.
        model: The model, in whose modules `forward` is replaced.
        modules: Names of the modules whose attention is that of all ranks.
        kind: Of attention: `all_to_all`, `ring`, or what fits.
    """

    # Context of the operator plan.
    guard: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    divides_samples = True  # for watches of losses

    def __init__(
        self,
        key: str,
        ranks: SequenceRanks,
        model: nn.Module,
        modules: Iterable[str],
        kind: str | None,
    ) -> None:
        super().__init__()
        self._key = key
        self._ranks = ranks
        self._kind = kind or "auto"
        self._model = weakref.ref(model)
        self._local = threading.local()
        self._cut: Cut | None = None
        self._tokens = 0
        self._real: Tensor | None = None
        # Of this micro-batch, and whether the model has looked for them.
        self._documents: Documents | None = None
        self._has_documents = False
        # Samples of the batch that micro-batches had.
        self._done = 0
        self._is_step = False
        # Whether a stage raised in this step, which goes on.
        self._has_raised = False
        self._watch: TokenWatch | None = None
        # Whether attention of something else than tokens was seen, so that shapes do not tell.
        self._has_others = False
        self._watched: set[bool] = set()
        self.windows = Windows(key)
        self._has_apart = False
        # Calls that make positions, and calls of the same functions that do not.
        self._positions: set[Any] = set()
        self._plain: set[Any] = set()
        self._special: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: self._attend,
            torch.arange: self._count,
            Tensor.__getitem__: self._take,
            torch.diff: self._find_documents,
        }
        names = set(modules)
        self._all = "" in names
        for name, module in model.named_modules():
            if name and not has_no_attention(module):
                forward = module.forward
                inside = Inside(partial(self.inside, is_all=name in names), forward)
                module.forward = update_wrapper(inside, forward)

    def leave_out(self, module: nn.Module, *, is_compiled: bool) -> None:
        """Have `module` and those inside enter this mode no more by themselves."""
        self._has_apart |= is_compiled
        for part in module.modules():
            if isinstance(inside := vars(part).get("forward"), Inside):
                part.forward = inside.plain

    def in_recordings(self, names: Collection[str]) -> list[tuple[str, nn.Module]]:  # noqa: ARG002 - of stages
        """Return the modules of these names that run in recordings of a pipeline."""
        return []

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Refuse inside, in the module `name`, what is of the tokens of all ranks."""
        before = getattr(self._local, "apart", "")
        self._local.apart = name
        try:
            yield
        finally:
            self._local.apart = before

    def takes_first_rows(self, x: Tensor, items: tuple[Any, ...]) -> bool:
        """Return whether an index takes as many first rows of `x` as this part has tokens."""
        return first_rows(x, items, self._tokens, self._ranks.size) is not None

    def _refuse_apart(self, what: str) -> None:
        if name := getattr(self._local, "apart", ""):
            raise apart_refusal(name, what)

    @property
    def _is_training(self) -> bool:
        model = self._model()
        return model is None or model.training

    def cover(
        self, model: nn.Module, guard: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        """Have `model` cut what a script calls it with, and compute under `guard`.

        Called once nothing else wraps the model.
        """
        self.guard = guard
        model.forward = update_wrapper(partial(self.run, model, model.forward), model.forward)

    # The batch.

    def cut(self, model: nn.Module, batch: StepBatch) -> StepBatch:
        """Return this rank's part of a batch of whole sequences."""
        self._cut = cut_batch(self._key, model, batch, self._ranks.index, self._ranks.size)
        self._done, self._tokens = 0, self._cut.tokens
        self.windows.begin(self._tokens, self._ranks.size, is_expected=self._cut.has_windows)
        return self._cut.batch

    def begin(self, part: StepBatch) -> None:
        """Begin the forward pass of `part`, the next micro-batch of what `cut` returned."""
        samples = batch_size(part)
        self._choose(range(self._done, self._done + samples))
        self._has_documents = False
        self._done += samples
        self._begin_watch(self._watch, tensors_in(part))

    def _choose(self, samples: Sequence[int]) -> None:
        """Have attention see the padding and the documents of some samples of the batch."""
        cut = self._of_batch
        self._real = None if cut.real is None else cut.real[list(samples)]
        self._documents = cut.documents and cut.documents.of(samples)

    def _begin_watch(self, watch: TokenWatch | None, tensors: Sequence[Tensor]) -> None:
        """Have `watch` follow those of the first tensors of the batch that were cut."""
        if watch:
            found = [x for x, is_cut in zip(tensors, self._of_batch.is_cut, strict=False) if is_cut]
            watch.begin(found, self._tokens)

    @property
    def _of_batch(self) -> Cut:
        if self._cut is None:
            raise RuntimeError("no batch was cut")
        return self._cut

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Compute on parts inside: forward, loss and backward of a step, or a call of the model."""
        self._is_step, self._has_raised = True, False
        if self._has_others or self._is_training not in self._watched:
            self._watch = TokenWatch(self._key)
        try:
            with self._around_step():
                yield
            if not self._has_others:
                if not self._has_raised:
                    self.windows.check()
                    self._watched.add(self._is_training)
            elif self._has_apart:
                raise ModelError(
                    f"{ROOT}.compile: functions of this model are looked at in each step, since it "
                    f"has attention of something else than tokens beside {self._key}",
                    hint="leave out one of the two",
                )
        finally:
            self._is_step = False
            self._watch = None

    def _around_step(self) -> contextlib.AbstractContextManager[Any]:
        return self.inside(is_all=self._all)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look for what mixes tokens inside, if a first step is to: within all other modes."""
        with self._watch or contextlib.nullcontext():
            yield

    def repeated(self) -> contextlib.AbstractContextManager[None]:
        """Be active in a recomputation, outside of the modes that it enters, as in a step."""
        return self.inside(is_all=False)

    def watch_now(self) -> TokenWatch | None:
        """Return what looks at functions of the model now."""
        return None if is_in_backward() else self._watch

    @contextlib.contextmanager
    def inside(self, *, is_all: bool) -> Iterator[None]:
        """Be active inside; `is_all` says that attention there is that of all ranks."""
        local = self._local
        local.depth = getattr(local, "depth", 0) + is_all
        outer = getattr(local, "region", None)
        if self._watch:
            local.region = checkpointed()
        try:
            with contextlib.nullcontext() if is_active(self) else self:
                yield
        finally:
            local.depth -= is_all
            local.region = outer

    def run(
        self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `forward` on the part of whole arguments; return whole outputs."""
        if self._is_step or is_in_backward():
            with self.inside(is_all=self._all):
                return forward(*args, **kwargs)
        part = self.cut(model, StepBatch(args, kwargs, None))
        with self.active(), self.guard(), self.watched():
            self.begin(part)
            output = forward(*part.inputs, **part.named)
        return map_leaves(self._joined, output)

    def _joined(self, x: Tensor) -> Tensor:
        if x.dim() > 1 and x.shape[1] == self._tokens:
            return all_gather(x, self._ranks.group, 1)
        if x.dim():
            return x
        raise ModelError(
            f"{self._key}.style: context: the model returns a number of its part of the batch, "
            "which is not that of the whole",
            hint="train it by rt.step, which puts losses together, or leave out the labels",
        )

    # Functions of torch.

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the module."""
        del types
        kwargs = kwargs or {}
        if func in self._special:
            return self._special[func](func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Positions of all tokens, added to those of a part.
            if getattr(func, "__name__", "") not in ADDING:
                raise
            given = self._with_rows(args)
            if given is None:
                raise
        self._refuse_apart("a sum with values for all tokens")
        return func(*given, **kwargs)

    def _with_rows(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        take = partial(self._called, RowsOfAll(self._first, self._tokens, self._note))
        return with_rows(args, self._tokens, self._ranks.size, take)

    def _count(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """`arange`, from the first token of this part on if it counts tokens."""
        is_tokens = range_of(args, kwargs) == (0, self._tokens, 1)
        if not self._is_meant(self.watch_now(), "torch.arange", is_tokens=is_tokens):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        return self._called(RangeOfPart(self._first, self._note), *args, **kwargs)

    def _take(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`x[...]`, of a table of positions with those of this part."""
        watch = self.watch_now()
        x, index = args
        items = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(item, slice) for item in items):
            return func(*args, **kwargs)
        at = first_rows(x, items, self._tokens, self._ranks.size)
        if watch and watch.mark(x):
            at = None
        if not self._is_meant(watch, "a slice of a table", is_tokens=at is not None) or at is None:
            return func(*args, **kwargs)
        return self._called(RowsOfPart(at, self._first, self._note), x, items)

    def _called(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    def _note(self, x: Tensor, place: TokenPlace) -> None:
        """Note where `x` has tokens, if somebody looks."""
        if watch := self.watch_now():
            watch.leave(x, place)

    def _find_documents(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`torch.diff`, by which transformers finds documents: they are those of whole sequences.

        It finds none here, so it makes no mask, and attention follows them.
        """
        result = func(*args, **kwargs)
        if self._documents is None or Path(site_of_call()[0].co_filename).name not in FINDERS:
            return result
        self._has_documents = True
        return torch.ones_like(result)

    @property
    def _first(self) -> int:
        """Number of the first token of this part."""
        return self._ranks.index * self._tokens

    def _is_meant(self, watch: TokenWatch | None, what: str, *, is_tokens: bool) -> bool:
        """Return whether this call of the model makes positions of the tokens of the part."""
        if not is_tokens and watch is None:
            return False
        if is_tokens:
            self._refuse_apart(what)
        site = site_of_call()
        if self._is_decided(site):
            return False
        if watch and is_tokens:
            self._check_repeated(watch, what)
        if watch:
            (self._positions if is_tokens else self._plain).add(site)
            return is_tokens
        if site in self._positions:
            return True
        if site in self._plain:
            return False
        raise ModelError(
            f"{self._key}.style: context: {what} of {self._tokens} values, as many as the part has "
            f"tokens, in a line that did not run in the first step{shown_site(site)}",
            hint="give the model its positions in the batch",
        )

    def _is_decided(self, site: tuple[Any, int]) -> bool:  # noqa: ARG002 - of stages
        """Return whether calls at `site` that make positions were replaced already."""
        return False

    def _attend(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`scaled_dot_product_attention`, of the tokens of all ranks."""
        watch = self.watch_now()
        query, key, value, mask, dropout, is_causal = attention_arguments(*args, **kwargs)
        is_tokens = query.shape[_TOKENS] == key.shape[_TOKENS] == self._tokens
        if self._is_of_others(query, key, value) or not is_tokens:
            return func(*args, **kwargs)
        self._refuse_apart("attention")
        if watch:
            self._check_repeated(watch, "attention")
        if window := window_of(mask):
            mask, is_causal = None, not window.behind
        self._check_attention(query, mask, dropout, is_causal=is_causal)
        part = SequencePart(self._key, self._first, self._tokens, self._ranks.size)
        known = None if watch is None or mask is None else watch.mark(mask)
        is_known = watch is not None
        rows = None if self._real is not None else part.rows(mask, known, is_known=is_known)
        keys = part.keys(mask, self._real, known, is_known=is_known) if rows is None else None
        ask = Attention(
            group=self._ranks.group,
            is_causal=is_causal,
            scale=kwargs.get("scale"),
            keys=keys,
            rows=rows,
            documents=self._documents if self._has_documents and mask is None else None,
            distance=window and window.before,
        )
        attention = around if self._is_ring(query) else by_heads
        return attention(ask, as_factor(query), as_factor(key), as_factor(value))

    def _is_of_others(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether somebody looks, and sees that this is no attention of tokens."""
        watch = self.watch_now()
        if watch is None or self._is_over_tokens(watch, query, key, value):
            return False
        self._has_others = True
        return True

    def _is_over_tokens(self, watch: TokenWatch, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether tokens attend to tokens, and not each by itself or something else."""
        places = [watch.mark(x) for x in (query, key, value)]
        if places == [TokenPlace(x.dim() + _TOKENS) for x in (query, key, value)]:
            return True
        is_alike = query.shape[_TOKENS] == key.shape[_TOKENS] == self._tokens
        if places == [None] * 3 and not is_alike:
            return False
        if isinstance(places[0], TokenPlace) and set(places) == {places[0]} and places[0].dim == 0:
            return False
        raise watch.refusal("an attention of tokens to something else")

    def _check_repeated(self, watch: TokenWatch, what: str) -> None:
        """Refuse what a backward pass would repeat without entering a module, and this mode."""
        if checkpointed() is not getattr(self._local, "region", None):
            raise watch.refusal(
                f"{what} in a function of torch.utils.checkpoint, which must call a module there"
            )

    def _is_ring(self, query: Tensor) -> bool:
        return self._kind == "ring" or query.shape[1] % self._ranks.size > 0

    def _check_attention(
        self, query: Tensor, mask: Tensor | None, dropout: float, *, is_causal: bool
    ) -> None:
        """Refuse attention that is not that of one process, or does not divide."""
        problem = ""
        if not getattr(self._local, "depth", 0):
            problem = "attention in a module that the rule does not match"
        elif dropout:
            problem = f"dropout {dropout} of attention weights, which has no counterpart on parts"
        elif is_causal and mask is not None:
            problem = "attention with is_causal and a mask, of which torch takes one"
        elif query.dim() != _DIMS:
            problem = (
                f"attention of shape {tuple(query.shape)}, and not (samples, heads, tokens, width)"
            )
        elif self._kind == "all_to_all" and query.shape[1] % self._ranks.size:
            problem = (
                f"{query.shape[1]} heads of queries, which can not be split into "
                f"{self._ranks.size} parts (choose kind: ring)"
            )
        elif is_causal and self._is_ring(query) and self._tokens % 2:
            problem = (
                f"{self._tokens} tokens in a part, and a ring with is_causal exchanges halves of it"
            )
        if problem:
            raise ModelError(f"{self._key}.style: context: the model has {problem}")
