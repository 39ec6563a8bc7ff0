"""`verify`: the first steps run also as one process would, and must give the same.

The problem.  A model that this runtime has never seen may compute something else on many ranks than
in one process, and training goes on without an error.

The idea.  Rank 0 keeps a copy of the model from before `rt.shard`.  In a step that is verified it
takes the weights of the sharded model and the batches of all ranks, and computes loss, gradients
and buffers by plain torch.  Then all ranks compute the step as always.  Before the optimizer
changes a weight, rank 0 compares: each gradient is gathered, one at a time.  A difference is a
`ModelError` on all ranks, which names the tensors and the likely cause.

Random numbers.  If the copy draws some, and ranks draw from streams of their own, no two runs are
equal.  Then the comparison has a run of its own before the step, with every rate of dropout at 0 in
both models; whatever it changed is put back.  If the copy draws even so and the step differs, the
copy runs again with other numbers: if it comes to something else itself, nothing can be compared.

Invariants:

- A step that is compared by itself is the step that trains: nothing is repeated or put back on the
  sharded side.  Of a plain loop one call is repeated (`loop`).
- Nothing is skipped in silence: a step that cannot be verified is a warning with the reason.
- All ranks take the same branches, which rank 0 decides and broadcasts.
- Without `verify` a step tests one attribute.
"""

from __future__ import annotations

import contextlib
import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from msrun.errors import ModelError
from msrun.parallel.config import DATA_AXIS, PIPELINE_AXIS, ROOT, ParallelConfig
from msrun.parallel.foreach.step_hooks import before_step
from msrun.parallel.local import local_gradient, local_part
from msrun.parallel.losses.batch import StepBatch, split_batch
from msrun.parallel.rank_context import RankContext
from msrun.parallel.sharded_model import ShardedModel
from msrun.parallel.verify.causes import Evidence, find_cause
from msrun.parallel.verify.comparison import (
    Differences,
    Gap,
    find,
    measure,
    tolerance,
)
from msrun.parallel.verify.gather import (
    NotOneBatchError,
    any_rank,
    complete_flags,
    to_first_rank,
    whole_batch,
)
from msrun.parallel.verify.layer_step import LayerVerifier
from msrun.parallel.verify.layers import LayerSample
from msrun.parallel.verify.loop import LoopObserver, loop_step
from msrun.parallel.verify.one_process import OneProcess
from msrun.parallel.verify.put_back import put_back
from msrun.parallel.verify.randomness import without_dropout
from msrun.parallel.verify.reference import CannotRunError, Reference
from msrun.parallel.verify.replicas import between_replicas, with_replicas
from msrun.parallel.verify.script_changes import OfStage, ScriptChanges
from msrun.parallel.verify.verified_step import VerifiedStep

_NAMES_SHOWN = 3
_NOT_OF_LOOP = (
    "; a plain loop: gradients are those of the outputs' gradients, and the loss function of the "
    "script was not compared"
)
_NO_CALL = (
    "nothing was verified: the optimizer stepped, and backward reached no output of a call of the "
    "model itself on some rank, as in a compiled or wrapped one"
)

_OTHER_NUMBERS = "the model draws random numbers other than dropout, and ranks draw other ones"
_OWN_DROPOUT = "a plan of mode auto draws random numbers of its own for dropout"
_DRAWN = "; random numbers that the model drew changed nothing"


class Verifier:
    """Verifies the first steps of one model.

    Args:
        config: The configuration.
        context: This rank.
        copied: The model before `rt.shard`, None on other ranks than 0; or sampled layers.

    Attributes:
        verified: Steps that were compared.
        outcome: What the last verified step came to, for a person; on rank 0.
        has_told: Whether a warning or error says that a step was not verified.
    """

    def __init__(
        self,
        config: ParallelConfig,
        context: RankContext,
        copied: Reference | LayerSample | None,
    ) -> None:
        self._config = config
        self._context = context
        self._reference, self._layers = None, None
        if isinstance(copied, LayerSample):
            self._layers = LayerVerifier(config, context, copied)
        else:
            self._reference = copied
        self._steps = 0
        self._sharded: Callable[[], ShardedModel | None] = lambda: None
        self._changes: ScriptChanges | None = None
        self._observer: LoopObserver | None = None
        self._is_in_step = False
        self._has_optimizer = False
        self._wanted = int(config.verified.steps)
        self.verified = 0
        self.outcome = ""
        self.has_told = False

    @property
    def is_done(self) -> bool:
        """Whether no step is verified any more."""
        return self._steps >= self._wanted

    @property
    def is_over(self) -> bool:
        """Whether none will be verified any more: also of a frozen model without an optimizer.

        One with an optimizer may be thawed, as the judge of a generator.  Ranks may differ: a stage
        of a pipeline may be frozen.
        """
        sharded = self._sharded()
        params = sharded.parameters() if sharded else []
        is_frozen = not any(param.requires_grad for param in params)
        return self.is_done or (is_frozen and not self._has_optimizer)

    def run(self, step: VerifiedStep) -> Tensor:
        """Return the loss of `step`, whose gradients are there then.

        Raises:
            ModelError: It is not that of one process.
        """
        if self.is_done:
            return step.compute()
        self._is_in_step = True
        self._steps += 1
        with self._unobserved():
            if self._layers:
                loss = self._compare_layers(self._layers, step, trains=True)
                self._end()
                return loss
            whole, plan = self._prepare(step)
            if plan["problem"]:
                self._warn(f"nothing was verified in step {self._steps}: {plan['problem']}")
            elif plan["is_quiet"]:
                model = step.sharded.model()
                with put_back(model, self._context.device), without_dropout(model):
                    self._compare(step, step.compute(), whole, plan)
            loss = step.compute()
            if not plan["problem"] and not plan["is_quiet"]:
                self._compare(step, loss, whole, plan)
        self._end()
        return loss

    def observe(self, sharded: ShardedModel) -> None:
        """Observe the calls of a model by the script, for steps of a plain loop."""
        self._sharded = weakref.ref(sharded)
        self._changes = ScriptChanges(sharded.model())
        if not sharded.is_pipeline:
            self._observer = LoopObserver(sharded.model(), self._context.device)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Verify also steps of `optimizer` that the script takes without `rt.step`."""
        sharded = self._sharded()
        self._has_optimizer |= sharded is not None and sharded.holds(optimizer)
        before_step(optimizer, lambda: self._before_step(optimizer))

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Verify the call that the script made of the model, unless `rt.step` made it.

        Raises:
            ModelError: It is not that of one process.
        """
        is_of_loop, self._is_in_step = not self._is_in_step, False
        sharded = self._sharded()
        if self.is_done or not is_of_loop or sharded is None or not sharded.holds(optimizer):
            return
        observer = self._observer
        if observer is None:
            if not self.verified and not self.has_told:
                self._warn("nothing was verified: only rt.step of a pipeline is")
            return
        call, observer.call = observer.call, None
        with self._unobserved():
            step = loop_step(self._context, sharded, optimizer, call)
            if step is None:
                self._count_unobserved(sharded)
                return
            self._steps += 1
            if self._layers:
                self._compare_layers(self._layers, step, trains=False)
                self._end()
                return
            whole, plan = self._prepare(step)
            if plan["problem"]:
                self._warn(f"nothing was verified in step {self._steps}: {plan['problem']}")
            else:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(put_back(sharded.model(), self._context.device))
                    if plan["is_quiet"]:
                        stack.enter_context(without_dropout(sharded.model()))
                    self._compare(step, step.compute(), whole, plan)
        self._end()

    def _count_unobserved(self, sharded: ShardedModel) -> None:
        """Count a step of which no call was observed, if it trained; all ranks call it.

        Scripts also step without gradients, or with zeros, to have the state of an optimizer.
        """
        gradients = [param.grad for param in sharded.parameters() if param.grad is not None]
        trains = any(bool(local_part(gradient).any()) for gradient in gradients)
        if any_rank(self._context, flag=trains):
            self._steps += 1
            if not self.verified and not self.has_told:
                self._warn(_NO_CALL)
            self._end()

    def _compare_layers(self, layers: LayerVerifier, step: VerifiedStep, *, trains: bool) -> Tensor:
        """Compare sampled layers in a step; return its loss.

        Raises:
            ModelError: One differs.
        """
        loss, results = layers.run(step, trains=trains)
        self.has_told |= any(result.difference for result in results)
        sentence = layers.sentence(results, self._steps)
        if any(not result.problem for result in results):
            self.verified += 1
            self.outcome = f"step {self._steps}: {sentence}"
            self._context.print(f"msrun: {self.outcome}")
        else:
            self._warn(f"nothing was verified in step {self._steps}: {sentence}")
        return loss

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Call the model without being observed."""
        sharded = self._sharded()
        loop = sharded.plain_loop if sharded else None
        if self._observer:
            self._observer.is_paused = True
        try:
            with loop.paused() if loop else contextlib.nullcontext():
                yield
        finally:
            if self._observer:
                self._observer.is_paused = False

    def _end(self) -> None:
        """Release what the last verified step needed."""
        if self.is_done:
            self._reference = self._layers = None  # a copy is as large as the model
            if self._observer:
                self._observer.close()

    def _warn(self, sentence: str) -> None:
        self.has_told = True
        if self._context.rank == 0:
            self.outcome = self.outcome or sentence
            warnings.warn(f"msrun: {ROOT}.verify: {sentence}", stacklevel=5)

    def _prepare(self, step: VerifiedStep) -> tuple[StepBatch | None, dict[str, Any]]:
        """Compute the step in one process on rank 0; return its batch and how to compare."""
        reference, problem = self._reference, ""
        model = step.sharded.model()
        of_others, changes = OfStage(), self._changes
        if step.sharded.is_pipeline and changes:
            of_others = changes.of_other_stages(self._context, model)
        try:
            if reference and changes:
                reference.prepare(step.sharded, changes, of_others, self._context.device)
        except (CannotRunError, RuntimeError) as error:
            problem = str(error).partition("\n")[0]
        take = reference.take if reference and not problem else _drop
        tensors = (*model.named_parameters(), *model.named_buffers())
        to_first_rank(self._context, [(name, t) for name, t in tensors if t.numel()], take)
        try:
            values = whole_batch(self._context, tuple(step.batch))
        except NotOneBatchError as error:
            problem = problem or str(error)
        plan: dict[str, Any] = {"problem": problem, "is_quiet": False, "quiet": [], "drawn": ""}
        whole = None
        if reference and not problem:
            whole = StepBatch(*values)
            reference.keep_buffers()
            try:
                plan |= self._run_alone(OneProcess(self._context, step, reference, whole))
            except CannotRunError as error:
                plan["problem"] = str(error)
        plan = json.loads(self._context.broadcast(json.dumps(plan).encode()))
        return whole, plan

    def _run_alone(self, one: OneProcess) -> dict[str, Any]:
        """Compute the step in one process; return how to compare it."""
        if not one.run() or self._has_one_stream(one.step.sharded):
            return {}
        if self._config.mode == "auto":
            return {"drawn": _OWN_DROPOUT}
        with without_dropout(one.reference.model) as quiet:
            drawn = _OTHER_NUMBERS if one.run() else ""
        return {"is_quiet": bool(quiet), "quiet": quiet, "drawn": drawn}

    def _has_one_stream(self, sharded: ShardedModel) -> bool:
        """Return whether the ranks draw the random numbers of one process."""
        layout = self._context.layout
        is_one = layout.size(DATA_AXIS) == 1 or self._config.dropout == "exact"
        parts = sharded.microbatches
        return is_one and layout.size(PIPELINE_AXIS) == parts == 1 and self._config.mode != "auto"

    def _compare(
        self, step: VerifiedStep, loss: Tensor, whole: StepBatch | None, plan: Mapping[str, Any]
    ) -> None:
        """Compare the sharded step with that of one process; all ranks call it.

        Args:
            step: The step.
            loss: Of the ranks.
            whole: The batch of all ranks, on rank 0.
            plan: Of `_prepare`.

        Raises:
            ModelError: They differ.
        """
        gradients, buffers = self._gather_gaps(step)
        found_value = step.found(loss)
        answer: dict[str, str] = {}
        reference = self._reference
        if reference and whole is not None:
            expected = step.expected(reference)
            of_loss = measure("the loss", found_value, expected)
            dtypes = [param.dtype for param in reference.model.parameters()] or [expected.dtype]
            if torch.float64 in dtypes:
                # What a model computes in less, float64 cannot tell from rounding below.
                dtypes += reference.dtypes
            allowed = tolerance(self._config, dtypes, self._context.device)
            found = find(of_loss, gradients, buffers, allowed)
            one = OneProcess(self._context, step, reference, whole)
            with without_dropout(reference.model) if plan["is_quiet"] else contextlib.nullcontext():
                if found and plan["drawn"] and one.depends_on_numbers(allowed):
                    answer = {"nothing": plan["drawn"]}
                elif rest := self._beyond_rounding(one, found, plan):
                    answer = self._refusal(one, rest, float(loss), plan)
                elif not gradients:
                    answer = {"nothing": "no gradient was compared"}
                else:
                    counts = len(gradients), len(buffers)
                    self._tell(step, float(loss), found.largest, counts, plan)
        answer = json.loads(self._context.broadcast(json.dumps(answer).encode()))
        self.has_told |= bool(answer)
        if "message" in answer:
            raise ModelError(answer["message"], hint=answer["hint"])
        if "nothing" in answer:
            self._warn(f"nothing was verified in step {self._steps}: {answer['nothing']}")
        else:
            self.verified += 1

    def _gather_gaps(self, step: VerifiedStep) -> tuple[list[Gap], list[Gap]]:
        """Return, on rank 0, how far gradients and buffers are from those of one process."""
        sharded, model = step.sharded, step.sharded.model()
        held = {id(param) for group in step.optimizer.param_groups for param in group["params"]}
        held -= {id(param) for param in sharded.excluded()}
        params = [(n, p) for n, p in model.named_parameters() if id(p) in held and p.requires_grad]
        has_any = complete_flags(self._context, [p.grad is not None for _, p in params])
        held_here: list[tuple[str, Parameter, Tensor]] = []
        for (name, param), has_gradient in zip(params, has_any, strict=True):
            if has_gradient:
                local_gradient(param)  # completes one of which ranks hold summands
            gradient = param.grad
            whole = torch.zeros_like(param) if gradient is None else gradient
            held_here.append((name, param, whole))
        replicas = between_replicas(self._context, held_here)
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.numel()]
        reference = self._reference
        of_gradients, of_buffers = _Gaps(), _Gaps()
        if reference and not reference.problem:
            copies = reference.model.named_parameters(remove_duplicate=False)
            of_gradients.expected = {
                name: torch.zeros_like(param) if param.grad is None else param.grad
                for name, param in copies
            }
            of_buffers.expected = reference.buffers()
        to_first_rank(self._context, [(n, g) for n, _, g in held_here], of_gradients.take)
        to_first_rank(self._context, buffers, of_buffers.take)
        return with_replicas(of_gradients.found, replicas), of_buffers.found

    def _beyond_rounding(
        self, one: OneProcess, found: Differences, plan: Mapping[str, Any]
    ) -> Differences:
        """Return the differences that may not be rounding."""
        is_known = not self._may_draw(one, plan)
        return one.beyond_rounding(found) if found and is_known else found

    def _may_draw(self, one: OneProcess, plan: Mapping[str, Any]) -> bool:
        """Return whether random numbers may be why a step differs."""
        return one.reference.has_drawn and not plan["drawn"]

    def _refusal(
        self, one: OneProcess, found: Differences, loss: float, plan: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return message and hint of the error."""
        step, reference = one.step, one.reference
        cause = find_cause(
            Evidence(
                config=self._config,
                reference=reference,
                found=found,
                whole=one.batch,
                part=StepBatch(*split_batch(tuple(step.batch), step.parts())[0]),
                loss_fn=step.loss_fn,
                loss=loss,
                loss_hint=step.loss_hint,
                may_draw=self._may_draw(one, plan),
            )
        )
        parts = []
        if found.loss and step.is_loop:
            share = f"{found.loss.share:.2g} of their norm"
            parts.append(f"outputs of the model differ by {share}")
        elif found.loss:
            parts.append(f"the loss is {loss:.7g}, and {reference.loss.item():.7g} in one process")
        for what, gaps in (("gradient", found.gradients), ("buffer", found.buffers)):
            if gaps:
                names = ", ".join(str(gap) for gap in gaps[:_NAMES_SHOWN])
                more = f" and {len(gaps) - _NAMES_SHOWN} more" if len(gaps) > _NAMES_SHOWN else ""
                parts.append(f"{what}s that differ: {names}{more}")
        return {
            "message": f"step {self._steps} is not that of one process: {'; '.join(parts)}; likely "
            f"cause: {cause.sentence}; no weight was changed",
            "hint": cause.hint,
        }

    def _tell(
        self,
        step: VerifiedStep,
        loss: float,
        largest: tuple[float, str],
        counts: tuple[int, int],
        plan: Mapping[str, Any],
    ) -> None:
        """Print that the step is right."""
        share, name = largest
        quiet, drawn = ", ".join(plan["quiet"]), _DRAWN if plan["drawn"] else ""
        off = f", with {quiet} at 0 for the comparison" if quiet else ""
        worst = f"; largest difference {share:.1e} ({name})" if share else ""
        what, rest = f"loss {loss:.7g}", ""
        if step.is_loop:
            what, rest = "outputs of one call of the model", _NOT_OF_LOOP
        self.outcome = (
            f"step {self._steps} equals one process: {what}, {counts[0]} gradients and "
            f"{counts[1]} buffers{worst}{off}{drawn}{rest}"
        )
        self._context.print(f"msrun: {self.outcome}")


class _Gaps:
    """Measures tensors as they arrive on rank 0."""

    def __init__(self) -> None:
        self.expected: dict[str, Tensor] = {}
        self.found: list[Gap] = []

    def take(self, name: str, value: Tensor) -> None:
        """Measure one; names that the model of one process lacks are left out."""
        if name in self.expected:
            self.found.append(measure(name, value, self.expected[name]))


def _drop(name: str, value: Tensor) -> None:
    """Take nothing, beside ranks that do."""
    del name, value
