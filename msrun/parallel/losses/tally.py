"""Adds up the loss over the micro-batches of a step and over data-parallel ranks.

What one process would differentiate is `sum / count` over the whole batch, and a rank has only its
part when its backward pass begins.  One all-reduce of a few numbers, between forward and backward,
has the sums, the counts and the loss at once:

- One micro-batch: the count of the whole batch is known before the backward pass, which therefore
  begins with the right factor.  Hooks of parameters see the gradients of one process.
- Several, and pipelines: backward passes begin before all counts are known.  They compute gradients
  of the sum over a first guess, and `finish` scales the reduced gradients.  Data-parallel ranks
  guess the samples of a rank, which all know.  One alone expects of all micro-batches the count of
  the first; if they have it, nothing is scaled.
- A sum needs no count, and a plain loss is weighted by samples.
- A linear function of means has one count for each mean.  With one micro-batch the function is
  replaced by one with the same gradient in which each mean has its weight.  With several the counts
  must be alike in all parts; otherwise all ranks raise.

Errors are raised in `finish`, before the optimizer step, on all ranks alike.  A stage of a pipeline
that raised alone would leave the others waiting for its gradients: it notes the error and goes on
with zeros, and the numbers tell all ranks that there is one.  The host reads the numbers that
decide only there, and waits no longer for the device than to the end of the last forward pass.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ConfigError, DividedModelError, ModelError, PeerRankError, UsageError
from msrun.parallel.exchange import messages
from msrun.parallel.exchange.host_copy import HostCopy
from msrun.parallel.local import full_tensor, is_sharded, scale_gradients
from msrun.parallel.losses.calls.unknown import warn_of_unknown
from msrun.parallel.losses.decided.outside_values import StepValues
from msrun.parallel.losses.terms import (
    Kind,
    PartLoss,
    TallyRanks,
    Term,
    check_count,
    count_of,
    count_type,
    divisor_of,
    mean_of,
    note_counted,
    one_number,
    refuse_hooks,
    sum_of_parts,
)
from msrun.parallel.losses.watch import LossWatch
from msrun.parallel.torch_compat import eagerly, without_functions

_KINDS: tuple[Kind, ...] = ("plain", "counted", "summed", "linear")
_SUM, _COUNT, _FLOOR, _OFFSET, _REFUSED, _UNREACHED, _MET, _FIRST_TERM = range(
    len(_KINDS), len(_KINDS) + 8
)
_TERMS_MAX = 8
_FIRST_SLOPE = _FIRST_TERM + 2 * _TERMS_MAX
_EXPECTED = _FIRST_SLOPE  # a counted loss has no slopes
_SIZE = _FIRST_SLOPE + 2 * _TERMS_MAX
# Relative difference below which counts of parts are equal.
_ALIKE = {torch.float64: 1e-9, torch.float32: 1e-4}
_KINDS_RAISED = (ConfigError, DividedModelError, ModelError, PeerRankError)
_ERRORS = {kind.__name__: kind for kind in _KINDS_RAISED}
_HINT = "return (sum, count) from the loss function: a step divides the sum of all by the count"


class LossTally:
    """The loss of one step.

    Args:
        ranks: The data-parallel ranks.
        parts: Micro-batches of a rank.
        samples: Samples of this rank's batch.
        pipeline: The stages, where backward passes begin before the last forward pass has ended.
        dtype: Type of the loss on a rank that computes none.
        items: Targets that the script counted in its batch, to compare; None for nothing.

    Attributes:
        numbers: What is added over parts and ranks: the parts of each kind, sum, count and limits,
            and four numbers for each mean of linear losses.
        has_unreached: Whether stages noted gradients that one process may not have; by `finish`.
        looks: Whether to say of which functions of a loss nothing is known.
        is_cut: Whether dim 0 of the batch has samples for certain, as micro-batches cut it.
        values: What losses meet that is of no sample, for parts to compare; None for nothing.
    """

    values: StepValues | None = None

    def __init__(
        self,
        ranks: TallyRanks,
        *,
        parts: int,
        samples: int,
        pipeline: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        items: Any = None,
    ) -> None:
        self._ranks = ranks
        self._parts = parts
        self._samples = samples
        self._pipeline = pipeline
        self._refusal: UsageError | None = None
        self._raised: Exception | None = None
        # Whether the counts of the whole batch are known before the backward pass.
        self._is_early = parts == 1 and pipeline is None
        self._dtype = dtype
        self.scale = 1.0
        self.has_unreached, self.looks, self.is_cut = False, False, parts > 1
        self._is_plain = pipeline is None and items is None
        self._terms: Sequence[Term] = ()
        self._host: HostCopy | None = None
        self._adding: dist.Work | None = None
        self._expected: Tensor | None = None
        self._has_items = items is not None
        # By place in `numbers`, for `_add_up`: each part alone would be several small operations.
        self._added: defaultdict[int, list[Any]] = defaultdict(list)
        self.numbers = torch.zeros(_SIZE, dtype=count_type(ranks.device), device=ranks.device)
        if items is not None:
            self.numbers[_FIRST_TERM] += items  # a counted loss leaves this place empty

    @property
    def is_whole(self) -> bool:
        """Whether the only part is the whole batch of all ranks."""
        return self._ranks.size == self._parts == 1

    def measure(
        self,
        compute: Callable[[], Any],
        samples: int,
        data: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (),
    ) -> PartLoss:
        """Return the loss of a part of the batch.

        Args:
            compute: Returns it, or its sum and count.
            samples: Samples of the part.
            data: Tensors that `compute` gets of the batch; None if it runs the model itself.
            inputs: Tensors that the model gets of the batch.

        Raises:
            ModelError: It cannot be combined with that of other parts, or is not one number.
        """
        if self.is_whole:
            loss = compute()
            return self._pair(loss) or PartLoss(
                kind="plain", value=full_tensor(one_number(loss, self.device))
            )
        watch = LossWatch(samples, data, inputs, is_cut=self.is_cut)
        values = self.values.following(samples) if self.values else contextlib.nullcontext()
        with eagerly(), watch, values:  # a compiled function calls no function that could be seen
            loss = compute()
        if data is not None:
            refuse_hooks(loss, data)
        return self._pair(loss) or self._read(watch, one_number(loss, self.device))

    def _read(self, watch: LossWatch, loss: Tensor) -> PartLoss:
        """Return what is known of a loss; ranks whose numbers differ refuse it together.

        A sum divided by a number is a mean where that is the number of samples, which it may be
        on one rank and not on another.
        """
        try:
            found = watch.read(loss)
        except ModelError as error:
            is_read = not self._is_plain or loss.device.type == "cpu"  # by all in `finish`
            if self._ranks.group is None or self._pipeline is not None or not is_read:
                raise
            self.refuse(error)
            return PartLoss(kind="plain", value=full_tensor(loss))
        if self.looks and found.kind in ("plain", "linear"):
            warn_of_unknown(loss)
        return found

    def _pair(self, loss: Any) -> PartLoss | None:
        """Return a loss that the script returned as its sum and count; None if it did not."""
        if not isinstance(loss, tuple) or len(loss) != 2:  # noqa: PLR2004 - a pair
            return None
        total, count = loss
        if isinstance(count, Tensor):
            if count.numel() != 1 or count.requires_grad:
                problem = "needs a gradient" if count.requires_grad else f"is {tuple(count.shape)}"
                raise ModelError(f"the count of the loss {problem}, and must be a plain number")
            count = full_tensor(count).to(self.numbers).reshape(())
        elif isinstance(count, int | float):
            count = torch.full((), count, dtype=self.numbers.dtype, device=self.numbers.device)
        else:
            raise ModelError(f"the count of the loss is {type(count).__name__}, and not a number")
        total = note_counted(full_tensor(one_number(total, self.device, "sum of the loss")))
        return PartLoss(kind="counted", value=total, count=count)

    def add(self, loss: PartLoss, samples: int) -> None:
        """Add the loss of a part with so many `samples` that count; none if they are repeated."""
        self._dtype = torch.promote_types(loss.value.dtype, torch.float32)
        self._is_plain &= loss.kind == "plain"
        if samples:
            with self._unseen(loss):
                self._add(loss, samples)

    def _add(self, loss: PartLoss, samples: int) -> None:
        numbers = self.numbers
        self._added[_KINDS.index(loss.kind)].append(1)
        value = loss.value.detach()
        value = value.reshape(()) if value.dim() else value
        if loss.kind in ("counted", "summed"):
            self._added[_SUM].append(value)
            if loss.count is not None:
                if self._expected is None and self._ranks.size == 1:
                    count = torch.where(loss.count == 0, samples, loss.count)
                    self._expected = count.to(numbers) * (self._samples / samples)
                    numbers[_EXPECTED] += self._expected
                self._added[_COUNT].append(loss.count)
                if (limit := loss.limit).floor or limit.offset:
                    numbers[_FLOOR : _OFFSET + 1] += numbers.new_tensor([limit.floor, limit.offset])
            return
        if len(loss.terms) > _TERMS_MAX:
            raise ModelError(
                f"the loss is made of {len(loss.terms)} means, and at most {_TERMS_MAX} combine",
                hint=_HINT,
            )
        self._terms = loss.terms
        for index, term in enumerate(loss.terms):
            first, count = _FIRST_TERM + 2 * index, count_of(term)
            slope = loss.slopes[index].reshape(()) if loss.slopes else torch.zeros_like(value)
            if is_sharded(slope) or (self._is_early and is_sharded(term.total)):
                # As torch says it of the sum, had it come to that; ZeRO names the module.
                raise RuntimeError("the loss got mixed torch.Tensor and DTensor")
            if self._is_early:
                numbers[first] += slope * term.total.detach().reshape(())
                numbers[first + 1] += count
                value = value - slope * mean_of(term).detach()
            else:
                # Counts are equal if the mean of their squares is the square of their mean.
                numbers[first] += count / samples
                numbers[first + 1] += (count / samples).square()
            slope = slope.to(numbers.dtype)
            numbers[_FIRST_SLOPE + 2 * index] += slope
            numbers[_FIRST_SLOPE + 2 * index + 1] += slope.square()
        self._added[_SUM].append(value * self._share(samples))

    def _add_up(self) -> None:
        for index, values in self._added.items():
            self.numbers[index] += sum_of_parts(values)
        self._added.clear()

    def begin_adding(self, group: dist.ProcessGroup) -> None:
        """Begin to add the numbers of all stages of `group`, which all call this."""
        self._add_up()
        self._adding = dist.all_reduce(self.numbers, group=group, async_op=True)

    def may_refuse(self) -> None:
        """Have `finish` look for refusals; all ranks call it if one of them may refuse."""
        self._is_plain = False

    def refuse(self, error: UsageError) -> None:
        """Note that this rank refuses a part of the batch; `finish` raises on all ranks."""
        self._refusal = self._refusal or error
        self.numbers[_REFUSED] += 1

    def refuse_if(self, error: UsageError | None) -> None:
        """Note an error, if there is one."""
        if error is not None:
            self.refuse(error)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise what an earlier micro-batch was refused for in place of an error that follows."""
        try:
            yield
        except (RuntimeError, IndexError, ValueError) as error:
            if self._refusal is None:
                raise
            raise self._refusal from error

    def fail(self, error: Exception, where: str) -> None:
        """Note that code of the script raised `error` on this rank; `finish` raises on all ranks.

        Args:
            error: What this rank raises then; others name it.
            where: Which code.
        """
        text = str(error).strip().partition("\n")[0]
        problem = f"{where} raised {type(error).__name__} on rank {dist.get_rank()}"
        said = f"{problem}: {text}" if text else problem
        if not self.has_refused:
            self._raised = error
        self.refuse(
            PeerRankError(f"{said}; no weight was changed", hint="see the log of that rank")
        )

    def note_unreached(self, count: int) -> None:
        """Note so many gradients of this stage that one process may not have."""
        if count:
            self.numbers[_UNREACHED] += count

    def check_reached(self, absent: int) -> None:
        """Refuse losses that depend on nothing in all parts of all ranks, after `combine`.

        Args:
            absent: Such parts of this rank, as noted by `note_unreached`.
        """
        if absent == self._parts and self.numbers[_UNREACHED] == absent * self._ranks.size:
            raise ModelError("the loss of no rank depends on a parameter that is trained")

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._ranks.device

    @property
    def has_refused(self) -> bool:
        """Whether this stage refused a part."""
        return self._refusal is not None

    def combine(self) -> None:
        """Add the numbers of all data-parallel ranks, which all call this."""
        if self._adding is None:
            self._add_up()
        else:
            self._adding.wait()
        if self.values:
            self._is_plain &= not self.values.is_due
            self.numbers[_MET] += self.values.end_step()
        if self._ranks.group is not None:
            dist.all_reduce(self.numbers, group=self._ranks.group)
        # A host reads them anyway: ranks whose losses are plain and others' must all raise.
        if not self._is_plain or self.numbers.device.type == "cpu":
            self._host = HostCopy(self.numbers)

    def _unseen(self, loss: PartLoss) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which modes of the model do not see what is done with plain losses.

        Watches of a pipeline need to: they look at what is differentiated.
        """
        is_plain = self._pipeline is None and type(loss.value) is Tensor and not loss.terms
        return without_functions() if is_plain else contextlib.nullcontext()

    def objective(self, loss: PartLoss, samples: int) -> Tensor:
        """Return what a backward pass differentiates for a part with so many `samples`.

        With one micro-batch, `combine` comes before it.
        """
        with self._unseen(loss):
            objective = self._objective(loss, samples)
            return objective if self._ranks.scale == 1.0 else objective * self._ranks.scale

    def _objective(self, loss: PartLoss, samples: int) -> Tensor:
        value, ranks = loss.value.reshape(()), self._ranks
        if not samples:
            return value * 0.0
        if loss.kind == "summed":
            return value * float(ranks.size) if ranks.op == "mean" else value
        if loss.kind == "counted":
            if self._expected is not None and not self._is_early:
                return value / self._expected.to(value.dtype)
            if not self._is_early:
                return value * self._guess()
            return value * (ranks.size / loss.limit(self.numbers[_COUNT])).to(value.dtype)
        share = self._share(samples)
        result = value * share
        for index, (term, slope) in enumerate(zip(loss.terms, loss.slopes, strict=False)):
            if self._is_early:  # gives the mean the weight of its count
                everywhere = term.limit(self.numbers[_FIRST_TERM + 2 * index + 1])
                weight = divisor_of(term) * ranks.size / everywhere - share
                result = result + slope.reshape(()) * weight.to(slope.dtype) * mean_of(term)
        return result

    def finish(self, params: Callable[[], Iterable[Parameter]]) -> Tensor:
        """Complete the gradients of `params`, which are reduced; return the loss of all ranks.

        Raises:
            ModelError: There is no such loss, or code of the script raised something else on
                another rank.  All ranks raise.
        """
        ranks, numbers = self._ranks, self.numbers
        loss = numbers[_SUM] / ranks.size
        if self._host is None:
            return loss.to(self._dtype)
        found = self._host.read()
        self._settle(found)
        self.has_unreached = found[_UNREACHED] > 0
        kinds = [kind for kind, count in zip(_KINDS, found, strict=False) if count]
        if len(kinds) > 1:
            raise ModelError(
                f"the loss is {kinds[0]} in some micro-batches or ranks and {kinds[1]} in others, "
                "so they do not make one loss; no weight was changed",
                hint=_HINT,
            )
        self._check_items(kinds, found)
        if kinds == ["summed"]:
            loss = numbers[_SUM]
        elif kinds == ["counted"]:
            floor, offset = (found[index] / found[1] for index in (_FLOOR, _OFFSET))
            divisor = max(found[_COUNT], floor) if floor or offset else found[_COUNT]
            divisor += offset
            check_count(divisor)
            loss = numbers[_SUM] / divisor
            if not self._is_early:
                expected = found[_EXPECTED] or ranks.size / self._guess()
                self.scale = expected / divisor
                scale_gradients(params, self.scale)
        elif kinds == ["linear"] and self._is_early:
            self._check_slopes(found)
            for index, term in enumerate(self._terms):
                first = _FIRST_TERM + 2 * index
                check_count(float(term.limit(torch.tensor(found[first + 1]))), term.name)
                loss = loss + numbers[first] / term.limit(numbers[first + 1])
        elif kinds == ["linear"]:
            self._check_slopes(found)
            self._check_alike(found)
        return loss.to(self._dtype)

    def _settle(self, found: Sequence[float]) -> None:
        """Raise what a rank has refused; compare what losses met that was of no sample."""
        if found[_REFUSED]:
            raise self._agreed()
        if self.values and found[_MET]:
            self.values.compare(self._ranks.group, self._ranks.device)

    def _check_items(self, kinds: Sequence[Kind], found: Sequence[float]) -> None:
        """Refuse targets that a script counted otherwise than the step.

        Each rank may have counted its own, or those of the whole batch.
        """
        given, counted = found[_FIRST_TERM], found[_COUNT]
        if not self._has_items:
            return
        if kinds != ["counted"] or given not in (counted, counted * self._ranks.size):
            what = f"{counted:g} targets count" if kinds == ["counted"] else "the loss has no count"
            what += "; no weight was changed"
            raise ModelError(
                f"num_items_in_batch is {given:g} over all ranks, and {what}",
                hint="leave it out: a step counts the targets of all ranks and micro-batches",
            )

    def _agreed(self) -> Exception:
        """Return the error of the first rank that has one; all ranks that add numbers call it.

        A rank whose script raised something else returns that.
        """
        error = self._refusal
        own = [] if error is None else [type(error).__name__, error.message, error.hint or ""]
        noted = own
        for group in (self._pipeline, self._ranks.group):
            if group is not None:
                every = messages.gather_all(own, list[str], group, self._ranks.device)
                own = next(filter(None, every), [])
        if self._raised is not None and own == noted:  # and no consequence of another
            return self._raised
        kind, message, hint = own
        return _ERRORS.get(kind, UsageError)(message, hint=hint or None)

    def _check_alike(self, found: Sequence[float]) -> None:
        """Refuse means in a linear loss that have other counts in other parts of the batch."""
        if self._differ(found, _FIRST_TERM):
            raise ModelError(
                "the loss contains a mean over parts of the batch in which different numbers of "
                "targets count, so their mean is not that of the batch; no weight was changed",
                hint=_HINT,
            )

    def _check_slopes(self, found: Sequence[float]) -> None:
        """Refuse means in a linear loss that it multiplies by other numbers in other parts."""
        if self._differ(found, _FIRST_SLOPE):
            raise ModelError(
                "the loss multiplies a mean by a number that other parts of the batch have another"
                " of, such as the value of a loss without its gradient, so the losses of parts do "
                "not make that of the batch; no weight was changed",
                hint="multiply by a constant, or with one micro-batch by what all ranks have: "
                "rt.mean_over_data(value)",
            )

    def _differ(self, found: Sequence[float], begin: int) -> bool:
        """Return whether one of the values from `begin` on is not equal in all parts.

        They are equal if the mean of their squares is the square of their mean.
        """
        parts, tolerance = found[_KINDS.index("linear")], _ALIKE[self.numbers.dtype]
        pairs = (
            (found[first] / parts, found[first + 1] / parts)
            for first in range(begin, begin + 2 * _TERMS_MAX, 2)
        )
        return any(abs(square - mean * mean) > tolerance * square for mean, square in pairs)

    def _share(self, samples: int) -> float:
        """Return the weight of a part in a mean over samples."""
        return samples / self._samples * self._ranks.weight

    def _guess(self) -> float:
        """Return the factor of sums whose count is not known yet, equal on all ranks."""
        return self._ranks.weight / self._samples
