"""Notices, in the first step, a model that mixes the samples of a batch.

A rank and a micro-batch have a part of the batch.  A batch norm by hand takes the statistics of
that part, and no result of the parts makes that of the batch.  `SampleWatch` is active in the first
forward pass and loss of a model, and follows the dim of samples by the rules of `sample_dims`, and
where these know nothing by `guesses`.  Later steps do without it.  A stage of a pipeline sees a
part of the forward; there it is active while the whole one is recorded, and the last stage gets
what is `known` of outputs.

Samples that are taken by their position, such as `x[:k]`, are followed by `rows`.  So are integers
of the batch that micro-batches do not cut, such as the edges of a graph: they are places in the
whole batch, and no micro-batch may take its samples by them.

What it finds counts only if the loss depends on it, which the graph of autograd says; so metrics
and buffers may mix samples.  Micro-batches cut dim 0 of the batch, so there a mixture is refused.
Data-parallel ranks alone may have a batch with the sequence first, or add up statistics by
collectives of the script, so there it is a warning.  Where `rt.loader` knows how many samples a
batch has, its first dim is certain, and samples by their position are refused there too; `verify`
compares instead.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from msrun.errors import ModelError
from msrun.parallel.config import ROOT
from msrun.parallel.local import is_sharded, takes_gradients
from msrun.parallel.losses.batch import tensors_in
from msrun.parallel.losses.calls.host_values import HostValues
from msrun.parallel.losses.calls.marks import Known, Mark, Mixture, Outcome, TorchCall
from msrun.parallel.losses.calls.model_numbers import ModelNumbers
from msrun.parallel.losses.calls.orders import ORDERING
from msrun.parallel.losses.calls.sample_notes import SampleNotes
from msrun.parallel.losses.calls.size_factors import SizeFactors
from msrun.parallel.losses.calls.whole_numbers import handed_on, of_result
from msrun.parallel.losses.decided.outside_values import OutsideValue, of_pairs
from msrun.parallel.losses.guesses import PUTTING_BACK, guess, marks_behind, marks_of_values
from msrun.parallel.losses.notes import (
    MIXTURE,
    SAMPLES,
    carried,
    grad_fn_of,
    graph_of,
    leave,
    metadata_of,
    node_of,
    note_of_all_ranks,
    watch_numbers,
)
from msrun.parallel.losses.pairs.input_pairs import (
    CUT_HINT,
    chosen_samples,
    failure_of,
    input_marks,
    outcome_of,
)
from msrun.parallel.losses.rows import RowsWatch, is_row_of_integers, takes_by
from msrun.parallel.losses.sample_dims import has_rule, pairs_of_numbers, plain_name
from msrun.parallel.losses.terms import is_counted
from msrun.parallel.losses.torch_calls import KEEPING, SIZES, name_of, script_line, tensors_of
from msrun.parallel.torch_compat import local_tensor, write_count

# Attributes of tensors: the number of the watch, how often it was written, and what is known.
_MARK, _MIXTURE = SAMPLES, MIXTURE
# Of a node: the call was seen, and no rule said more; what is known of tensors that it comes from.
_SEEN = "msrun_seen"
_BEHIND = "msrun_samples_behind"
_WRITTEN_VIEW = "CopySlices"  # the node of a tensor of which a view was written
_watches = watch_numbers()
_NONE = torch.empty(0)
_COLLECTIVES = dist.all_reduce.__module__
_HINT = (
    f"`{ROOT}: {{verify: first_step}}` compares the step with one process instead, and "
    f"`{ROOT}: {{batch_norm: local}}` accepts statistics of each part"
)
_GATHER = "; rt.gather has the samples of all ranks"


class SampleWatch(TorchFunctionMode):
    """While it is active, functions that mix samples are noticed.

    Args:
        batch: Inputs and targets of this part of the batch.
        samples: Samples in it.
        dim: That of samples.
        names: Of the tensors in `batch`; empty for those that micro-batches do not cut.
        parts: Micro-batches.
        has_labels: Whether whole numbers that nobody gave the model, as many as samples, are
            labels of these.

    Attributes:
        samples: Samples in it.
        parts: Micro-batches.
        numbers: What the model computes of all samples.
        reads_graph: As every watch that `torch_compat.is_graph_read` tells of.
    """

    is_watch = reads_graph = True

    def __init__(
        self,
        batch: Any,
        samples: int,
        dim: int = 0,
        *,
        names: Iterable[str] = (),
        parts: int = 1,
        has_labels: bool = False,
    ) -> None:
        super().__init__()
        self.samples = samples
        self.parts = parts
        self.numbers = ModelNumbers()
        self._has_labels = has_labels and samples > 1
        self._number = next(_watches)
        self._notes = SampleNotes(self._number)
        # Where nothing cuts rows, `read` warns of neighbours, as of all other mixtures.
        self._rows = RowsWatch(self._number, samples, of_model=True, is_cut=True)
        self._sizes, self._host = SizeFactors(samples), HostValues()
        self._cut = ""  # where rows were cut first
        self._failure: tuple[Exception, str] | None = None  # and its line
        self.pairs: list[OutsideValue] = []
        self._pairs = ""  # of rows of different inputs, that were computed first
        self._found: list[tuple[Mixture, Any]] = []  # and the nodes of autograd that have them
        self._inputs: dict[str, list[Tensor]] = {}  # by the names that marks have
        self.take(batch, dim, names)

    def take(self, batch: Any, dim: int = 0, names: Iterable[str] = ()) -> None:
        """Let `batch`, of another call of a model too, have its samples in `dim`."""
        for tensor, mark in input_marks(tensors_in(batch), names, self.samples, dim, self.parts):
            if (known := self._mark(tensor)) and not known.is_guess:
                continue  # of an earlier call
            if mark:
                self._leave(tensor, mark)
                self._inputs.setdefault("".join(mark.inputs), []).append(tensor)
            elif tensor.dim():
                self._notes.leave_whole([tensor])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; see the class."""
        del types
        return self.see(func, func, *args, **(kwargs or {}))

    def see(
        self, func: Callable[..., Any], run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what `run` does, which is `func` or lets other watches see it."""
        if func in SIZES:
            return self._size(func, run(*args, **kwargs), args, kwargs)
        name, given = plain_name(func), tensors_of((*args, *kwargs.values()))
        # Before the call, which may write them.
        marks = {id(tensor): mark for tensor in given if (mark := self._mark(tensor))}
        mixture = self._handed_on(name, args, kwargs, marks)
        try:
            result = run(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            self._note_failure(error, func, args, kwargs, marks)
            raise
        if getattr(func, "__module__", "") == _COLLECTIVES:
            for tensor in given:
                note_of_all_ranks(tensor)
            for mark in marks.values():
                self.numbers.add_up(mark.statistic)
            return result
        if given and not isinstance(result, Tensor):
            number = self._host.follow(name, marks.get(id(given[0])), mixture, result)
            if number:
                self._sizes.note_number(number)
        if name in ORDERING or (name in KEEPING and given and self._notes.order(given[0])):
            self._notes.leave_order(result, given)
        if marks or self._rows.has_cut:
            self._follow(func, args, kwargs, result, marks)
        orders = {id(tensor): order for tensor in given if (order := self._notes.order(tensor))}
        cut, none = self.parts > 1, _NONE
        call = TorchCall(name, args, kwargs, none, marks, self.samples, orders=orders, is_cut=cut)
        self._note_results(call, result, mixture, given)
        return result

    def _handed_on(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], marks: Mapping[int, Mark]
    ) -> Mixture | None:
        """Return the mixture that a function gets, with what is known of its arguments."""

        def has_samples(tensor: Tensor) -> bool:
            mark = marks.get(id(tensor))
            return mark is not None and mark.dim is not None

        found = handed_on(name, args, kwargs, self._mixture, has_samples)
        return found or self._host.mixture(name, args)

    def _note_results(
        self, call: TorchCall, result: Any, mixture: Mixture | None, given: Sequence[Tensor]
    ) -> None:
        """Note what is known of the results of a function.

        Args:
            call: Of the function.
            result: What it returned.
            mixture: What it got from other functions.
            given: Tensors that it got.
        """
        name, args = call.name, call.args
        wholes = {id(tensor) for tensor in given if self._notes.is_whole(tensor)}
        is_known = bool(call.marks or mixture or wholes)
        if self._has_labels and not is_known and all(map(self._notes.is_made, given)):
            self._notes.leave_made(result)
        if not (is_known or self._sizes.may_decide(name)):
            return
        results = [args[0]] if name == "__setitem__" else tensors_of((result,))
        dims = {number: mark.dim for number, mark in call.marks.items()}
        if wholes and takes_by(name, args, call.kwargs, dims, wholes):
            mixture = mixture or Mixture(f"samples by their position{script_line()}", of_parts=True)
        elif wholes and not call.marks:
            self._notes.leave_whole(results)
        is_written = bool(results and args and results[0] is args[0])
        is_plain = is_written and id(args[0]) not in call.marks and grad_fn_of(args[0]) is None
        if is_plain and not mixture:
            return  # a buffer that takes statistics
        for tensor in results:
            own = replace(call, result=tensor)
            outcome = self._sizes.outcome(own) or self._outcome(own)
            outcome = self.numbers.looked_at(outcome)
            self.numbers.note(own, outcome)
            if outcome is None:
                self._leave_unknown(tensor, is_written=is_written)
            self._note(tensor, outcome, mixture)

    def _size(
        self, func: Callable[..., Any], result: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Return sizes of a tensor, and note that a script reads that of samples."""
        x = args[0]
        mark = self._mark(x)
        dim = 0 if mark and mark.is_chosen else mark.dim if mark else None
        if mark and dim is not None and not mark.is_guess and x.shape[dim]:
            asked = next((value for value in (*args[1:], *kwargs.values())), None)
            self._sizes.note(plain_name(func), x, dim, asked)
        return result

    def _outcome(self, call: TorchCall) -> Outcome:
        outcome = outcome_of(call)
        if outcome is not None:
            return outcome
        if (own := call.mark(call.result)) and self._mark(call.result) == own:
            return own  # that of an argument, which was not written, as by `requires_grad_`
        if (chosen := chosen_samples(call) or pairs_of_numbers(call)) is not None:
            return chosen
        return self._guess_of(call) if self._may_be_guessed(call.result) else None

    def _guess_of(self, call: TorchCall) -> Outcome:
        if call.name in PUTTING_BACK and grad_fn_of(call.result):
            return guess(call.result, marks_behind(call.result, self._of_node), self.samples)
        if has_rule(call.name):
            return None
        return guess(call.result, marks_of_values(call), self.samples, call.name)

    def _follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        marks: Mapping[int, Mark],
    ) -> None:
        """Note which rows a result comes from."""

        def is_sample(tensor: Tensor) -> bool:
            mark = marks.get(id(tensor))
            is_known = mark is not None and not (mark.is_guess or mark.is_joined)
            return is_known and mark is not None and mark.dim == 0

        name = name_of(func)
        results = [tensor for tensor in tensors_in(result) if not tensor.is_inference()]
        if is_row_of_integers(args, results):
            return
        had_cut = self._rows.has_cut
        self._rows.follow(name, args, kwargs, results, is_sample)
        if self._rows.has_cut and not had_cut:
            self._cut = script_line()

    def _note(self, tensor: Tensor, outcome: Outcome, mixture: Mixture | None) -> None:
        """Note what is known of a result, of which some argument may have a `mixture` already."""
        if isinstance(outcome, Mark):
            self._leave(tensor, outcome)
        elif outcome and (self.samples > 1 or self.parts > 1 or outcome.hint):
            # Any dim of one may have the one sample of a batch that nothing cuts.
            mixture = outcome if mixture is None or mixture.between else mixture
        mixture = mixture and of_result(mixture, tensor)
        if mixture:
            setattr(tensor, _MIXTURE, (self._number, *mixture))
        if mixture and (node := grad_fn_of(tensor)):
            self._found.append((mixture, node_of(node, tensor.output_nr)))

    def _note_failure(
        self,
        error: Exception,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        marks: Mapping[int, Mark],
    ) -> None:
        """Note why a function raised, if it is that other micro-batches have the other rows."""
        if isinstance(error, torch.OutOfMemoryError):
            return
        call = TorchCall(plain_name(func), args, kwargs, _NONE, marks, self.samples)
        if self.parts > 1 and (cause := self._pairs or failure_of(call, self.parts)):
            self._failure = error, cause

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Say of an error inside that other micro-batches have the other rows, where it may be so.

        Raises:
            ModelError: It was raised by a function of torch that got a part of inputs.
        """
        try:
            yield
        except (RuntimeError, IndexError, ValueError) as error:
            failed, cause = self._failure or (None, "")
            self._failure = None
            if failed is not error:
                raise
            problem = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"a micro-batch has a part of the rows of {cause}, and a function raised "
                f"{type(error).__name__}: {problem}",
                hint=CUT_HINT,
            ) from error

    def _leave(self, tensor: Tensor, mark: Mark) -> None:
        self._pairs = self._pairs or mark.pairs
        if tensor.is_inference():
            return
        noted = (self._number, write_count(tensor), *mark)
        leave(tensor, _MARK, noted)
        if grad_fn_of(tensor) is None and is_sharded(tensor):
            # Which goes on in tensors that no node leads back from.
            setattr(local_tensor(tensor), _MARK, noted)

    def _leave_unknown(self, tensor: Tensor, *, is_written: bool) -> None:
        if is_written:
            vars(tensor).pop(_MARK, None)  # it has other values
        if node := grad_fn_of(tensor):
            metadata_of(node)[_SEEN, tensor.output_nr] = self._number

    def _mark(self, tensor: Tensor) -> Mark | None:
        if isinstance(tensor, Parameter) or tensor.is_inference():
            return None
        noted = getattr(tensor, _MARK, None)
        if noted is not None:
            number, count, *known = noted
            if number != self._number:
                return None
            # A view of it may have been written, which moves no samples.
            is_guess = count != write_count(tensor)
            return Mark(*known)._replace(is_guess=True) if is_guess else Mark(*known)
        number, _, *known = carried(tensor, _MARK) or (None, 0)
        if number != self._number:
            return self._guessed(tensor)
        mark = Mark(*known)
        # Of an image or a DTensor, a part may have some of the samples.
        is_whole = mark.dim is None or tensor.shape[mark.dim : mark.dim + 1] == (self.samples,)
        return mark if is_whole else None

    def _guessed(self, tensor: Tensor) -> Mark | None:
        """Return what the graph of a tensor says that no function of torch returned, if any."""
        is_label = self._has_labels and not (
            takes_gradients(tensor) or self._notes.is_whole(tensor)
        )
        is_label = is_label and not self._notes.is_made(tensor)
        if is_label and tensor.shape[:1] == (self.samples,) and tensor.dtype != torch.bool:
            return Mark(0, is_guess=True)
        if (node := grad_fn_of(tensor)) is None or not self._may_be_guessed(tensor):
            return None
        marks = marks_behind(tensor, self._known_of_node)
        metadata, place = metadata_of(node), tensor.output_nr
        is_written = node.name().endswith(_WRITTEN_VIEW)
        if is_written or metadata.get((_SEEN, place)) == self._number:  # by linear functions
            marks = [mark._replace(statistic="") for mark in marks]
        metadata[_BEHIND, place] = self._number, marks
        outcome = guess(tensor, marks, self.samples)
        self._note(tensor, outcome, None)
        if isinstance(outcome, Mixture):
            self._leave(tensor, Mark(None))
        return outcome if isinstance(outcome, Mark) else None

    def _may_be_guessed(self, tensor: Tensor) -> bool:
        if tensor.is_nested or self._rows.is_part(tensor):
            return False
        return takes_gradients(tensor) and bool(tensor.dim() or self.numbers.is_alone)

    def _of_node(self, node: Any, output: int) -> list[Mark] | None:
        """Return what is known of an output of a node; None of samples that were chosen."""
        found = self._known_of_node(node, output) or []
        return [mark for mark in found if mark.dim is not None or mark.statistic] or None

    def _known_of_node(self, node: Any, output: int) -> list[Mark] | None:
        """Return what is known of an output of a node of autograd, or of what it comes from."""
        metadata = metadata_of(node)
        noted = metadata.get((_MARK, output))
        if noted is None and (leaf := getattr(node, "variable", None)) is not None:
            noted = None if isinstance(leaf, Parameter) else getattr(leaf, _MARK, None)
        if noted and noted[0] == self._number:
            return [Mark(*noted[2:])]
        number, marks = metadata.get((_BEHIND, output), (None, None))
        return marks if number == self._number else None

    def _mixture(self, tensor: Tensor) -> Mixture | None:
        number, *noted = getattr(tensor, _MIXTURE, (None,))
        if number == self._number:
            return Mixture(*noted)
        is_of_batch = getattr(tensor, _MARK, (None,))[0] == self._number or self._notes.is_whole(
            tensor
        )
        return None if is_of_batch else self._host.of_numpy(tensor)

    def _by_position(self, tensor: Tensor) -> Mixture | None:
        problem = self._rows.problem(tensor)
        return Mixture(problem + self._cut) if problem else None

    def has_samples_first(self, tensor: Tensor) -> bool:
        """Return whether dim 0 of `tensor` is known to be that of samples."""
        mark = self._mark(tensor)
        return mark is not None and mark.dim == 0 and not mark.is_guess

    def known(self, outputs: Sequence[Tensor]) -> tuple[Known, ...]:
        """Return what is known of outputs of the model, for a watch of the loss alone."""
        noticed = [*self._found, *self.numbers.undivided(self._sizes.divided)]
        noticed.sort(key=lambda each: each[0].of_number)  # which are right in a model's own loss
        found = []
        for tensor in outputs:
            nodes = graph_of(tensor) if noticed else set()
            reached = next((mixture for mixture, node in noticed if node in nodes), None)
            reached = reached or self._mixture(tensor) or self._by_position(tensor)
            found.append(Known(self._mark(tensor), reached))
        return tuple(found)

    def seed(self, outputs: Sequence[Tensor], known: Sequence[Known]) -> None:
        """Note what is `known` of the outputs of a model that ran elsewhere."""
        if len(outputs) != len(known):
            return  # of another form than those that were looked at
        for tensor, (mark, mixture) in zip(outputs, known, strict=True):
            self._note(tensor, mark, mixture)
            self.numbers.take(mark)

    def copy_notes(self, tensor: Tensor, copied: Tensor) -> None:
        """Note of `copied`, which has other values, what is known of `tensor`."""
        self.seed([copied], self.known([tensor]))
        self._notes.copy(tensor, copied)

    def read(self, loss: Tensor, *, is_cut: bool, is_known: bool = False) -> ModelError | None:
        """Return why `loss` has no counterpart in the whole batch; or warn that it may have none.

        Args:
            loss: Of this part of the batch.
            is_cut: Whether dim 0 has the samples for certain, since micro-batches cut it.
            is_known: Whether it has, as a loader knows how many there are.
        """
        found, self._found = self._found, []
        if self.samples > 1 or self.parts > 1:
            found += self.numbers.undivided(self._sizes.divided)
        found = [(mixture, node) for mixture, node in found if is_cut or not mixture.of_parts]
        nodes = graph_of(loss) if found else set()
        by_position = self._by_position(loss)
        is_cut = is_cut or bool(is_known and by_position)
        reached = by_position if is_known else None
        reaching = [mixture for mixture, node in found if node in nodes]
        if is_counted(nodes):
            reaching = [mixture for mixture in reaching if not mixture.unless_counted]
        pairs = [of_pairs(each, self._inputs) for each in dict.fromkeys(reaching) if each.between]
        self.pairs, reaching = pairs, [each for each in reaching if not each.between]
        reaching.sort(key=lambda mixture: not mixture.is_sure)
        reached = reached or next(iter(reaching), None) or by_position
        if reached is None:
            return None
        text = f"the loss depends on {reached.name} of a part of the batch, which is another number"
        text += (
            " for the whole batch" if reached.is_sure else " for the whole batch if these mix them"
        )
        if is_cut and reached.is_sure:
            return ModelError(text, hint=reached.hint or _HINT)
        warnings.warn(f"msrun: {text}: {reached.hint or _HINT + _GATHER}", stacklevel=6)
        return None
