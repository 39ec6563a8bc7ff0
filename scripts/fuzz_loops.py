"""Ways to train that scripts/fuzz_models.py draws: optimizers, what is done between steps, batches.

`LOOPS` need torch alone; `LIBRARY_LOOPS` are those of accelerate, diffusers and transformers, which
are drawn only on demand, as their import takes seconds.
"""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fuzz_quirks import SAMPLES
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

Groups = list[dict[str, Any]]


def _sgd(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)


def _adamw(groups: Groups, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4, weight_decay=0.1, **options)


def _tensor_rates(groups: Groups) -> torch.optim.Optimizer:
    for group in groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    return torch.optim.SGD(groups, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)


def _lbfgs(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([param for group in groups for param in group["params"]])


def _change_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + step)
    optimizer.param_groups[-1]["weight_decay"] = 0.01 * step


def _per_group(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rates: list[Callable[[int], float]] = [
        lambda step, i=i: 1 / (1 + step + i) for i in range(len(optimizer.param_groups))
    ]
    return lr_scheduler.LambdaLR(optimizer, rates)


def _in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1)
    then = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [1])


def _scaler(optimizer: torch.optim.Optimizer, loss: Any, parameters: Any) -> None:
    """Train as with mixed precision."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def _twice(optimizer: torch.optim.Optimizer, loss: Any, parameters: Any) -> None:
    """Run backward for two parts of the loss."""
    del parameters
    (loss * 0.25).backward(retain_graph=True)
    (loss * 0.75).backward()
    optimizer.step()


def _closure(optimizer: torch.optim.Optimizer, loss: Any, parameters: Any) -> None:
    """Run backward in a closure."""
    del parameters

    def run() -> Any:
        loss.backward()
        return loss

    optimizer.step(run)


def _accelerate(optimizer: Any, loss: Any, parameters: Any) -> None:
    """Train as a script of accelerate, whose model is one of `rt.shard`."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    prepared: Any = accelerator.prepare_optimizer(optimizer)
    accelerator.backward(loss)
    prepared.step()
    prepared.zero_grad()
    del parameters


def _lightning(optimizer: Any, loss: Any, parameters: Any) -> None:
    """Run the closure of Lightning's automatic optimization: zero, backward, clip, step."""

    def run() -> Any:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(parameters(), 0.02)
        return loss.detach()

    optimizer.step(closure=run)


def _hf_scheduler(name: str, optimizer: torch.optim.Optimizer) -> Any:
    from transformers import get_scheduler

    return get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=4)


def _ema(model: nn.Module) -> nn.Module:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def _swa(model: nn.Module) -> nn.Module:
    return AveragedModel(model, use_buffers=True)


class _DiffusersAverage(nn.Module):
    """`EMAModel` of diffusers, with the parameters by the names that an average of torch has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from diffusers.training_utils import EMAModel

        self._names = [name for name, _ in model.named_parameters()]
        self._average = EMAModel(model.parameters(), decay=0.5, use_ema_warmup=False)

    def update_parameters(self, model: nn.Module) -> None:
        """Take the weights in."""
        self._average.step(model.parameters())

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        """Yield the averages."""
        yield from zip(self._names, self._average.shadow_params, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A way to train.

    Args:
        make: Returns the optimizer of groups.
        schedule: Returns a scheduler, made before `rt.optimizer`.
        takes_loss: Whether the scheduler gets the loss.
        before: Called before each step.
        max_norm: Of gradients.
        samples: Samples of each batch, of all ranks.
        evaluates: Whether the model is evaluated after each step.
        average: Returns an average of weights; None keeps none.
        restores: Whether the first step is saved, and loaded into other values.
        is_plain: Whether the script runs backward and the optimizer by itself.
        parts: Micro-batches of such a loop.
        update: What such a loop does with optimizer, loss and what returns the parameters; None is
            backward and step.
        zeroes: Whether such a loop keeps gradients, as zeros.
        forwards: How often such a loop calls the model in one step.
        freezes: Whether the first block is frozen in the first and the last step.
        adds_group: Whether the optimizer gets the head after the first step.
    """

    make: Callable[[Groups], torch.optim.Optimizer] = _sgd
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    takes_loss: bool = False
    before: Callable[[torch.optim.Optimizer, int], None] = lambda *_: None
    max_norm: float | None = None
    samples: Sequence[int] = (SAMPLES, SAMPLES, SAMPLES)
    evaluates: bool = False
    average: Callable[[nn.Module], nn.Module] | None = None
    restores: bool = False
    is_plain: bool = False
    parts: int = 1
    update: Callable[[torch.optim.Optimizer, Any, Any], None] | None = None
    zeroes: bool = False
    forwards: int = 1
    freezes: bool = False
    adds_group: bool = False


LOOPS = {
    "sgd": Loop(),
    "adamw": Loop(make=_adamw),
    "tensor rates": Loop(make=_tensor_rates),
    "lbfgs": Loop(make=_lbfgs),
    "changed rates": Loop(before=_change_rates),
    "scheduler": Loop(schedule=lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
    "scheduler of groups": Loop(schedule=_per_group),
    "one cycle": Loop(schedule=lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=9)),
    "clipped": Loop(max_norm=0.05),
    "clipped adamw": Loop(make=_adamw, max_norm=0.01),
    "evaluated": Loop(evaluates=True),
    "averaged": Loop(average=_ema),
    "restored": Loop(restores=True),
    "restored adamw": Loop(make=_adamw, restores=True, evaluates=True),
    "smaller batch": Loop(samples=(SAMPLES, SAMPLES // 2, SAMPLES)),
    "larger batch": Loop(samples=(SAMPLES, 2 * SAMPLES, SAMPLES), evaluates=True),
    "plain loop": Loop(is_plain=True),
    "clipped plain loop": Loop(is_plain=True, max_norm=0.05),
    "plain loop of parts": Loop(is_plain=True, parts=2),
    "foreach": Loop(make=partial(_adamw, foreach=True)),
    "fused adamw": Loop(make=partial(_adamw, fused=True)),
    "fused": Loop(make=partial(_sgd, fused=True), max_norm=0.05),
    "differentiable adamw": Loop(make=partial(_adamw, foreach=False, amsgrad=True)),
    "schedulers in sequence": Loop(schedule=_in_sequence),
    "plateau": Loop(
        schedule=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
        takes_loss=True,
    ),
    "stochastic averages": Loop(
        schedule=lambda o: SWALR(o, swa_lr=0.03, anneal_epochs=2), average=_swa, evaluates=True
    ),
    "empty batch": Loop(samples=(SAMPLES, 0, SAMPLES)),
    "frozen and thawed": Loop(freezes=True),
    "frozen and thawed adamw": Loop(make=_adamw, freezes=True, evaluates=True),
    "frozen and thawed plain loop": Loop(freezes=True, is_plain=True),
    "later group": Loop(adds_group=True),
    "later group adamw plain loop": Loop(make=_adamw, adds_group=True, is_plain=True),
    "scaler": Loop(is_plain=True, update=_scaler),
    "closure": Loop(is_plain=True, update=_closure),
    "lightning": Loop(make=_adamw, is_plain=True, update=_lightning),
    "backward twice": Loop(is_plain=True, update=_twice),
    "kept gradients": Loop(is_plain=True, zeroes=True, make=_adamw),
    "two forwards": Loop(is_plain=True, forwards=2),
    "evaluated plain loop": Loop(is_plain=True, evaluates=True, average=_ema),
}
LIBRARY_LOOPS = {
    "accelerate": Loop(is_plain=True, update=_accelerate),
    "accelerate adamw": Loop(make=_adamw, is_plain=True, update=_accelerate, evaluates=True),
    "average of diffusers": Loop(average=_DiffusersAverage),
    "linear of transformers": Loop(schedule=partial(_hf_scheduler, "linear")),
    "cosine of transformers": Loop(
        make=_adamw, schedule=partial(_hf_scheduler, "cosine"), restores=True
    ),
}
