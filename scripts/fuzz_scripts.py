"""What people write into training scripts: the parts that scripts/fuzz_models.py draws.

A quirk is something done to the model or its parameters, or a loss; `fuzz_loops` has ways to train.
"""

# mypy cannot follow scripts that import each other.
# mypy: disable-error-code="import-not-found, misc, no-any-return"

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from fuzz_quirks import CLASSES
from torch import Tensor, nn
from torch.nn import functional

# What a script does to a model before `rt.shard`, or to its parameters after it.


def _halve(*args: Any) -> Any:
    return args[-1] * 0.5


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@torch.no_grad()
def _shrink(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


def _backward(module: nn.Module, into: Any, out: Any) -> Any:
    del module, out
    return tuple(None if gradient is None else gradient * 0.5 for gradient in into)


def _first(model: nn.Module) -> nn.Module:
    return model.get_submodule("blocks.0")


def _head(model: nn.Module, name: str = "weight") -> nn.Parameter:
    return model.get_parameter(f"head.{name}")


def _freeze(param: nn.Parameter) -> None:
    param.requires_grad = False


def _mark(model: nn.Module) -> None:
    for param in model.parameters():
        vars(param)["lr_scale"] = 0.5 if param.dim() == 1 else 1.0


def _scale_inputs(module: nn.Module, args: Any) -> Any:
    del module
    return tuple(value * 0.5 if isinstance(value, Tensor) else value for value in args)


def _tie(model: nn.Module) -> None:
    """Let the last block have the first weight of the first one."""
    blocks: Any = model.blocks
    if all(type(getattr(blocks[index], "up", None)) is nn.Linear for index in (0, -1)):
        blocks[-1].up.weight = blocks[0].up.weight


def _channels_last(model: nn.Module) -> None:
    to: Any = model.to
    to(memory_format=torch.channels_last)


def _keyword_hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
    del module
    return tuple(value * 0.5 for value in args), {**kwargs}


def _alias(model: nn.Module) -> None:
    """Let a parameter and a module have a second name."""
    model.register_parameter("again", _head(model))
    model.add_module("first_again", _first(model))


def _scale_gradients(module: nn.Module, gradients: Any) -> Any:
    del module
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


def _old_norms(model: nn.Module) -> None:
    """Normalise weights by torch's older functions, which have hooks."""
    torch.nn.utils.weight_norm(model.get_submodule("head"))
    if type(up := getattr(_first(model), "up", None)) is nn.Linear:
        torch.nn.utils.spectral_norm(up)


def _to_buffers(model: nn.Module) -> None:
    """Replace a parameter by a buffer, as for fixed weights."""
    head: Any = model.get_submodule("head")
    bias = head.bias.detach().clone()
    del head.bias
    head.register_buffer("bias", bias)


def _without_residuals(model: nn.Module) -> None:
    """Let nothing pass by the layers of a plan."""
    for module in model.modules():
        if hasattr(module, "has_residual"):
            module.has_residual = False  # type: ignore[assignment]  # torch knows modules alone


BEFORE: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda model: _first(model).register_forward_hook(_halve),
    "forward pre-hook": lambda model: _first(model).register_forward_pre_hook(
        lambda _, args: tuple(value * 0.5 for value in args)
    ),
    "backward hook": lambda model: _first(model).register_full_backward_hook(_backward),
    "root forward hook": lambda model: model.register_forward_hook(_halve),
    "gradient hook": lambda model: _head(model).register_hook(_clamp),
    "hook after accumulation": lambda model: _head(model).register_post_accumulate_grad_hook(
        _shrink
    ),
    "attributes": _mark,
    "frozen head bias": lambda model: _freeze(_head(model, "bias")),
    "root pre-hook": lambda model: model.register_forward_pre_hook(_scale_inputs),
    "removed hook": lambda model: _first(model).register_forward_hook(_halve).remove(),
    "tied blocks": _tie,
    "frozen block": lambda model: _first(model).requires_grad_(requires_grad=False),
    "channels last": _channels_last,
    "keyword pre-hook": lambda model: _first(model).register_forward_pre_hook(
        _keyword_hook, with_kwargs=True
    ),
    "backward pre-hook": lambda model: _first(model).register_full_backward_pre_hook(
        _scale_gradients
    ),
    "hook that always runs": lambda model: _first(model).register_forward_hook(
        lambda *args: args[-1] * 0.5, always_call=True
    ),
    "second names": _alias,
    "norms with hooks": _old_norms,
    "buffer for a bias": _to_buffers,
    "copied block": lambda model: setattr(model.blocks, "0", copy.deepcopy(_first(model))),
    "no residuals": _without_residuals,
    "compiled block": lambda model: _first(model).compile(backend="eager"),
}


def _hook_later(model: nn.Module) -> None:
    param = dict(model.named_parameters()).get("head.weight")
    if param is not None:  # a stage of a pipeline may be without it
        param.register_hook(_clamp)


def _step_hook_later(model: nn.Module) -> None:
    param = dict(model.named_parameters()).get("head.weight")
    if param is not None:
        param.register_post_accumulate_grad_hook(_shrink)


def _forward_hook_later(model: nn.Module) -> None:
    if "head" in dict(model.named_children()):
        model.get_submodule("head").register_forward_hook(_halve)


@torch.no_grad()
def _halve_later(model: nn.Module) -> None:
    for param in model.parameters():
        param.mul_(0.5)


def _freeze_later(model: nn.Module) -> None:
    param = dict(model.named_parameters()).get("head.bias")
    if param is not None:
        _freeze(param)


def _mark_later(model: nn.Module) -> None:
    _mark(model)


def _retain_later(model: nn.Module) -> None:
    """Let outputs keep their gradients, as scripts that look at activations do."""

    def hook(*args: Any) -> None:
        if isinstance(args[-1], Tensor) and args[-1].requires_grad:
            args[-1].retain_grad()

    for module in model.children():
        module.register_forward_hook(hook)


AFTER: dict[str, Callable[[nn.Module], Any]] = {
    "gradient hook later": _hook_later,
    "hook after accumulation later": _step_hook_later,
    "forward hook later": _forward_hook_later,
    "halved later": _halve_later,
    "frozen later": _freeze_later,
    "attributes later": _mark_later,
    "retained gradients": _retain_later,
}


# Losses of output and target; targets may be -100.

_WEIGHTS = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


def _pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    losses = functional.cross_entropy(output, target, reduction="none")
    return losses.sum(), (target >= 0).sum()


def _masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target >= 0).to(output.dtype)
    return (output.square().mean(1) * mask).sum() / mask.sum().clamp(min=1)


def _root(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output[:, 0], target.to(output.dtype)).sqrt()


class _OfAll:
    """How a script gets the samples of all ranks: `rt.gather`, and in one process nothing."""

    gather: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)


OF_ALL = _OfAll


def _contrast(output: Tensor, target: Tensor) -> Tensor:
    del target
    every = OF_ALL.gather(output)
    return functional.cross_entropy(every @ every.T, torch.arange(len(every)))


def _contrast_parts(output: Tensor, target: Tensor) -> Tensor:
    del target
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def _pairwise(output: Tensor, target: Tensor) -> Tensor:
    same = (target[:, None] == target[None]).to(output.dtype)
    return functional.binary_cross_entropy_with_logits(output @ output.T, same)


def _distances(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) + 0.1 * torch.cdist(output, output[:1]).mean()


def _halves(output: Tensor, target: Tensor) -> Tensor:
    half = (len(output) + 1) // 2
    pairs = functional.mse_loss(output[:half], output[-half:])
    return functional.cross_entropy(output, target.clamp(min=0)) + pairs


def _half_labelled(output: Tensor, target: Tensor) -> Tensor:
    half = len(output) // 2
    loss = functional.cross_entropy(output[:half], target[:half].clamp(min=0))
    return loss + 0.1 * output[half:].square().mean()


def _chunks(output: Tensor, target: Tensor) -> Tensor:
    pairs = zip(output.split(3), target.clamp(min=0).split(3), strict=True)
    return torch.cat([functional.cross_entropy(*pair, reduction="none") for pair in pairs]).mean()


def _differences(output: Tensor, target: Tensor) -> Tensor:
    del target
    return (output[:, None] - output[None]).square().mean()


def _balance(output: Tensor, target: Tensor) -> Tensor:
    share = output.softmax(-1).mean(0)
    return functional.cross_entropy(output, target.clamp(min=0)) + share.square().sum()


def _variance(output: Tensor, target: Tensor) -> Tensor:
    loss = functional.cross_entropy(output, target.clamp(min=0))
    return loss + torch.relu(2 - output.var(0)).mean()


def _column_means(output: Tensor, target: Tensor) -> Tensor:
    one = functional.one_hot(target.clamp(min=0), CLASSES).to(output.dtype)
    return (output - one).square().mean(0).mean()


def _column_sums(output: Tensor, target: Tensor) -> Tensor:
    one = functional.one_hot(target.clamp(min=0), CLASSES).to(output.dtype)
    return (output - one).square().sum(0).sum()


def _soft(target: Tensor) -> Tensor:
    one = functional.one_hot(target.clamp(min=0), CLASSES).to(torch.float64)
    return 0.9 * one + 0.1 / CLASSES


def _negative_log(output: Tensor, target: Tensor) -> Tensor:
    chosen = output.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])
    return -chosen.mean()


def _sum_by_samples(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target.clamp(min=0), reduction="sum") / len(output)


def _each(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(output, target, reduction="none")
    return torch.stack([losses[index] for index in range(len(losses))]).mean()


def _of_class_means(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    sums = torch.zeros(CLASSES, dtype=losses.dtype).index_add(0, target.clamp(min=0), losses)
    return sums.mean()


def _margin(output: Tensor, target: Tensor) -> Tensor:
    return functional.multi_margin_loss(output, target.clamp(min=0))


def _focal(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(output, target, reduction="none")
    return ((1 - (-losses).exp()).square() * losses).mean()


def _balanced(output: Tensor, target: Tensor) -> Tensor:
    """Weigh a second loss so that it is as large as the first."""
    first = functional.cross_entropy(output, target.clamp(min=0))
    second = output.square().mean()
    return first + second * (first.detach() / second.detach())


def _annealed(output: Tensor, target: Tensor) -> Tensor:
    """Weigh a loss by its own value, without the gradient of that."""
    loss = functional.cross_entropy(output, target.clamp(min=0))
    return loss * loss.item()


def _straight_through(output: Tensor, target: Tensor) -> Tensor:
    """Add what commits outputs to rounded values."""
    rounded = output + (output.round() - output).detach()
    commitment = functional.mse_loss(output, output.round().detach())
    return functional.cross_entropy(rounded, target.clamp(min=0)) + 0.25 * commitment


def _adversarial(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of logits that moved along the sign of the gradient of their loss."""
    leaf = output.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(functional.cross_entropy(leaf, target.clamp(min=0)), leaf)
    return functional.cross_entropy(output + 0.1 * slope.sign(), target.clamp(min=0))


def _top(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the hardest samples."""
    losses = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda o, t: functional.cross_entropy(o, t.clamp(min=0)),
    "ignored targets": functional.cross_entropy,
    "class weights": lambda o, t: functional.cross_entropy(o, t, weight=_WEIGHTS),
    "smoothed": lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.1),
    "sum": lambda o, t: functional.cross_entropy(o, t, reduction="sum"),
    "scaled sum": lambda o, t: functional.cross_entropy(o, t, reduction="sum") * 0.01,
    "mean and sum": lambda o, t: functional.cross_entropy(o, t) + 0.01 * o.square().sum(),
    "sum and count": _pair,
    "masked mean": _masked,
    "two means": lambda o, t: functional.cross_entropy(o, t.clamp(min=0)) + o.square().mean(),
    "root": _root,
    "gathered contrast": _contrast,
    "contrast of parts": _contrast_parts,
    "pairwise": _pairwise,
    "distances": _distances,
    "halves": _halves,
    "half labelled": _half_labelled,
    "chunks": _chunks,
    "differences": _differences,
    "balance": _balance,
    "variance": _variance,
    "column means": _column_means,
    "column sums": _column_sums,
    "negative log": _negative_log,
    "sum by samples": _sum_by_samples,
    "each sample": _each,
    "class means": _of_class_means,
    "margin": _margin,
    "focal": _focal,
    "hardest": _top,
    "balanced losses": _balanced,
    "by its value": _annealed,
    "commitment": _straight_through,
    "adversarial": _adversarial,
    "mapping loss": lambda o, t: {"loss": functional.cross_entropy(o, t.clamp(min=0))},
    "smooth l1": lambda o, t: functional.smooth_l1_loss(o[:, 0], t.to(o.dtype)),
    "soft targets": lambda o, t: functional.kl_div(
        o.log_softmax(-1), _soft(t), reduction="batchmean"
    ),
}


def _squares(model: nn.Module) -> Any:
    return sum(param.square().sum() for param in model.parameters() if param.requires_grad)


# Penalties on weights beside a loss function, which gets the model from the script around it.
PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "weight penalty": lambda model: 0.01 * _squares(model),
    "mean of weights": lambda model: 0.1 * next(iter(model.parameters())).abs().mean(),
    "norm of a weight": lambda model: 0.1 * next(iter(model.parameters())).norm(),
}
