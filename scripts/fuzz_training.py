"""One drawn case of scripts/fuzz_models.py, trained by plain torch and as a rank."""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fuzz_blocks import MixedTypes
from fuzz_forms import BLOCKS, FORMS, Form
from fuzz_loops import LIBRARY_LOOPS, LOOPS, Loop
from fuzz_quirks import CLASSES, WIDTH
from fuzz_scripts import AFTER, BEFORE, LOSSES, OF_ALL, PENALTIES
from torch import Tensor, nn

import msrun

SPARSE = ("sparse embedding", "sparse bag")


@dataclass(frozen=True, slots=True)
class Case:
    """One draw.

    Args:
        config: A key of `CONFIGS`.
        quirks: Keys of the tables of blocks, changes, losses, loops and forms; blocks in order.
    """

    config: str
    quirks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.config}: {', '.join(self.quirks)}"

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks; there is one at least."""
        return [quirk for quirk in self.quirks if quirk in BLOCKS] or ["plain"]

    @property
    def loss(self) -> Callable[[Any, Any], Any]:
        """The loss of logits and target."""
        found: Callable[[Any, Any], Any] = LOSSES[self._first(LOSSES, "mean")]
        return found

    def penalized(self, loss: Any, model: nn.Module) -> Any:
        """Return a loss with the penalty on weights of the case, if it has one."""
        quirk = self._first(PENALTIES, "")
        if not quirk or isinstance(loss, dict):
            return loss
        penalty = PENALTIES[quirk](model)
        if isinstance(loss, tuple):
            return loss[0] + penalty * loss[1], loss[1]
        return loss + penalty

    @property
    def loop(self) -> Loop:
        """The way to train."""
        loops = LOOPS | LIBRARY_LOOPS
        return loops[self._first(loops, "sgd")]

    @property
    def form(self) -> Form:
        """The form of batch and output."""
        return FORMS[self._first(FORMS, "by position")]

    @property
    def has_own_loss(self) -> bool:
        """Whether the model returns its loss."""
        return self.form.has_loss

    def has(self, *quirks: str) -> bool:
        """Return whether it has one of these quirks."""
        return not set(quirks).isdisjoint(self.quirks)

    def _first(self, table: Mapping[str, Any], default: str) -> str:
        return next((quirk for quirk in self.quirks if quirk in table), default)


def _build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    own = (case.loss,) if case.has_own_loss else ()
    model: nn.Module = case.form.kind(case.blocks, *own).double()
    for module in model.modules():
        if isinstance(module, MixedTypes):
            module.settle()
    for quirk in case.quirks:
        if quirk in BEFORE:
            BEFORE[quirk](model)
    return model


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose groups follow attributes of parameters."""
    groups: dict[float, list[Any]] = {}
    for name, param in model.named_parameters():
        if case.loop.adds_group and name.startswith("head."):
            continue
        groups.setdefault(getattr(param, "lr_scale", 1.0), []).append(param)
    rate = 0.01 if "adamw" in str(case) else 0.1
    made = [{"params": params, "lr": rate * scale} for scale, params in groups.items()]
    if case.has(*SPARSE) and case.loop == Loop():
        return torch.optim.SGD(made, lr=rate)
    return case.loop.make(made)


def _batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return the batches without moving the random numbers of the model."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        found = []
        for samples in case.loop.samples:
            y = torch.randint(0, CLASSES, (samples,))
            y[:3:2] = -100
            found.append((torch.randn(samples, WIDTH, dtype=torch.float64), y))
        return found


def _between_steps(case: Case, model: nn.Module, step: int) -> None:
    """Change an attribute of blocks, also where a stage has another module in their place."""
    modules = dict(model.named_modules())
    for index, name in enumerate(case.blocks):
        block = modules.get(f"blocks.{index}")
        if name == "temperature" and block is not None:
            block.__dict__["temperature"] = 1.0 + step
        if name == "sometimes unused" and block is not None:
            block.__dict__["is_used"] = step != 1
        if name == "late attribute" and block is not None and step:
            block.__dict__["late_scale"] = 1.5
    if case.loop.freezes and (first := modules.get("blocks.0")) is not None:
        first.requires_grad_(requires_grad=step == 1)


@dataclass(frozen=True, slots=True)
class Learned:
    """What training came to.

    Args:
        losses: Of each step.
        tensors: Parameters and buffers by all their names.
        logits: Of evaluations, by sample; ranks have the first samples.
    """

    losses: list[float] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def is_finite(self) -> bool:
        """Whether all losses and tensors are numbers."""
        values = [torch.tensor(self.losses), *self.tensors.values()]
        return all(bool(value.isfinite().all()) for value in values)


class _Training:
    """One training of a case, in one process or as a rank.

    Args:
        case: The case.
        model: After `rt.shard`.
        rt: The runtime; None for plain torch.
    """

    def __init__(self, case: Case, model: nn.Module, rt: Any = None) -> None:
        self.case, self.model, self.rt = case, model, rt
        self.loop = case.loop
        self.share, self.count = 0, 1
        if rt is not None:
            self.share, self.count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
        self.optimizer = _optimizer(case, model)
        self.scheduler = self.loop.schedule(self.optimizer) if self.loop.schedule else None
        if rt is not None:
            self.optimizer = rt.optimizer(self.optimizer)
        self.average: nn.Module | None = None
        if self.loop.average:
            self.average = self.loop.average(model)
        self.learned = Learned()

    def run(self) -> Learned:
        """Train; return what rank 0 knows."""
        torch.manual_seed(11)
        random.seed(11)
        for step, batch in enumerate(_batches(self.case)):
            x, y = (value.tensor_split(self.count)[self.share] for value in batch)
            unwritten = x.clone()  # a pipeline leaves the batch as it was
            _between_steps(self.case, self.model, step)
            self.loop.before(self.optimizer, step)
            is_step = self.rt is not None and not self.loop.is_plain
            loss = self._step(x, y) if is_step else self._by_hand(x, y)
            self.learned.losses.append(float(loss))
            if self.scheduler:
                self.scheduler.step(*[float(loss)] if self.loop.takes_loss else [])
            if self.average:
                self.average.update_parameters(self.model)  # type: ignore[operator]
            if self.loop.adds_group and step == 0:
                self._add_group()
            if self.loop.restores and step == 0 and self.rt is not None:
                self._restore()
            if self.loop.evaluates:
                self._evaluate(unwritten, y)
        return self.learned

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train by `rt.step`."""
        max_norm = self.loop.max_norm
        if self.case.has_own_loss:
            batch = {"x": x, "labels": y}
            return self.rt.step(self.model, self.optimizer, batch, max_norm=max_norm)
        form, loss_fn = self.case.form, self.case.loss
        return self.rt.step(
            self.model,
            self.optimizer,
            lambda output, target: self.case.penalized(
                loss_fn(form.logits(output), target), self.model
            ),
            *form.inputs(x),
            y,
            max_norm=max_norm,
        )

    def _by_hand(self, x: Tensor, y: Tensor) -> Tensor:
        """Train as a script does; return the loss of all ranks."""
        if self.loop.zeroes:
            self.optimizer.zero_grad(set_to_none=False)
        else:
            self.optimizer.zero_grad()
        has_parts = self.loop.parts > 1 and self.rt is not None
        parts = self.loop.parts if has_parts else 1
        loss = torch.zeros(())
        for index, (part, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            value = self._losses(part, target) / parts
            loss = loss + value.detach()
            if self.loop.update:
                self.loop.update(self.optimizer, value, self.model.parameters)
            elif has_parts and index < parts - 1:
                with self.rt.no_sync(self.model):
                    value.backward()
            else:
                value.backward()
        if self.rt is not None:
            loss = self.rt.mean_over_data(loss)
        if self.loop.max_norm and self.rt is not None:
            self.rt.clip_grad_norm_(self.model, self.loop.max_norm)
        elif self.loop.max_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.loop.max_norm)
        if not self.loop.update:
            self.optimizer.step()
        return loss

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of several forward passes, each with other inputs."""
        count = self.loop.forwards
        losses = [self._loss(x * (1 - 0.5 * index), y) for index in range(count)]
        return torch.stack(losses).sum() / count if count > 1 else losses[0]

    def _add_group(self) -> None:
        """Give the optimizer the head, which it had not; a stage may be without it."""
        named = self.model.named_parameters()
        params = [param for name, param in named if name.startswith("head.")]
        if params:
            self.optimizer.add_param_group({"params": params, "lr": 0.05})

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        case = self.case
        if case.has_own_loss:
            loss = case.form.loss(self.model(x=x, labels=y))
        else:
            output = case.form.logits(case.form.call(self.model, x))
            loss = case.penalized(case.loss(output, y), self.model)
        if isinstance(loss, dict):
            return loss["loss"]
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def _evaluate(self, x: Tensor, y: Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            if self.case.has_own_loss:
                output = self.model(x=x, labels=y)
            else:
                output = self.case.form.call(self.model, x)
        self.learned.logits.append(self.case.form.logits(output).detach().clone())
        self.model.train()

    def _restore(self) -> None:
        """Save, spoil all values, and load."""
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        self.rt.save(self.model, self.optimizer, step=1, path=f"{folder[0]}/one")
        self.rt.finish()
        with torch.no_grad():
            for param in self.model.parameters():
                param.add_(1)
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.detach().add_(1)
        self.rt.load(self.model, self.optimizer, path=f"{folder[0]}/one")
        self.rt.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by all their names: a stage may have a shared one under a later name."""
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)
        if self.average:
            for name, tensor in self.average.named_parameters():
                yield f"average.{name}", tensor


def alone(case: Case) -> Learned:
    """Train in one process by plain torch."""
    OF_ALL.gather = lambda x: x
    model = _build(case)
    for quirk in case.quirks:
        if quirk in AFTER:
            AFTER[quirk](model)
    training = _Training(case, model)
    learned = training.run()
    learned.tensors.update((name, t.detach().clone()) for name, t in training.tensors())
    return learned


def sharded(case: Case, config: dict[str, Any]) -> Learned:
    """Train under the configuration on this rank."""
    from msrun.parallel.verify.gather import to_first_rank

    rt = msrun.init(config)
    OF_ALL.gather = rt.gather
    model = _build(case)
    x, y = _batches(case)[0]
    share, count = 0, 1
    if config.get("mesh") != "auto":
        share, count = rt.coordinate.get("dp", 0), rt.layout.axes.get("dp", 1)
    sample: Any = None
    if "pipeline" in config or config.get("mode") == "auto":
        x, y = (value.chunk(count)[share] for value in (x, y))
        sample = (x, y) if case.has_own_loss else case.form.inputs(x)
        if case.form.is_named:
            sample = copy.copy(sample[0])
    model = rt.shard(model, sample)
    for quirk in case.quirks:
        if quirk in AFTER:
            AFTER[quirk](model)
    training = _Training(case, model, rt)
    learned = training.run()
    tensors = [(name, tensor.detach()) for name, tensor in training.tensors()]
    to_first_rank(rt.context, tensors, learned.tensors.__setitem__)
    return learned
