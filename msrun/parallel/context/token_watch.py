"""Follows the tokens of a batch through the first forward pass and loss of a model.

`TokenWatch` notes at each tensor what `token_dims` knows of it, and raises a `ModelError` that
names the line of the first function that mixes tokens of the part.  Only attention may, which the
axis `cp` computes for all of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.context.token_calls import (
    MixedTokensError,
    Taint,
    TokenCall,
    TokenPlace,
    shown,
)
from msrun.parallel.context.token_dims import PROPERTIES, place_of
from msrun.parallel.context.token_writes import place_after, place_in
from msrun.parallel.local import is_sharded
from msrun.parallel.losses.calls.size_factors import FACTORS
from msrun.parallel.losses.calls.sources import SIZE, Sources, script
from msrun.parallel.losses.notes import PASSING, watch_numbers
from msrun.parallel.losses.torch_calls import DIVIDING, MULTIPLYING, SIZES
from msrun.parallel.torch_compat import reads_values, viewed, write_count

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[2])
_MARK = "msrun_tokens"
_watches = watch_numbers()
_WRITING = frozenset(["copy", "__setitem__"])
# What reads a number of a tensor, on which code then depends.
_READING = frozenset(["__bool__", "__int__", "__float__", "__index__", "item", "tolist"])
# A cache keeps the last tokens of a window, and returns all of them to the layer.
_KEEPERS = frozenset(["cache_utils.py"])
# It asks whether position numbers go up one by one, which those of every part do if all do.
_READERS = frozenset(["masking_utils.py"])
_HINT = (
    "compute it from all tokens before rt.shard, or of each token by itself; attention must be "
    "torch.nn.functional.scaled_dot_product_attention (in transformers attn_implementation='sdpa')"
    "; experts need a rule of style experts, with ep: 1 in the mesh where each rank has all of them"
)
Known = TokenPlace | Taint


class TokenWatch(TorchFunctionMode):
    """While it is active, functions that mix tokens are refused.

    It is the innermost mode, and so sees what the model calls, and not what an operator plan does
    instead.

    Args:
        key: Path of the rule in the configuration, for messages.

    Attributes:
        refuses: Whether the model computes, and not a pipeline with what it gets.
    """

    is_watch = True
    refuses = True

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self._number = next(_watches)
        self._tokens = 1
        self._sources = Sources()

    def begin(self, tensors: Iterable[Tensor], tokens: int) -> None:
        """Note that `tensors` of the batch have their tokens in dim 1."""
        self._tokens = tokens
        for tensor in tensors:
            self.leave(tensor, TokenPlace(1))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        # Before the call, which may write them.
        known = {id(tensor): mark for tensor in given if (mark := self.mark(tensor))}
        if not known:
            return func(*args, **kwargs)
        if func in SIZES:
            self._note_size(args, kwargs)
            return func(*args, **kwargs)
        name = _name(func)
        written = [(x, write_count(x)) for x in given if not x.is_inference()]
        taints = [mark for mark in known.values() if isinstance(mark, Taint)]
        if taints and name in _READING and self.refuses:
            self._check_read(taints[0])
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            said = str(error).strip().partition("\n")[0]
            is_of_size = "size" in said or "shape" in said
            if not is_of_size or not self.refuses or reads_values(error):
                raise
            raise self.refusal(f"{name}, which does not run on a part: {said}") from None
        for tensor in _tensors((args[0] if name == "__setitem__" else result,)):
            self._follow(TokenCall(name, args, kwargs, tensor, known, self._tokens))
        for tensor, count in written:
            if write_count(tensor) != count and (mark := self.mark(tensor)):
                self._leave_base(tensor, mark)
        return result

    def _follow(self, call: TokenCall) -> None:
        try:
            mark = _known(call)
        except MixedTokensError as error:
            if self.refuses and _is_kept_only():
                self.leave(call.result, Taint(str(error)))  # no output of the layer has it
                return
            if self.refuses:
                raise self.refusal(str(error)) from None
            return
        if self.refuses and (isinstance(mark, TokenPlace) or call.name in MULTIPLYING):
            self._check_factor(call)
        if mark:
            self.leave(call.result, mark)

    def _note_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the model reads how many tokens the part has."""
        place, asked = self.mark(args[0]), next(iter((*args[1:], *kwargs.values())), None)
        if not isinstance(place, TokenPlace) or place.before * place.after > 1:
            return
        count = args[0].dim()
        if asked is None or asked % count == place.dim:
            self._sources.note((place.dim, place.dim - count))

    def _check_factor(self, call: TokenCall) -> None:
        """Refuse what the model computes by the number of tokens of the part.

        What is trained and divided by this number is so for a mean, which is right in a loss.
        """
        if call.name not in FACTORS or not self._sources.has_reads:
            return
        number = next((x for x in call.args if type(x) in (int, float)), None)
        divides = call.name in DIVIDING and call.result.requires_grad
        is_mean = divides and number and number % self._tokens == 0
        found = None if number is None or is_mean else script()
        if found and self._sources.followed(*found) is SIZE:
            raise self.refusal(f"{shown(call)} by a number of the tokens of the part")

    def _leave_base(self, tensor: Tensor, mark: Known) -> None:
        """Note that a write to `tensor`, if it is a view, has brought tokens into its memory."""
        base = viewed(tensor)
        if base is None or self.mark(base):
            return
        found = place_in(base, tensor, mark) if isinstance(mark, TokenPlace) else mark
        if found:
            self.leave(base, found)
        elif self.refuses:
            raise self.refusal("a write to some tokens of the part, by their position")

    def refusal(self, what: str) -> ModelError:
        """Return the error for a model that mixes tokens of the part by `what`."""
        text = what if " (" in what else f"{what}{_line()}"
        return ModelError(
            f"{self._key}.style: context divides the tokens of sequences, and the model has {text}",
            hint=_HINT,
        )

    def _check_read(self, taint: Taint) -> None:
        stack = traceback.extract_stack(limit=12)
        if not any(Path(frame.filename).name in _READERS for frame in stack):
            raise self.refusal(f"a decision by {taint.name}")

    def leave(self, tensor: Tensor, mark: Known) -> None:
        """Note what is known of `tensor`."""
        if tensor.is_inference():
            return
        if isinstance(mark, Taint) and " (" not in mark.name:
            mark = Taint(f"{mark.name}{_line()}")
        # Whatever is written later: a tensor keeps its tokens where they are.
        noted = (self._number, *mark)
        setattr(tensor, _MARK, noted)
        part = _shard(tensor)
        # An operator plan makes tensors of many ranks from those of one, and the other way round.
        if part is not None and not (
            isinstance(mark, TokenPlace) and part.shape[mark.dim] != tensor.shape[mark.dim]
        ):
            setattr(part, _MARK, noted)
        if tensor.grad_fn:
            metadata: dict[Any, Any] = tensor.grad_fn.metadata  # type: ignore[assignment]
            metadata[_MARK, tensor.output_nr] = noted

    def mark(self, tensor: Tensor) -> Known | None:
        """Return what is known of `tensor`; None if it is not computed from the batch."""
        if isinstance(tensor, Parameter) or tensor.is_inference():
            return None
        noted = getattr(tensor, _MARK, None) or _carried(tensor)
        if noted is None and (part := _shard(tensor)) is not None:
            return self.mark(part)
        if noted is None or noted[0] != self._number:
            return None
        return Taint(noted[1]) if isinstance(noted[1], str) else TokenPlace(*noted[1:])


def _known(call: TokenCall) -> Known | None:
    """Return what is known of a result, of which some argument may be tainted already."""
    taint = next((mark for mark in call.places.values() if isinstance(mark, Taint)), None)
    if taint is None:
        return place_after(call) if call.name in _WRITING else place_of(call)
    has_tokens = any(isinstance(mark, TokenPlace) for mark in call.places.values())
    if call.name in _WRITING and call.result.is_floating_point() and not has_tokens:
        return None  # a list of metrics
    if call.result.is_floating_point() and (has_tokens or call.result.dim()):
        raise MixedTokensError(taint.name)
    return taint


def _shard(tensor: Tensor) -> Tensor | None:
    """Return this rank's shard of a tensor that an operator plan divides; None of a plain one."""
    if not is_sharded(tensor):
        return None
    with torch.no_grad():
        return tensor.to_local()


def _carried(tensor: Tensor) -> Any:
    """Return what was noted of a tensor that a library passed on in one of its own."""
    node, place = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name() in PASSING and place < len(node.next_functions):
        node, place = node.next_functions[place]
        metadata: dict[Any, Any] = node.metadata if node else {}  # type: ignore[assignment]
        if noted := metadata.get((_MARK, place)):
            return noted
    return None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Return tensors among `values` and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, Tensor))


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, also of one that writes in place."""
    name: str = PROPERTIES.get(func, getattr(func, "__name__", ""))
    return name if name.endswith("__") else name.removesuffix(".default").removesuffix("_")


def _is_kept_only() -> bool:
    """Return whether the running function was called by a cache, which nobody reads in training."""
    frame = next((f for f in reversed(traceback.extract_stack()) if not _is_library(f)), None)
    return frame is not None and Path(frame.filename).name in _KEEPERS


def _is_library(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return any(library in path.parents for library in _LIBRARIES)


def _line() -> str:
    """Return where in the model the running function was called: its last line there."""
    for frame in reversed(traceback.extract_stack()):
        if not _is_library(frame):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
